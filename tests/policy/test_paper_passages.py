"""Sentences of the papers, each as the smallest case that shows it."""

import numpy as np

from edgemoe.policy import LogicalCache, Policy


def make(policy, capacity=3, k=2, n_experts=6, **fields):
    return LogicalCache(policy, n_layers=2, n_experts=n_experts, top_k=k, capacity=capacity, **fields)


def step(cache, scores, pregate=None, layer=1):
    cache.begin_token()
    prefetched = [] if pregate is None else cache.prefetch(layer, np.array(pregate))
    return prefetched, *cache.select(layer, np.array(scores))


def test_the_bonus_holds_a_resident_expert_and_a_strong_one_overcomes_it():
    """Equation 1: λΔ̄ = 1 on the resident 0, 1, 2."""
    cache = make(Policy(routing="cache-prior", lam=0.5), delta=np.array([2, 2]))
    assert step(cache, [0, 0.2, 0.1, 1.05, 0, 0])[1:] == ([1, 2], [])
    assert step(cache, [0, 0.2, 0.1, 1.25, 0, 0])[1] == [3, 1]


def test_top_j_gets_the_bonus_as_if_resident():
    """Appendix B: the router's best expert, though it is not resident, ties with nobody any more."""
    scores = [0, 0.2, 0.1, 1.05, 1.0, 0]
    assert step(make(Policy(routing="cache-prior", lam=0.5), delta=np.array([2, 2])), scores)[1] == [1, 2]
    assert step(make(Policy(routing="cache-prior", lam=0.5, top_j=1), delta=np.array([2, 2])), scores)[1] == [3, 1]


def test_a_tie_after_the_bonus_goes_to_the_routers_own_choice():
    """4 without the bonus and 1 with it both reach 1; "ties are broken toward the router's own ranking" (§4.1)."""
    cache = make(Policy(routing="cache-prior", lam=0.5), k=1, delta=np.array([2, 2]))
    assert step(cache, [-1, 0, -1, -2, 1, -2])[1] == [4]


def test_a_bonus_never_crosses_a_group_mask():
    cache = make(Policy(routing="cache-prior", lam=1e6), delta=np.array([9, 9]))
    assert step(cache, [-np.inf, -np.inf, -np.inf, 0.1, 0.2, 0])[1] == [4, 3]


def test_running_scale_includes_the_current_token():
    """Ranges 2, then 4: the mean after the second token is 3, so λ = 0.5 adds 1.5 to the resident 0, 1, 2."""
    cache = make(Policy(routing="cache-prior", lam=0.5, scale="running"), k=1)
    assert step(cache, [2, 0, 0, 0, 0, 0])[1] == [0]
    assert step(cache, [-2, 0.51, 0, 2, 0, 0])[1] == [1]
    cache.reset()
    step(cache, [2, 0, 0, 0, 0, 0])
    assert step(cache, [-2, 0.49, 0, 2, 0, 0])[1] == [3]


def test_part_1_visits_in_rank_order_protects_and_stops_at_the_budget():
    """g ranks 3, 2, 4, 0: 3 is inserted for 0 (lowest index), 2 is protected, and 4 is beyond n = 1."""
    cache = make(Policy(prefetch="pre-gate", window=3, budget=1))
    prefetched, executed, demanded = step(cache, [0, 0, 0, 0, 1, 2], [5, 0, 8, 9, 6, 0])
    assert prefetched == [(3, 0)]
    assert executed == [5, 4]
    # 1 is the only resident that part 1 has not visited: it goes first, then the lowest index of the protected.
    assert demanded == [(4, 1), (5, 2)]
    assert cache.resident(1) == [3, 4, 5]


def test_a_resident_candidate_further_down_is_not_yet_protected():
    """§4.1: "an insertion can evict it if it has the lowest priority"."""
    cache = make(Policy(prefetch="pre-gate", window=2, budget=1))
    prefetched, *_ = step(cache, [0, 0, 0, 9, 8, 0], [5, 0, 0, 9, 0, 0])
    assert prefetched == [(3, 0)]


