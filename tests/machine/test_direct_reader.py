"""Reads with many in flight: what was asked for is what is read, and a read that fails is not a rate."""

import mmap
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgemoe.machine import page_cache
from edgemoe.machine.alignment import declared_alignment, open_direct
from edgemoe.machine.direct_reader import DirectReader, at_random, sequential

MB = 1 << 20


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(4 * MB))
    descriptor = os.open(path, os.O_RDWR)
    os.fsync(descriptor)
    yield descriptor
    os.close(descriptor)


def reads(size: int, length: int, depth: int, start: int) -> list[list[np.ndarray]]:
    return [sequential(size, length, depth, start), at_random(size, length, depth, np.random.default_rng(start))]


@given(st.integers(1, 300), st.integers(1, 40), st.integers(0, 1000), st.integers(0, 511))
def test_offsets_cover_the_file_once_in_whole_requests(count: int, depth: int, start: int, rest: int) -> None:
    length = 512
    for lanes in reads(count * length + rest, length, depth, start):
        assert len(lanes) == depth and all(len(lane) for lane in lanes)
        every = np.concatenate(lanes)
        assert set(every.tolist()) == {at * length for at in range(count)}
        if count >= depth:
            assert len(every) == count  # no request twice


def test_a_stream_is_read_in_order_and_goes_round() -> None:
    lanes = sequential(8 * 512, 512, 2, start=5)
    assert [int(at) // 512 for pair in zip(*lanes, strict=True) for at in pair] == [5, 6, 7, 0, 1, 2, 3, 4]


@pytest.mark.parametrize("huge_pages", [False, True])
@pytest.mark.parametrize("depth", [1, 3, 8])
def test_once_reads_every_offset_once(file: int, depth: int, huge_pages: bool) -> None:
    with DirectReader(depth, huge_pages) as reader:
        done = reader.read(file, 64 << 10, sequential(4 * MB, 64 << 10, depth), seconds=60, once=True)
    assert done.bytes == 4 * MB and done.rate == done.bytes / done.seconds


def test_memory_begins_at_a_page_and_has_room() -> None:
    for huge_pages, boundary in ((False, mmap.PAGESIZE), (True, 2 * MB)):
        with DirectReader(1, huge_pages) as reader:
            memory = reader._memory(3 * MB + 4096)
        assert len(memory) == 3 * MB + 4096 and memory.ctypes.data % boundary == 0 and memory[-4096] == 1


def test_ctrl_c_while_the_buffer_is_touched_is_ctrl_c(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(np.ndarray):
        def __setitem__(self, *_: object) -> None:
            raise KeyboardInterrupt

    whole = np.frombuffer
    monkeypatch.setattr(np, "frombuffer", lambda *given: whole(*given).view(Interrupted))
    with DirectReader(1) as reader, pytest.raises(KeyboardInterrupt):
        reader.read(file, 4096, sequential(4 * MB, 4096, 1), seconds=0.01)


def test_time_bounds_a_round_and_every_thread_reads_once(file: int) -> None:
    with DirectReader(4) as reader:
        timed = reader.read(file, 4096, sequential(4 * MB, 4096, 4), seconds=0.1)
        assert timed.seconds >= 0.1 and timed.bytes > 4 * 4096
        assert reader.read(file, MB, sequential(4 * MB, MB, 4), seconds=0).bytes == 4 * MB


def test_reads_past_the_cache_come_from_the_device(file: int, tmp_path: Path) -> None:
    opened = open_direct(file, 4096)
    if opened is None:
        pytest.skip("this file system refuses O_DIRECT")
    direct, alignment = opened
    page_cache.drop_pages(file)
    before = page_cache.fetched_bytes()
    with DirectReader(4) as reader:
        for _ in range(2):
            done = reader.read(
                direct, 64 << 10, at_random(4 * MB, 64 << 10, 4, np.random.default_rng(0)), 60, once=True
            )
            assert done.bytes == 4 * MB
        with pytest.raises(OSError, match="Invalid argument"):
            reader.read(direct, 4096, [np.array([alignment // 2])], 0)
    os.close(direct)
    assert page_cache.resident_share(file) == 0.0
    after = page_cache.fetched_bytes()
    assert before is None or after is None or after - before >= 8 * MB


def test_a_read_that_fails_or_is_short_is_an_error(file: int) -> None:
    with DirectReader(2) as reader:
        with pytest.raises(EOFError, match="gave 0"):
            reader.read(file, 4096, [np.array([0]), np.array([64 * MB])], 0)
        with pytest.raises(OSError, match="Bad file descriptor"):
            reader.read(1 << 20, 4096, [np.array([0])], 0)
        assert reader.read(file, 4096, [np.array([0])], 0).bytes == 4096  # and it goes on


def test_an_interrupted_round_ends_its_threads(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = DirectReader(4)
    submit, count = reader._pool.submit, iter(range(4))

    def interrupted(*arguments):
        if next(count) == 2:
            raise KeyboardInterrupt
        return submit(*arguments)

    monkeypatch.setattr(reader._pool, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt), reader:
        reader.read(file, 4096, sequential(4 * MB, 4096, 4), 0.1)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("edgemoe-read")]


def test_statx_tells_the_alignment_or_nothing(file: int) -> None:
    declared = declared_alignment(file)
    assert declared is None or declared == (0, 0) or all(value & (value - 1) == 0 < value for value in declared)
    shared = Path("/dev/shm")
    if shared.is_dir():
        with tempfile.TemporaryFile(dir=shared) as inside:
            assert declared_alignment(inside.fileno()) in (None, (0, 0)) or open_direct(inside.fileno(), 512)
