"""What the bench enqueues on the device decides as the host does, here in Triton's interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

for name in ("torch", "triton"):
    pytest.importorskip(name)


def test_forced_tokens_follow_recorded_routing() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    program = Path(__file__).with_name("interpreted_forced.py")
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 2
    for window in found:
        assert window["residents"] and window["executed"] and window["timed"]
        assert window["copies"][0] == window["copies"][1] > 0
