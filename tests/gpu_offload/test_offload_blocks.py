"""Tokens that an engine chooses several at a time: the text is the one that it writes token by token."""

import json
import signal
from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("torch", reason="the GPU tier needs torch (pip install edgemoe[gpu])")

from offload_engines import POLICIES, TINY, make
from programs import run

from edgemoe.generation import Context, Options, Writer
from edgemoe.gpu_offload.engine import OffloadEngine
from edgemoe.model.synthetic import write_synthetic

TEXT, OPTIONS = "Once upon a time", {"n": 21, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OffloadEngine]:
    path = write_synthetic(tmp_path_factory.mktemp("tiny") / "tiny.gguf", **TINY, add_bos=True)[0]
    with make(path, policy=POLICIES["psr-gated"], n_ctx=64) as engine:
        yield engine


@pytest.fixture
def blocks(engine: OffloadEngine, monkeypatch: pytest.MonkeyPatch) -> OffloadEngine:
    """The same engine, asked for eight tokens at a time."""
    monkeypatch.setattr(OffloadEngine, "block", 8)
    return engine


@pytest.mark.parametrize(
    "options", [OPTIONS, {"n": 21, "seed": 4, "ignore_eos": True}, {"n": 9, "seed": 4, "top_k": 0}, {"n": 1, "seed": 4}]
)
def test_blocks_give_the_text_of_single_tokens(
    engine: OffloadEngine, options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    single = list(Writer(engine).stream(TEXT, **options))
    monkeypatch.setattr(OffloadEngine, "block", 8)
    steps = list(Writer(engine).stream(TEXT, **options))
    for name in ("index", "token", "text", "finish"):
        assert [getattr(step, name) for step in steps] == [getattr(step, name) for step in single]
    assert all(step.seconds > 0 for step in steps)


def test_tokens_whose_figures_are_asked_for_are_chosen_one_at_a_time(
    blocks: OffloadEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer(blocks)
    text = writer.write(TEXT, **OPTIONS)
    writer.context.singly = True
    monkeypatch.setattr(blocks.executor, "extend", lambda *_: pytest.fail("it was asked for a block"))
    loads = [blocks.stats().loads for _ in writer.stream(TEXT, **OPTIONS)]
    assert writer.write(TEXT, **OPTIONS) == text
    assert np.array_equal(np.diff(loads), np.full(20, TINY["n_layers"] * TINY["top_k"]))


def test_a_full_context_ends_the_text(blocks: OffloadEngine) -> None:
    writer = Writer(blocks)
    steps = list(writer.stream(TEXT, temperature=0.0, ignore_eos=True))
    assert [step.finish for step in steps].index("context") == len(steps) - 1
    assert blocks.position == 64 == len(writer.context.tokens)


def test_an_end_of_the_text_ends_a_block(blocks: OffloadEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = list(Writer(blocks).stream(TEXT, **OPTIONS))
    tokens = [step.token for step in steps]
    at = next(i for i in range(2, 21) if tokens[i] not in tokens[:i])
    monkeypatch.setattr(OffloadEngine, "eos_tokens", frozenset({tokens[at]}))
    ended = list(Writer(blocks).stream(TEXT, n=21, temperature=0.0))
    assert [step.token for step in ended] == tokens[: at + 1] and ended[-1].finish == "end"
    assert blocks.position == blocks.tokenize(TEXT.encode()).size + 1 + at


def test_a_stop_string_takes_back_what_follows_it(blocks: OffloadEngine) -> None:
    """The memory, the logical cache and the slots are those of the text's end."""
    writer = Writer(blocks)
    steps = list(writer.stream(TEXT, **OPTIONS))
    texts = [step.text for step in steps]
    at = next(i for i in range(10, 15) if texts[i].strip() and texts[i] not in "".join(texts[:i]))
    stopped = list(writer.stream(TEXT, stop=(texts[at],), **OPTIONS))
    assert [step.token for step in stopped] == [step.token for step in steps[: at + 1]]
    assert stopped[-1].finish == "stop" and blocks.position == len(writer.context.tokens)
    resident, logits = blocks.executor.slot_of() >= 0, blocks.decode(stopped[-1].token)
    prompt = len(writer.prompt)
    blocks.reset()
    blocks.prefill(writer.prompt)
    for step in stopped[:-1]:
        blocks.decode(step.token)
    assert blocks.position == prompt + at
    assert np.array_equal(blocks.executor.slot_of() >= 0, resident)
    assert np.array_equal(blocks.decode(stopped[-1].token), logits)


def test_an_interrupt_waits_for_the_block_and_its_text(blocks: OffloadEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Writer(blocks)
    expected = writer.write(TEXT, **OPTIONS)
    extend, calls = blocks.executor.extend, []

    def interrupted(*arguments: object) -> object:
        calls.append(arguments)
        signal.raise_signal(signal.SIGINT)
        return extend(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(blocks.executor, "extend", interrupted)
    shown = []
    with pytest.raises(KeyboardInterrupt):
        for step in writer.stream(TEXT, **OPTIONS):
            shown.append(step.text)
    assert len(calls) == 1 and len(shown) == 9 and expected.startswith("".join(shown))
    assert blocks.position == len(writer.context.tokens)
    monkeypatch.undo()
    assert writer.write(TEXT, **OPTIONS) == expected


def test_a_block_that_fails_did_not_happen(blocks: OffloadEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Writer(blocks)
    expected = writer.write(TEXT, **OPTIONS)
    extend = blocks.executor.extend

    def broken(*arguments: object) -> object:
        extend(*arguments)  # type: ignore[arg-type]
        raise OSError("the link is gone")

    monkeypatch.setattr(blocks.executor, "extend", broken)
    with pytest.raises(OSError, match="the link is gone"):
        writer.write(TEXT, **OPTIONS)
    assert blocks.position == len(writer.prompt) == len(writer.context.tokens)
    blocks.verify()
    monkeypatch.undo()
    assert writer.write(TEXT, **OPTIONS) == expected


@pytest.mark.parametrize("error", [OSError("the link is gone"), KeyboardInterrupt()])
def test_a_replay_that_fails_is_at_the_block_s_beginning(
    blocks: OffloadEngine, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, options = Context(blocks), Options(temperature=0.0, ignore_eos=True)
    blocks.reset()
    context.prefill(blocks.tokenize(TEXT.encode()).tolist())
    begin, resident = blocks.position, blocks.executor.slot_of() >= 0
    chosen = context.extend(7, 8, options)
    extend = blocks.executor.extend

    def broken(*arguments: object) -> object:
        extend(*arguments)  # type: ignore[arg-type]
        raise error

    with monkeypatch.context() as breaking:
        breaking.setattr(blocks.executor, "extend", broken)
        with pytest.raises(type(error)):
            context.shorten(begin + 3)
    assert blocks.position == begin == len(context.tokens)
    assert np.array_equal(blocks.executor.slot_of() >= 0, resident)
    blocks.verify()
    assert context.extend(7, 8, options) == chosen
    context.shorten(begin + 3)
    assert blocks.position == begin + 3 == len(context.tokens)
    assert context.extend(chosen[2], 5, options) == chosen[3:]


def test_the_device_s_blocks_are_the_cpu_s_text() -> None:
    """In Triton's interpreter: greedy, drawn by seed and position, and taken back behind a stop string."""
    pytest.importorskip("triton")
    found = json.loads(run("interpreted_engine.py"))
    device, cpu = found["cuda"], found["cpu"]
    assert device["block"] == 4 and cpu["block"] == 1
    for name in ("greedy", "drawn", "stopped", "held", "counted"):
        assert device[name] == cpu[name], name
    for ours, theirs in zip(device["told"], cpu["told"], strict=True):
        assert ours["tokens"] == theirs["tokens"] and ours["executed"] == theirs["executed"]
        assert np.allclose(ours["scores"], theirs["scores"], atol=2e-4)
        assert np.allclose(ours["pregate"][1:], theirs["pregate"][1:], atol=2e-4)
    assert np.allclose(device["next"], cpu["next"], rtol=1e-5)
    assert device["unknown"] == [None] * 3 and device["shares"] == ["device", "other"]
    assert all(value > 0 for value in cpu["unknown"]) and "demand_wait" in cpu["shares"]
