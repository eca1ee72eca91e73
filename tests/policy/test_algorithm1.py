"""The compiled policy against the plain reading of Algorithm 1, decision for decision, on adversarial input."""

from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_reference import Layer

from edgemoe.errors import UserError
from edgemoe.policy import LogicalCache, Policy

VOCABULARY = 5


@st.composite
def policies(draw, k, capacity):
    routing = draw(st.sampled_from(["exact", "cache-prior", "cache-prior", "speculative", "tau"]))
    kinds = {"speculative": ["pre-gate"]}.get(routing, ["none", "pre-gate", "pre-gate", "token-prior"])
    prefetch = draw(st.sampled_from(kinds))
    fields = {
        "routing": routing,
        "prefetch": prefetch,
        "eviction": draw(st.sampled_from(["lru", "lfu", "static", "score"])),
    }
    if prefetch != "none":
        fields["window"] = draw(st.integers(1, capacity))
        fields["budget"] = draw(st.one_of(st.integers(0, fields["window"]), st.just("unbounded")))
    if prefetch == "pre-gate":
        fields["gate"] = draw(st.sampled_from(["none", "predicted"]))
    if routing == "tau":
        fields["tau"] = draw(st.sampled_from([0.1, 0.5, 0.7, 0.99]))
    if routing == "cache-prior":
        fields["top_j"] = draw(st.integers(0, k))
    if routing == "cache-prior" or fields.get("gate") == "predicted":
        fields["lam"] = draw(st.sampled_from([0.0, 0.2, 1.0, 1.0, 100.0]))
        fields["scale"] = draw(st.sampled_from(["fixed", "running"]))
    fields["elide"] = draw(st.sampled_from([0.0, 0.0, 0.02, 0.4]))
    return Policy(**fields)


