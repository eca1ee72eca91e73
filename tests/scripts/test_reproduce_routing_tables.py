"""The script that sets our figures beside the study's."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "reproduce_routing_tables"
ROUTING = ROOT.parent / "shared" / "data" / "routing"


def run(*arguments):
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True)


@pytest.mark.skipif(not ROUTING.is_dir(), reason="the published traces (../shared/data/routing) are absent")
def test_every_figure_is_equal_or_explained():
    done = run(ROUTING)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 not explained" in re.sub(r"\s+", " ", done.stdout)
    ours = dict(re.findall(r"^ (.+?) {2,}(-?\d+\.\d+) ", done.stdout, flags=re.MULTILINE))
    expected = {
        "P(expert reused at next token)": "0.4439",
        "chance, Σp²/Σp": "0.2227",
        "working set, 95% of traffic (%)": "52.47",
        "LRU misses per token": "2.7255000",
        "LFU hit rate @ 13.4% (%)": "60.06",
        "static-pin hit rate @ 13.4% (%)": "59.19",
        "Belady misses per token": "1.51075",
        "code – general": "0.1614",
        "general – medical": "0.4151",
    }
    assert {what: ours[what] for what in expected} == expected
    # Table 5, within 0.5 points: reuse, LRU hit@25%, static hit@50%.
    table_5 = {"a": (0.336, 0.494, 0.747), "b": (0.634, 0.788, 0.930), "c": (0.470, 0.733, 0.991)}
    for arm, printed in table_5.items():
        for column, theirs in zip(("reuse", "LRU hit@25%", "static hit@50%"), printed, strict=True):
            assert float(ours[f"{arm}-main s1, {column}"]) == pytest.approx(theirs, abs=0.005)


def test_without_the_traces_it_says_so_in_one_line(tmp_path):
    done = run(tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "no such trace file" in done.stderr and len(done.stderr.splitlines()) == 1
