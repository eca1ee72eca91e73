"""Did these bytes come from the disk? The page cache is many times faster, and a benchmark of it looks like a fast SSD.

Four witnesses, because none of them sees everything:
- the file system: tmpfs, RAM disks, loop devices over cached files are known beforehand (edgemoe.machine.disk);
- the kernel's count of bytes that this process, or its control group, fetched from block devices;
- mincore(2): reads past the cache leave no page of the file resident, reads through it do;
- speed: a "disk" that is as fast as a warm buffered read of the same bytes is the cache.
A device's own cache, or that of a virtual disk's host, is beyond all of them: the disk's label says so.
"""

import ctypes
import mmap
import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

CGROUP_ROOT = Path("/sys/fs/cgroup")
PROCESS_IO = Path("/proc/self/io")
MEMBERSHIP = Path("/proc/self/cgroup")
BDI = Path("/sys/class/bdi")

MOST_OF = 0.95
AS_FAST_AS_CACHE = 0.8
_FEW = 0.01


@dataclass(frozen=True)
class Evidence:
    """What the witnesses say of `read_bytes` bytes that were read. None: that witness cannot tell here.

    `fetched_bytes` came from block devices (a witness only where `block_device`: network and FUSE reads may go
    uncounted); resident shares of the file are before and after; rates are of the same reads, direct and warm buffered.
    """

    read_bytes: int
    fetched_bytes: int | None
    block_device: bool
    resident_before: float | None
    resident_after: float | None
    bytes_per_s: float
    warm_bytes_per_s: float

    @property
    def fetched_share(self) -> float | None:
        return None if self.fetched_bytes is None else self.fetched_bytes / self.read_bytes

    def why_cached(self) -> str | None:
        """Why the rate is the page cache's, in words; None if it is the disk's."""
        share = self.fetched_share
        if share is not None and MOST_OF <= share <= 2 - MOST_OF:  # more is readahead, which only the cache does
            return None
        if share is not None and share < MOST_OF and self.block_device:
            return f"only {share:.0%} of the bytes read came from the device"
        if self.resident_before is not None and self.resident_after is not None:
            grown = self.resident_after - self.resident_before
            if grown > _FEW:
                return f"reading left {grown:.0%} of the file in the page cache"
        if self.bytes_per_s >= AS_FAST_AS_CACHE * self.warm_bytes_per_s:
            fast, warm = self.bytes_per_s / 1e9, self.warm_bytes_per_s / 1e9
            return f"{fast:.1f} GB/s is no slower than the page cache's {warm:.1f} GB/s"
        return None

    @property
    def lines(self) -> tuple[str, ...]:
        """What was seen, for people."""
        seen = []
        if self.fetched_share is not None and (self.block_device or self.fetched_share >= MOST_OF):
            seen.append(f"{min(self.fetched_share, 1):.0%} of the bytes read came from the device (kernel's count)")
        if self.resident_before is not None and self.resident_after is not None:
            seen.append(f"{max(self.resident_after - self.resident_before, 0):.0%} of the file entered the page cache")
        ratio = self.warm_bytes_per_s / self.bytes_per_s
        seen.append(f"a warm buffered read of the same bytes is {ratio:.1f} × as fast")
        return tuple(seen)


def fetched_bytes(process: Path = PROCESS_IO, root: Path = CGROUP_ROOT, membership: Path = MEMBERSHIP) -> int | None:
    """Bytes fetched from block devices so far: by this process, else by its control group; None if nobody counts."""
    text = _read(process)
    for line in text.splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    for line in _read(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            found = _read(root / path.lstrip("/") / "io.stat")
            if found:
                return sum(int(word[7:]) for word in found.split() if word.startswith("rbytes="))
    return None


def resident_share(descriptor: int) -> float | None:
    """The share of a file's pages that the page cache holds; None where the kernel does not tell (files of others)."""
    size = os.fstat(descriptor).st_size
    pages = np.empty(-(-size // mmap.PAGESIZE), np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    # Unmapped with its last reference: closing it would be refused while a traceback (of Ctrl-C) holds the array.
    mapped = np.frombuffer(mmap.mmap(descriptor, size, prot=mmap.PROT_READ), np.uint8)
    address, answers = ctypes.c_void_p(mapped.ctypes.data), ctypes.c_void_p(pages.ctypes.data)
    failed = libc.mincore(address, ctypes.c_size_t(size), answers)
    if failed:
        return None
    share = float((pages & 1).mean())
    # Since Linux 5.2 every page of a file that is neither ours nor writable is called resident.
    return None if share == 1 and not _may_ask(descriptor) else share


def _may_ask(descriptor: int) -> bool:
    owner = os.fstat(descriptor).st_uid
    return os.geteuid() in (0, owner) or os.access(f"/proc/self/fd/{descriptor}", os.W_OK)


def drop_pages(descriptor: int) -> None:
    """Ask the kernel to forget a file's clean pages; those that others have mapped stay."""
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def make_cold(descriptor: int, enough: float) -> float | None:
    """Drop a file's pages until at most the share `enough` of them stays; returns what stayed (see `resident_share`).

    The kernel cannot forget a page that is still being read ahead or written back, so this asks for up to a second.
    """
    deadline = time.monotonic() + 1.0
    while True:
        drop_pages(descriptor)
        left = resident_share(descriptor)
        if left is None or left <= enough or time.monotonic() > deadline:
            return left
        time.sleep(0.02)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def read_ahead(path: Path) -> int | None:
    """Bytes that the kernel reads around a page fault in a file, wanted or not; None where it does not say."""
    device = path.stat().st_dev
    try:
        text = (BDI / f"{os.major(device)}:{os.minor(device)}" / "read_ahead_kb").read_text()
        return int(text) * 1024
    except (OSError, ValueError):
        return None
