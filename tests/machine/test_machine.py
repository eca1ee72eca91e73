"""RAM within control groups, reads past the page cache, and GPUs."""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import psutil
import pytest

from edgemoe.machine import gpus
from edgemoe.machine.direct_io import ALIGNMENTS, DirectIoError, direct_io_alignment
from edgemoe.machine.gpus import Gpu, nvidia_gpus
from edgemoe.machine.memory import ram

GB = 10**9


def group(place: Path, limit: str, used: int, cached: int = 0, version: int = 2) -> None:
    """A control group's files as the kernel writes them."""
    names = ("memory.max", "memory.current", "inactive_file")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    place.mkdir(parents=True, exist_ok=True)
    (place / names[0]).write_text(f"{limit}\n")
    (place / names[1]).write_text(f"{used}\n")
    (place / "memory.stat").write_text(f"anon 1\n{names[2]} {cached}\nfile 5\n")


def member(tmp_path: Path, line: str) -> Path:
    path = tmp_path / "cgroup"
    path.write_text(f"9:cpuset:/elsewhere\n{line}\n")
    return path


@pytest.mark.parametrize("version", [1, 2])
def test_the_tightest_group_counts_and_its_page_cache_is_available(tmp_path: Path, version: int) -> None:
    top = tmp_path if version == 2 else tmp_path / "memory"
    group(top / "outer", str(GB // 2), 300_000_000, cached=100_000_000, version=version)
    group(top / "outer/inner", str(GB), 100_000_000, version=version)
    line = "0::/outer/inner" if version == 2 else "4:memory:/outer/inner"
    found = ram(tmp_path, member(tmp_path, line))
    assert (found.total, found.available, found.limited) == (GB // 2, 300_000_000, True)


@pytest.mark.parametrize("limit", ["max", "9223372036854771712", str(1 << 62)])
def test_no_limit_is_the_machine(tmp_path: Path, limit: str) -> None:
    group(tmp_path / "free", limit, 10)
    found = ram(tmp_path, member(tmp_path, "0::/free"))
    assert found.total == psutil.virtual_memory().total and not found.limited
    assert ram(tmp_path, tmp_path / "no such file").total == found.total


def test_a_group_that_uses_more_than_its_limit_leaves_nothing(tmp_path: Path) -> None:
    group(tmp_path / "full", "1000000", 2_000_000)
    assert ram(tmp_path, member(tmp_path, "0::/full")).available == 0


def test_this_machine_has_memory() -> None:
    found = ram()
    assert 0 < found.available <= found.total <= psutil.virtual_memory().total


def test_direct_io_reads_what_was_written_and_leaves_nothing(tmp_path: Path) -> None:
    try:
        assert direct_io_alignment(tmp_path) in ALIGNMENTS
    except DirectIoError as error:
        if "refuse" not in str(error) and "Invalid argument" not in str(error):  # wrong bytes are no reason to skip
            raise
        pytest.skip(f"this file system has no O_DIRECT: {error}")
    assert list(tmp_path.iterdir()) == []


def test_where_nothing_can_be_written_the_reason_is_given() -> None:
    with pytest.raises(DirectIoError, match=r"No such file|denied|not permitted|not supported"):
        direct_io_alignment(Path("/proc/self"))


def test_a_file_system_that_refuses_or_lies_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "preadv", refuse)
    with pytest.raises(DirectIoError, match=r"refused \(Invalid argument\)"):
        direct_io_alignment(tmp_path)
    monkeypatch.setattr(os, "preadv", lambda _fd, views, _offset: len(views[0]))
    with pytest.raises(DirectIoError, match="other bytes"):
        direct_io_alignment(tmp_path)


DRIVER = """
#include <string.h>
int nvmlInit_v2(void) {{ return {init}; }}
int nvmlShutdown(void) {{ return 0; }}
int nvmlDeviceGetCount_v2(unsigned *count) {{ *count = 3; return 0; }}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {{ *handle = (void *)(long)(index + 1); return 0; }}
int nvmlDeviceGetName(void *handle, char *name, unsigned size) {{ strncpy(name, "A GPU", size); return 0; }}
int nvmlDeviceGetUUID(void *handle, char *uuid, unsigned size) {{
    strncpy(uuid, (long)handle == 1 ? "GPU-1" : "GPU-3", size); return 0; }}
int nvmlDeviceGetMemoryInfo(void *handle, unsigned long long *memory) {{
    if ((long)handle == 2) return 15;  /* lost */
    memory[0] = 24000; memory[1] = 23000 + (long)handle; memory[2] = 1000; return 0; }}
"""


def driver(tmp_path: Path, init: int) -> ctypes.CDLL:
    """NVML's functions as a driver of three GPUs has them, the second lost, in a library of our own."""
    source, library = tmp_path / f"nvml{init}.c", tmp_path / f"libnvml{init}.so"
    source.write_text(DRIVER.format(init=init))
    subprocess.run(["cc", "-shared", "-fPIC", source, "-o", library], check=True)
    return ctypes.CDLL(str(library))


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_gpus_are_what_the_driver_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    libraries = {init: driver(tmp_path, init) for init in (0, 9)}
    monkeypatch.setattr(gpus.ctypes, "CDLL", lambda name: libraries[0])
    assert nvidia_gpus() == [Gpu("A GPU", 24000, 23001, "GPU-1"), Gpu("A GPU", 24000, 23003, "GPU-3")]
    monkeypatch.setattr(gpus.ctypes, "CDLL", lambda name: libraries[9])
    assert nvidia_gpus() == []


def test_without_a_driver_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(gpus.ctypes, "CDLL", absent)
    assert nvidia_gpus() == []


@pytest.mark.gpu
@pytest.mark.skipif(not list(Path("/dev").glob("nvidia[0-9]*")), reason="no NVIDIA GPU")
def test_the_gpus_of_this_machine_have_memory() -> None:
    found = nvidia_gpus()
    assert found and all(gpu.name and 0 < gpu.free <= gpu.total and gpu.uuid.startswith("GPU-") for gpu in found)
