"""Real file systems that refuse O_DIRECT: `edgemoe run --ram` reads through the page cache there and says so, once."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "edgemoe" / "data" / "demo-moe-32m-q8_0.gguf"
NOTE = "note this file system cannot be read past the page cache: what reads leave in it is dropped"
KINDS = ("ramfs", "ext4, data=journal")


def do(*command: object) -> None:
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=120)
    if result.returncode:
        pytest.skip(f"{command[0]} cannot be done here: {(result.stderr or result.stdout).strip()}")


@pytest.fixture(params=KINDS)
def mounted(request, tmp_path):
    """A folder on a file system without O_DIRECT."""
    if os.geteuid() != 0:
        pytest.skip("file systems are mounted by root")
    for program in ("mount", "umount", "mkfs.ext4"):
        if not shutil.which(program):
            pytest.skip(f"{program} is not installed")
    place = tmp_path / "mounted"
    place.mkdir()
    if request.param == "ramfs":
        do("mount", "-t", "ramfs", "none", place)
    else:
        image = tmp_path / "image"
        with image.open("wb") as file:
            file.truncate(160 << 20)
        do("mkfs.ext4", "-q", "-F", image)
        do("mount", "-o", "loop,data=journal", image, place)
    yield place
    subprocess.run(["umount", str(place)], check=True, timeout=120)


def run(model: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "edgemoe.cli", "run", model, "-p", "In the beginning", "-n", 24, "--greedy"]
    more = ["--threads", 1, "--ram", "320MB", "--verify-reads"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [str(part) for part in command + more], capture_output=True, text=True, timeout=300, env=environment
    )


def test_the_text_is_the_same_and_one_line_says_what_is_different(mounted):
    model = mounted / "m.gguf"
    shutil.copyfile(DEMO, model)
    os.sync()
    usual, there = run(DEMO), run(model)
    assert (usual.returncode, there.returncode) == (0, 0), there.stderr
    assert there.stdout == usual.stdout and len(there.stdout) > 20
    assert there.stderr.splitlines().count(NOTE) == 1
    if NOTE in usual.stderr:
        pytest.skip("the demo model's own file system has no O_DIRECT either: nothing differs")
