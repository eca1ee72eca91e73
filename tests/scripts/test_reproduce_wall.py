"""The script that sets the wall beside the paper's figures."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "reproduce_wall"
ROUTING = ROOT.parent / "shared" / "data" / "routing"
EXPECTED = {
    "cold decode (tok/s)": ("0.200", "0.20"),
    "bandwidth for 10 tok/s (GB/s)": ("120.0", "120"),
    "gap to the SSD (×)": ("50.0", "50"),
    "misses (GB/token)": ("2.72", "2.7"),
    "single stream (tok/s)": ("0.88", "0.9"),
    "tok/s at a 95% hit rate": ("6.0", "10"),
    "hit rate for 10 tok/s (%)": ("97.0", "95"),
    "share of the experts in 18 GB (%)": ("14.11", "13.4"),
    "rate that 0.44 tok/s implies (GB/s)": ("5.28", "2.4"),
}


def run(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True)


@pytest.mark.skipif(not ROUTING.is_dir(), reason="the published traces (../shared/data/routing) are absent")
def test_what_follows_does_and_what_does_not_is_said() -> None:
    done = run(ROUTING)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {what: (ours, theirs) for what, ours, theirs in re.findall(
        r"^ (.+?) {2,}(-?\d+\.\d+) +(\d[\d.]*)", done.stdout, flags=re.MULTILINE)}  # fmt: skip
    assert {what: found[what] for what in EXPECTED} == EXPECTED
    flat = re.sub(r"\s+", " ", done.stdout)
    assert "0 should follow and do not" in flat and "differ from edgemoe.wall.hits" not in flat
    assert "13.4% is 18 GB of the whole 134 GB file" in flat and "55% of the bytes came from RAM" in flat


def test_without_the_traces_in_a_folder_it_says_so_in_one_line(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 2 and "no such trace file" in done.stderr and len(done.stderr.splitlines()) == 1
