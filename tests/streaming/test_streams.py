"""Many sequences in one batch: each as its own cache decides, all bytes right, whoever joins, leaves or fails."""

import os
from pathlib import Path

import numpy as np
import pytest
from interrupting import interrupt_while_reading

from edgemoe.demo import demo_model
from edgemoe.errors import UserError
from edgemoe.llamacpp.session import Session
from edgemoe.model.synthetic import write_synthetic
from edgemoe.policy import LogicalCache, preset
from edgemoe.streaming import reads
from edgemoe.streaming import words as w
from edgemoe.streaming.engine import StreamingEngine
from edgemoe.streaming.streams import Streams
from edgemoe.units import Residency

TEXT = Path(__file__).read_bytes()
PROMPTS = [TEXT[at : at + 90] for at in range(0, 1000, 100)]
N_CTX, CHUNK = 96, 16


def make(path=None, places=4, **more):
    options = {"residency": Residency.parse("16"), "n_ctx": N_CTX, "n_threads": 1, "chunk": CHUNK, "readers": 3}
    return Streams(path or demo_model(), places, **{**options, **more})


class Resident(Session):
    """The same llama.cpp with the whole model in RAM, and the same face as `Streams`."""

    def __init__(self, path, places):
        self._at = {}
        more = {"n_ctx": N_CTX * places, "n_batch": max(CHUNK, places), "n_ubatch": max(CHUNK, places)}
        super().__init__(path, n_sequences=places, n_threads=1, **more)
        self._free = list(range(places))

    def _model_params(self, n_gpu_layers):
        params = super()._model_params(n_gpu_layers)
        params.use_extra_bufts = False
        return params

    def join(self, tokens):
        number = min(self._free)
        self._free.remove(number)
        for at in range(0, len(tokens), CHUNK):
            part = tokens[at : at + CHUNK]
            self.decode(part, at, sequences=np.full(len(part), number))
        self._at[number] = len(tokens)
        return number, self.last_logits()

    def step(self, tokens):
        numbers = list(tokens)
        positions = np.array([self._at[n] for n in numbers])
        self.decode(list(tokens.values()), positions=positions, sequences=np.array(numbers))
        for n in numbers:
            self._at[n] += 1
        return {n: self.row_logits(row) for row, n in enumerate(numbers)}

    def leave(self, number):
        self.forget(0, number)
        self._free.append(number)


def play(engine, joins=(0, 0, 2, 5, 9, 9), lives=(11, 6, 9, 3, 8, 2), steps=16, checked=None):
    """Streams join before a step and leave some steps later; all logits of every stream, in order of joining.

    `checked` is a `Resident` that does the same: its logits must be these, bit for bit.
    """
    logits, live = [], {}
    for at in range(steps):
        for i, joined in enumerate(joins):
            if joined == at:
                tokens = engine.tokenize(PROMPTS[i])[: 7 + 5 * i]
                live[i] = engine.join(tokens)
                logits.append([live[i].logits])
                if checked:
                    number, expected = checked.join(tokens)
                    assert number == live[i].number and np.array_equal(expected, live[i].logits)
        tokens = {stream: int(stream.logits.argmax()) for stream in live.values()}
        if tokens:
            engine.step(tokens)
        if checked and tokens:
            expected = checked.step({stream.number: token for stream, token in tokens.items()})
            assert all(np.array_equal(expected[stream.number], stream.logits) for stream in tokens)
        for i, stream in list(live.items()):
            logits[i].append(stream.logits)
            if len(logits[i]) > lives[i] or at == steps - 1:
                engine.leave(live.pop(i))
                if checked:
                    checked.leave(stream.number)
    return [np.stack(rows) for rows in logits]


SYNTHETIC = {
    "olmoe": {},
    "deepseek2": {"arch": "deepseek2", "leading_dense": 1, "expert_groups": 4, "expert_groups_used": 2},
    "gpt-oss": {"arch": "gpt-oss"},
}


