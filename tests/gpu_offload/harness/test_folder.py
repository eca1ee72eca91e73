"""Traces and calibrations of a Hugging Face folder, from the command line: what llama.cpp gives of the GGUF file."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from edgemoe.calibration import load_calibration
from edgemoe.cli import main
from edgemoe.data import DOMAINS
from edgemoe.demo import demo_file, demo_model
from edgemoe.gpu_offload.harness.folder import trace_folder
from edgemoe.model import read_model
from edgemoe.progress import no_progress
from edgemoe.tracing.calibrate import calibration_of
from edgemoe.tracing.capture import Settings
from edgemoe.tracing.texts import Source
from edgemoe.tracing.tracefile import load_trace
from edgemoe.training.export import read_gguf, write_hf

SMALL = ("--ctx", "64", "--max-tokens", "150", "--threads", "1")
TEXTS = ("-f", "prose.txt", "-f", "program=code.txt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("folder")
    write_hf(folder / "demo", *read_gguf(demo_model()))
    for domain in DOMAINS:
        (folder / f"{domain}.txt").write_bytes(demo_file(f"{domain}.txt").read_bytes()[:6000])
    (folder / "dense").mkdir()
    said = json.loads((folder / "demo" / "config.json").read_text())
    said |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (folder / "dense" / "config.json").write_text(json.dumps(said))
    return folder


@pytest.fixture
def edgemoe(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def run(*arguments: str, code: int = 0) -> "pytest.CaptureResult[str]":
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "argv", ["edgemoe", *arguments])
        for name in ("trace", "calibrate"):
            monkeypatch.setattr(f"edgemoe.cli.{name}.interrupt_on_sigterm", lambda: None)
        with pytest.raises(SystemExit) as stopped:
            main()
        captured = capsys.readouterr()
        assert stopped.value.code == code, captured.err
        return captured

    return run


def test_a_folders_trace_is_that_of_its_gguf_file_but_for_near_ties(edgemoe, folder: Path) -> None:
    how = (*TEXTS, *SMALL, "--scores", "--pregate")
    said = json.loads(edgemoe("trace", "demo", *how, "--dtype", "float32", "-o", "hf.npz", "--json").out)
    assert said["members"] == ["experts", "scores", "pregate"] and said["failures"] == [] and not said["partial"]
    edgemoe("trace", str(demo_model()), *how, "-o", "gguf.npz")
    ours, theirs = load_trace(folder / "hf.npz"), load_trace(folder / "gguf.npz")
    assert np.array_equal(ours.tokens, theirs.tokens) and np.array_equal(ours.windows, theirs.windows)
    assert ours.domains == theirs.domains and ours.layers.tolist() == theirs.layers.tolist()
    assert said["n_tokens"] == len(ours.tokens) and said["n_windows"] == len(ours.windows)
    same = (np.sort(ours.experts, axis=2) == np.sort(theirs.experts, axis=2)).all(axis=2)
    assert same.mean() > 0.9
    assert np.abs(ours.scores - theirs.scores).mean() < 0.05 * theirs.scores.std()
    assert np.abs(ours.pregate[1:] - theirs.pregate[1:]).mean() < 0.05 * theirs.pregate[1:].std()
    assert ours.meta["texts"] == theirs.meta["texts"] and ours.meta["self_check"] == "passed"
    edgemoe("stats", "hf.npz")
    edgemoe("simulate", "hf.npz", "--policy", "lru,exact-lru", "--capacity", "50%")


def test_a_folders_calibration_is_that_of_its_trace(edgemoe, folder: Path) -> None:
    how = (*TEXTS, *SMALL, "--dtype", "float32")
    said = edgemoe("calibrate", "demo", *how, "-o", "hf.calib").out
    assert said.startswith("hf.calib: demo, 8 MoE layers of 64 experts, from 30")
    edgemoe("trace", "demo", *how, "--scores", "--pregate", "-o", "again.npz")
    found, trace = load_calibration(folder / "hf.calib"), load_trace(folder / "again.npz")
    assert found.digest == calibration_of(trace).digest
    assert [text["domain"] for text in found.texts] == ["prose", "program"]
    done = edgemoe("simulate", "again.npz", "--policy", "psr", "--capacity", "50%", "--calibration", "hf.calib")
    assert "token prior from hf.calib" in " ".join(done.out.split())


def test_one_token_at_a_time_routes_alike(edgemoe, folder: Path) -> None:
    how = ("-f", "math.txt", "--ctx", "32", "--max-tokens", "60", "--threads", "1", "--dtype", "float32")
    edgemoe("trace", "demo", *how, "-o", "whole.npz")
    assert "token by token" in edgemoe("trace", "demo", *how, "--decode", "-o", "single.npz").out
    whole, single = (load_trace(folder / name) for name in ("whole.npz", "single.npz"))
    assert whole.scores is None and whole.pregate is None
    assert (np.sort(whole.experts, axis=2) == np.sort(single.experts, axis=2)).mean() > 0.99


def test_an_interrupt_keeps_the_windows_that_are_finished(folder: Path, tmp_path: Path) -> None:
    windows = iter(range(10))

    class Interrupting:
        def __enter__(self):
            return lambda count: self.stop() if next(windows) == 2 else no_progress(count)

        def __exit__(self, *_):
            pass

        def stop(self):
            raise KeyboardInterrupt

    settings = Settings(n_ctx=32, max_tokens=300, n_threads=1)
    sources = [Source("prose", folder / "prose.txt")]
    model = read_model(folder / "demo")
    report = trace_folder(model, sources, tmp_path / "t.npz", settings, watch=lambda _: Interrupting())
    trace = load_trace(tmp_path / "t.npz")
    assert report.partial and trace.meta["partial"] and report.n_windows == len(trace.windows) == 3
    assert report.n_tokens == 96 < report.planned_tokens


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("trace", "demo", "--weights"), "--weights and --layers: a folder's trace"),
        (("trace", "demo", "--layers", "0"), "--weights and --layers: a folder's trace"),
        (("trace", "demo", "--n-gpu-layers", "3"), "--n-gpu-layers is for GGUF files"),
        (("trace", "demo", "--dtype", "int4"), "dtype 'int4' is not one of"),
        (("trace", "dense"), "dense"),
        (("trace", str(demo_model()), "--dtype", "float32"), "--dtype is about a Hugging Face folder"),
        (("calibrate", str(demo_model()), "--device", "cpu"), "--device is about a Hugging Face folder"),
        (("calibrate", "demo", "-o", "prose.txt", "--overwrite"), "is what the trace would be made of"),
        (("calibrate", "demo", "--max-tokens", "8"), "text too short"),
    ],
)
def test_mistakes_are_one_line_and_lose_nothing(edgemoe, folder: Path, arguments: tuple[str, ...], words: str) -> None:
    before = (folder / "prose.txt").read_bytes()
    limit = () if "--max-tokens" in arguments else ("--max-tokens", "150")
    out = () if "-o" in arguments else ("-o", "wrong")
    said = edgemoe(*arguments, "-f", "prose.txt", "--ctx", "64", "--threads", "1", *limit, *out, code=2)
    assert words in said.err and said.err.count("\n") == 1 and said.out == ""
    assert not list(folder.glob("wrong*")) and (folder / "prose.txt").read_bytes() == before
