"""Sets of two implementations: alike from the same scores, near-ties told from what is no tie."""

import numpy as np
import pytest

from edgemoe.evaluation.agreement import NEAR, Recorded, agreement
from edgemoe.policy import LogicalCache, Policy, preset

LAYERS, TOKENS, EXPERTS, K = 2, 60, 16, 4
DELTA = np.array([4.0, 4.0], np.float32)


def cache(policy):
    return LogicalCache(policy, n_layers=LAYERS, n_experts=EXPERTS, top_k=K, capacity=8, delta=DELTA)


def recorded(policy, scores, pregate=None):
    one, executed = cache(policy), np.zeros((LAYERS, TOKENS, K), int)
    for t in range(TOKENS):
        one.begin_token(t)
        for layer in range(LAYERS):
            if layer and pregate is not None:
                one.prefetch(layer, pregate[layer, t])
            executed[layer, t] = one.select(layer, scores[layer, t]).experts
    return Recorded(np.arange(TOKENS), executed, scores, pregate)


@pytest.fixture
def drawn():
    return np.random.default_rng(1).standard_normal((2, LAYERS, TOKENS, EXPERTS)).astype(np.float32)


@pytest.mark.parametrize("policy", [Policy(), preset("psr", window=6)], ids=["exact", "psr"])
def test_the_same_scores_give_the_same_sets(drawn, policy):
    scores, pregate = drawn
    ours = recorded(policy, scores, pregate if policy.needs_pregate else None)
    found = agreement([(ours, ours)], cache(policy), DELTA)
    assert (found.sets, found.same, found.replayed, found.gap) == (LAYERS * TOKENS, LAYERS * TOKENS, 0, 0)
    assert found.share == 1


def test_a_near_tie_is_told_from_another_choice(drawn):
    scores = drawn[0]
    scores[0, :2] = np.linspace(2, -2, EXPERTS)
    other = scores.copy()
    scores[0, 0, K] = scores[0, 0, K - 1] - NEAR  # a quarter of what is near, at a bonus scale of 4
    other[0, 0, K] = scores[0, 0, K - 1] + NEAR
    other[0, 1, K] += 1
    found = agreement([(recorded(Policy(), scores), recorded(Policy(), other))], cache(Policy()), DELTA)
    assert (found.sets - found.same, found.ties, found.inherited, found.other) == (2, 1, 0, 1)
    assert found.explained == 0.5 and found.gap > NEAR


def test_a_near_tie_leaves_another_cache_behind(drawn):
    scores, policy = drawn[0], preset("cache-prior", lam=0.2)
    scores[:, 1:] *= 0.5  # the bonus decides often
    other = scores.copy()
    first = np.argsort(-scores[0, 0] - 0.8 * (np.arange(EXPERTS) < 8))
    biased = scores[0, 0] + 0.8 * (np.arange(EXPERTS) < 8)
    move = biased[first[K - 1]] - biased[first[K]]
    scores[0, 0, first[K]] += move - 0.01
    other[0, 0, first[K]] += move + 0.01
    found = agreement([(recorded(policy, scores), recorded(policy, other))], cache(policy), DELTA)
    assert found.ties >= 1 and found.other == 0 and found.replayed == 0
    assert found.ties + found.inherited == found.sets - found.same


def test_a_choice_that_the_scores_do_not_give_is_found(drawn):
    ours = recorded(Policy(), drawn[0])
    wrong = ours.executed.copy()
    wrong[1, 7, 0] = next(e for e in range(EXPERTS) if e not in wrong[1, 7])
    theirs = Recorded(ours.tokens, wrong, ours.scores)
    assert agreement([(ours, theirs)], cache(Policy()), DELTA).replayed == 1
