"""Memory groups that exist: a process gets what one has and no more, and what killed runs left is removed."""

import os
import subprocess
import sys

import pytest

from edgemoe.bench import memory_group
from edgemoe.bench.memory_group import MemoryGroup, find_hierarchy

FOUND = find_hierarchy()
HOG = """
import os, sys
from pathlib import Path
Path(sys.argv[1]).write_text(str(os.getpid()))
held = bytearray(b"x") * int(sys.argv[2])
"""


@pytest.mark.skipif(isinstance(FOUND, str), reason=str(FOUND))
@pytest.mark.parametrize(("megabytes", "code"), [(8, 0), (256, -9)])
def test_a_process_gets_what_the_group_has_and_no_more(megabytes, code):
    assert not isinstance(FOUND, str)
    with MemoryGroup(FOUND, 64 << 20, "hog") as group:
        command = [sys.executable, "-c", HOG, str(group.joined_by), str(megabytes << 20)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert result.returncode == code, result.stderr
        assert group.peak is None or 8 << 20 <= group.peak <= 64 << 20
    assert not group.path.exists()


def test_groups_of_killed_runs_are_removed_and_those_of_living_ones_stay(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    gone, alive = (tmp_path / f"edgemoe-bench-{pid}-x" for pid in (ended.pid, os.getpid()))
    others = tmp_path / "somebody"
    for folder in (gone, alive, others):
        folder.mkdir()
    memory_group._sweep(tmp_path)
    assert not gone.exists() and alive.exists() and others.exists()