@pytest.mark.parametrize("case", SYNTHETIC)
def test_logits_are_those_of_the_resident_model(tmp_path, case):
    [path] = write_synthetic(tmp_path / "m.gguf", **SYNTHETIC[case])
    with (
        make(path, residency=Residency.parse("5"), verify_reads=True) as engine,
        Resident(path, 4) as resident,
    ):
        logits = play(engine, checked=resident)
        assert len(logits) == 6 and min(np.ptp(rows, axis=1).min() for rows in logits) > 0
        distinct, layers = engine.union
        assert distinct / layers > 5, "a step's union exceeds what is kept"


@pytest.mark.parametrize("policy", ["exact-lru", "exact-prefetch"])
@pytest.mark.parametrize("slots", ["8", "24"])
def test_demo_model_whatever_the_caches_do(policy, slots):
    more = {"residency": Residency.parse(slots), "policy": preset(policy), "verify_reads": True}
    with make(**more) as engine, Resident(demo_model(), 4) as resident:
        play(engine, checked=resident)
        stats = engine.stats()
    assert stats.hits < stats.loads and stats.demand_reads > 0
    assert (stats.prefetch_reads > 0) == (policy == "exact-prefetch")


def joined(stream):
    """The records of a stream's decodes, one after the other along its tokens."""
    names = stream.records[0]
    return {n: np.concatenate([r[n] for r in stream.records], axis=0 if n == "tokens" else 1) for n in names}


def replay(record, policy, has_pregate, capacity):
    """Hold a stream's decisions against a cache that Python drives, from the recorded scores and pre-gates."""
    n_layers, n_tokens, n_experts = record["scores"].shape
    cache = LogicalCache(policy, n_layers=n_layers, n_experts=n_experts, top_k=8, capacity=capacity)
    for t in range(n_tokens):
        cache.begin_token()
        for layer in range(n_layers):
            first = cache.prefetch(layer, record["pregate"][layer, t]) if has_pregate[layer] else []
            if policy.needs_scores:
                executed, second = cache.select(layer, record["scores"][layer, t])
            else:
                executed = record["executed"][layer, t].tolist()
                second = cache.observe(layer, executed)
            assert record["executed"][layer, t].tolist() == executed
            for part, copies in enumerate((first, second)):
                count = record["counts"][layer, t, part]
                assert record["copies"][layer, t, part, :count].tolist() == [copy.expert for copy in copies]
    return n_tokens


@pytest.mark.parametrize("name", ["psr", "psr-gated", "cache-prior", "speculative", "exact-prefetch"])
def test_each_stream_decides_as_if_alone(name):
    """What a stream's cache decides follows from its own scores, whatever the others do to the one store."""
    with make(policy=preset(name), record=True) as engine:
        streams = []
        join = engine.join
        engine.join = lambda tokens: streams.append(join(tokens)) or streams[-1]
        play(engine)
        replayed = [replay(joined(s), engine.policy, engine.has_pregate, engine.capacity) for s in streams]
        assert replayed == [stream.position for stream in streams] and len(streams) == 6
        loads = sum(joined(s)["executed"].size for s in streams)
        demanded = sum(int(joined(s)["counts"][:, :, 1].sum()) for s in streams)
        stats = engine.stats()
        assert stats.loads == loads and stats.loads - stats.hits == demanded
        assert stats.tokens == sum(replayed)


@pytest.mark.parametrize("name", ["psr-gated", "exact-prefetch"])
def test_timing_changes_nothing(name):
    runs = []
    for more in ({"readers": 1}, {"readers": 7, "verify_reads": True}, {"readers": 2, "read_delay": 0.0005}):
        with make(policy=preset(name), **more) as engine:
            runs.append(play(engine))
            if more["readers"] == 7:
                runs.append(play(engine))  # who joins anew starts anew
    for other in runs[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(runs[0], other, strict=True))


