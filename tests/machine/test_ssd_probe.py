"""The disk probe on this machine's disk: rates where there is one, refusals where the page cache would be measured."""

import os
from pathlib import Path

import pytest

from edgemoe.errors import UserError
from edgemoe.machine import page_cache, ssd_probe
from edgemoe.machine.disk import disk_of
from edgemoe.machine.rounds import Effort
from edgemoe.machine.ssd_probe import QUICK, SsdGrid, n_rounds, probe_ssd

MB = 1 << 20
SMALL = SsdGrid((4096, 1 * MB), (1, 4), 0.01, 32 * MB, Effort(3, 3, 30))


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    found = disk_of(tmp_path)
    if found.caches or not found.block_device:
        pytest.skip(f"temporary files are on no disk here: {found.label}")
    return tmp_path


def model(directory: Path, size: int) -> Path:
    path = directory / "model.gguf"
    path.write_bytes(os.urandom(size))
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return path


def test_a_disk_is_measured_and_left_as_it_was(disk: Path) -> None:
    told: list[int] = []
    found = probe_ssd(disk, grid=SMALL, advance=told.append)
    assert sum(told) == n_rounds(SMALL) and list(disk.iterdir()) == []
    assert {(p.pattern, p.request_bytes, p.depth) for p in found.points} == {
        (pattern, size, depth) for pattern in ("sequential", "random") for size in (4096, MB) for depth in (1, 4)
    }
    assert all(p.bytes_per_s.rounds == 3 for p in found.points)
    assert found.random_expert(MB, depth=1) > found.random_expert(4096, depth=1)
    assert (found.dir, found.device, found.cached) == (str(disk.resolve()), disk_of(disk).device, False)
    assert found.method in ("O_DIRECT", "cold buffered") and found.evidence


def test_a_model_is_read_and_not_written(disk: Path) -> None:
    path = model(disk, 20 * MB)
    before = path.stat()
    told: list[int] = []
    found = probe_ssd(Path("/nowhere"), path, QUICK, told.append)
    assert (found.source, found.source_bytes, found.dir) == ("model.gguf", 20 * MB, str(disk.resolve()))
    assert (path.stat().st_mtime_ns, path.stat().st_size) == (before.st_mtime_ns, before.st_size)
    assert {p.request_bytes * p.depth <= 20 * MB for p in found.points} == {True}  # what the file has
    assert sum(told) == n_rounds(QUICK, path)


def test_without_o_direct_cold_pages_are_read_and_it_is_said(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssd_probe, "open_direct", lambda *_: None)
    found = probe_ssd(disk, grid=SMALL)
    assert found.method == "cold buffered" and not found.cached
    assert "came from the device" in found.evidence[0] or not page_cache.fetched_bytes()


def test_o_direct_that_is_accepted_and_ignored_is_found_out(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of the paper's log: a warm page cache, measured as a disk."""
    monkeypatch.setattr(ssd_probe, "open_direct", lambda descriptor, _: (os.dup(descriptor), 512))
    with pytest.raises(UserError, match=r"so this would measure the page cache, not the disk; give --dir") as caught:
        probe_ssd(disk, grid=SMALL)
    assert "\n" not in str(caught.value) and list(disk.iterdir()) == []


def test_pages_that_others_keep_mapped_cannot_be_cold(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mmap

    path = model(disk, 20 * MB)
    monkeypatch.setattr(ssd_probe, "open_direct", lambda *_: None)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert sum(mapped[:: mmap.PAGESIZE]) > 0  # every page is now in use
        with pytest.raises(UserError, match="refuses O_DIRECT, and 100% of it stays cached"):
            probe_ssd(disk, path, SMALL)


def test_o_direct_that_reads_other_bytes_is_a_fault(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = os.open(model(disk, 32 * MB), os.O_RDONLY)
    monkeypatch.setattr(ssd_probe, "open_direct", lambda *_: (os.dup(other), 512))
    with pytest.raises(UserError, match="other bytes than the file has"):
        probe_ssd(disk, grid=SMALL)
    os.close(other)


def test_where_files_are_in_ram_there_is_no_disk() -> None:
    if not Path("/dev/shm").is_dir() or disk_of(Path("/dev/shm")).filesystem != "tmpfs":
        pytest.skip("no tmpfs at /dev/shm")

    def ours() -> list[Path]:
        """Not what another program puts there meanwhile."""
        return sorted(Path("/dev/shm").glob(".edgemoe-probe-*"))

    before = ours()
    with pytest.raises(UserError, match="tmpfs keeps its files in RAM, so there is no disk to measure"):
        probe_ssd(Path("/dev/shm"), grid=SMALL)
    assert ours() == before


@pytest.mark.parametrize("size", [0, 1 * MB])
def test_a_file_too_small_to_measure_is_refused(disk: Path, size: int) -> None:
    with pytest.raises(UserError, match=r"at least 16\.8 MB are needed"):
        probe_ssd(disk, model(disk, size), SMALL)
