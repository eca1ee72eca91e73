"""Compiled kernels are kept on disk, and never run when what they were compiled from has changed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import edgemoe

PROGRAM = """
import numpy as np
from edgemoe.policy.eviction import score
loads = np.random.default_rng(0).integers(0, 12, size=(400, 2)).astype(np.int16)
print(score(loads, 12, 4), sum(score.stats.cache_hits.values()))
"""


@pytest.fixture
def package(tmp_path):
    source = Path(edgemoe.__file__).parent
    (tmp_path / "edgemoe").mkdir()
    for name in ("__init__.py", "errors.py"):
        shutil.copy(source / name, tmp_path / "edgemoe" / name)
    shutil.copytree(source / "policy", tmp_path / "edgemoe" / "policy", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def run(package, **environment):
    """(misses, how many kernels came from the cache)"""
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(package)!r})\n{PROGRAM}"]
    clean = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**clean, **environment})
    return [int(word) for word in done.stdout.split()]


def test_an_edit_in_another_file_discards_the_machine_code(package):
    first, cached = run(package)
    assert cached == 0
    assert run(package) == [first, 1]
    constants = package / "edgemoe" / "policy" / "algorithm1.py"
    text = constants.read_text()
    assert "FAST_GAIN = np.float32(0.5), np.float32(0.5)" in text
    constants.write_text(
        text.replace("FAST_GAIN = np.float32(0.5), np.float32(0.5)", "FAST_GAIN = np.float32(0.5), np.float32(-9)")
    )
    second, cached = run(package)
    assert cached == 0
    assert second != first


def test_without_a_place_for_machine_code_it_still_runs(package):
    nowhere = package / "file"
    nowhere.write_text("")
    policy = package / "edgemoe" / "policy"
    first, _ = run(package)
    shutil.rmtree(policy / "__pycache__")
    (policy / "__pycache__").write_text("")  # neither the package nor the home directory can take a cache
    environment = {"HOME": str(nowhere), "XDG_CACHE_HOME": str(nowhere), "PYTHONDONTWRITEBYTECODE": "1"}
    assert run(package, **environment) == [first, 0]
