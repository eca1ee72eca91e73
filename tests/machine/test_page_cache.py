"""The witnesses against the page cache, on real reads, and the verdict that they give."""

import os
from pathlib import Path

import pytest

from edgemoe.machine.disk import disk_of
from edgemoe.machine.page_cache import Evidence, drop_pages, fetched_bytes, read_ahead, resident_share

MB = 1 << 20


def evidence(
    fetched: float | None = None,
    block_device: bool = True,
    resident: tuple[float | None, float | None] = (None, None),
    speed: float = 2e9,
) -> Evidence:
    return Evidence(10**9, None if fetched is None else round(fetched * 10**9), block_device, *resident, speed, 10e9)


@pytest.mark.parametrize(
    ("seen", "why"),
    [
        (evidence(1.0), None),
        (evidence(1.0, speed=12e9), None),  # a disk faster than this CPU copies: the count settles it
        (evidence(0.4), "40% of the bytes"),
        (evidence(0.0, block_device=False), None),  # network reads go uncounted
        (evidence(0.0, block_device=False, resident=(0.0, 0.5)), "50% of the file"),
        (evidence(1.0, resident=(0.0, 0.5)), None),  # somebody else reads the same model
        (evidence(3.0, resident=(0.0, 0.5)), "50% of the file"),  # readahead
        (evidence(None, resident=(0.2, 0.2)), None),
        (evidence(None, speed=9e9), "no slower than the page cache"),
        (evidence(None, resident=(0.0, 0.0), speed=9e9), "no slower than the page cache"),
    ],
)
def test_the_verdict(seen: Evidence, why: str | None) -> None:
    found = seen.why_cached()
    assert found is None if why is None else why in (found or "")


def test_the_evidence_is_told() -> None:
    assert evidence(1.0, resident=(0.1, 0.1)).lines == (
        "100% of the bytes read came from the device (kernel's count)",
        "0% of the file entered the page cache",
        "a warm buffered read of the same bytes is 5.0 × as fast",
    )


def test_pages_come_and_go(tmp_path: Path) -> None:
    if disk_of(tmp_path).kind == "memory":
        pytest.skip("this directory is in RAM: its pages cannot go")
    path = tmp_path / "file"
    path.write_bytes(os.urandom(8 * MB))
    descriptor = os.open(path, os.O_RDWR)
    try:
        assert resident_share(descriptor) == 1.0
        os.fsync(descriptor)
        drop_pages(descriptor)
        assert resident_share(descriptor) == 0.0
        before = fetched_bytes()
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        for offset in range(0, 4 * MB, MB):
            os.pread(descriptor, MB, offset)
        assert resident_share(descriptor) == pytest.approx(0.5, abs=0.1)
        if before is None or not disk_of(tmp_path).block_device:
            return
        once = fetched_bytes()
        assert once is not None and once - before >= 4 * MB
        for offset in range(0, 4 * MB, MB):
            os.pread(descriptor, MB, offset)
        assert fetched_bytes() == once  # the second time they came from the cache
    finally:
        os.close(descriptor)


def test_a_group_counts_where_the_process_is_not_counted(tmp_path: Path) -> None:
    group = tmp_path / "cgroup" / "mine"
    group.mkdir(parents=True)
    (group / "io.stat").write_text("8:0 rbytes=1000 wbytes=5 rios=1\n259:0 rbytes=234 wbytes=0 rios=2\n")
    (tmp_path / "membership").write_text("1:cpu:/\n0::/mine\n")
    assert fetched_bytes(tmp_path / "no", tmp_path / "cgroup", tmp_path / "membership") == 1234
    assert fetched_bytes(tmp_path / "no", tmp_path / "no", tmp_path / "membership") is None
    assert fetched_bytes(tmp_path / "no", tmp_path / "no", tmp_path / "no") is None


def test_the_kernel_says_how_far_it_reads_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = tmp_path.stat().st_dev
    place = tmp_path / "bdi" / f"{os.major(device)}:{os.minor(device)}"
    monkeypatch.setattr("edgemoe.machine.page_cache.BDI", tmp_path / "bdi")
    assert read_ahead(tmp_path) is None
    place.mkdir(parents=True)
    (place / "read_ahead_kb").write_text("128\n")
    assert read_ahead(tmp_path) == 128 * 1024
