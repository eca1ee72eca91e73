"""Algorithm 1 of the PSR paper (§4.1), line by line.

Per layer and token: `freeze` (the priority p, fixed for the token), `prefetch` (part 1, lines 2–12), `select` (part 2,
lines 13–21). R is the set of experts with a slot, B the experts that part 1 visited, S the executed experts.

Ties: a selection prefers the router's own score, then the lower index; an eviction takes the lowest index. All
arithmetic that decides is float32 in the order written here: another implementation that keeps this order decides the
same, bit for bit. Layers share nothing but working memory, so any interleaving of layers gives the same result.
"""

import numpy as np

from edgemoe.policy._jit import kernel
from edgemoe.policy.state import CACHE_PRIOR, LFU, LRU, SPECULATIVE, STATIC, TAU, TOKEN_PRIOR, Cache

FAST_DECAY, FAST_GAIN = np.float32(0.5), np.float32(0.5)
SLOW_DECAY, SLOW_GAIN = np.float32(0.98), np.float32(0.02)
MASKED = np.float32(-np.inf)
NO_LIMIT = 2**62


@kernel
def rank(key: np.ndarray, own: np.ndarray, m: int, order: np.ndarray) -> None:
    """Write the first m experts by `key`, then by the router's `own` score, then by index, to order[:m]."""
    found = 0
    for e in range(len(key)):
        at = found
        while at > 0:
            o = order[at - 1]
            if not (key[e] > key[o] or (key[e] == key[o] and own[e] > own[o])):
                break
            at -= 1
        if at < m:
            found = min(found + 1, m)
            for i in range(found - 1, at, -1):
                order[i] = order[i - 1]
            order[at] = e


@kernel
def a_priority(c: Cache, layer: int, e: int) -> np.float32:
    """The A priority (§4.1): both moving averages plus the token prior."""
    return (c.fast[layer, e] + c.slow[layer, e]) + c.prior[layer, e]


@kernel
def reset(c: Cache, layer: int) -> None:
    """Start a sequence: the warm set, statistics zero."""
    for e in range(c.n_experts):
        c.slot_of[layer, e] = c.warm_slot[layer, e]
        c.recency[layer, e] = 0
        c.uses[layer, e] = 0
        c.protected[layer, e] = 0
        c.fast[layer, e] = 0
        c.slow[layer, e] = 0
        c.prior[layer, e] = 0
    c.clock[layer] = 0
    c.frozen[layer] = 0
    c.n_predicted[layer] = 0
    c.range_sum[layer] = 0


@kernel
def freeze(c: Cache, layer: int) -> None:
    """Fix p for the whole step, from the statistics through the previous token and `c.prior`; line 1: B ← ∅."""
    for e in range(c.n_experts):
        if c.eviction == LRU:
            c.priority[layer, e] = c.recency[layer, e]
        elif c.eviction == LFU:
            c.priority[layer, e] = c.uses[layer, e]
        elif c.eviction == STATIC:
            c.priority[layer, e] = c.warm_rank[layer, e]
        else:
            c.priority[layer, e] = a_priority(c, layer, e)
        c.protected[layer, e] = 0
    c.n_predicted[layer] = 0
    c.frozen[layer] = 1


@kernel
def victim(c: Cache, layer: int) -> int:
    """Lines 9 and 17: arg min of p over R \\ (S ∪ B), or over R \\ S if that set is empty. In part 1, S is empty.

    R without pinned experts, which keep the first slots of their layer.
    """
    best = spared = -1
    for j in range(c.n_experts):
        if c.slot_of[layer, j] < c.pinned[layer] or c.chosen[j]:  # not resident, or pinned, or in S
            continue
        if c.protected[layer, j]:
            if spared < 0 or c.priority[layer, j] < c.priority[layer, spared]:
                spared = j
        elif best < 0 or c.priority[layer, j] < c.priority[layer, best]:
            best = j
    return best if best >= 0 else spared


