"""What a process holds in RAM that the kernel cannot take back: anonymous and shared memory, not the page cache."""

from pathlib import Path

STATUS = Path("/proc/self/status")


def held_bytes(status: Path = STATUS) -> int:
    """RssAnon + RssShmem of this process, 0 where the kernel does not tell."""
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))
