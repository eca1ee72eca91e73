"""A control group that limits memory, page cache included: the only fair way to hold mmap to a budget.

A process that maps a file may use all free RAM as page cache, and none of that is its own. In a memory group, pages
that it brings in are charged to the group, and the kernel takes back the group's oldest when the limit is reached, as
it would on a machine that has no more. Groups are made by root, and where /sys/fs/cgroup is writable.
"""

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from edgemoe.errors import UserError
from edgemoe.units import format_bytes

MOUNTS = Path("/proc/self/mounts")
MEMBERSHIP = Path("/proc/self/cgroup")
_PREFIX = "edgemoe-bench-"


@dataclass(frozen=True)
class Hierarchy:
    """Where memory groups can be made, and how their files are called."""

    version: int
    parent: Path

    @property
    def limit_file(self) -> str:
        return "memory.max" if self.version == 2 else "memory.limit_in_bytes"

    @property
    def peak_file(self) -> str:
        return "memory.peak" if self.version == 2 else "memory.max_usage_in_bytes"


class MemoryGroup:
    """A group of so many bytes; a context manager. A process joins by writing its id to `joined_by`.

    Raises `UserError` where it cannot be made.
    """

    def __init__(self, hierarchy: Hierarchy, limit: int, name: str) -> None:
        self.hierarchy = hierarchy
        self.path = hierarchy.parent / f"{_PREFIX}{os.getpid()}-{name}"
        try:
            self.path.mkdir()
        except OSError as error:
            raise UserError(f"{self.path}: no memory group can be made ({error.strerror})") from None
        try:
            (self.path / hierarchy.limit_file).write_text(str(limit))
            # Swap would be more memory than the limit says; without the file there is none to limit.
            with suppress(OSError):
                if hierarchy.version == 2:
                    (self.path / "memory.swap.max").write_text("0")
                else:
                    (self.path / "memory.memsw.limit_in_bytes").write_text(str(limit))
            self.limit = int((self.path / hierarchy.limit_file).read_text())
        except (OSError, ValueError):
            self.close()
            raise UserError(f"{self.path}: a limit of {format_bytes(limit)} is refused") from None
        except BaseException:
            self.close()
            raise

    @property
    def joined_by(self) -> Path:
        return self.path / "cgroup.procs"

    @property
    def peak(self) -> int | None:
        """The most bytes that it has held, page cache included; None where the kernel does not tell."""
        try:
            return int((self.path / self.hierarchy.peak_file).read_text())
        except (OSError, ValueError):
            return None

    def close(self) -> None:
        """Remove the group; its processes must have ended, which the kernel may notice a little later."""
        for _ in range(100):
            try:
                self.path.rmdir()
            except FileNotFoundError:
                return
            except OSError:
                time.sleep(0.05)
            else:
                return

    def __enter__(self) -> "MemoryGroup":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def find_hierarchy(mounts: Path = MOUNTS, membership: Path = MEMBERSHIP) -> Hierarchy | str:
    """Where a memory group can be made, or in words why not: tried by making an empty one and removing it."""
    if os.name != "posix" or not mounts.exists():
        return "memory control groups are Linux's"
    found = _mounted(mounts)
    if not found:
        return "no memory control group hierarchy is mounted"
    if os.geteuid() != 0:
        return "memory control groups are made by root: run it as root for this comparison"
    reasons = []
    for version, point in found:
        for parent in _parents(version, point, membership):
            hierarchy = Hierarchy(version, parent)
            _sweep(parent)
            try:
                MemoryGroup(hierarchy, 1 << 30, "trial").close()
                return hierarchy
            except UserError as error:
                reasons.append(str(error))
    return reasons[0] if reasons else "no control group hands the memory controller down (cgroup.subtree_control)"


def _mounted(mounts: Path) -> list[tuple[int, Path]]:
    """Hierarchies that could limit memory: version 1's memory controller, which excludes it from 2, comes first."""
    first, second = [], []
    for line in mounts.read_text().splitlines():
        _, point, kind, options, *_ = line.split()
        if kind == "cgroup" and "memory" in options.split(","):
            first.append((1, Path(point)))
        elif kind == "cgroup2" and "memory" in _words(Path(point) / "cgroup.controllers"):
            second.append((2, Path(point)))
    return first + second


def _parents(version: int, point: Path, membership: Path) -> list[Path]:
    """Groups to make ours in, the hierarchy's root first; version 2 must hand the controller down."""
    own = ""
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if (version == 2 and controllers == "") or (version == 1 and "memory" in controllers.split(",")):
            own = path
    inner = point / own.lstrip("/")
    chain = [place for place in (inner, *inner.parents) if place == point or point in place.parents][::-1]
    if version == 1:
        return chain
    return [place for place in chain if "memory" in _words(place / "cgroup.subtree_control")]


def _sweep(parent: Path) -> None:
    """Remove the empty groups of benchmarks that were killed."""
    with suppress(OSError):
        for left in parent.glob(f"{_PREFIX}*"):
            pid = left.name.removeprefix(_PREFIX).partition("-")[0]
            if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
                with suppress(OSError):
                    left.rmdir()


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
