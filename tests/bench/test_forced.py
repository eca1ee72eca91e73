"""Replayed routing: what was recorded is what runs, in llama.cpp as it is and in the tier, with the same logits."""

import numpy as np
import pytest

from edgemoe.bench.forced import ForcedHub
from edgemoe.bench.mapped import MappedSession
from edgemoe.bench.replayed import ReplayedEngine
from edgemoe.llamacpp.graph import find_routers
from edgemoe.llamacpp.hub import Tap
from edgemoe.model.synthetic import write_synthetic
from edgemoe.units import Residency

LAYERS, EXPERTS, K, STEPS = 3, 16, 4, 6


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    [path] = write_synthetic(
        tmp_path_factory.mktemp("forced") / "m.gguf",
        "qwen3moe",
        n_layers=LAYERS,
        n_experts=EXPERTS,
        top_k=K,
        n_vocab=300,
    )
    return path


def recorded(streams):  # [STEPS, L, B, k] int32
    rng = np.random.default_rng(streams)
    shape = (STEPS, LAYERS, streams, EXPERTS)
    return np.ascontiguousarray(rng.random(shape).argsort(axis=3)[..., :K], dtype=np.int32)


def tokens(step, streams):
    return np.random.default_rng(step).integers(300, size=streams, dtype=np.int32)


def mapped(model, streams, ids):
    """Logits [STEPS, B, V] and executed experts [STEPS, L, B, k] of llama.cpp."""
    hub, logits, executed = ForcedHub(), [], []
    with MappedSession(model, streams=streams, n_ctx=32, n_threads=1, hub=hub) as session:
        with hub.survey():
            session.step([0] * streams, 0)
        routers = find_routers(hub.nodes())
        hub.install([Tap(routers[layer].topk) for layer in range(LAYERS)], streams)
        session.clear()
        for step in range(STEPS):
            hub.force(None if ids is None else ids[step])
            with hub.capture():
                session.step(tokens(step, streams), step)
            logits.append(session.logits(streams))
            executed.append(np.stack([hub.rows(layer).copy() for layer in range(LAYERS)]))
    return np.stack(logits), np.stack(executed)


@pytest.mark.parametrize("streams", [1, 3])
def test_llamacpp_executes_what_was_recorded(model, streams):
    ids = recorded(streams)
    logits, executed = mapped(model, streams, ids)
    assert np.array_equal(executed, ids)
    free, own = mapped(model, streams, None)
    assert not np.array_equal(own, ids) and not np.array_equal(free, logits)


@pytest.mark.parametrize("streams", [1, 3])
def test_the_tier_executes_the_same_with_the_same_logits(model, streams):
    ids = recorded(streams)
    expected, _ = mapped(model, streams, ids)
    settings = {"residency": Residency.parse("6"), "n_ctx": 32, "n_threads": 1, "chunk": 1, "record": True}
    with ReplayedEngine(model, streams=streams, verify_reads=True, **settings) as engine:
        for step in range(STEPS):
            engine.force(ids[step])
            engine.step(tokens(step, streams))
            assert engine._session is not None
            assert np.array_equal(engine._session.logits(streams), expected[step])
            for number, stream in enumerate(engine._streams):
                assert np.array_equal(stream.records[-1]["executed"][:, 0], ids[step, :, number])
        assert engine.stats().demand_reads > 0


def test_beginning_again_keeps_what_was_read(model):
    ids = recorded(2)
    settings = {"residency": Residency.parse("100%"), "n_ctx": 32, "n_threads": 1, "chunk": 1}
    with ReplayedEngine(model, streams=2, **settings) as engine:
        engine.force(ids[0])
        engine.step(tokens(0, 2))
        read = engine.stats().demand_reads
        engine.rewind_all()
        assert [stream.position for stream in engine._streams] == [0, 0] and read > 0
        engine.step(tokens(0, 2))
        assert engine.stats().demand_reads == read
