"""The dependency timeline, by cases that a person can compute."""

import numpy as np
import pytest

from edgemoe.bench.gpu.replay import Decided
from edgemoe.bench.gpu.timeline import Compute, timeline

ATTENTION, EXPERTS, OUTPUT, COPY = 1.0, 2.0, 0.5, 10.0
FREE = Compute(ATTENTION, EXPERTS, OUTPUT)


def decided(executed, prefetch=None, demand=None, n_experts=8):
    """executed: [T][L] of k experts; prefetch and demand: {(token, layer): [(expert, slot), …]}."""
    ids = np.array(executed, np.int32).transpose(1, 0, 2)
    n_layers, n_tokens, _ = ids.shape
    counts = np.zeros((n_layers, n_tokens, 2), np.int32)
    copies, places = (np.zeros((n_layers, n_tokens, 2, n_experts), np.int32) for _ in range(2))
    for part, pairs in enumerate((prefetch or {}, demand or {})):
        for (token, layer), found in pairs.items():
            counts[layer, token, part] = len(found)
            for i, (expert, slot) in enumerate(found):
                copies[layer, token, part, i], places[layer, token, part, i] = expert, slot
    return Decided(ids, counts, copies, places, 0, np.zeros((n_layers, n_experts), bool))


def test_without_copies_a_token_takes_its_computing():
    found = timeline(decided([[[0, 1], [2, 3]]] * 3), COPY, FREE)
    assert found == pytest.approx([2 * (ATTENTION + EXPERTS) + OUTPUT] * 3)
    assert FREE.token(2) == pytest.approx(found[0])


def test_a_demand_copy_starts_when_the_router_has_spoken_and_other_experts_go_first():
    found = timeline(decided([[[0, 1]]], demand={(0, 0): [(1, 0)]}), COPY, FREE)
    # Expert 0 is computed while expert 1 comes; then expert 1's half of the computing.
    assert found == pytest.approx([ATTENTION + COPY + EXPERTS / 2 + OUTPUT])


def test_a_copy_that_is_shorter_than_the_other_experts_costs_nothing():
    found = timeline(decided([[[0, 1]]], demand={(0, 0): [(1, 0)]}), 0.25, FREE)
    assert found == pytest.approx([FREE.token(1)])


def test_demand_copies_share_the_link():
    found = timeline(decided([[[0, 1]]], demand={(0, 0): [(0, 0), (1, 1)]}), COPY, FREE)
    assert found == pytest.approx([ATTENTION + 2 * COPY + EXPERTS / 2 + OUTPUT])


def test_a_prefetch_is_under_way_since_the_layer_before():
    # Asked for at 1 (layer 0's router), needed at 1 + 2 + 1 = 4, there at 11.
    found = timeline(decided([[[0, 1], [2, 3]]], prefetch={(0, 1): [(3, 0)]}), COPY, FREE)
    assert found == pytest.approx([11 + EXPERTS / 2 + OUTPUT])


def test_a_demand_copy_goes_before_a_prefetch_which_loses_nothing():
    # Layer 0's demand has the link from 1 to 11, computing ends at 12; layer 1's prefetch from 11, needed at 13, at 21.
    both = decided([[[0, 1], [2, 3]]], prefetch={(0, 1): [(3, 0)]}, demand={(0, 0): [(1, 0)]})
    assert timeline(both, COPY, FREE) == pytest.approx([21 + EXPERTS / 2 + OUTPUT])


def test_an_unused_prefetch_delays_nobody():
    # From 1 to 4 the link carries the prefetch that nobody executes; layer 1's demand interrupts it.
    both = decided([[[0, 1], [2, 3]]], prefetch={(0, 1): [(5, 1)]}, demand={(0, 1): [(3, 0)]})
    assert timeline(both, COPY, FREE) == pytest.approx([4 + COPY + EXPERTS / 2 + OUTPUT])


def test_what_an_unused_prefetch_still_needs_is_carried_until_a_later_token_executes_it():
    # Token 0: computing ends at 6.5, 5.5 of the prefetch are done. Token 1 executes it in layer 1, whose router speaks
    # at 6.5 + 4 = 10.5: 9.5 are done, 0.5 are left.
    found = timeline(decided([[[0, 1], [2, 3]], [[0, 1], [2, 5]]], prefetch={(0, 1): [(5, 1)]}), COPY, FREE)
    assert found == pytest.approx([FREE.token(2), FREE.token(2)])  # 0.5 hide behind expert 2
    slow = timeline(decided([[[0, 1], [2, 3]], [[0, 1], [2, 5]]], prefetch={(0, 1): [(5, 1)]}), 20.0, FREE)
    assert slow == pytest.approx([FREE.token(2), 21 + EXPERTS / 2 + OUTPUT - FREE.token(2)])


def test_a_prefetch_whose_slot_goes_to_another_expert_is_dropped():
    # Slot 1 of layer 1 was promised to expert 5 and goes to expert 3: nothing is left of the prefetch in token 1.
    two = decided([[[0, 1], [2, 3]], [[0, 1], [2, 3]]], prefetch={(0, 1): [(5, 1)]}, demand={(0, 1): [(3, 1)]})
    assert timeline(two, COPY, FREE) == pytest.approx([4 + COPY + EXPERTS / 2 + OUTPUT, FREE.token(2)])


def test_layer_0_prefetches_by_token_prior_when_the_token_begins():
    found = timeline(decided([[[0, 1]]], prefetch={(0, 0): [(1, 0)]}), COPY, FREE)
    assert found == pytest.approx([COPY + EXPERTS / 2 + OUTPUT])


def test_elided_gates_are_not_computed():
    found = timeline(decided([[[0, -1]]]), COPY, FREE)
    assert found == pytest.approx([ATTENTION + EXPERTS / 2 + OUTPUT])


def test_no_token_is_faster_than_its_computing_or_its_demand_copies():
    rng = np.random.default_rng(0)
    n_layers, n_tokens, k, n_experts, slots = 3, 12, 2, 8, 4
    held = [list(range(slots)) for _ in range(n_layers)]
    executed = np.zeros((n_tokens, n_layers, k), np.int32)
    demand = {}
    for t in range(n_tokens):
        for layer in range(n_layers):
            chosen = rng.choice(n_experts, k, replace=False)
            executed[t, layer] = chosen
            for expert in chosen.tolist():
                if expert not in held[layer]:
                    slot = next(s for s in range(slots) if held[layer][s] not in chosen)
                    held[layer][slot] = expert
                    demand.setdefault((t, layer), []).append((expert, slot))
    found = timeline(decided(executed.tolist(), demand=demand), COPY, FREE)
    copies = [sum(len(pairs) for (at, _), pairs in demand.items() if at == t) for t in range(n_tokens)]
    assert (found >= np.maximum(FREE.token(n_layers), COPY * np.array(copies)) - 1e-9).all()
    assert (found <= FREE.token(n_layers) + COPY * np.array(copies) + 1e-9).all()
