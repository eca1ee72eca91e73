"""The script that holds the RAM→VRAM engine to the quality harness, on a few short windows."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch (pip install edgemoe[eval])")
pytest.importorskip("transformers", reason="needs transformers (pip install edgemoe[eval])")

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_engine_against_harness"


def test_engine_and_harness_are_one_model_under_one_policy() -> None:
    small = ("--windows", "2", "--length", "24", "--calibrate", "2", "--policy", "psr", "--dtype", "float32", "--json")
    one = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, SCRIPT, *small], capture_output=True, text=True, env=one, timeout=300)
    assert done.returncode == 0, done.stderr
    exact, psr = json.loads(done.stdout)
    for found in (exact, psr):
        sets = found["agreement"]
        assert found["met"] and found["tokens"] == 8 * 23 and found["windows"] == 8
        assert sets["sets"] == 8 * 23 * 8 and sets["same"] > 0.98 * sets["sets"] and sets["replayed"] == 0
        assert found["perplexity_engine"] == pytest.approx(found["perplexity_harness"], rel=0.002)
    assert psr["perplexity_engine"] != exact["perplexity_engine"]
    assert psr["interaction"] == pytest.approx(psr["difference"] - exact["difference"], abs=1e-9)
