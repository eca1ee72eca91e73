"""`edgemoe tune` as a person runs it: the file that it writes, who takes it, and what an interrupt leaves."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from edgemoe.calibration import load_calibration
from edgemoe.cli import main
from edgemoe.demo import demo_file
from edgemoe.errors import UserError
from edgemoe.generation import load
from edgemoe.generation.parallel import load_streams
from edgemoe.model import read_model
from edgemoe.model.synthetic import write_synthetic
from edgemoe.policy.policy_file import load_policy_file

COMMAND = [sys.executable, "-m", "edgemoe.cli"]
SMALL = ("--windows", "3", "--ctx", "16", "--threads", "1", "--residency", "8", "--lambda", "0.1,0.3", "--window", "4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tune")
    write_synthetic(folder / "moe.gguf")
    write_synthetic(folder / "other.gguf", n_layers=3)
    (folder / "prose.txt").write_bytes(demo_file("prose.txt").read_bytes()[:9000])
    (folder / "code.txt").write_bytes(demo_file("code.txt").read_bytes()[:9000])
    edgemoe(folder, "trace", "moe.gguf", "-f", "code.txt", "-o", "t.npz", "--max-tokens", "60", *SCORES)
    edgemoe(folder, "trace", "other.gguf", "-f", "code.txt", "-o", "o.npz", "--max-tokens", "60", *SCORES)
    return folder


SCORES = ("--scores", "--threads", "1")


def edgemoe(folder: Path, *arguments: str, code: int = 0) -> "subprocess.CompletedProcess[str]":
    wide = {**os.environ, "COLUMNS": "120"}
    done = subprocess.run([*COMMAND, *arguments], cwd=folder, env=wide, capture_output=True, text=True, timeout=400)
    assert done.returncode == code, done.stderr
    return done


@pytest.fixture(scope="module")
def tuned(folder: Path) -> dict:
    """A tuned file in `folder`, and what the command said of it."""
    done = edgemoe(folder, "tune", "moe.gguf", "-f", "prose.txt", *SMALL, "--max-kl", "9", "-o", "a.json", "--json")
    assert done.stderr == ""
    return json.loads(done.stdout)


def test_the_fewest_copies_within_the_limits_are_written_down(folder: Path, tuned: dict) -> None:
    points = {json.dumps(point["policy"]): point for point in tuned["points"]}
    assert len(points) == len(tuned["points"]) >= 2 + 2 * 3
    assert {point["policy"]["window"] for point in tuned["points"]} == {0, 4}
    (chosen,) = (point for point in tuned["points"] if point["chosen"])
    inside = [point for point in tuned["points"] if point["within"]]
    assert chosen["copies"] == min(point["copies"] for point in inside)
    assert all(
        point["within"] == (point["kl"] <= 9 and point["excess_perplexity"] <= 0.05) for point in points.values()
    )
    # All layers of this model have experts of one size.
    (size,) = set(read_model(folder / "moe.gguf").geometry.expert_bytes)
    assert all(point["bytes_per_token"] == pytest.approx(size * point["copies"]) for point in points.values())
    exact = next(point for point in tuned["points"] if point["policy"]["routing"] == "exact")
    assert exact["kl"] == 0 and exact["copies"] > chosen["copies"]
    file = load_policy_file(folder / "a.json")
    assert file.slots == 8 and file.measured["copies"] == chosen["copies"] and file.calibration == "a.calib"
    assert not list(folder.glob("a*.partial")) and (folder / "a.calib").is_file()


def test_nothing_steers_where_no_divergence_is_allowed(folder: Path) -> None:
    done = edgemoe(folder, "tune", "moe.gguf", "-f", "prose.txt", *SMALL, "--max-kl", "0", "-o", "exact/e.json")
    assert load_policy_file(folder / "exact" / "e.json").policy.routing == "exact"
    assert "exact, score" in done.stdout and "psr λ=0.3 n=1" in done.stdout and done.stdout.count("chosen") == 1
    assert "coarse grid, 8 policies: " in done.stderr and "\x1b" not in done.stdout + done.stderr


def test_every_command_takes_the_file_with_its_calibration(folder: Path, tuned: dict) -> None:
    done = edgemoe(folder, "simulate", "t.npz", "--policy", "a.json", "--capacity", "8", "--json")
    assert "warm set: experts by frequency from a.calib" in " ".join(json.loads(done.stdout)["notes"])
    say = ("-p", "the", "-n", "3", "--threads", "1", "--json")
    done = edgemoe(folder, "run", "moe.gguf", "--policy", "a.json", "--residency", "8", *say)
    assert json.loads(done.stdout)["text"] is not None
    windows = ("-f", "code.txt", "--windows", "2", "--ctx", "16", "--threads", "1")
    done = edgemoe(
        folder, "eval", "divergence", "moe.gguf", *windows, "--policy", "exact-lru,a.json", "-o", "q.json", "--json"
    )
    runs = {run["policy"]: run for run in json.loads(done.stdout)["runs"]}
    assert runs["a.json"]["path"] == "q.a.json" and runs["a.json"]["config"]["policy"] == tuned["policy"]
    # At the residency that it was tuned for, and all with its calibration.
    assert {run["config"]["slots"] for run in runs.values()} == {8}
    assert len({run["config"]["calibration"] for run in runs.values()} - {""}) == 1


def test_benchmarks_take_it_and_another_residency_is_said(folder: Path, tuned: dict) -> None:
    pytest.importorskip("lm_eval", reason="needs lm_eval (pip install edgemoe[eval])")
    tasks = Path(__file__).parents[1] / "evaluation" / "tasks"
    asked = ("--tasks", str(tasks / "next_number.yaml"), "--ctx", "160", "--threads", "1", "--limit", "1")
    done = edgemoe(
        folder, "eval", "tasks", "moe.gguf", *asked, "--policy", "a.json", "--residency", "9", "-o", "k.json", "--json"
    )
    said = json.loads(done.stdout)
    assert said["config"]["policy"] == tuned["policy"] and said["config"]["calibration"]
    assert "a.json was tuned for 8 slots per layer, here are 9" in said["notes"][-1]


@pytest.mark.parametrize(
    "command",
    [
        ("run", "other.gguf", "-p", "the", "-n", "1", "--residency", "8"),
        ("eval", "divergence", "other.gguf", "-f", "code.txt", "-o", "no.json"),
        ("eval", "tasks", "other.gguf", "--tasks", "arc_easy", "-o", "no.json"),
        ("simulate", "o.npz", "--capacity", "8"),
    ],
)
def test_another_models_file_is_refused_in_one_line(folder: Path, tuned: dict, command: tuple[str, ...]) -> None:
    done = edgemoe(folder, *command, "--policy", "a.json", code=2)
    assert "a.json: tuned for" in done.stderr and done.stderr.count("\n") == 1 and done.stdout == ""
    assert tuned and not list(folder.glob("no*"))


def test_python_takes_the_file_with_its_calibration(folder: Path, tuned: dict) -> None:
    tuned_file = str(folder / "a.json")
    known = load_calibration(folder / "a.calib").digest
    with load(folder / "moe.gguf", residency="8", policy=tuned_file, n_threads=1) as writer:
        assert writer.calibration is not None and writer.calibration.digest == known
        assert asdict(writer.engine.policy) == tuned["policy"]
    with load_streams(folder / "moe.gguf", 2, residency="8", policy=tuned_file, n_threads=1, n_ctx=64):
        pass
    for loading in (load, lambda path, **how: load_streams(path, 2, **how)):
        with pytest.raises(UserError, match=r"a\.json: tuned for"):
            loading(folder / "other.gguf", residency="8", policy=tuned_file)


def test_files_of_different_calibrations_do_not_share_a_run(folder: Path, tuned: dict) -> None:
    edgemoe(folder, "tune", "moe.gguf", "-f", "code.txt", *SMALL, "--budget", "0", "-o", "b.json")
    text = ("-f", "code.txt", "-o", "no.json")
    done = edgemoe(folder, "eval", "divergence", "moe.gguf", *text, "--policy", "a.json,b.json", code=2)
    assert "a.json and b.json were tuned with different calibrations" in done.stderr and done.stderr.count("\n") == 1
    (folder / "psr.json").write_bytes((folder / "a.json").read_bytes())
    done = edgemoe(folder, "eval", "divergence", "moe.gguf", *text, "--policy", "psr.json,psr", code=2)
    assert "two of them are called psr" in done.stderr and done.stderr.count("\n") == 1
    assert tuned and not list(folder.glob("no*"))


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupt_keeps_what_is_measured(folder: Path, tmp_path: Path, stop: signal.Signals) -> None:
    """The same command goes on, measures nothing twice, and ends in the bytes of an uninterrupted run."""
    asked = ["tune", "moe.gguf", "-f", "prose.txt", *SMALL, "--windows", "12", "-o"]
    process = subprocess.Popen(
        [*COMMAND, *asked, str(tmp_path / "x.json")],
        cwd=folder,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    partial, patience = tmp_path / "x.json.partial", time.monotonic() + 200
    while not partial.exists() or partial.read_bytes().count(b"\n") < 8:
        assert time.monotonic() < patience and process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(stop)
    out, err = process.communicate(timeout=120)
    assert out == "" and "Traceback" not in err
    if stop != signal.SIGKILL:
        assert process.returncode == 130 and "the same command goes on" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.calib.partial", "x.json.partial"]
    finished = partial.read_bytes().count(b"\n") - 2  # a header, and the calibration's name
    done = edgemoe(folder, *asked, str(tmp_path / "x.json"), "--json")
    assert json.loads(done.stdout)["resumed"] in (finished, finished - 1)  # the last line may be torn
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.calib", "x.json"]
    if not (folder / "whole.json").exists():
        edgemoe(folder, *asked, "whole.json")
    assert (tmp_path / "x.json").read_text() == (folder / "whole.json").read_text().replace("whole.calib", "x.calib")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--max-kl", "nan"), "--max-kl nan: expected nats from 0"),
        (("--max-kl", "-1"), "--max-kl -1: expected nats from 0"),
        (("--max-ppl", "few"), "--max-ppl few: expected a share"),
        (("--max-ppl", "5"), "--max-ppl 5: that is 500% of the exact perplexity: write 5%"),
        (("--max-ppl", "nan%"), "--max-ppl nan: expected a share"),
        (("--lambda", "much"), "--lambda much: expected numbers"),
        (("--lambda", ","), "--lambda ',': expected values"),
        (("--lambda", "-0.5"), "lambda -0.5 is out of range"),
        (("--budget", "9"), "no budget of 9 fits a window of 4"),
        (("--window", "12"), "no budget of 1 fits a window of 12 and 8 slots"),
        (("--gate", "ajar"), "gate 'ajar' is not one of"),
        (("--eviction", "whim"), "eviction 'whim' is not one of"),
        (("--residency", "2000"), "residency 2000 is 2000 slots"),
        (("--residency", "1"), "cannot hold the 4 experts of one token"),
        (("--engine", "onnx"), "--engine onnx: expected one of"),
        (("--batch", "4"), "--batch: the llama.cpp engine has no such choice"),
        (("--windows", "1"), "--windows 1: an interval needs at least 2"),
        (("--ctx", "9000"), "longer than the context of 4,096"),
        (("-f", "none.txt"), "none.txt: cannot be read"),
        (("-f", "line.txt"), "line.txt: without a line's end"),
        (("-o", "policy.toml"), "expected a name ending in .json"),
        (("-o", "there.json"), "there.json: exists already"),
        (("-o", "prose.json", "-f", "prose.json", "--overwrite"), "prose.json: is one of the texts"),
        (("--calibration", "prose.txt"), "prose.txt: not a"),
    ],
)
def test_mistakes_are_answered_in_one_line(
    folder: Path,
    arguments: tuple[str, ...],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (folder / "line.txt").write_text("word " * 2000)
    (folder / "there.json").write_text("precious")
    (folder / "prose.json").write_bytes((folder / "prose.txt").read_bytes())
    text = () if "-f" in arguments else ("-f", "prose.txt")
    out = () if "-o" in arguments else ("-o", "wrong.json")
    budget = ("--budget", "1") if "--window" in arguments else ()
    command = ["edgemoe", "tune", "moe.gguf", *text, *SMALL, *budget, *out, *arguments]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setattr("edgemoe.cli.tune.interrupt_on_sigterm", lambda: None)
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as stopped:
        main()
    said = capsys.readouterr()
    assert stopped.value.code == 2 and words in said.err and said.err.count("\n") == 1 and said.out == ""
    assert not list(folder.glob("wrong*")) and (folder / "there.json").read_text() == "precious"
    assert (folder / "prose.json").read_bytes() == (folder / "prose.txt").read_bytes()
