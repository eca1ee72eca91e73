"""`edgemoe calibrate` as a person runs it, and its file in `edgemoe simulate`."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from edgemoe.calibration import load_calibration
from edgemoe.model.synthetic import write_synthetic

COMMAND = [sys.executable, "-m", "edgemoe.cli"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calibrate")
    write_synthetic(folder / "moe.gguf")
    write_synthetic(folder / "other.gguf", n_layers=3)
    write_synthetic(folder / "dense.gguf", "llama")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog, again and again.\n" * 8000)
    (folder / "short.txt").write_text("hi")
    (folder / "exists.calib").write_bytes(b"precious")
    return folder


def edgemoe(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], cwd=folder, capture_output=True, text=True, timeout=300)


def test_calibrate_and_simulate_with_it(folder: Path) -> None:
    small = ("-f", "a=text.txt", "--max-tokens", "300", "--ctx", "128", "--threads", "1")
    done = edgemoe(folder, "calibrate", "moe.gguf", *small, "-o", "moe.calib")
    assert done.returncode == 0, done.stderr
    assert "4 MoE layers of 16 experts, from 300 tokens" in done.stdout and "\x1b" not in done.stdout + done.stderr
    assert "next: edgemoe simulate TRACE --policy psr --calibration moe.calib" in done.stdout
    done = edgemoe(folder, "calibrate", "moe.gguf", *small, "-o", "moe.calib", "--overwrite", "--json")
    assert done.returncode == 0 and done.stderr == ""
    said, found = json.loads(done.stdout), load_calibration(folder / "moe.calib", folder / "moe.gguf")
    assert said["delta"] == pytest.approx(found.delta.tolist()) and said["warm"] == found.warm.tolist()
    assert said["tokens"] == 300 and said["prior"]["tokens"] == len(found.prior.tokens) > 10
    assert said["settings"]["n_ctx"] == 128 and said["texts"][0]["domain"] == "a"

    traced = edgemoe(folder, "trace", "moe.gguf", *small, "--scores", "--pregate", "-o", "moe.npz")
    assert traced.returncode == 0, traced.stderr
    options = ("--capacity", "8", "--policy", "psr", "--window", "4", "--json")
    done = edgemoe(folder, "simulate", "moe.npz", *options, "--calibration", "moe.calib")
    assert done.returncode == 0, done.stderr
    with_prior = json.loads(done.stdout)
    notes = with_prior["notes"][-1]
    assert "mean range from moe.calib" in notes and notes.endswith("token prior from moe.calib")
    by_trace = json.loads(edgemoe(folder, "simulate", "moe.npz", *options, "--calibration", "moe.npz").stdout)
    assert by_trace["notes"][-1].endswith("no token prior")
    assert with_prior["rows"][0]["demand_per_token"] != by_trace["rows"][0]["demand_per_token"]

    edgemoe(folder, "trace", "other.gguf", *small, "--scores", "--pregate", "-o", "other.npz")
    for wrong, message in ((["other.npz"], "fingerprints differ"), (["moe.npz", "--layer", "9"], "no MoE layer 9")):
        refused = edgemoe(folder, "simulate", *wrong, *options, "--calibration", "moe.calib")
        assert refused.returncode == 2 and message in refused.stderr and refused.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("dense.gguf", "-f", "text.txt"), "a dense model"),
        (("nope.gguf", "-f", "text.txt"), "no such file"),
        (("moe.gguf", "-f", "nope.txt"), "nope.txt: cannot be read"),
        (("moe.gguf", "-f", "short.txt"), "text too short"),
        (("moe.gguf", "-f", "text.txt", "-o", "exists.calib"), "exists already"),
        (("moe.gguf", "-f", "text.txt", "-o", "text.txt", "--overwrite"), "choose another name"),
        (("moe.gguf", "-f", "text.txt", "-o", "no/such"), "no folder"),
        (("moe.gguf", "-f", "text.txt", "-o", "."), "a folder"),
    ],
)
def test_mistakes_are_one_line_and_lose_nothing(folder: Path, arguments: tuple[str, ...], message: str) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    done = edgemoe(folder, "calibrate", *arguments, *(() if "-o" in arguments else ("-o", "new.calib")))
    assert done.returncode == 2 and done.stdout == ""
    assert message in done.stderr and done.stderr.count("\n") == 1 and done.stderr.startswith("edgemoe: ")
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


@pytest.mark.parametrize(
    ("number", "out", "said"),
    [(signal.SIGINT, "new.calib", "nothing was written"), (signal.SIGTERM, "exists.calib", "is as it was")],
)
def test_an_interrupted_run_leaves_nothing(folder: Path, number: int, out: str, said: str) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    process = subprocess.Popen(
        [
            *COMMAND,
            "calibrate",
            "moe.gguf",
            "-f",
            "text.txt",
            "-o",
            out,
            "--overwrite",
            "--threads",
            "1",
            "--ctx",
            "64",
        ],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 300
    while not [at for at in folder.glob(f".{out}.*/*.partial/tokens.i32") if at.stat().st_size >= 400]:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(process.pid, number)
    stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 130 and stdout == "", stderr
    assert stderr.splitlines()[-1].startswith("edgemoe: interrupted: ") and stderr.rstrip().endswith(said)
    assert "Traceback" not in stderr
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_a_full_disk_is_one_line_and_leaves_nothing(folder: Path) -> None:
    """A limit on file size stands in for the full disk."""
    before = sorted(path.name for path in folder.iterdir())
    command = f"{' '.join(COMMAND)} calibrate moe.gguf -f text.txt -o full.calib --threads 1"
    script = f"trap '' XFSZ; ulimit -f 8; exec {command}"
    done = subprocess.run(["bash", "-c", script], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "cannot be written (File too large)" in done.stderr, done.stderr
    assert "captured" not in done.stderr and "Traceback" not in done.stderr
    assert sorted(path.name for path in folder.iterdir()) == before


def test_the_same_text_gives_the_same_numbers(folder: Path) -> None:
    small = ("-f", "text.txt", "--max-tokens", "100", "--threads", "1")
    for out in ("one", "two"):
        assert edgemoe(folder, "calibrate", "moe.gguf", *small, "-o", out).returncode == 0
    one, two = load_calibration(folder / "one"), load_calibration(folder / "two")
    assert np.array_equal(one.delta, two.delta) and np.array_equal(one.prior.counts, two.prior.counts)
