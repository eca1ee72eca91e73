"""A long capture needs no more memory than a short one: what it captures is on disk."""

import subprocess
import sys
from pathlib import Path

import pytest

from edgemoe.model.synthetic import write_synthetic

PROGRAM = """
import resource, sys
from contextlib import nullcontext
from pathlib import Path
from edgemoe.progress import no_progress
from edgemoe.tracing.capture import Settings, capture
from edgemoe.tracing.texts import Source
folder, windows = Path(sys.argv[1]), int(sys.argv[2])
settings = Settings(n_ctx=128, max_tokens=128 * windows, n_threads=1, scores=True, pregate=True)
report = capture(folder / "m.gguf", [Source("x", folder / "text.txt")], folder / f"{windows}.npz", settings,
                 watch=lambda _: nullcontext(no_progress))
assert report.n_windows == windows and not report.failures, report
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def peak(folder: Path, windows: int) -> int:
    command = [sys.executable, "-c", PROGRAM, str(folder), str(windows)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in kilobytes on Linux only")
def test_ten_times_the_windows_need_no_more_memory(tmp_path: Path) -> None:
    write_synthetic(tmp_path / "m.gguf", n_layers=3, n_experts=256)
    words = (f"{number * 7919 % 10007} " for number in range(60_000))
    (tmp_path / "text.txt").write_text("".join(words))
    short, long = peak(tmp_path, 20), peak(tmp_path, 200)
    written = [(tmp_path / f"{windows}.npz").stat().st_size for windows in (20, 200)]
    assert written[1] - written[0] > 130e6
    assert long - short < 15e6, (short, long)
