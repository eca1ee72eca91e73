"""The engine as generation drives it: turns, rewinds, interruptions, the end of the context."""

import numpy as np
import pytest

pytest.importorskip("torch", reason="the GPU tier needs torch (pip install edgemoe[gpu])")

from offload_engines import POLICIES, PROMPT, TINY, generate, made_up_calibration, make

from edgemoe.errors import UserError
from edgemoe.generation import Context, Options, Writer
from edgemoe.model.synthetic import write_synthetic
from edgemoe.units import Residency


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_synthetic(tmp_path_factory.mktemp("tiny") / "tiny.gguf", **TINY, add_bos=True)[0]


@pytest.fixture
def steered(tiny):
    with make(tiny, policy=POLICIES["psr-gated"]) as engine:
        yield engine


def test_the_same_prompt_gives_the_same_text(steered):
    """Also under a policy that favours what is resident: the prompt goes back to the cache of its beginning."""
    writer = Writer(steered)
    text = "Once upon a time there was a model whose experts did not fit"
    first = writer.write(text, n=20, temperature=0)
    assert writer.write(text, n=20, temperature=0) == first
    writer.write("Something else entirely, 0123456789", n=5)
    assert writer.write(text, n=20, temperature=0) == first
    drawn = [writer.write(text, n=20, seed=5) for _ in range(2)]
    assert drawn[0] == drawn[1] != first


def test_a_second_turn_keeps_what_the_first_computed(steered):
    context = Context(steered)
    context.prefill(PROMPT)
    for token in (1, 2, 3):
        context.decode(token)
    tokens = steered.stats().tokens
    context.prefill([*PROMPT, 1, 2, 3, 4, 5])
    assert context.reused == len(PROMPT) + 3
    assert steered.stats().tokens == tokens + 2


def test_a_rewind_repeats_bit_for_bit(steered):
    first = generate(steered)
    assert steered.rewind(len(PROMPT) - 1) == 48  # where the last chunk of 24 began
    assert np.array_equal(generate(steered, PROMPT[48:]), first)
    assert steered.rewind(20) == 0 == steered.position
    assert np.array_equal(generate(steered), first)
    steered.reset()
    assert np.array_equal(generate(steered), first)


def test_a_snapshot_is_the_cache_of_its_moment(steered):
    executor = steered.executor
    steered.prefill(PROMPT[:24])
    taken, resident = executor.snapshot(), executor.slot_of() >= 0
    logits = steered.prefill(PROMPT[24:])
    assert not np.array_equal(executor.slot_of() >= 0, resident)
    executor.restore(taken)
    executor.verify()
    assert np.array_equal(executor.slot_of() >= 0, resident)
    steered._position = 24
    assert np.array_equal(steered.prefill(PROMPT[24:]), logits)


def test_a_reset_keeps_what_is_warm_in_its_slot(steered):
    executor = steered.executor
    generate(steered)
    held = [set(np.flatnonzero(row >= 0)) for row in executor.slot_of()]
    before = executor.counters.reset_copies
    steered.reset()
    executor.verify()
    warm = [set(range(8))] * 4
    assert [set(np.flatnonzero(row >= 0)) for row in executor.slot_of()] == warm
    assert executor.counters.reset_copies - before == sum(len(w - h) for w, h in zip(warm, held, strict=True))


@pytest.mark.parametrize("tokens", [24, 1])
def test_an_interrupted_step_did_not_happen(tiny, tokens, monkeypatch):
    from edgemoe.gpu_offload.slots import Slots

    with make(tiny, policy=POLICIES["psr"]) as engine:
        engine.prefill(PROMPT[:24])
        for token in PROMPT[24:26]:
            engine.decode(token)
        expected = (engine.prefill(PROMPT[26 : 26 + tokens]), engine.decode(3))
        engine.reset()
        engine.prefill(PROMPT[:24])
        for token in PROMPT[24:26]:
            engine.decode(token)
        copied, raised = [], []

        def copy(self, layer, expert, slot, whole=Slots.copy):
            copied.append(layer)
            if layer >= 2 and not raised:
                raised.append(layer)
                self.held[layer, slot] = -1
                self.bytes[layer, slot, :7] = 0
                raise KeyboardInterrupt
            whole(self, layer, expert, slot)

        monkeypatch.setattr(Slots, "copy", copy)
        with pytest.raises(KeyboardInterrupt):
            engine.prefill(PROMPT[26 : 26 + tokens] if tokens > 1 else [PROMPT[26]])
        monkeypatch.undo()
        assert copied and raised and engine.position == 26
        engine.verify()
        assert np.array_equal(engine.prefill(PROMPT[26 : 26 + tokens]), expected[0])
        assert np.array_equal(engine.decode(3), expected[1])


def test_the_context_ends_clearly(tiny):
    with make(tiny, n_ctx=40) as engine:
        with pytest.raises(UserError, match="50 tokens do not fit into a context of 40: give a larger one"):
            engine.prefill(PROMPT)
        assert engine.position == 0
        steps = list(Writer(engine).stream("abc", ignore_eos=True, temperature=0))
        assert steps[-1].finish == "context" and engine.position == 40
        with pytest.raises(UserError, match="1 tokens after 40 do not fit"):
            engine.decode(1)
        engine.verify()


