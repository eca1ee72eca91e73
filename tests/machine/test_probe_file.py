"""The temporary file: it has no name, so nothing can leave it behind; and it is really there while it lasts."""

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from edgemoe.errors import UserError
from edgemoe.machine.probe_file import CHUNK, check_not_sparse, model_file, n_pieces, temporary_file

MB = 1 << 20


def test_it_is_incompressible_has_no_holes_and_no_name(tmp_path: Path) -> None:
    import zlib

    told: list[int] = []
    size = 2 * CHUNK + 3 * MB
    with temporary_file(tmp_path, size, told.append) as descriptor:
        assert os.fstat(descriptor).st_size == size and 512 * os.fstat(descriptor).st_blocks >= size
        assert list(tmp_path.iterdir()) == []
        pieces = [os.pread(descriptor, MB, offset) for offset in (0, CHUNK, 2 * CHUNK)]
        assert len(zlib.compress(b"".join(pieces))) > 0.999 * 3 * MB
    assert len(told) == n_pieces(size) == 3


HOLD = """
import sys, time
from pathlib import Path
from edgemoe.machine.probe_file import temporary_file
def advance(_):
    print("writing", flush=True)
with temporary_file(Path(sys.argv[1]), 1 << 28, advance):
    print("written", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("moment", ["writing", "written"])
def test_nothing_is_left_however_the_process_ends(tmp_path: Path, number: signal.Signals, moment: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    while process.stdout.readline().strip() != moment:
        assert process.poll() is None
    held = shutil.disk_usage(tmp_path).free
    assert list(tmp_path.iterdir()) == []
    process.send_signal(number)
    process.wait(300)
    assert list(tmp_path.iterdir()) == []
    if moment == "written":
        _wait_for_room(tmp_path, held + (1 << 27))


def _wait_for_room(directory: Path, free: int) -> None:
    """Others use this disk too, but not 128 MB within a moment."""
    end = time.monotonic() + 120
    while shutil.disk_usage(directory).free < free:
        assert time.monotonic() < end, "the file's room was not given back"
        time.sleep(0.1)


def test_a_file_system_without_nameless_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY)  # what a kernel without it makes of the flag: EISDIR
    with temporary_file(tmp_path, MB) as descriptor:
        assert os.fstat(descriptor).st_size == MB and list(tmp_path.iterdir()) == []


def test_no_room_is_told_beforehand(tmp_path: Path) -> None:
    said = r"1000000 TB are needed .* are free: make room, give --dir .* --model"
    with pytest.raises(UserError, match=said), temporary_file(tmp_path, 10**18):
        pass


def test_a_write_that_fails_is_one_line(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MB, limits[1]))
    try:
        said = r"failed \(File too large\): make room"
        with pytest.raises(UserError, match=said), temporary_file(tmp_path, 4 * MB):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    for place in (tmp_path / "missing", Path("/proc/self")):
        with pytest.raises(UserError, match=r"cannot write in .*--dir"), temporary_file(place, MB):
            pass


def test_files_with_holes_are_refused(tmp_path: Path) -> None:
    sparse = tmp_path / "skeleton.gguf"
    with sparse.open("wb") as file:
        file.write(os.urandom(MB))
        file.truncate(64 * MB)
    said = r"skeleton\.gguf is sparse or compressed: 1\.05 MB on the disk for 67\.1 MB"
    with pytest.raises(UserError, match=said), model_file(sparse):
        pass
    whole = tmp_path / "whole.gguf"
    whole.write_bytes(os.urandom(MB))
    with whole.open("rb") as file:
        os.fsync(file.fileno())
        check_not_sparse(file.fileno(), "whole")
    with pytest.raises(UserError, match="No such file"), model_file(tmp_path / "missing.gguf"):
        pass
