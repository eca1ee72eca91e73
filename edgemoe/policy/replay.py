"""Algorithm 1 over a recorded trace: what the tiers would decide, counted."""

import numpy as np

from edgemoe.policy import algorithm1
from edgemoe.policy._jit import kernel
from edgemoe.policy.state import PRE_GATE, TOKEN_PRIOR, Cache

EXECUTED, DEMAND, PREFETCHED, UNUSED, REPLACED = range(5)


@kernel
def replay_layer(
    c: Cache,
    layer: int,
    starts: np.ndarray,  # [T] bool: a sequence starts here
    scores: np.ndarray,  # [T, E] float32
    pregate: np.ndarray,  # [T, E] float32, or [0, E] for a layer without one
    recorded: np.ndarray,  # [T, k] int16: what exact routing executed; [0, k] for a policy that needs the scores
    prior: np.ndarray,  # [T, E] float32: π_l of each token, or [0, E]
) -> np.ndarray:  # [5] int64
    """Replay one layer and count: executed experts, demand copies, prefetch copies, those unused, replaced experts.

    A prefetch copy is unused if the layer does not execute its expert in the same token (the "never used" of PSR §6.5);
    an executed expert is replaced if the router's own top-K does not contain it. Layers are independent given their
    scores, so replaying them one after the other decides what interleaving them by token would.
    """
    counts = np.zeros(5, dtype=np.int64)
    brought = np.empty(c.n_experts, dtype=np.int64)
    for t in range(len(starts)):
        if starts[t]:
            algorithm1.reset(c, layer)
        if len(prior):
            for e in range(c.n_experts):
                c.prior[layer, e] = prior[t, e]
        algorithm1.freeze(c, layer)
        n = 0
        if c.prefetch == TOKEN_PRIOR or (c.prefetch == PRE_GATE and len(pregate)):
            algorithm1.prefetch(c, layer, pregate[t] if len(pregate) else c.biased)
            n = c.n_copies[0]
        for i in range(n):
            brought[i] = c.copy_expert[i]
        if len(recorded):
            algorithm1.observe(c, layer, recorded[t])
            m = c.top_k[layer]
        else:
            m = algorithm1.select(c, layer, scores[t])
        counts[EXECUTED] += m
        counts[DEMAND] += c.n_copies[0]
        counts[PREFETCHED] += n
        for i in range(n):
            counts[UNUSED] += not member(c.executed, m, brought[i])
        for i in range(m):
            counts[REPLACED] += not member(c.own, c.top_k[layer], c.executed[i])
    return counts


@kernel
def member(experts: np.ndarray, n: int, e: int) -> bool:
    """Whether e is among experts[:n]."""
    for i in range(n):  # noqa: SIM110 (numba has no generators)
        if experts[i] == e:
            return True
    return False
