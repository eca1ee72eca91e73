"""The figures after a text: what is counted where a run was ended, and what each number is of."""

import json
import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the GPU tier needs torch (pip install edgemoe[gpu])")

from edgemoe.cli import commands
from edgemoe.errors import UserError
from edgemoe.gpu_offload.cpu import CpuExecutor

DEMO = str(Path(__file__).parents[2] / "edgemoe" / "data" / "demo-moe-32m-q8_0.gguf")
CPU = ["--device", "cpu", "--threads", "1", "--residency", "16"]
LAYERS, TOP_K = 8, 8


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """A command takes SIGTERM for itself: a test that runs one in this process gives it back."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def interrupt(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Ctrl-C in the midst of a step: before so many layers and two more have computed their attention."""
    attention, left = CpuExecutor._attention, after + 2

    def counting(self: CpuExecutor, *arguments: Any) -> Any:
        nonlocal left
        if not left:
            left = -1
            raise KeyboardInterrupt
        left -= 1
        return attention(self, *arguments)

    monkeypatch.setattr(CpuExecutor, "_attention", counting)


def test_a_token_that_was_interrupted_counts_nowhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupt(monkeypatch, LAYERS * (1 + 5))  # the prompt and five tokens
    assert commands.run(["run", DEMO, *CPU, "-p", "In the beginning", "-n", "90", "--ignore-eos", "--json"]) == 130
    said = json.loads(capsys.readouterr().out)
    assert (said["finish"], said["generated_tokens"], said["decoded_tokens"]) == ("interrupted", 6, 5)
    phase = said["decode_phase"]
    assert phase["tokens"] == 5 and phase["loads"] == 5 * LAYERS * TOP_K
    assert said["read_tokens"] == said["prompt_tokens"]


def test_a_text_after_an_interrupted_one_counts_its_own_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from edgemoe.generation import Options, load
    from edgemoe.generation.summary import Meter

    with load(DEMO, device="cpu", residency="16", n_threads=1, n_ctx=128) as writer:
        meter, found = Meter(writer.engine), []
        interrupt(monkeypatch, LAYERS * (1 + 3))
        for _ in range(2):
            meter.begin()
            with suppress(KeyboardInterrupt):
                for step in writer.run("In the beginning", Options(n=6, seed=1, ignore_eos=True)):
                    meter.step(step)
            found.append(meter.summary(seed=1, prompt_tokens=len(writer.prompt), reused_tokens=0))
        both = found[0].then(found[1])
    assert [(each.finish, each.decode.tokens) for each in found] == [("interrupted", 3), ("length", 5)]
    assert [each.decode.loads for each in found] == [3 * LAYERS * TOP_K, 5 * LAYERS * TOP_K]
    assert both.decode.loads == 8 * LAYERS * TOP_K and both.read_tokens == both.prompt_tokens


@pytest.mark.parametrize("reading", [0, 7])
def test_of_a_prompt_that_was_interrupted_what_was_read_is_said(
    reading: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupt(monkeypatch, LAYERS * reading)
    prompt = ["-p", "In the beginning God created the heaven and the earth", "--chunk", "1", "--verify-slots"]
    assert commands.run(["run", DEMO, *CPU, *prompt]) == 130
    err = capsys.readouterr().err
    found = re.search(r"^prompt +(\d+) of (\d+) tokens(, \d+ tok/s)?$", err, re.MULTILINE)
    assert found and int(found[1]) == reading < int(found[2])
    assert bool(found[3]) == bool(reading) == ("each compared with its expert" in err)


def test_every_number_of_the_summary_is_of_one_thing(capsys: pytest.CaptureFixture[str]) -> None:
    run = ["run", DEMO, *CPU, "--policy", "psr", "-p", "In the beginning", "-n", "9", "--ignore-eos", "--seed", "1"]
    assert commands.run([*run, "--json"]) == 0
    phase = json.loads(capsys.readouterr().out)["decode_phase"]
    assert commands.run(run) == 0
    err = capsys.readouterr().err
    names = ("prefetch_reads", "prefetch_in_time", "prefetch_late", "prefetch_unused")
    per_token = [f"{phase[name] / phase['tokens']:.1f}" for name in names]
    said = "{} prefetched per token ({} in time, {} late, {} unused)".format(*per_token)
    assert said in err and phase["prefetch_reads"] > 0
    assert re.search(r"^from RAM +[\d.]+ .B/s", err, re.MULTILINE)
    assert re.search(r"^memory .* of RAM held", err, re.MULTILINE) and not re.search(r"^RAM ", err, re.MULTILINE)


def test_one_token_is_one_token(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert commands.run(["run", DEMO, "--threads", "1", "-p", "a", "-n", "1", "--trace", str(tmp_path / "t.npz")]) == 0
    err = capsys.readouterr().err
    assert re.search(r"^generated +1 token;", err, re.MULTILINE) and re.search(r"^prompt +2 tokens", err, re.MULTILINE)
    assert not re.search(r"\b1 \w+s\b", err)


@pytest.mark.parametrize("asked", [[], ["--verify-slots"]])
def test_slots_that_were_compared_are_said_to_be(asked: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    run = ["run", DEMO, *CPU, "-p", "In", "-n", "2", *asked]
    assert commands.run(run) == 0
    assert ("each compared with its expert after every step" in capsys.readouterr().err) == bool(asked)
    assert commands.run([*run, "--json"]) == 0
    assert json.loads(capsys.readouterr().out).get("verify_slots") == (True if asked else None)


def test_slots_that_differ_end_it_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison is one: a slot with another expert's bytes is found."""
    from edgemoe.gpu_offload.slots import Slots

    copy = Slots.copy
    monkeypatch.setattr(Slots, "copy", lambda self, layer, expert, slot: copy(self, layer, expert ^ 1, slot))
    with pytest.raises(UserError) as refused:
        commands.run(["run", DEMO, *CPU, "-p", "In the", "-n", "9", "--ignore-eos", "--verify-slots"])
    assert "slot" in str(refused.value)
