"""Finding where memory can be limited, on both versions, by trying; and the reason where it cannot."""

import os
from pathlib import Path

import pytest

from edgemoe.bench import memory_group
from edgemoe.bench.memory_group import Hierarchy, MemoryGroup, find_hierarchy
from edgemoe.errors import UserError


@pytest.fixture
def as_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)


def described(folder: Path, mounts: str, membership: str) -> tuple[Path, Path]:
    (folder / "mounts").write_text(mounts)
    (folder / "cgroup").write_text(membership)
    return folder / "mounts", folder / "cgroup"


def test_without_the_controller_the_reason_is_said(tmp_path: Path) -> None:
    files = described(tmp_path, "proc /proc proc rw 0 0\n", "0::/\n")
    assert find_hierarchy(*files) == "no memory control group hierarchy is mounted"


def test_only_root_makes_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    files = described(tmp_path, f"cgroup {tmp_path} cgroup rw,memory 0 0\n", "4:memory:/\n")
    found = find_hierarchy(*files)
    assert isinstance(found, str) and "root" in found


def test_a_controller_that_is_not_handed_down_is_no_place(tmp_path: Path, as_root: None) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpu memory\n")
    (tmp_path / "cgroup.subtree_control").write_text("cpu\n")
    files = described(tmp_path, f"cgroup2 {tmp_path} cgroup2 rw 0 0\n", "0::/\n")
    found = find_hierarchy(*files)
    assert isinstance(found, str) and "cgroup.subtree_control" in found


@pytest.mark.parametrize("version", [1, 2])
def test_both_versions_are_found_by_trying(
    tmp_path: Path, as_root: None, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    tried = []

    class Trial(MemoryGroup):
        def __init__(self, hierarchy: Hierarchy, limit: int, name: str) -> None:
            tried.append(hierarchy)
            if hierarchy.parent == tmp_path:
                raise UserError("not here")
            self.path = tmp_path / "gone"

    monkeypatch.setattr(memory_group, "MemoryGroup", Trial)
    (tmp_path / "own").mkdir()
    for place in (tmp_path, tmp_path / "own"):
        (place / "cgroup.controllers").write_text("memory\n")
        (place / "cgroup.subtree_control").write_text("memory\n")
    kind = "cgroup rw,memory" if version == 1 else "cgroup2 rw"
    files = described(tmp_path, f"x {tmp_path} {kind} 0 0\n", "4:memory:/own\n" if version == 1 else "0::/own\n")
    found = find_hierarchy(*files)
    assert found == Hierarchy(version, tmp_path / "own") and tried[0].parent == tmp_path
    assert found.limit_file == ("memory.limit_in_bytes" if version == 1 else "memory.max")


def test_a_group_limits_and_is_removed() -> None:
    hierarchy = find_hierarchy()
    if isinstance(hierarchy, str):
        pytest.skip(hierarchy)
    with MemoryGroup(hierarchy, 1 << 28, "test") as group:
        assert group.limit == 1 << 28 and group.joined_by.exists() and group.peak is not None
        path = group.path
    assert not path.exists()


def test_a_group_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no memory group can be made"):
        MemoryGroup(Hierarchy(1, tmp_path / "missing"), 1 << 28, "test")
