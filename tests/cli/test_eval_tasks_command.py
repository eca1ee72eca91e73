"""`edgemoe eval tasks` as a person runs it, and its files in `edgemoe eval compare`."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="needs lm_eval (pip install edgemoe[eval])")

from edgemoe.model.synthetic import write_synthetic

COMMAND = [sys.executable, "-m", "edgemoe.cli", "eval"]
TASKS = Path(__file__).parents[1] / "evaluation" / "tasks"
SMALL = ("--threads", "1", "--ctx", "160")
WINDOW = ("--window", "6")  # the small model has no more experts that a prefetch could consider


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    write_synthetic(folder / "moe.gguf")
    for file in TASKS.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    question = (TASKS / "odd_one_out.jsonl").read_text().splitlines()[0]
    (folder / "many").mkdir()
    (folder / "many" / "odd_one_out.jsonl").write_text(f"{question}\n" * 2000)
    for name in ("odd_one_out.yaml", "odd_one_out_shots.jsonl"):
        (folder / "many" / name).write_bytes((TASKS / name).read_bytes())
    return folder


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "HF_DATASETS_CACHE": str(folder / "cache")}


def edgemoe(folder: Path, *arguments: str, code: int = 0) -> "subprocess.CompletedProcess[str]":
    done = subprocess.run(
        [*COMMAND, *arguments], cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=400
    )
    assert done.returncode == code, done.stderr
    return done


def test_a_reference_and_a_policy_to_compare_with_it(folder: Path) -> None:
    both = ("--tasks", "odd_one_out.yaml,next_number.yaml", *SMALL)
    done = edgemoe(
        folder, "tasks", "moe.gguf", *both, "--policy", "exact-lru", "--num-fewshot", "1", "-o", "out/a.json"
    )
    assert "wrote out/a.json" in done.stdout and "8 slots per layer, exact routing, lru" in done.stdout
    assert "odd_one_out  acc_norm" in done.stdout and "note next_number is always asked without" in done.stdout
    assert "13 questions" in done.stderr and "it/s" not in done.stderr and "\x1b" not in done.stdout + done.stderr

    steering = (
        "--policy",
        "psr",
        "--lambda",
        "0.5",
        "--window",
        "6",
        "--residency",
        "8",
        "--num-fewshot",
        "1",
        "--json",
    )
    done = edgemoe(folder, "tasks", "moe.gguf", *both, *steering, "-o", "out/b.json")
    assert done.stderr == ""
    said = json.loads(done.stdout)
    assert said["path"] == "out/b.json" and said["questions"] == 13 and said["config"]["policy"]["lam"] == 0.5
    assert {(score["task"], score["metric"]) for score in said["scores"]} == {
        ("next_number", "exact_match"),
        ("odd_one_out", "acc"),
        ("odd_one_out", "acc_norm"),
    }
    done = edgemoe(folder, "compare", "out/a.json", "out/b.json", "--json")
    rows = json.loads(done.stdout)["rows"]
    assert [(row["task"], row["n"], row["test"]) for row in rows] == [
        ("next_number", 6, "mcnemar"),
        ("odd_one_out", 7, "mcnemar"),
    ]


def test_a_mistake_is_one_line(folder: Path) -> None:
    done = edgemoe(folder, "tasks", "moe.gguf", "--tasks", "./none.yaml", *SMALL, "-o", "wrong.json", code=2)
    assert "none.yaml: no such task file" in done.stderr and done.stderr.count("\n") == 1 and done.stdout == ""
    (folder / "there.json").write_text("precious")
    done = edgemoe(folder, "tasks", "moe.gguf", "--tasks", "odd_one_out.yaml", "-o", "there.json", code=2)
    assert "there.json: exists already" in done.stderr and (folder / "there.json").read_text() == "precious"
    assert not list(folder.glob("wrong*"))


def test_ctrl_c_keeps_what_is_finished(folder: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [
            *COMMAND,
            "tasks",
            "moe.gguf",
            "--tasks",
            "many/odd_one_out.yaml",
            *SMALL,
            "-o",
            str(tmp_path / "x.json"),
            *WINDOW,
        ],
        cwd=folder,
        env=environment(folder),
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    partial, patience = tmp_path / "x.json.partial", time.monotonic() + 300
    while not partial.exists() or partial.read_bytes().count(b"\n") < 3:
        assert time.monotonic() < patience and process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130 and out == "" and "the same command goes on" in err and "Traceback" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["x.json.partial"]
    assert partial.read_bytes().count(b"\n") >= 3
