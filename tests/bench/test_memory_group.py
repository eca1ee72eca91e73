"""Memory groups: they limit, they go, and where they cannot be made the reason is said."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from edgemoe.bench import memory_group
from edgemoe.bench.memory_group import Hierarchy, MemoryGroup, find_hierarchy
from edgemoe.errors import UserError

FOUND = find_hierarchy()
limited = pytest.mark.skipif(isinstance(FOUND, str), reason=str(FOUND))
HOG = """
import sys
from pathlib import Path
Path(sys.argv[1]).write_text("0")
held = bytearray(int(sys.argv[2]))
print(len(held))
"""


@limited
@pytest.mark.parametrize(("megabytes", "code"), [(8, 0), (256, -9)])
def test_a_process_gets_what_the_group_has_and_no_more(megabytes, code):
    with MemoryGroup(FOUND, 64 << 20, "test") as group:
        command = [sys.executable, "-c", HOG, group.joined_by, str(megabytes << 20)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert result.returncode == code
        assert group.limit == 64 << 20 and 8 << 20 <= group.peak <= group.limit
        path = group.path
    assert not path.exists()


@limited
def test_a_group_that_is_there_already_is_refused():
    with MemoryGroup(FOUND, 64 << 20, "twice"), pytest.raises(UserError, match="no memory group can be made"):
        MemoryGroup(FOUND, 64 << 20, "twice")


def test_groups_of_killed_runs_are_removed_and_those_of_living_ones_stay(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    gone, alive, other = (
        tmp_path / name for name in (f"edgemoe-bench-{ended.pid}-x", f"edgemoe-bench-{os.getpid()}-x", "a")
    )
    for folder in (gone, alive, other):
        folder.mkdir()
    memory_group._sweep(tmp_path)
    assert not gone.exists() and alive.exists() and other.exists()


@pytest.mark.parametrize(
    ("mounts", "says"),
    [("proc /proc proc rw 0 0\n", "no memory control group hierarchy"), ("", "no memory control group hierarchy")],
)
def test_without_a_hierarchy_the_reason_is_said(tmp_path, mounts, says):
    (tmp_path / "mounts").write_text(mounts)
    assert says in find_hierarchy(tmp_path / "mounts")


def hierarchy_of(tmp_path, own, controllers, handed_down):
    """A version 2 tree of ordinary folders, and the two files of /proc that lead to it."""
    root = tmp_path / "cgroup"
    inner = root / own.lstrip("/")
    inner.mkdir(parents=True, exist_ok=True)
    (root / "cgroup.controllers").write_text(controllers)
    (root / "cgroup.subtree_control").write_text(handed_down)
    (tmp_path / "mounts").write_text(f"cgroup2 {root} cgroup2 rw 0 0\n")
    (tmp_path / "membership").write_text(f"0::{own}\n")
    return tmp_path / "mounts", tmp_path / "membership"


def test_version_2_needs_the_controller_to_be_handed_down(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert "subtree_control" in find_hierarchy(*hierarchy_of(tmp_path, "/user/me", "cpu memory", "cpu"))


def test_without_root_the_reason_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "root" in find_hierarchy(*hierarchy_of(tmp_path, "/user/me", "cpu memory", "memory"))


def test_a_tree_that_cannot_be_written_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    mounts, membership = hierarchy_of(tmp_path, "/", "memory", "memory")

    def refuse(self, *_, **__):
        raise PermissionError(30, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert "Read-only file system" in find_hierarchy(mounts, membership)


def test_both_versions_name_their_files():
    names = [(Hierarchy(v, Path("/")).limit_file, Hierarchy(v, Path("/")).peak_file) for v in (1, 2)]
    assert names == [("memory.limit_in_bytes", "memory.max_usage_in_bytes"), ("memory.max", "memory.peak")]