@pytest.mark.parametrize("name", ["exact-prefetch", "psr"])
def test_one_stream_is_the_engine_for_one(name):
    options = {"policy": preset(name), "record": True}
    with (
        make(places=1, **options) as streams,
        StreamingEngine(
            demo_model(), residency=Residency.parse("16"), n_ctx=N_CTX, n_threads=1, chunk=CHUNK, **options
        ) as engine,
    ):
        assert streams.config_hash == engine.config_hash and streams.budget == engine.budget
        tokens = engine.tokenize(PROMPTS[0])
        stream, logits = streams.join(tokens), engine.prefill(tokens)
        for _ in range(12):
            assert np.array_equal(stream.logits, logits)
            token = int(logits.argmax())
            streams.step({stream: token})
            logits = engine.decode(token)
        assert all(
            np.array_equal(a[name], b[name]) for a, b in zip(stream.records, engine.records, strict=True) for name in a
        )
        assert streams.stats().hits == engine.stats().hits


def test_batch_composition_is_in_the_config_hash():
    with make(places=2) as two, make(places=3) as three:
        assert two.config_hash != three.config_hash
        assert two.capacity == three.capacity == 16


def test_the_store_keeps_what_there_is_room_for():
    """After a layer has run, no more than its slots; while it runs, all that it executes."""
    with make(places=6, residency=Residency.parse("8"), policy=preset("exact-prefetch")) as engine:
        streams = [engine.join(engine.tokenize(text)) for text in PROMPTS[:6]]
        engine.leave(streams[0])
        streams[0] = engine.join(engine.tokenize(PROMPTS[0])[: engine.chunk + 1])  # its last chunk is one token
        assert engine.union == (0, 0), "of steps, not of prompts"
        for _ in range(8):
            engine.step({stream: int(stream.logits.argmax()) for stream in streams})
            held = (engine._store.states() != reads.ABSENT).sum(axis=1)
            # The last layer's surplus goes before the next step's first layer.
            assert (held[:-1] <= 8 + 6).all(), "at most one prefetch of each stream may be on its way for nobody"
            assert held[-1] <= 48
        distinct, layers = engine.union
        assert layers == 8 * 8 and 8 < distinct / layers < 48


def test_a_shared_expert_is_read_once():
    """Four streams with one text ask for no more reads than one does."""
    counts = []
    for n in (1, 4):
        with make(residency=Residency.parse("64")) as engine:
            streams = [engine.join(engine.tokenize(PROMPTS[0])) for _ in range(n)]
            for _ in range(6):
                engine.step({stream: int(streams[0].logits.argmax()) for stream in streams})
            stats = engine.stats()
            assert stats.loads == n * 64 * streams[0].position
            counts.append(stats.demand_reads)
    assert counts[0] == counts[1] > 64


def test_a_failed_read_takes_every_stream_s_token_back(tmp_path):
    [path] = write_synthetic(tmp_path / "m.gguf", d_expert=128)
    tokens = {}
    with make(path, residency=Residency.parse("5")) as engine, make(path, residency=Residency.parse("5")) as other:
        streams = [[e.join(e.tokenize(text)) for text in PROMPTS[:3]] for e in (engine, other)]
        positions = [stream.position for stream in streams[0]]
        fd = engine._store._files[0][0]
        kept, empty = os.dup(fd), os.open(os.devnull, os.O_RDONLY)
        os.dup2(empty, fd)
        tokens = {stream: 40 + i for i, stream in enumerate(streams[0])}
        with pytest.raises(UserError, match="cannot be read"):
            engine.step(tokens)
        with pytest.raises(UserError, match="cannot be read"):
            engine.join(np.arange(60, 70))
        assert [stream.position for stream in streams[0]] == positions and len(engine.live) == 3
        os.dup2(kept, fd)
        os.close(kept)
        os.close(empty)
        for _ in range(3):
            engine.step(tokens)
            other.step({stream: 40 + i for i, stream in enumerate(streams[1])})
            for mine, theirs in zip(*streams, strict=True):
                assert np.array_equal(mine.logits, theirs.logits)