@kernel
def insert(c: Cache, layer: int, e: int) -> None:
    """Lines 9–10 and 17–18: evict one expert, and let e take its slot; the next copy in order brings e there."""
    evicted = victim(c, layer)
    slot = c.slot_of[layer, evicted]
    c.slot_of[layer, evicted] = -1
    c.slot_of[layer, e] = slot
    c.copy_expert[c.n_copies[0]] = e
    c.copy_slot[c.n_copies[0]] = slot
    c.n_copies[0] += 1


@kernel
def bonus(c: Cache, layer: int, observed: int) -> np.float32:
    """λΔ̄; the running Δ̄ is the mean of the `observed` ranges so far, and no bonus before the first."""
    if not c.running:
        return c.rules[0] * c.scale[layer]
    if observed == 0:
        return np.float32(0)
    return c.rules[0] * (c.range_sum[layer] / np.float32(observed))


@kernel
def bias(c: Cache, layer: int, z: np.ndarray, extra: np.float32) -> None:
    """Equation 1: z + λΔ̄·1[· ∈ R] to c.biased. A group mask holds: −∞ plus any bonus is −∞."""
    for e in range(c.n_experts):
        c.biased[e] = z[e] + extra if c.slot_of[layer, e] >= 0 else z[e]


@kernel
def prefetch(c: Cache, layer: int, g: np.ndarray, room: int = NO_LIMIT) -> None:
    """Part 1 for `layer`, lines 2–12: the prefetch copies stand in the first `n_copies` of `copy_expert`, `copy_slot`.

    g [E] float32 are the pre-gate's scores. Prefetch by token prior ranks the A priority in their place, where an
    expert of which nothing is known (A priority zero) is no candidate.

    room: insertions that the caller lets through, however large the budget is. Prefetch that is throttled by what the
    link has room for (PSR §6.1) passes it, and so lets the time that copies take decide. Nothing else does.
    """
    k = c.top_k[layer]
    least = MASKED
    if c.gated:
        bias(c, layer, g, bonus(c, layer, c.clock[layer]))
        rank(c.biased, g, k, c.order)
        for e in range(c.n_experts):
            c.accepted[e] = 0
        for i in range(k):
            c.accepted[c.order[i]] = 1
    if c.prefetch == TOKEN_PRIOR:
        for e in range(c.n_experts):
            c.biased[e] = a_priority(c, layer, e)
        rank(c.biased, c.biased, c.window, c.order)
        g, least = c.biased, np.float32(0)
    else:
        rank(g, g, max(c.window, k), c.order)
        for i in range(k):
            c.predicted[layer, i] = c.order[i]
        c.n_predicted[layer] = k
    c.n_copies[0] = 0  # line 4: this is `new`
    for i in range(c.window):  # line 5
        e = c.order[i]
        if not g[e] > least:
            break
        if c.gated and not c.accepted[e]:
            continue
        if c.slot_of[layer, e] >= 0:  # line 6
            c.protected[layer, e] = 1  # line 7
        elif c.n_copies[0] < min(c.budget, room):  # line 8
            insert(c, layer, e)  # lines 9, 10; |R| is always C
            c.protected[layer, e] = 1


@kernel
def reroute(c: Cache, layer: int, z: np.ndarray, k: int) -> None:
    """τ-rerouting (bandwidth-wall paper §7.1): S to c.executed.

    k times: take the best resident expert among those left whose probability is at least (1 − τ) times that of the best
    one left, or else that best one. On logits the condition is z ≥ z_best + ln(1 − τ), which needs no exponential.
    """
    rank(z, z, c.n_experts, c.order)
    for e in range(c.n_experts):
        c.accepted[e] = 0
    for i in range(k):
        best = pick = -1
        for e in c.order:
            if c.accepted[e]:
                continue
            if best < 0:
                best = pick = e
            if not z[e] >= z[best] + c.rules[1] or z[e] == MASKED:
                break
            if c.slot_of[layer, e] >= 0:
                pick = e
                break
        c.accepted[pick] = 1
        c.executed[i] = pick


