"""`edgemoe run` and `chat` with --device: what is printed, what is refused."""

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU tier needs torch (pip install edgemoe[gpu])")

from edgemoe.cli import commands  # noqa: E402
from edgemoe.demo import demo_model  # noqa: E402
from edgemoe.errors import UserError  # noqa: E402

DEMO = str(demo_model())
CPU = ["--device", "cpu", "--threads", "1"]


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """A command takes SIGTERM for itself: a test that runs one in this process gives it back."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert commands.run(["run", DEMO, *CPU, "-p", "In the beginning", "-n", "6", "--json", *arguments]) == 0
    out: dict[str, Any] = json.loads(capsys.readouterr().out)
    return out


def test_the_default_policy_is_exact_and_figures_are_there(capsys: pytest.CaptureFixture[str]) -> None:
    out = said(capsys, "--residency", "50%", "--greedy", "--verify-slots")
    assert (out["experts"], out["device"], out["slots"]) == ("offloaded", "cpu", 32)
    assert out["policy"] == "exact routing, lru" and len(out["config_hash"]) == 12 and out["load_s"] > 0
    phase = out["decode_phase"]
    assert phase["loads"] == 5 * 8 * 8 and phase["demand_reads"] > 0 and phase["prefetch_reads"] == 0
    assert phase["demand_bytes"] == phase["demand_reads"] * 3 * 64 * 256 * 2
    assert said(capsys, "--residency", "25%", "--greedy")["text"] == out["text"]


def test_the_cpu_says_what_a_gpu_would_hold(capsys: pytest.CaptureFixture[str]) -> None:
    """What --vram bounds: the slots, of which there are as many as fit, and all besides them."""
    out = said(capsys, "--vram", "60MB")
    held, slot = out["decode_phase"]["vram_bytes"], 8 * 3 * 64 * 256 * 2
    assert out["vram_in_ram"] and 60e6 - slot < held <= 60e6 and out["slots"] * slot < held
    assert held == out["prompt_phase"]["vram_bytes"] < out["decode_phase"]["ram_bytes"]
    assert held - said(capsys, "--residency", str(out["slots"] - 1))["decode_phase"]["vram_bytes"] == slot


def test_a_policy_and_a_trace(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "t.npz"
    options = ["--residency", "16", "--policy", "psr-gated", "--lambda", "0.4", "--budget", "2", "--greedy"]
    out = said(capsys, *options, "--trace", str(trace), "--verify-slots")
    assert "lam 0.4" in out["policy"] and "gate predicted" in out["policy"]
    assert out["decode_phase"]["prefetch_reads"] > 0
    assert out["text"] == said(capsys, *options)["text"]
    with np.load(trace) as found:
        meta = json.loads(str(found["meta"]))
        assert "edgemoe's own engine" in json.dumps(meta) and found["experts"].shape[0] == 8


def test_the_summary_speaks_of_copies(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.run(["run", DEMO, *CPU, "-p", "In the", "-n", "4", "--vram", "40MB", "--policy", "psr"]) == 0
    err = capsys.readouterr().err
    assert re.search(r"of RAM held, [34]\d\.\d MB of it in place of VRAM; context", err)
    assert "experts per layer have a slot in RAM, as on a GPU" in err
    assert "demand copies per token" in err and "in time" in err and "disk" not in err


HELD = {
    "llama.cpp": [],
    "disk": ["--residency", "25%"],
    "streams": ["--residency", "25%", "--parallel", "1"],
    "device": ["--residency", "25%", "--device", "cpu"],
}


@pytest.mark.parametrize("held", HELD)
def test_a_context_beyond_training_is_noted(capsys: pytest.CaptureFixture[str], held: str) -> None:
    command = ["run", DEMO, "--threads", "1", "-p", "In the", "-n", "2", "--raw", *HELD[held]]
    for given, noted in (([], False), (["-c", "1024"], False), (["-c", "2000"], True)):
        assert commands.run([*command, *given]) == 0
        said = " ".join(capsys.readouterr().err.split())
        note = "note -c 2,000: the model was trained for 1,024 tokens of context; text beyond may be poor"
        assert (note in said) == noted and said.count("trained for") == noted


def test_a_conversation_keeps_its_context(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import io
    import sys

    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}{{ m['content'] }}<|endoftext|>{% endfor %}")
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello there\nAnd again\n"))
    command = ["chat", DEMO, *CPU, "--residency", "50%", "--policy", "psr", "-n", "5", "--seed", "2", "--json"]
    assert commands.run([*command, "--chat-template", str(template)]) == 0
    turns = json.loads(capsys.readouterr().out)["turns"]
    assert len(turns) == 2 and turns[1]["reused_tokens"] >= turns[0]["prompt_tokens"]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--device", "cpu", "--ram", "6GB"], "--ram is about experts on disk"),
        (["--device", "cpu", "-ngl", "3"], "--n-gpu-layers is about llama.cpp"),
        (["--device", "cpu", "--residency", "4"], "cannot hold the 8 experts of one token"),
        (["--device", "cpu", "--vram", "1MB"], "are allowed (--vram)"),
        (["--device", "gpu"], "not one of cpu, cuda"),
        (["--vram", "6GB"], "give --device with it"),
        (["--verify-slots"], "--verify-slots is about experts on a device"),
        (["--gpu", "0"], "--gpu is about experts on a device"),
        (["--device", "cpu", "--gpu", "0"], "--gpu is about --device cuda"),
        (["--device", "cpu", "--executor", "host"], "--executor is about --device cuda"),
        (["--device", "cuda", "--executor", "magic"], "not one of device, host"),
        (["--device", "cpu", "--policy", "pst"], "no policy preset 'pst'"),
        (["--device", "cpu", "--policy", "psr", "--scale", "fixed"], "--scale fixed needs the bonus scale of a"),
        (["--device", "cpu", "--prefetch", "token-prior"], "needs the token prior of a calibration: give --cal"),
    ],
)
def test_mistakes_are_one_line(options: list[str], complaint: str) -> None:
    with pytest.raises(UserError) as caught:
        commands.run(["run", DEMO, "-p", "x", "-n", "1", *options])
    assert complaint in str(caught.value) and "\n" not in str(caught.value)


def test_without_a_gpu_cuda_says_what_runs() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(UserError, match="--device cpu runs the same policies in RAM"):
        commands.run(["run", DEMO, "--device", "cuda", "-p", "x"])
