"""The study of policies on the demo model, as a smoke test; a second run takes what the first measured."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch (pip install edgemoe[eval])")
pytest.importorskip("transformers", reason="needs transformers (pip install edgemoe[eval])")

SCRIPT = Path(__file__).parents[2] / "scripts" / "reproduce_frontier"


def test_a_quick_study_is_measured_once_and_judged(tmp_path: Path) -> None:
    command = [sys.executable, SCRIPT, "--quick", "--residency", "50%", "--out", tmp_path, "--json"]
    one = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=one, timeout=600)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    by_name = {row["setting"]: row["text"] for row in said["frontier"]}
    assert by_name["exact, LRU"]["kl"]["mean"] == 0 and by_name["exact, LRU"]["copies"] > 0
    psr, prior = by_name["psr n=1 λ=0.2"], by_name["cache-prior A λ=0.2"]
    (claim,) = said["claims"]
    assert claim["kl"]["mean"] == pytest.approx(psr["kl"]["mean"] - prior["kl"]["mean"])
    assert claim["copies"]["mean"] == pytest.approx(psr["copies"] - prior["copies"])
    page = (tmp_path / "frontier.md").read_text(encoding="utf-8")
    assert (tmp_path / "frontier.png").stat().st_size > 1000 and "| psr n=1 λ=0.2 |" in page
    four = f"| 50% | A | {prior['kl']['mean']:.4f} ± {prior['kl']['half_width']:.4f} | {psr['kl']['mean']:.4f} ± "
    assert four in page
    results = sorted(tmp_path.glob("*/*.json"))
    before = [path.stat().st_mtime_ns for path in results]
    again = subprocess.run(command, capture_output=True, text=True, env=one, timeout=600)
    assert again.stdout == done.stdout and [path.stat().st_mtime_ns for path in results] == before
