"""RAM that this process may really use: the machine's, or what its control group leaves."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
# cgroup v1 writes "no limit" as the largest multiple of the page size.
_NO_LIMIT = 1 << 60


@dataclass(frozen=True)
class Ram:
    """Bytes. `limited` says that a control group allows less than the machine has."""

    total: int
    available: int
    limited: bool


def ram(root: Path = CGROUP_ROOT, membership: Path = Path("/proc/self/cgroup")) -> Ram:
    """Total and available RAM; in a container, the tightest limit on the way up to the root group counts.

    Page cache that a group holds can be reclaimed, so it counts as available, as the kernel counts it for the machine.
    """
    import psutil

    memory = psutil.virtual_memory()
    total, available = memory.total, memory.available
    for limit, used in _limits(root, membership):
        if limit < memory.total:
            total = min(total, limit)
            available = min(available, max(limit - used, 0))
    return Ram(total, available, total < memory.total)


def _limits(root: Path, membership: Path) -> Iterator[tuple[int, int]]:
    """(limit, bytes that cannot be reclaimed) of each group that this process is in, innermost first."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # v2
            top, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top = root / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = top / path.lstrip("/")
        for place in (group, *group.parents):
            limit, used = _number(place / names[0]), _number(place / names[1])
            if limit is not None and used is not None and limit < _NO_LIMIT:
                yield limit, max(used - _statistic(place / "memory.stat", names[2]), 0)
            if place == top:
                break


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such group here, or "max"
        return None


def _statistic(path: Path, name: str) -> int:
    try:
        pairs = dict(line.split(" ", 1) for line in path.read_text().splitlines())
        return int(pairs.get(name, 0))
    except (OSError, ValueError):
        return 0
