"""Placement plans: pinned experts are read once and stay, the other slots work as ever, and a plan must fit."""

import json

import numpy as np
import pytest

from edgemoe.errors import UserError
from edgemoe.generation import load
from edgemoe.model import read_model
from edgemoe.model.synthetic import write_synthetic
from edgemoe.policy import LogicalCache, preset
from edgemoe.streaming import reads
from edgemoe.streaming.engine import StreamingEngine
from edgemoe.streaming.streams import Streams
from edgemoe.units import Residency, parse_bytes
from edgemoe.wall.plan import LayerPlan, Plan, load_plan, save_plan

TOKENS = list(range(3, 63))
SMALL = {"residency": Residency.parse("5"), "n_ctx": 128, "n_threads": 1, "chunk": 16, "verify_reads": True}
KEPT = ([3, 9, 1], [], [15], [2, 4])  # a layer without pins among them


def write_plan(model, path, kept):
    """A plan that keeps these experts in RAM, the first of each layer in VRAM."""
    g = model.geometry
    layers = [
        LayerPlan(layer, tuple(pins[:1]), tuple(pins[1:]), tuple(e for e in range(g.n_experts) if e not in pins))
        for layer, pins in zip(g.moe_layers, kept, strict=True)
    ]
    return save_plan(Plan(g.name, g.architecture, g.n_experts, (), 0, 0, (), {}, tuple(layers)), path)


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pins")
    [path] = write_synthetic(folder / "m.gguf", d_expert=128)
    return path, write_plan(read_model(path), folder / "plan.json", KEPT)


def test_pinned_experts_are_there_at_once_and_stay(planned):
    path, plan = planned
    with StreamingEngine(path, **SMALL) as plain:
        expected = [plain.prefill(TOKENS), *(plain.decode(t) for t in (5, 6, 7))]
        unpinned, hits = plain.config_hash, plain.stats().hits
    with StreamingEngine(path, plan=plan, **SMALL) as engine:
        at_start = engine._store.states()
        assert [np.flatnonzero(row == reads.PRESENT).tolist() for row in at_start] == [sorted(k) for k in KEPT]
        found = [engine.prefill(TOKENS), *(engine.decode(t) for t in (5, 6, 7))]
        state, stats = engine._store.states(), engine.stats()
        assert all((state[row, kept] == reads.PRESENT).all() for row, kept in enumerate(KEPT))
        assert engine.capacity == 5
        assert [int((row == reads.PRESENT).sum()) for row in state[:-1]] == [5 + len(kept) for kept in KEPT[:-1]]
        assert stats.hits > hits
        assert engine.config_hash != unpinned
    assert all(np.array_equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("policy", ["exact-score", "psr-gated"])
def test_decisions_are_those_of_a_logical_cache_with_the_same_pins(planned, policy):
    path, plan = planned
    chosen = preset(policy, window=4) if policy != "exact-score" else preset(policy)
    options = {**SMALL, "policy": chosen, "record": True}
    with StreamingEngine(path, plan=load_plan(plan), **options) as engine:
        engine.prefill(TOKENS[:20])
        for token in TOKENS[20:]:
            engine.decode(token)
        records, policy = engine.records, engine.policy
        g, has_pregate = engine.model.geometry, engine.has_pregate
    cache = LogicalCache(policy, n_layers=4, n_experts=16, top_k=g.top_k, capacity=5, pinned=KEPT)
    for record in records:
        n_tokens = len(record["tokens"])
        for t in range(n_tokens):
            cache.begin_token()
            for layer in range(4):
                first = cache.prefetch(layer, record["pregate"][layer, t]) if has_pregate[layer] else []
                selection = cache.select(layer, record["scores"][layer, t])
                assert sorted(selection.experts) == sorted(record["executed"][layer, t])
                parts = record["copies"][layer, t]
                counts = record["counts"][layer, t]
                assert [c.expert for c in selection.copies] == parts[1, : counts[1]].tolist()
                if has_pregate[layer]:
                    assert [c.expert for c in first] == parts[0, : counts[0]].tolist()
                assert set(KEPT[layer]) <= set(cache.resident(layer))


def test_a_plan_counts_within_the_budget(planned):
    path, plan = planned
    with pytest.raises(UserError, match="give at least") as refusal:
        StreamingEngine(path, ram=100_000_000, n_ctx=128, chunk=16)
    least = parse_bytes(str(refusal.value).split(" need ")[1].split(":")[0])
    everything = write_plan(read_model(path), plan.with_name("all.json"), [list(range(16))] * 4)
    with pytest.raises(UserError, match=r"slots per layer that one token needs.* of that are the plan's") as refusal:
        StreamingEngine(path, ram=least + 500_000, plan=everything, n_ctx=128, chunk=16)
    assert "\n" not in str(refusal.value)
    with StreamingEngine(path, ram=3 * least, plan=everything, n_ctx=128, n_threads=1, chunk=16) as engine:
        engine.prefill(TOKENS)
        assert engine.stats().demand_reads == 0 and engine.stats().hits == engine.stats().loads


def test_plans_of_others_are_refused(planned, tmp_path):
    path, plan = planned
    [other] = write_synthetic(tmp_path / "other.gguf", n_experts=8)
    for given in (plan, load_plan(plan)):
        with pytest.raises(UserError, match="a plan for"):
            StreamingEngine(other, plan=given, **SMALL)
    with pytest.raises(UserError, match="no such placement plan"):
        StreamingEngine(path, plan=tmp_path / "none.json", **SMALL)
    damaged = tmp_path / "damaged.json"
    damaged.write_text(json.dumps({**json.loads(plan.read_text()), "layers": 3}))
    with pytest.raises(UserError, match="damaged placement plan"):
        StreamingEngine(path, plan=damaged, **SMALL)


def test_a_writer_takes_a_plan(planned):
    path, plan = planned
    with load(path, plan=plan, **SMALL) as writer:
        assert writer.engine.pins[0] == (3, 9, 1)


def test_pinned_experts_are_never_read_again_whatever_else_needs_the_room(planned):
    """Chunks that execute more than there are slots, then many streams whose caches hold all kinds of experts."""
    path, plan = planned
    with Streams(path, 4, plan=plan, **SMALL) as streams:
        log = streams._store.log(1 << 16)
        texts = [streams.join(np.arange(3 + 50 * i, 53 + 50 * i)) for i in range(4)]
        for step in range(30):
            streams.step({text: (7 * step + 31 * i) % 200 + 3 for i, text in enumerate(texts)})
        cells = log[: streams._store.ctl[reads.LOG_COUNT], reads.LOG_READ] // 65536
        pinned = {row * 16 + expert for row, kept in enumerate(KEPT) for expert in kept}
        assert len(cells) > 500 and not pinned & set(cells.tolist())
        state = streams._store.states()
        assert all((state[row, kept] == reads.PRESENT).all() for row, kept in enumerate(KEPT))
