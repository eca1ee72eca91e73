"""The device's executor: what it decides, moves and computes is the CPU's, here in Triton's interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

for name in ("torch", "triton"):
    pytest.importorskip(name)


def test_a_token_on_the_device_is_the_cpu_s() -> None:
    """Whatever part of the copies has arrived when an expert's block begins."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    program = Path(__file__).with_name("interpreted_device.py")
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {name: case["wrong"] for name, case in found.items()} == {name: [] for name in found}
    assert len(found) == 3 and max(case["worst"] for case in found.values()) < 2e-6
    assert found["psr-gated/1"]["late"] > 0
