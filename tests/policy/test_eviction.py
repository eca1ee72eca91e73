"""Eviction rules against plain readings of their definitions, and Belady against exhaustive search."""

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgemoe.policy.eviction import RULES


@st.composite
def loads_and_capacity(draw, max_experts=10, max_tokens=30):
    n_experts = draw(st.integers(1, max_experts))
    k = draw(st.integers(1, min(n_experts, 4)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    loads = np.array([rng.permutation(n_experts)[:k] for _ in range(draw(st.integers(0, max_tokens)))], dtype=np.int16)
    loads = loads.reshape(-1, k)
    if draw(st.booleans()):
        loads[rng.random(loads.shape) < 0.2] = -1  # layers of smaller k are padded
    return loads, n_experts, draw(st.integers(1, n_experts))


def replay(loads, capacity, priority):
    """One load after the other; a miss evicts the resident of least (priority, index). Capacity below k is allowed."""
    resident, misses = set(), 0
    history = []  # (token, expert) of every load so far
    for t, row in enumerate(loads.tolist()):
        for e in row:
            if e < 0:
                continue
            if e not in resident:
                misses += 1
                if len(resident) == capacity:
                    resident.remove(min(resident, key=lambda j: (priority(j, t, history), j)))
                resident.add(e)
            history.append((t, e))
    return misses


def last_use(j, t, history):
    return max((token for token, e in history if e == j), default=-1)


def uses(j, t, history):
    return sum(e == j for _, e in history)


def a_priority(j, t, history):
    """The A priority as Algorithm 1 freezes it at the start of token t."""
    fast = slow = np.float32(0)
    for token in range(t):
        hit = (token, j) in history
        fast = fast * np.float32(0.5) + np.float32(0.5 * hit)
        slow = slow * np.float32(0.98) + (np.float32(0.02) if hit else np.float32(0))
    return fast + slow


@settings(max_examples=150)
@given(loads_and_capacity())
@pytest.mark.parametrize(("rule", "priority"), [("lru", last_use), ("lfu", uses), ("score", a_priority)])
def test_rule_counts_the_misses_of_its_definition(rule, priority, case):
    loads, n_experts, capacity = case
    assert RULES[rule](loads, n_experts, capacity) == replay(loads, capacity, priority)


def fewest_misses(loads, capacity):
    """The best that inserting every miss can do, by trying every eviction."""
    flat = [e for row in loads.tolist() for e in row if e >= 0]

    @cache
    def best(i, resident):
        if i == len(flat):
            return 0
        if flat[i] in resident:
            return best(i + 1, resident)
        if len(resident) < capacity:
            return 1 + best(i + 1, resident | {flat[i]})
        return 1 + min(best(i + 1, resident - {j} | {flat[i]}) for j in resident)

    return best(0, frozenset())


@settings(max_examples=150)
@given(loads_and_capacity(max_experts=6, max_tokens=7))
def test_belady_is_optimal(case):
    loads, n_experts, capacity = case
    assert RULES["belady"](loads, n_experts, capacity) == fewest_misses(loads, capacity)


@given(loads_and_capacity())
@settings(max_examples=50)
def test_static_oracle_misses_what_it_does_not_pin(case):
    loads, n_experts, capacity = case
    frequency = sorted(np.bincount(loads[loads >= 0], minlength=n_experts), reverse=True)
    assert RULES["static-oracle"](loads, n_experts, capacity) == sum(frequency[capacity:])


def test_static_prefix_learns_from_the_first_fifth_only():
    loads = np.array([[0], [1], [0], [1]] + [[2]] * 16, dtype=np.int16)
    assert RULES["static-prefix"](loads, 3, 1) == 18  # 0 and 1 tie: the lower index is pinned
    assert RULES["static-oracle"](loads, 3, 1) == 4


def test_belady_counts_a_use_later_in_the_same_token_as_the_next_use():
    """Evicting 1 for 0 in the second token would lose it one load before it is needed."""
    loads = np.array([[1, 2], [0, 1]], dtype=np.int16)
    assert RULES["belady"](loads, 3, 2) == 3


def test_a_miss_may_evict_what_its_token_still_needs():
    """Rank order, one load at a time: 2 is oldest when 3 arrives, although the token also uses 2."""
    loads = np.array([[2, 0], [0, 1], [3, 2]], dtype=np.int16)
    assert RULES["lru"](loads, 4, 2) == 5
