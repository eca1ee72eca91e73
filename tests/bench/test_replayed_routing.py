"""Recorded routing in llama.cpp: a row executes what was recorded for it, and reads what the replayed caches miss."""

from pathlib import Path

import numpy as np
import pytest

from edgemoe.bench.arm import MAPPED, STREAMED, Opening, Server
from edgemoe.bench.forced import ForcedHub
from edgemoe.bench.loads import fit_trace, forced_ids
from edgemoe.bench.mapped import MappedSession
from edgemoe.bench.replayed import ReplayedEngine
from edgemoe.errors import UserError
from edgemoe.llamacpp.graph import find_routers
from edgemoe.llamacpp.hub import Tap
from edgemoe.model import read_model
from edgemoe.model.synthetic import write_synthetic
from edgemoe.streaming.replay_reads import ReadLog, replay
from edgemoe.tracing import Trace
from edgemoe.units import Residency
from edgemoe.wall.sharing import replayed_misses

EXPERTS, TOP_K, TOKENS = 16, 2, 96


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_synthetic(tmp_path_factory.mktemp("model") / "moe.gguf", n_experts=EXPERTS, top_k=TOP_K)[0]


def recorded(n_layers: int) -> Trace:
    """Loads with memory: one expert of the token before is taken again."""
    rng = np.random.default_rng(1)
    experts = np.empty((n_layers, TOKENS, TOP_K), np.int16)
    for layer in range(n_layers):
        kept = 0
        for token in range(TOKENS):
            other = rng.choice(np.delete(np.arange(EXPERTS), kept))
            experts[layer, token] = kept, other
            kept = int(rng.choice([kept, other]))
    layers, windows = np.arange(n_layers, dtype=np.int32), np.zeros(1, np.int64)
    return Trace(experts, EXPERTS, layers, windows, ("text",), "recorded")


def trace_for(model: Path) -> Trace:
    return recorded(read_model(model).geometry.n_moe_layers)


def test_windows_start_at_equal_distances_and_layers_repeat() -> None:
    trace = fit_trace(recorded(2), 5)
    assert np.array_equal(trace.experts[[2, 3, 4]], recorded(2).experts[[0, 1, 0]])
    ids = forced_ids(trace, 3)
    assert ids.shape == (TOKENS // 3, 5, 3, TOP_K) and ids.dtype == np.int32
    assert np.array_equal(ids[7, 1, 2], trace.experts[1, 2 * (TOKENS // 3) + 7])
    padded = trace.experts.copy()
    padded[0, :, 1] = -1
    with pytest.raises(UserError, match="different numbers of experts"):
        forced_ids(Trace(padded, EXPERTS, trace.layers, trace.windows, ("text",), "padded"), 1)


@pytest.mark.parametrize("streams", [1, 4])
def test_rows_execute_what_was_recorded_and_read_what_the_caches_miss(model: Path, streams: int) -> None:
    trace, steps, slots = trace_for(model), 12, 5
    ids = forced_ids(trace, streams)
    with ReplayedEngine(
        model, residency=Residency.parse(str(slots)), n_ctx=16, n_threads=1, chunk=1, streams=streams, record=True
    ) as engine:
        log = engine.log_reads()
        reads, distinct = [0], [0]
        for step in range(steps):
            engine.force(np.ascontiguousarray(ids[step]))
            engine.step(np.full(streams, step, np.int32))
            reads.append(engine.stats().demand_reads)
            distinct.append(engine.distinct)
            for row, stream in enumerate(engine._streams):
                assert np.array_equal(stream.records[-1]["executed"][:, 0], ids[step, :, row])
        for first in (0, 5):
            missed, union = replayed_misses(trace, streams, slots, first, steps - first)
            assert round(missed * trace.n_layers * (steps - first)) == reads[-1] - reads[first]
            assert round(union * trace.n_layers * (steps - first)) == distinct[-1] - distinct[first]
        engine.rewind_all()
        engine.force(None)
        engine.step(np.zeros(streams, np.int32))
        own = np.stack([stream.records[-1]["executed"][:, 0] for stream in engine._streams], axis=1)
        assert not np.array_equal(own, ids[steps - 1])
        found = log.end()
    assert len(found.number) >= reads[-1] and replay(found, readers=2) > 0


def test_mmap_executes_it_too(model: Path) -> None:
    ids = forced_ids(trace_for(model), 2)[3].copy()
    hub = ForcedHub()
    session = MappedSession(model, streams=2, n_ctx=16, n_threads=1, hub=hub)
    try:
        with hub.survey():
            session.step([0, 0], 0)
        routers = find_routers(hub.nodes())
        taps = [Tap(routers[layer].topk) for layer in sorted(routers)]
        hub.install(taps, 2)
        hub.force(ids)
        with hub.capture():
            session.step([1, 2], 1)
        for layer in range(len(taps)):
            assert np.array_equal(hub.rows(layer)[:2], ids[layer])
    finally:
        session.close()


@pytest.mark.parametrize("arm", [MAPPED, STREAMED])
def test_an_arm_decodes_what_it_is_told_and_begins_again_when_full(model: Path, tmp_path: Path, arm: str) -> None:
    ids = tmp_path / "ids.npy"
    np.save(ids, forced_ids(trace_for(model), 2))
    server = Server(Opening(arm, str(model), 2, 8, 1, str(ids), ram=10**9))
    try:
        first = server.steps(0, 5, None)
        assert len(first["seconds"]) == 5 and first["ram_bytes"] > 0
        log = tmp_path / "reads.npz"
        again = server.steps(5, 5, str(log))
        assert len(again["seconds"]) == 5 and server.arm.position == 5
        assert log.exists() == (arm == STREAMED)
        if arm == STREAMED:
            assert again["counted"]["tokens"] == 10
            assert ReadLog.load(log).nbytes >= again["counted"]["demand_bytes"]
    finally:
        server.arm.close()
