"""Eviction rules alone: replay the loads of one layer through a cache of C slots (bandwidth-wall paper, Appendix E).

Loads come one after the other, a token's in rank order, and every miss is inserted, so a miss may evict an expert that
the same token still needs; C < k is therefore possible. That is the paper's simulator, and not what Algorithm 1 does:
there, S is protected as a whole. The cache starts empty.
"""

from collections.abc import Callable

import numpy as np

from edgemoe.policy._jit import kernel
from edgemoe.policy.algorithm1 import FAST_DECAY, FAST_GAIN, SLOW_DECAY, SLOW_GAIN

STATIC_PREFIX = 0.2  # share of the tokens from which static-prefix learns what to pin


@kernel
def lru(loads: np.ndarray, n_experts: int, capacity: int) -> int:
    """Misses of LRU over loads [T, k]; recency is the token of the last use, and ties go to the lowest index.

    That is the paper's Table 3, up to its ties; its Table 5 orders the uses within a token too, which gives hit rates
    that are lower by about 0.003.

    The residents form a ring through the sentinel `n_experts`, ordered by (token of the last use, index): the first is
    the next victim. Only the newest token's experts need sorting in, so a load costs a few steps whatever C is.
    Links are unsigned, which spares a wrap-around test for each index: a third of the time.
    """
    ring = np.uint32(n_experts)
    absent = np.uint32(n_experts + 1)
    after = np.full(n_experts + 1, absent, dtype=np.uint32)
    before = np.full(n_experts + 1, absent, dtype=np.uint32)
    used = np.full(n_experts + 1, -1, dtype=np.int32)  # the sentinel never is
    after[ring] = before[ring] = ring
    size = misses = 0
    for t in range(loads.shape[0]):
        for i in range(loads.shape[1]):
            if loads[t, i] < 0:
                continue
            e = np.uint32(loads[t, i])
            if after[e] != absent:
                if used[e] == t:
                    continue
                following, last = after[e], before[e]
                after[last] = following
                before[following] = last
            else:
                misses += 1
                if size == capacity:
                    evicted = after[ring]
                    following = after[evicted]
                    after[ring] = following
                    before[following] = ring
                    after[evicted] = absent
                else:
                    size += 1
            used[e] = t
            following, last = ring, before[ring]
            while used[last] == t and last > e:
                following, last = last, before[last]
            after[last] = before[following] = e
            before[e] = last
            after[e] = following
    return misses


@kernel
def lfu(loads: np.ndarray, n_experts: int, capacity: int) -> int:
    """Misses of LFU over loads [T, k]: evict the least count of uses so far, ties to the lowest index."""
    resident = np.zeros(n_experts, dtype=np.bool_)
    count = np.zeros(n_experts, dtype=np.int64)
    size = misses = 0
    for e in loads.flat:
        if e < 0:
            continue
        if not resident[e]:
            misses += 1
            size = admit(e, count, resident, size, capacity)
        count[e] += 1
    return misses


@kernel
def score(loads: np.ndarray, n_experts: int, capacity: int) -> int:
    """Misses under the A priority (PSR §4.1, no token prior) over loads [T, k], frozen at the start of each token."""
    resident = np.zeros(n_experts, dtype=np.bool_)
    fast = np.zeros(n_experts, dtype=np.float32)
    slow = np.zeros(n_experts, dtype=np.float32)
    priority = np.zeros(n_experts, dtype=np.float32)
    size = misses = 0
    for t in range(loads.shape[0]):
        for e in range(n_experts):
            priority[e] = fast[e] + slow[e]
            fast[e] *= FAST_DECAY
            slow[e] *= SLOW_DECAY
        for i in range(loads.shape[1]):
            e = loads[t, i]
            if e < 0:
                continue
            if not resident[e]:
                misses += 1
                size = admit(e, priority, resident, size, capacity)
            fast[e] += FAST_GAIN
            slow[e] += SLOW_GAIN
    return misses


@kernel
def admit(e: int, priority: np.ndarray, resident: np.ndarray, size: int, capacity: int) -> int:
    """Make e resident, in place of the resident of lowest priority (ties: lowest index) if full; the new size."""
    if size < capacity:
        resident[e] = True
        return size + 1
    best = -1
    for j in range(len(resident)):
        if resident[j] and (best < 0 or priority[j] < priority[best]):
            best = j
    resident[best] = False
    resident[e] = True
    return size


@kernel
def belady(loads: np.ndarray, n_experts: int, capacity: int) -> int:
    """Misses of the clairvoyant rule over loads [T, k]: evict the resident whose next use is farthest away.

    Exact: a use later in the same token is the next use. The fewest misses that any rule inserting every miss can have.
    """
    flat = loads.reshape(-1)
    n = len(flat)
    next_use = np.empty(n, dtype=np.int64)
    seen = np.full(n_experts, n, dtype=np.int64)
    for i in range(n - 1, -1, -1):
        if flat[i] >= 0:
            next_use[i] = seen[flat[i]]
            seen[flat[i]] = i
    slot_of = np.full(n_experts, -1, dtype=np.int64)
    holds = np.empty(capacity, dtype=np.int64)
    due = np.empty(capacity, dtype=np.int64)  # next use of the expert in each slot
    size = misses = 0
    for i in range(n):
        e = flat[i]
        if e < 0:
            continue
        slot = slot_of[e]
        if slot < 0:
            misses += 1
            if size < capacity:
                slot = size
                size += 1
            else:
                slot = 0
                for s in range(1, capacity):
                    if due[s] > due[slot]:
                        slot = s
                slot_of[holds[slot]] = -1
            slot_of[e] = slot
            holds[slot] = e
        due[slot] = next_use[i]
    return misses


def static_prefix(loads: np.ndarray, n_experts: int, capacity: int) -> int:
    """Misses over all of loads [T, k] with the most frequent experts of the first 20% of the tokens pinned."""
    return _pinned(loads, loads[: int(len(loads) * STATIC_PREFIX)], n_experts, capacity)


def static_oracle(loads: np.ndarray, n_experts: int, capacity: int) -> int:
    """Misses over loads [T, k] with the most frequent experts of the whole trace pinned."""
    return _pinned(loads, loads, n_experts, capacity)


def _pinned(loads: np.ndarray, learnt: np.ndarray, n_experts: int, capacity: int) -> int:
    frequency = np.bincount(learnt[learnt >= 0], minlength=n_experts)
    counts = np.bincount(loads[loads >= 0], minlength=n_experts)
    pinned = np.argsort(-frequency, kind="stable")[:capacity]
    return int(counts.sum() - counts[pinned].sum())


RULES: dict[str, Callable[[np.ndarray, int, int], int]] = {
    "lru": lru,
    "lfu": lfu,
    "static-prefix": static_prefix,
    "static-oracle": static_oracle,
    "score": score,
    "belady": belady,
}
"""Rule by name: (loads [T, k] int16 C-contiguous, padded with −1; E; C) → misses."""
