"""`edgemoe eval divergence` as a person runs it, and its files in `edgemoe eval compare`."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from edgemoe.demo import demo_file
from edgemoe.model.synthetic import write_synthetic

COMMAND = [sys.executable, "-m", "edgemoe.cli", "eval"]
SMALL = ("--windows", "6", "--ctx", "16", "--threads", "1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("divergence")
    write_synthetic(folder / "moe.gguf")
    write_synthetic(folder / "other.gguf", n_layers=3)
    (folder / "prose.txt").write_bytes(demo_file("prose.txt").read_bytes())
    (folder / "code.txt").write_bytes(demo_file("code.txt").read_bytes()[:9000])
    return folder


def edgemoe(folder: Path, *arguments: str, code: int = 0) -> "subprocess.CompletedProcess[str]":
    done = subprocess.run([*COMMAND, *arguments], cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == code, done.stderr
    return done


def test_a_reference_and_policies_to_compare_with_it(folder: Path) -> None:
    texts = ("-f", "prose.txt", "-f", "program=code.txt")
    done = edgemoe(folder, "divergence", "moe.gguf", *texts, *SMALL, "--policy", "exact-lru", "-o", "out/exact.json")
    assert "wrote out/exact.json" in done.stdout and "8 slots per layer, exact routing, lru" in done.stdout
    assert "+0.00 ± 0.00%" in done.stdout and "12 windows" in done.stderr and "\x1b" not in done.stdout + done.stderr

    options = ("--policy", "cache-prior,psr", "--lambda", "0.3", "--window", "6", "--residency", "8", "--json")
    done = edgemoe(folder, "divergence", "moe.gguf", *texts, *SMALL, *options, "-o", "out/a.json")
    assert done.stderr == ""
    said = json.loads(done.stdout)
    assert [(run["policy"], run["path"]) for run in said["runs"]] == [
        ("cache-prior", "out/a.cache-prior.json"),
        ("psr", "out/a.psr.json"),
    ]
    psr = said["runs"][1]
    assert psr["config"]["policy"]["lam"] == 0.3 and psr["config"]["policy"]["window"] == 6
    assert [line["domain"] for line in psr["summary"]] == ["program", "prose", "all"]
    assert psr["summary"][2]["kl"]["mean"] > 0 and psr["summary"][2]["prefetch"]["mean"] > 0
    assert said["runs"][0]["config"]["policy"]["window"] == 0

    done = edgemoe(folder, "compare", "out/exact.json", "out/a.psr.json", "out/a.cache-prior.json", "--json")
    rows = json.loads(done.stdout)["rows"]
    assert {(row["task"], row["metric"], row["n"]) for row in rows} == {("program", "nll", 6), ("prose", "nll", 6)}
    excess = {row["task"]: row["difference"]["mean"] for row in rows if "psr" in row["run"]}
    assert excess["prose"] == pytest.approx(psr["summary"][1]["excess_nll"]["mean"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--policy", "psr,psr"), "each once"),
        (("--policy", "fast"), "no policy preset 'fast'"),
        (("--policy", "exact-lru", "--lambda", "0.1"), "lambda means nothing to exact-lru"),
        (("--engine", "onnx"), "--engine onnx: expected one of llama.cpp, torch, offload"),
        (("--residency", "lots"), "is not a residency"),
        (("-f", "none.txt"), "none.txt: cannot be read"),
        (("--calibration", "other.calib", "--window", "6"), "not of this"),
        (("-o", "there.json"), "there.json: exists already"),
        (("-o", "prose.txt", "--overwrite"), "prose.txt: is one of the texts"),
        (("--ctx", "9000"), "longer than the context of 4,096 tokens"),
        (("--ctx", "4000", "-f", "code.txt"), "code: its text fills 1 windows"),
    ],
)
def test_mistakes_are_answered_in_one_line(folder: Path, arguments: tuple[str, ...], words: str) -> None:
    if "other.calib" in arguments and not (folder / "other.calib").exists():
        made = [
            "calibrate",
            "other.gguf",
            "-f",
            "code.txt",
            "-o",
            "other.calib",
            "--threads",
            "1",
            "--max-tokens",
            "200",
        ]
        subprocess.run([*COMMAND[:-1], *made], cwd=folder, check=True, capture_output=True, timeout=240)
    (folder / "there.json").write_text("precious")
    given = ("--file", "prose.txt") if "-f" not in arguments else ()
    out = () if "-o" in arguments else ("-o", "wrong.json")
    small = () if "--ctx" in arguments else SMALL
    done = edgemoe(folder, "divergence", "moe.gguf", *given, *small, *out, *arguments, code=2)
    assert words in done.stderr and done.stderr.count("\n") == 1 and done.stdout == ""
    assert not list(folder.glob("wrong*")) and (folder / "there.json").read_text() == "precious"


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_keeps_what_is_finished(folder: Path, tmp_path: Path, stop: signal.Signals) -> None:
    long = ("--windows", "300", "--ctx", "64", "--threads", "1", "--window", "6", "-o", str(tmp_path / "x.json"))
    process = subprocess.Popen(
        [*COMMAND, "divergence", "moe.gguf", "-f", "prose.txt", *long],
        cwd=folder,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    partial, patience = tmp_path / "x.json.partial", time.monotonic() + 120
    while not partial.exists() or partial.read_bytes().count(b"\n") < 3:
        assert time.monotonic() < patience and process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(stop)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130 and out == "" and "the same command goes on" in err and "Traceback" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["x.json.partial"]
    assert partial.read_bytes().count(b"\n") >= 3
