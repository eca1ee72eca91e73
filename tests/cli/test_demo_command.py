"""`edgemoe demo` as a newcomer meets it, on the shipped model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from edgemoe.tracing import load_trace

Run = tuple["subprocess.CompletedProcess[str]", Path]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("demo")
    command = [sys.executable, "-m", "edgemoe.cli", "demo", "--max-tokens", "400", "--plots", "out", "--json"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900), folder / "out"


def test_it_prints_one_json_object_and_nothing_else(run: Run) -> None:
    result, _ = run
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert json.loads(result.stdout).keys() == {"findings", "rows", "trace", "pictures"}


def test_the_findings_are_those_of_the_trace(run: Run) -> None:
    result, folder = run
    found = json.loads(result.stdout)["findings"]
    trace = load_trace(folder / "demo.npz")
    assert set(trace.domains) == {"prose", "code", "math", "manuals"}
    assert trace.scores is not None
    assert trace.pregate is not None
    # Recency beats popularity, hindsight beats recency, and neither reaches everything: §4 on a model of our own.
    assert 0 < found["fixed"] < found["lru"] < found["belady"] < 1
    assert found["reuse"] > found["chance"]
    assert found["steered_copies"] < found["exact_copies"] < found["loads_per_token"] == 64


def test_every_picture_is_a_png(run: Run) -> None:
    result, folder = run
    pictures = [folder.parent / name for name in json.loads(result.stdout)["pictures"]]
    assert len(pictures) == 8
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    command = [sys.executable, "-m", "edgemoe.cli", "demo", "--plots", str(tmp_path / "file" / "x"), "--json"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 2
    assert len(result.stderr.strip().splitlines()) == 1