@kernel
def choose(c: Cache, layer: int, z: np.ndarray, k: int) -> None:
    """Line 15: S to c.executed[:k]; c.own holds the router's own top-K of z."""
    if c.routing == TAU:
        reroute(c, layer, z, k)
        return
    if c.routing == CACHE_PRIOR:
        extra = bonus(c, layer, c.clock[layer] + 1)
        bias(c, layer, z, extra)
        for j in range(min(c.top_j, k)):  # the router's best count as resident (Appendix B)
            c.biased[c.own[j]] = z[c.own[j]] + extra
        rank(c.biased, z, k, c.order)
    for i in range(k):
        if c.routing == CACHE_PRIOR:
            c.executed[i] = c.order[i]
        elif c.routing == SPECULATIVE and c.n_predicted[layer] > 0:
            c.executed[i] = c.predicted[layer, i]  # §4.2
        else:
            c.executed[i] = c.own[i]


@kernel
def order_by_router(c: Cache, z: np.ndarray, k: int) -> None:
    """Sort c.executed[:k] by the router's own scores, then by index."""
    for i in range(1, k):
        e = c.executed[i]
        at = i
        while at > 0:
            o = c.executed[at - 1]
            if not (z[e] > z[o] or (z[e] == z[o] and e < o)):
                break
            c.executed[at] = o
            at -= 1
        c.executed[at] = e


@kernel
def elide(c: Cache, z: np.ndarray, k: int) -> int:
    """Gate elision: how many of c.executed[:k] keep a gate of at least ε. The best one always does.

    p_e / (p_e + p_best) < ε is z_e − z_best < ln(ε / (1 − ε)) on logits, which needs no exponential.
    """
    while k > 1 and z[c.executed[k - 1]] - z[c.executed[0]] < c.rules[2]:
        k -= 1
    return k


@kernel
def serve(c: Cache, layer: int, m: int) -> None:
    """Lines 16–19: make S = c.executed[:m] resident, by demand copies."""
    for i in range(m):
        c.chosen[c.executed[i]] = 1
    c.n_copies[0] = 0
    for e in range(c.n_experts):  # line 16: in index order
        if c.chosen[e] and c.slot_of[layer, e] < 0:
            insert(c, layer, e)  # lines 17, 18
    for i in range(m):
        c.chosen[c.executed[i]] = 0


@kernel
def update(c: Cache, layer: int, m: int, k: int) -> None:
    """Line 21: the averages follow the router's own top-K, c.own[:k]; recency and uses follow c.executed[:m]."""
    c.clock[layer] += 1
    for i in range(m):
        c.recency[layer, c.executed[i]] = c.clock[layer]
        c.uses[layer, c.executed[i]] += 1
    for e in range(c.n_experts):
        c.fast[layer, e] *= FAST_DECAY
        c.slow[layer, e] *= SLOW_DECAY
    for i in range(k):
        c.fast[layer, c.own[i]] += FAST_GAIN
        c.slow[layer, c.own[i]] += SLOW_GAIN
    c.frozen[layer] = 0


@kernel
def observe_range(c: Cache, layer: int, z: np.ndarray) -> None:
    """Add max z − min z, of the experts that are not masked, to the running Δ̄."""
    low, high = np.float32(np.inf), MASKED
    for score in z:
        if score != MASKED:
            low, high = min(low, score), max(high, score)
    if high >= low:
        c.range_sum[layer] += high - low


@kernel
def select(c: Cache, layer: int, z: np.ndarray) -> int:
    """Part 2, lines 13–21, on the router's scores z [E] float32.

    Returns |S|, which is k unless gates are elided. S stands in `executed`, the demand copies in the first `n_copies`
    of `copy_expert` and `copy_slot`.
    """
    k = c.top_k[layer]
    observe_range(c, layer, z)
    rank(z, z, k, c.own)
    choose(c, layer, z, k)
    order_by_router(c, z, k)
    m = elide(c, z, k)
    serve(c, layer, m)
    update(c, layer, m, k)
    return m


@kernel
def observe(c: Cache, layer: int, experts: np.ndarray) -> None:
    """Part 2 where the router itself has chosen: exact routing, `experts` [k] int in the router's own ranking."""
    k = c.top_k[layer]
    for i in range(k):
        c.own[i] = experts[i]
        c.executed[i] = experts[i]
    serve(c, layer, k)
    update(c, layer, k, k)
