"""What other systems get: with what Windows lacks taken away, traces are read and nothing of the tier is imported."""

import subprocess
import sys
from pathlib import Path

import numpy as np

from edgemoe.tracing import Trace, save_trace

SCRIPT = """
import os, sys
sys.modules["fcntl"] = None
del os.memfd_create, os.posix_fadvise
from edgemoe.cli.commands import run
import edgemoe.generation.loading, edgemoe.llamacpp.resident, edgemoe.tracing.live
assert run(["stats", sys.argv[1]]) == 0 and run(["simulate", sys.argv[1], "--capacity", "8", "--policy", "lru"]) == 0
assert not [name for name in sys.modules if name.startswith("edgemoe.streaming")]
"""


def test_traces_are_read_without_what_only_unix_has(tmp_path: Path) -> None:
    experts = np.argsort(np.random.default_rng(0).random((2, 40, 16)), axis=2)[:, :, :4].astype(np.int16)
    trace = Trace(experts, 16, np.arange(2), np.array([0]), ("text",), "t")
    save_trace(trace, tmp_path / "t.npz")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "t.npz")], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "lru" in done.stdout
