"""What a process holds in RAM that the kernel cannot take back: anonymous and shared memory, not the page cache. And
how much address space it may have.
"""

import mmap
from pathlib import Path

from edgemoe.errors import UserError
from edgemoe.units import format_bytes

STATUS = Path("/proc/self/status")
ADDRESSES = Path("/proc/self/statm")


def held_bytes(status: Path = STATUS) -> int:
    """RssAnon + RssShmem of this process, 0 where the kernel does not tell."""
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def check_address_space(nbytes: int, path: Path) -> None:
    """Raise `UserError` where a limit (`ulimit -v`) leaves no room for `nbytes` more: where llama.cpp runs into one, it
    can end the process."""
    import resource  # Windows, where other parts of this package are imported, has none

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY or not ADDRESSES.exists():
        return
    left = limit - int(ADDRESSES.read_text().split()[0]) * mmap.PAGESIZE
    if left < nbytes:
        raise UserError(
            f"{path}: no address space: loading takes {format_bytes(nbytes)} of it besides what is in use, a limit "
            f"leaves {format_bytes(max(left, 0))}: raise it (ulimit -v)"
        )
