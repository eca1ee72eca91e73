"""Blocks of positions, rows of a batch: the same decisions as one token at a time through `LogicalCache`."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_algorithm1 import cases

from edgemoe.policy import LogicalCache, preset
from edgemoe.policy.block import CacheRows
from edgemoe.policy.replay import DEMAND, EXECUTED, PREFETCHED, REPLACED, UNUSED, replay_layer
from edgemoe.policy.state import view


def cache_of(case):
    n_layers, _, n_experts = case["scores"].shape
    names = ("delta", "warm", "prior")
    return LogicalCache(
        case["policy"],
        n_layers=n_layers,
        n_experts=n_experts,
        top_k=case["k"],
        capacity=case["capacity"],
        **{name: case[name] for name in names},
    )


def one_by_one(case, cache):
    """(executed, copies, copies of part 1) of each layer and token, by the object; layer 0 has no pre-gate."""
    cache.reset()
    out = {}
    for t, token in enumerate(case["tokens"]):
        cache.begin_token(int(token))
        for layer in range(2):
            early = []
            if layer > 0 or not case["policy"].needs_pregate:
                early = cache.prefetch(layer, case["pregate"][layer, t] if layer > 0 else None)
            chosen = cache.select(layer, case["scores"][layer, t])
            out[layer, t] = chosen.experts, [*early, *chosen.copies], len(early)
    return out


def layer_inputs(case, layer, rows=1):
    def batch(values):
        return np.stack([values] * rows)

    prior = None if case["prior"] is None else batch(case["prior"][layer][case["tokens"]])
    return batch(case["scores"][layer]), batch(case["pregate"][layer]) if layer > 0 else None, prior


def unpadded(values):
    return [x.tolist() if isinstance(x, np.ndarray) else x for x in values if np.all(x >= 0)]


def check_layer(case, wanted, layer, decided, row):
    for t in range(len(case["tokens"])):
        experts, copies, early = wanted[layer, t]
        assert unpadded(decided.executed[row, t]) == experts
        assert unpadded(decided.copies[row, t]) == [list(copy) for copy in copies]
        counts = decided.counts[row, t]
        own = set(decided.own[row, t].tolist())
        brought = {copy.expert for copy in copies[:early]}
        assert counts[EXECUTED] == len(experts)
        assert (counts[PREFETCHED], counts[DEMAND]) == (early, len(copies) - early)
        assert counts[UNUSED] == len(brought - set(experts))
        assert counts[REPLACED] == len(set(experts) - own)


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(case=cases(), cut=st.integers(0, 25))
def test_a_block_decides_what_tokens_in_turn_decide(case, cut):
    """Whole, cut in two, and a row beside another: prefill, chunks and batches of the same scores are one thing."""
    cache = cache_of(case)
    wanted = one_by_one(case, cache)
    rows = CacheRows(cache)
    rows.reset(2)
    for layer in range(2):
        for row in range(2):
            check_layer(case, wanted, layer, rows.decide(layer, *layer_inputs(case, layer, 2)), row)
            rows.reset(2)
    parts = CacheRows(cache)
    parts.reset(1)
    for layer in range(2):
        pieces = []
        for part in (slice(0, cut), slice(cut, None)):
            inputs = [None if x is None else x[:, part] for x in layer_inputs(case, layer)]
            pieces.append(parts.decide(layer, *inputs))
        joined = type(pieces[0])(*(np.concatenate(both, axis=1) for both in zip(*pieces, strict=True)))
        check_layer(case, wanted, layer, joined, 0)


@settings(max_examples=50, suppress_health_check=list(HealthCheck))
@given(case=cases(), seed=st.integers(0, 2**32 - 1))
def test_padding_changes_nothing(case, seed):
    """Positions that are no tokens, wherever they stand, leave the decisions of the others and the state alone."""
    length = len(case["tokens"])
    pads = np.random.default_rng(seed).random(2 * length + 3) < 0.5
    pads[np.flatnonzero(~pads)[length:]] = True
    here = np.flatnonzero(~pads)
    case = {**case, **{name: case[name][:, : len(here)] for name in ("scores", "pregate")}}
    case["tokens"] = case["tokens"][: len(here)]
    plain, padded = CacheRows(cache_of(case)), CacheRows(cache_of(case))
    plain.reset(1)
    padded.reset(1)
    for layer in range(2):
        inputs = layer_inputs(case, layer)
        spread = [None if x is None else np.full((1, len(pads), x.shape[2]), 7, np.float32) for x in inputs]
        for wide, x in zip(spread, inputs, strict=True):
            if x is not None:
                wide[:, here] = x
        decided = padded.decide(layer, *spread, valid=~pads[None])
        for found, wanted in zip(decided, plain.decide(layer, *inputs), strict=True):
            assert np.array_equal(found[:, here], wanted)
        assert not decided.counts[0, pads].any()
        assert (decided.executed[0, pads] == np.arange(case["k"])).all()  # equal scores: the lowest indices
    size = len(cache_of(case).block)
    before, after = view(plain.blocks[0][:size]), view(padded.blocks[0][:size])
    for name in ("slot_of", "recency", "uses", "fast", "slow", "clock", "range_sum"):
        assert np.array_equal(getattr(before, name), getattr(after, name))


def test_counts_are_those_of_a_replay():
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(1, 400, 16)).astype(np.float32)
    pregate = (scores + rng.normal(scale=0.5, size=scores.shape)).astype(np.float32)
    policy = preset("psr", window=4)
    cache = LogicalCache(policy, n_layers=1, n_experts=16, top_k=4, capacity=8, delta=np.full(1, 3, np.float32))
    rows = CacheRows(cache)
    rows.reset(1)
    total = rows.decide(0, scores, pregate).counts.sum(axis=(0, 1))
    starts = np.zeros(400, np.bool_)
    starts[0] = True
    none = np.zeros((0, 16), np.float32)
    counts = replay_layer(cache.state, 0, starts, scores[0], pregate[0], np.zeros((0, 4), np.int16), none)
    assert total.tolist() == counts.tolist()
    assert counts[PREFETCHED] > 0 and counts[REPLACED] > 0


def test_a_row_does_not_see_its_neighbour():
    rng = np.random.default_rng(1)
    scores = rng.normal(size=(3, 50, 8)).astype(np.float32)
    cache = LogicalCache(preset("cache-prior", scale="running"), n_layers=1, n_experts=8, top_k=2, capacity=4)
    together, alone = CacheRows(cache), CacheRows(cache)
    together.reset(3)
    batch = together.decide(0, scores)
    for row in range(3):
        alone.reset(1)
        single = alone.decide(0, scores[row : row + 1])
        assert all(np.array_equal(a[row], b[0]) for a, b in zip(batch, single, strict=True))


def test_shapes_are_checked():
    rows = CacheRows(LogicalCache(preset("exact-lru"), n_layers=1, n_experts=8, top_k=2, capacity=4))
    with pytest.raises(ValueError, match="1 rows of 8 experts"):
        rows.decide(0, np.zeros((1, 3, 8), np.float32))
    rows.reset(1)
    with pytest.raises(ValueError, match="like the scores"):
        rows.decide(0, np.zeros((1, 3, 8), np.float32), np.zeros((1, 2, 8), np.float32))