def test_gate_predicted_rejects_what_the_bonus_would_push_out():
    """With λΔ̄ = 2 the residents 0 and 1 fill the predicted top-2: 3 and 4 are no candidates, nothing is inserted."""
    pregate = [0.5, 0.4, -3, 2, 1, -3]
    fields = {"routing": "cache-prior", "lam": 1.0, "prefetch": "pre-gate", "window": 2, "budget": 2}
    gated = make(Policy(**fields, gate="predicted"), delta=np.array([2, 2]))
    assert step(gated, pregate, pregate)[0] == []
    assert [expert for expert, _ in step(make(Policy(**fields), delta=np.array([2, 2])), pregate, pregate)[0]] == [3, 4]


def test_speculative_execution_runs_the_prediction_and_the_first_layer_its_router():
    policy = Policy(routing="speculative", prefetch="pre-gate", window=2, budget="unbounded")
    scores, pregate = [5, 4, 3, 2, 1, 0], [0, 0, 0, 0, 2, 1]
    assert step(make(policy), scores, pregate)[1:] == ([4, 5], [])
    assert step(make(policy), scores, layer=0)[1] == [0, 1]


def test_statistics_follow_the_router_not_the_executed_set():
    """Line 21: 4 was the router's choice and not executed, yet it is what the A priority remembers."""
    cache = make(Policy(routing="cache-prior", lam=1, eviction="score"), k=1, delta=np.array([3, 3]))
    assert step(cache, [0.5, 0, 0, 0, 1, 0])[1] == [0]
    assert np.flatnonzero(cache.state.fast[1]).tolist() == [4]
    assert cache.state.recency[1].tolist() == [1, 0, 0, 0, 0, 0]


def test_an_insertion_is_not_a_use():
    """LRU: prefetched but never executed, 3 is as old as the untouched warm 1, and 1 has the lower index."""
    cache = make(Policy(prefetch="pre-gate", window=1, budget=1), k=1)
    assert step(cache, [0, 0, 9, 0, 0, 0], [0, 0, 0, 9, 0, 0])[0] == [(3, 0)]
    assert step(cache, [0, 0, 0, 0, 9, 0])[2] == [(4, 1)]
    assert step(cache, [0, 0, 0, 0, 0, 9])[2] == [(5, 0)]


def test_tau_takes_a_resident_within_the_tolerance():
    """Probabilities relative to the best: 0.7 for the resident 1, and 0.4 for the resident 0."""
    scores = np.log([0.4, 0.7, 0.1, 1.0, 0.01, 0.01])
    assert step(make(Policy(routing="tau", tau=0.5)), scores)[1] == [3, 1]
    assert step(make(Policy(routing="tau", tau=0.65)), scores)[1] == [1, 0]
    assert step(make(Policy(routing="tau", tau=0.2)), scores)[1] == [3, 1]


def test_gate_elision_drops_a_gate_below_epsilon():
    """Top-2 with probabilities 99 to 1: the second gate is 0.01."""
    scores = np.log([99, 1, 0.1, 0.1, 0.1, 0.1])
    assert step(make(Policy(elide=0.02)), scores)[1] == [0]
    assert step(make(Policy(elide=0.005)), scores)[1] == [0, 1]


def test_static_eviction_keeps_the_frequent():
    """Warm ranking 4, 5, 3, 0: of the residents 4, 5, 3 the least frequent is 3, and then what came for it."""
    cache = make(Policy(eviction="static"), k=1, warm=np.array([[4, 5, 3, 0]] * 2))
    assert step(cache, [0, 0, 9, 0, 0, 0])[2] == [(2, 2)]
    assert step(cache, [0, 9, 0, 0, 0, 0])[2] == [(1, 2)]
    assert cache.resident(1) == [4, 5, 1]


def test_token_prior_prefetch_ranks_the_a_priority():
    prior = np.zeros((2, 3, 6), dtype=np.float32)
    prior[1, 2, [4, 5]] = 0.5, 0.9
    cache = make(Policy(prefetch="token-prior", window=3, budget=2, eviction="score"), prior=prior)
    cache.begin_token(2)
    assert cache.prefetch(1) == [(5, 0), (4, 1)]
    cache.reset()
    cache.begin_token(0)
    assert cache.prefetch(1) == []  # nothing is known of any expert yet


def test_the_warm_set_is_padded_by_the_lowest_index():
    cache = make(Policy(), capacity=4, warm=np.array([[5, 1]] * 2))
    assert cache.resident(0) == [5, 1, 0, 2]