@pytest.mark.parametrize("options", [Options(temperature=0), Options(seed=11, top_k=50), Options(seed=12, top_k=0)])
def test_extending_is_a_step_and_a_choice_at_a_time(tiny, options):
    from edgemoe.gpu_offload.kernels import draw

    with make(tiny, policy=POLICIES["psr"]) as engine:
        engine.prefill(PROMPT[:-1])
        chosen, token = [], PROMPT[-1]
        for _ in range(8):
            token = draw.choose(engine.decode(token), options, options.seed or 0, engine.position - 1)
            chosen.append(token)
        engine.reset()
        engine.prefill(PROMPT[:-1])
        assert engine.extend(PROMPT[-1], 8, options) == chosen
        assert engine.position == len(PROMPT) - 1 + 8


def test_what_decides_is_in_the_config_hash(tiny):
    variants = [
        {},
        {"residency": Residency.parse("9")},
        {"policy": POLICIES["psr"]},
        {"chunk": 25},
        {"dtype": "float32"},
        {"n_ctx": 64},
        {"calibration": made_up_calibration()},
    ]
    hashes = []
    for more in variants:
        with make(tiny, **more) as engine:
            hashes.append(engine.config_hash)
    assert len(set(hashes)) == len(variants)
    with make(tiny) as engine:
        assert engine.config_hash == hashes[0]


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        ({"residency": Residency.parse("3")}, "cannot hold the 4 experts of one token"),
        ({"policy": POLICIES["psr"], "residency": Residency.parse("5")}, "a window of 6 candidates needs as many"),
        ({"chunk": 0}, "expected 1 to 512"),
        ({"dtype": "float16"}, "not one of bfloat16, float32"),
        ({"device": "tpu"}, "not one of cpu, cuda"),
        ({"calibration": made_up_calibration(layers=3)}, "with 3 layers of 16 experts, not of this"),
        ({"n_ctx": 0}, "a context of 0 tokens"),
    ],
)
def test_mistakes_are_one_line(tiny, more, complaint):
    with pytest.raises(UserError, match=complaint) as caught:
        make(tiny, **more)
    assert "\n" not in str(caught.value)


def test_no_gpu_says_what_runs_without(tiny):
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(UserError, match="--device cpu runs the same policies in RAM"):
        make(tiny, device="cuda")


@pytest.mark.parametrize(("tokens", "strange"), [([1, 512], 512), ([3, -2, 511], -2), ([-1], -1), ([5, 600, -7], 600)])
def test_a_strange_token_is_refused(tiny, tokens, strange):
    with make(tiny, chunk=1) as engine:
        with pytest.raises(UserError, match=f"token {strange} is not one of the model's 512"):
            engine.prefill(tokens)
        assert engine.position == 0  # also where other chunks came before


def test_no_tokens_are_refused(tiny):
    with make(tiny) as engine, pytest.raises(UserError, match="no tokens"):
        engine.prefill([])


def test_an_observer_is_told_what_ran(tiny):
    told = []

    class Watching:
        def reset(self):
            told.append("reset")

        def decoded(self, tokens, rows):
            told.append((tokens.tolist(), {name: value.shape for name, value in rows.items()}))

    with make(tiny, policy=POLICIES["psr"], observer=Watching()) as engine:
        engine.prefill(PROMPT[:24])
        engine.decode(5)
        engine.reset()
    shapes = {"executed": (4, 24, 4), "scores": (4, 24, 16), "pregate": (4, 24, 16)}
    assert told[0] == (PROMPT[:24], shapes) and told[1][0] == [5] and told[2:] == ["reset"]


class Listening:
    """Keeps the tokens that it was told of, and raises what it is given."""

    def __init__(self):
        self.tokens, self.error = [], None

    def reset(self):
        self.tokens.clear()

    def decoded(self, tokens, rows):
        if self.error:
            raise self.error
        self.tokens += tokens.tolist()


@pytest.mark.parametrize("error", [OSError("the disk is full"), KeyboardInterrupt()])
@pytest.mark.parametrize("tokens", [24, 1])
def test_a_step_that_cannot_be_told_did_not_happen(tiny, error, tokens):
    heard, part = Listening(), PROMPT[24 : 24 + tokens]
    with make(tiny, policy=POLICIES["psr"], observer=heard, record=True) as engine:
        engine.prefill(PROMPT[:24])
        resident = engine.executor.slot_of() >= 0
        expected = engine.prefill(part), engine.decode(3)
        engine.reset()
        engine.prefill(PROMPT[:24])
        before, heard.error = (engine.position, engine.stats().tokens, len(engine.records)), error
        with pytest.raises(type(error)):
            engine.prefill(part)
        assert (engine.position, engine.stats().tokens, len(engine.records)) == before
        assert np.array_equal(engine.executor.slot_of() >= 0, resident) and heard.tokens == PROMPT[:24]
        engine.verify()
        heard.error = None
        assert np.array_equal(engine.prefill(part), expected[0]) and np.array_equal(engine.decode(3), expected[1])
        assert heard.tokens == [*PROMPT[: 24 + tokens], 3]


def test_a_chunk_brings_what_no_slot_held_and_nothing_else(tiny):
    """Who is evicted within the chunk and comes back keeps the slot: no byte of it crosses the link again."""
    with make(tiny, policy=POLICIES["exact-lru"], record=True, chunk=64) as engine:
        held = engine.executor.slots.held.copy()
        engine.prefill(PROMPT)
        executed, after = engine.records[0]["executed"], engine.executor.slots.held
        new = [set(layer.ravel().tolist()) - set(before.tolist()) for layer, before in zip(executed, held, strict=True)]
        counters = engine.executor.counters
        assert counters.demand == sum(map(len, new)) > 0 and counters.prefetch == 0 < counters.misses - counters.demand
        for before, now in zip(held, after, strict=True):
            stayed = set(before.tolist()) & set(now.tolist())
            assert all(before[slot] == now[slot] for slot in range(len(now)) if int(before[slot]) in stayed)