@st.composite
def cases(draw):
    n_experts = draw(st.one_of(st.integers(1, 12), st.integers(6, 12)))
    k = draw(st.integers(1, n_experts))
    capacity = draw(st.one_of(st.just(k), st.just(n_experts), st.integers(k, n_experts)))
    policy = draw(policies(k, capacity))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (2, draw(st.sampled_from([1, 6, 12, 25])), n_experts)  # [L, T, E]
    kind = draw(st.sampled_from(["smooth", "ties", "equal", "masked"]))
    scores = rng.normal(size=shape).astype(np.float32)
    pregate = (scores + rng.normal(scale=0.5, size=shape)).astype(np.float32)
    if kind != "smooth":
        scores, pregate = np.round(scores), np.round(pregate)
    if kind == "equal":
        scores[:] = 0
    if kind == "masked":
        scores[rng.random(shape) < 0.4] = -np.inf
        pregate[rng.random(shape) < 0.4] = -np.inf
    return {
        "policy": policy,
        "k": k,
        "capacity": capacity,
        "scores": scores,
        "pregate": pregate,
        # Whole numbers make a biased score tie with an unbiased one.
        "delta": (rng.uniform(0.1, 3, size=2) if kind == "smooth" else rng.integers(1, 4, size=2)).astype(np.float32),
        "warm": np.array([rng.permutation(n_experts)[: draw(st.integers(0, n_experts))] for _ in range(1)] * 2),
        "prior": rng.random((2, VOCABULARY, n_experts)).astype(np.float32) if draw(st.booleans()) else None,
        "pinned": [
            rng.permutation(n_experts)[: draw(st.sampled_from([0, 0, 1, n_experts // 2]))].tolist() for _ in "12"
        ],
        "tokens": rng.integers(0, VOCABULARY, size=shape[1]),
        "resets": rng.random(shape[1]) < 0.1,
    }


def pair(case):
    """The compiled cache and one reference layer for each of its layers."""
    policy, k, capacity, warm, prior = (case[x] for x in ("policy", "k", "capacity", "warm", "prior"))
    n_layers, _, n_experts = case["scores"].shape
    cache = LogicalCache(
        policy,
        n_layers=n_layers,
        n_experts=n_experts,
        top_k=k,
        capacity=capacity,
        delta=case["delta"],
        warm=warm,
        prior=prior,
        pinned=case["pinned"],
    )
    layers = [
        Layer(policy, n_experts, k, capacity, case["delta"][i], warm[i].tolist(), pi, case["pinned"][i])
        for i, pi in enumerate(prior if prior is not None else [None] * n_layers)
    ]
    return cache, layers


@settings(max_examples=2000)
@given(cases())
def test_decides_what_the_plain_reading_decides(case):
    cache, layers = pair(case)
    for t, token in enumerate(case["tokens"]):
        if case["resets"][t]:
            cache.reset()
            for layer in layers:
                layer.reset()
        cache.begin_token(token)
        for i, layer in enumerate(layers):
            layer.begin(token)
            z, g = case["scores"][i, t], case["pregate"][i, t]
            if i > 0:  # the first MoE layer has no pre-gate
                assert cache.prefetch(i, g) == layer.part1(g)
            executed, copies = layer.part2(z)
            selection = cache.select(i, z)
            assert selection.experts == executed
            assert selection.copies == copies
            assert cache.resident(i) == sorted(layer.slot, key=layer.slot.get)
            assert np.array_equal(cache.state.fast[i], layer.fast)
            assert np.array_equal(cache.state.slow[i], layer.slow)


@settings(max_examples=100)
@given(cases())
def test_layers_in_any_interleaving_decide_the_same(case):
    """A chunk of tokens goes layer by layer, generation token by token: the decisions must not differ."""
    case["resets"][:] = False
    by_token, _ = pair(case)
    by_layer, _ = pair(case)
    n_layers, n_tokens, _ = case["scores"].shape
    decided = {}
    for t in range(n_tokens):
        by_token.begin_token(case["tokens"][t])
        for i in range(n_layers):
            decided[i, t] = by_token.prefetch(i, case["pregate"][i, t]), by_token.select(i, case["scores"][i, t])
    for i in range(n_layers):
        for t in range(n_tokens):
            by_layer.begin_token(case["tokens"][t])
            step = by_layer.prefetch(i, case["pregate"][i, t]), by_layer.select(i, case["scores"][i, t])
            assert step == decided[i, t]


@settings(max_examples=100)
@given(cases())
def test_copies_keep_the_slots_a_bijection(case):
    cache, _ = pair(case)
    holds = [dict(enumerate(cache.resident(i))) for i in range(2)]
    for t, token in enumerate(case["tokens"]):
        cache.begin_token(token)
        for i in range(2):
            prefetched = cache.prefetch(i, case["pregate"][i, t])
            assert len(prefetched) <= case["policy"].insertions
            experts, demanded = cache.select(i, case["scores"][i, t])
            for expert, slot in [*prefetched, *demanded]:
                holds[i][slot] = expert
            pinned, n_experts = case["pinned"][i], case["scores"].shape[2]
            slots = min(len(pinned) + case["capacity"], n_experts)
            assert sorted(holds[i]) == list(range(slots))
            assert [holds[i][slot] for slot in range(slots)] == cache.resident(i)
            assert cache.resident(i)[: len(pinned)] == pinned
            assert set(experts) <= set(cache.resident(i))
            assert len(set(experts)) == len(experts) <= case["k"]
            if not case["policy"].elide:
                assert len(experts) == case["k"]


def test_a_snapshot_of_the_block_restores_every_decision():
    rng = np.random.default_rng(1)
    scores = rng.normal(size=(40, 16)).astype(np.float32)
    cache = LogicalCache(
        Policy(routing="cache-prior", lam=0.5, eviction="score", scale="running"),
        n_layers=1,
        n_experts=16,
        top_k=4,
        capacity=6,
    )

    def run(rows):
        out = []
        for z in rows:
            cache.begin_token()
            out.append(cache.select(0, z))
        return out

    run(scores[:20])
    snapshot = cache.block.copy()
    first = run(scores[20:])
    assert any(selection.copies for selection in first)
    cache.block[:] = snapshot
    assert run(scores[20:]) == first


def test_arrays_that_do_not_fit_are_errors():
    cache = LogicalCache(Policy(prefetch="pre-gate", window=1, budget=1), n_layers=1, n_experts=4, top_k=2, capacity=2)
    cache.begin_token()
    for wrong in (np.zeros(3), np.zeros(5), np.zeros((1, 4))):
        with pytest.raises(ValueError, match="4 scores"):
            cache.select(0, wrong)
        with pytest.raises(ValueError, match="4 scores"):
            cache.prefetch(0, wrong)
    for wrong in ([0], [0, 1, 2], [0, 4], [-1, 0]):
        with pytest.raises(ValueError, match="2 of 4 experts"):
            cache.observe(0, wrong)
    with pytest.raises(ValueError, match="pre-gate"):
        cache.prefetch(0)
    steered = LogicalCache(Policy(routing="tau", tau=0.5), n_layers=1, n_experts=4, top_k=2, capacity=2)
    steered.begin_token()
    with pytest.raises(ValueError, match="exact routing"):
        steered.observe(0, [0, 1])


@settings(max_examples=300)
@given(cases(), st.sampled_from(["fixed", "running"]))
def test_observing_the_routers_choice_is_selecting_exactly(case, scale):
    """With every eviction rule and prefetch; where a running bonus scale follows the scores, observing is refused."""
    drawn = asdict(case["policy"])
    kept = {name: drawn[name] for name in ("eviction", "prefetch", "window", "budget", "gate")}
    gated = kept["gate"] == "predicted"
    case["policy"] = Policy(**kept, lam=0.5 if gated else 0.0, scale=scale if gated else "fixed")
    selecting, _ = pair(case)
    observing, _ = pair(case)
    for t, z in enumerate(case["scores"][0]):
        for cache in (selecting, observing):
            cache.begin_token(case["tokens"][t])
        assert selecting.prefetch(0, case["pregate"][0, t]) == observing.prefetch(0, case["pregate"][0, t])
        experts, copies = selecting.select(0, z)
        if case["policy"].scale == "running":
            with pytest.raises(ValueError, match="running scale"):
                observing.observe(0, experts)
            return
        assert observing.observe(0, experts) == copies
        assert observing.resident(0) == selecting.resident(0)


def test_pinned_experts_must_be_experts_of_every_layer():
    for pinned in ([[0]], [[0], [4]], [[0], [-1]], [[0], [1, 1]]):
        with pytest.raises(UserError, match="pin"):
            LogicalCache(Policy(), n_layers=2, n_experts=4, top_k=1, capacity=2, pinned=pinned)


def test_a_token_without_an_id_has_no_prior():
    """The row of the token before must not stay behind."""
    prior = np.zeros((1, 2, 4), dtype=np.float32)
    prior[0, 1, 2] = 1
    cache = LogicalCache(Policy(eviction="score"), n_layers=1, n_experts=4, top_k=1, capacity=2, prior=prior)
    cache.begin_token(1)
    assert cache.state.priority[0].tolist() == [0, 0, 1, 0]
    cache.begin_token()
    assert cache.state.priority[0].tolist() == [0, 0, 0, 0]


def test_selecting_twice_for_one_token_is_an_error():
    cache = LogicalCache(Policy(), n_layers=2, n_experts=4, top_k=1, capacity=2)
    with pytest.raises(RuntimeError, match="begin_token"):
        cache.select(0, np.zeros(4))
    cache.begin_token()
    cache.select(0, np.zeros(4))
    cache.select(1, np.zeros(4))
    with pytest.raises(RuntimeError, match="begin_token"):
        cache.select(0, np.zeros(4))