@pytest.mark.parametrize("name", ["exact-lru", "psr"])
def test_an_interrupt_takes_every_stream_s_token_back(name):
    more = {"policy": preset(name), "readers": 1, "residency": Residency.parse("8")}
    with make(**more) as engine, make(**more) as other:
        streams = [[e.join(e.tokenize(text)) for text in PROMPTS[:3]] for e in (engine, other)]
        positions = [stream.position for stream in streams[0]]
        with interrupt_while_reading(engine._store, begun=3), pytest.raises(KeyboardInterrupt):
            engine.step({stream: 40 + i for i, stream in enumerate(streams[0])})
        assert [stream.position for stream in streams[0]] == positions
        engine.step({stream: 40 + i for i, stream in enumerate(streams[0])})
        other.step({stream: 40 + i for i, stream in enumerate(streams[1])})
        for mine, theirs in zip(*streams, strict=True):
            assert np.array_equal(mine.logits, theirs.logits)


def test_places_and_contexts_that_are_full_are_refused():
    with make(places=2, n_ctx=32) as engine:
        one, two = engine.join(range(40, 70)), engine.join(range(40, 50))
        with pytest.raises(UserError, match="all 2 streams are in use"):
            engine.join([40])
        with pytest.raises(UserError, match=r"prompt is empty"):
            engine.leave(two)
            engine.join([])
        with pytest.raises(UserError, match="stream 1 has left"):
            engine.step({one: 40, two: 40})
        with pytest.raises(UserError, match="33 tokens do not fit into a context of"):
            engine.join(np.arange(40, 40 + engine.n_ctx + 1))
        assert engine.live == [one]
        for _ in range(engine.n_ctx - 30):
            engine.step({one: 41})
        with pytest.raises(UserError, match=r"context of .* tokens is full"):
            engine.step({one: 41})
        three = engine.join([40])
        assert three.number == 1 and three is not two
        engine.leave(two)
        assert engine.live == [one, three]
    for places in (0, 257):
        with pytest.raises(UserError, match="expected 1 to 256"):
            make(places=places)


def test_too_many_streams_are_refused_with_how_many_fit(tmp_path):
    [path] = write_synthetic(tmp_path / "m.gguf")
    options = {"residency": None, "n_ctx": 4096}
    with make(path, places=2, **options) as two:
        need = two.budget.total
    with pytest.raises(UserError, match=r"too little for 40 streams: .* need \d+ MB.*; \d+ would fit") as refusal:
        make(path, places=40, ram=need, **options)
    most = int(str(refusal.value).split("; ")[1].split()[0])
    with make(path, places=most, ram=need, **options) as engine:
        assert engine.budget.total <= need
    with pytest.raises(UserError, match=f"; {most} would fit"):
        make(path, places=most + 1, ram=need, **options)


def test_a_memory_that_cannot_take_a_token_back_starts_anew(monkeypatch):
    """Recurrent layers keep no earlier state. llama.cpp then drops the whole sequence, and says so by position 0."""
    with make(places=2) as engine:
        one, other = engine.join(range(40, 50)), engine.join(range(50, 60))
        monkeypatch.setattr(engine._session, "forget", lambda *_: 0)
        with interrupt_while_reading(engine._store), pytest.raises(KeyboardInterrupt):
            engine.step({one: 61})
        assert (one.position, other.position) == (0, 10)
        with pytest.raises(UserError, match="its memory cannot take one token back: let the stream join again"):
            engine.step({one: 61})


def test_records_have_the_width_of_the_layer_that_executes_most():
    """Layers may execute different numbers of experts; the record of those that execute fewer is padded with −1."""
    records = []
    for extra in (0, 3):
        with StreamingEngine(
            demo_model(), residency=Residency.parse("16"), n_threads=1, n_ctx=64, record=True
        ) as engine:
            decider = engine._decider
            layers, rows, k = decider._executed.shape
            decider._executed = np.full((layers, rows, k + extra), -1, np.int32)
            decider.ctl[[w.ROUTING_OUT, w.MOST]] = decider._executed.ctypes.data, k + extra
            engine.prefill(range(40, 60))
            records.append(engine.records[0]["executed"])
    assert np.array_equal(records[1][..., :k], records[0]) and (records[1][..., k:] == -1).all()
