"""Programs beside these tests, each in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path


def run(program: str, *arguments: Path) -> str:
    """What it writes."""
    command = [sys.executable, str(Path(__file__).with_name(program)), *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout
