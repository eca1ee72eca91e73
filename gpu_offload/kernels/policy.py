"""Algorithm 1 of the PSR paper (§4.1) on the device, decision for decision what `edgemoe.policy.algorithm1` decides.

Device functions over one layer, whose experts lie in the registers of one warp: vectors [EP] int32 or float32, E padded
to a power of two with experts that no score can reach (−inf, and the highest indices). They take and return values;
`steps` loads and stores them. What is decided is compared as integers (`ranking`). The float32 arithmetic before that
is the host's in the host's order: kernels are launched with `enable_fp_fusion=False`, so that no product and sum
become one rounding, and the one division is `div_rn`, since Triton's `/` is approximate. An expert and what is known
of it travel through one reduction as the bits of one number, index first.
"""

import triton
import triton.language as tl

from edgemoe.gpu_offload.kernels.ranking import LOWEST, MASKED, NOTHING, ahead, ordered, top, top_by, unordered
from edgemoe.policy import algorithm1
from edgemoe.policy import state as host

CACHE_PRIOR = tl.constexpr(host.CACHE_PRIOR)
SPECULATIVE = tl.constexpr(host.SPECULATIVE)
TAU = tl.constexpr(host.TAU)
LRU = tl.constexpr(host.LRU)
LFU = tl.constexpr(host.LFU)
STATIC = tl.constexpr(host.STATIC)
SCORE = tl.constexpr(host.SCORE)
TOKEN_PRIOR = tl.constexpr(host.TOKEN_PRIOR)
FAST_DECAY = tl.constexpr(float(algorithm1.FAST_DECAY))
FAST_GAIN = tl.constexpr(float(algorithm1.FAST_GAIN))
SLOW_DECAY = tl.constexpr(float(algorithm1.SLOW_DECAY))
SLOW_GAIN = tl.constexpr(float(algorithm1.SLOW_GAIN))

SLOT_BITS = tl.constexpr(10)  # a slot, or a slot + 1, of at most 512
SLOT_MASK = tl.constexpr((1 << 10) - 1)

# How selected experts are weighted, from the router's unmodified scores.
SOFTMAX = tl.constexpr(0)  # of all scores
SOFTMAX_OVER_EXECUTED = tl.constexpr(1)
GIVEN = tl.constexpr(2)  # a row of gates, as of a sigmoid router whose scores carry a selection bias
GIVEN_OVER_EXECUTED = tl.constexpr(3)


@triton.jit
def experts_of(EP: tl.constexpr):  # type: ignore[no-untyped-def]
    """The index of each expert, [EP]. One to a lane, then the next 32: taken for contiguous, rows would be loaded in
    pairs and exchanged between lanes wherever they are then addressed through something else."""
    return tl.max_contiguous(tl.arange(0, EP), 1)


@triton.jit
def freeze(recency, uses, warm_rank, tally, EVICTION: tl.constexpr):  # type: ignore[no-untyped-def]
    """p of the token as int32: an integer, or with score eviction the bits of the A priority."""
    if EVICTION == LRU:
        priority = recency
    elif EVICTION == LFU:
        priority = uses
    elif EVICTION == STATIC:
        priority = warm_rank
    else:
        priority = tally.to(tl.int32, bitcast=True)
    return priority


@triton.jit
def comparable(priority, EVICTION: tl.constexpr):  # type: ignore[no-untyped-def]
    """p as a key."""
    if EVICTION == SCORE:
        priority = ordered(priority.to(tl.float32, bitcast=True))
    return priority


@triton.jit
def bonus(lam, scale, range_sum, observed, RUNNING: tl.constexpr):  # type: ignore[no-untyped-def]
    """λΔ̄; the running Δ̄ is the mean of the `observed` ranges so far, and no bonus before the first."""
    if RUNNING:
        mean = tl.div_rn(range_sum, tl.maximum(observed, 1).to(tl.float32))
        extra = tl.where(observed == 0, 0.0, lam * mean)
    else:
        extra = lam * scale
    return extra


@triton.jit
def insert(  # type: ignore[no-untyped-def]
    e, slot, priority, barred, spared, index, copies, n, FALLBACK: tl.constexpr
):
    """Lines 9–10 and 17–18: e takes the slot of arg min p over residents neither barred nor spared, else not barred."""
    named = (index << SLOT_BITS) | slot
    free = (slot >= 0) & (barred == 0) & (spared == 0)
    least = tl.min(tl.where(free, priority, NOTHING), 0)
    found = tl.min(tl.where(free & (priority == least), named, NOTHING), 0)
    if FALLBACK:  # noqa: SIM102 (the one is known to the compiler, the other to the device)
        if found == NOTHING:
            free = (slot >= 0) & (barred == 0)
            least = tl.min(tl.where(free, priority, NOTHING), 0)
            found = tl.min(tl.where(free & (priority == least), named, NOTHING), 0)
    freed = found & SLOT_MASK
    tl.store(copies + 2 * n, e)
    tl.store(copies + 2 * n + 1, freed)
    return tl.where(index == (found >> SLOT_BITS), -1, tl.where(index == e, freed, slot))


@triton.jit
def part1(  # type: ignore[no-untyped-def]
    g, tally, slot, priority, extra, index, copies,
    PREFETCH: tl.constexpr, GATED: tl.constexpr, K: tl.constexpr, W: tl.constexpr, N: tl.constexpr, ROUNDS: tl.constexpr
):  # fmt: skip
    """Part 1, lines 2–12: prefetch copies to `copies` [N, 2] as (expert, slot).

    g [EP] are the pre-gate's scores, extra is λΔ̄, ROUNDS is max(W, K) for the pre-gate and W for the token prior.
    Returns the slots, B, the place from 1 of each predicted expert (else 0), the place of each copied one among the
    copies (else −1), all [EP] int32, and the number of copies.
    """
    key = ordered(g)
    accepted = tl.full(index.shape, 1, tl.int32)
    if GATED:
        accepted, _ = top_by(ordered(tl.where(slot >= 0, g + extra, g)), key, index, K)
    least = MASKED
    if PREFETCH == TOKEN_PRIOR:
        key = ordered(tally)
        least = 0
    protected = tl.zeros_like(index)
    predicted = tl.zeros_like(index)
    turn = tl.full(index.shape, -1, tl.int32)
    n = 0
    for i in range(ROUNDS):
        best = tl.max(key, 0)
        named = (((index << 1) | accepted) << SLOT_BITS) | (slot + 1)
        found = tl.min(tl.where(key == best, named, NOTHING), 0)
        e = found >> (SLOT_BITS + 1)
        key = tl.where(index == e, LOWEST, key)
        if PREFETCH != TOKEN_PRIOR:
            predicted = tl.where((index == e) & (i < K), i + 1, predicted)
        visited = (i < W) & (best > least) & (((found >> SLOT_BITS) & 1) == 1)  # line 5
        resident = (found & SLOT_MASK) > 0
        missing = visited & (resident == 0) & (n < N)  # line 8
        if missing:
            # At most W − 1 < C experts are protected here: an unprotected resident exists.
            slot = insert(e, slot, priority, protected * 0, protected, index, copies, n, False)
            turn = tl.where(index == e, n, turn)
            n += 1
        protected = tl.where((index == e) & ((visited & resident) | missing), 1, protected)  # lines 7, 10
    return slot, protected, predicted, turn, n


@triton.jit
def reroute(key, slot, log_keep, index, K: tl.constexpr):  # type: ignore[no-untyped-def]
    """τ-rerouting: K times the best resident left that is near enough to the best left, or else that one."""
    taken = tl.zeros_like(index)
    place = tl.zeros_like(index)
    left = key
    for _ in range(K):
        best = tl.max(left, 0)
        near = (slot >= 0) & (left >= ordered(unordered(best) + log_keep)) & (left > MASKED)
        aim = tl.max(tl.where(near, left, LOWEST), 0)
        none = aim == LOWEST
        aim = tl.where(none, best, aim)
        e = tl.min(tl.where((left == aim) & (near | none), index, NOTHING), 0)
        taken = tl.where(index == e, 1, taken)
        left = tl.where(index == e, LOWEST, left)
        place += ahead(key, aim, e, index)
    return taken, place


@triton.jit
def part2(  # type: ignore[no-untyped-def]
    z, slot, protected, predicted, n_predicted, priority, clock, range_sum, scale, lam, log_keep, log_gate, index,
    copies,
    ROUTING: tl.constexpr, RUNNING: tl.constexpr, ELIDED: tl.constexpr, K: tl.constexpr, J: tl.constexpr
):  # fmt: skip
    """Part 2, lines 13–19, on the router's scores z [EP]: demand copies to `copies` [K, 2] as (expert, slot).

    Returns the slots, S, the place of each of S by the router's own scores, the router's own top-K, the place of each
    in it, all [EP] int32; the number of copies, and the sum of the score ranges.
    """
    key = ordered(z)
    high = tl.max(key, 0)
    low = tl.min(tl.where(key > MASKED, key, NOTHING), 0)
    range_sum = tl.where(low == NOTHING, range_sum, range_sum + (unordered(high) - unordered(low)))
    own, own_place = top(key, index, K)
    chosen = own
    place = own_place
    if ROUTING == CACHE_PRIOR:
        extra = bonus(lam, scale, range_sum, clock + 1, RUNNING)
        favoured = (slot >= 0) | ((own == 1) & (own_place < J))  # the router's best count as resident (Appendix B)
        chosen, place = top_by(ordered(tl.where(favoured, z + extra, z)), key, index, K)
    elif ROUTING == SPECULATIVE:  # §4.2; the first MoE layer has no prediction
        chosen, place = top(tl.where((predicted > 0) | (n_predicted == 0), key, LOWEST), index, K)
    elif ROUTING == TAU:
        chosen, place = reroute(key, slot, log_keep, index, K)
    if ELIDED:  # those that come last: a gate of less than ε beside the best one's
        best = unordered(tl.max(tl.where(chosen == 1, key, LOWEST), 0))
        chosen = tl.where(z - best < log_gate, 0, chosen)
    n = 0
    e = tl.min(tl.where((chosen == 1) & (slot < 0), index, NOTHING), 0)  # line 16: in index order
    while e != NOTHING:
        slot = insert(e, slot, priority, chosen, protected, index, copies, n, True)
        n += 1
        e = tl.min(tl.where((chosen == 1) & (slot < 0), index, NOTHING), 0)
    return slot, chosen, place, own, own_place, n, range_sum


@triton.jit
def update(recency, uses, fast, slow, chosen, own, clock):  # type: ignore[no-untyped-def]
    """Line 21: the averages follow the router's own top-K; recency and uses follow S."""
    clock += 1
    recency = tl.where(chosen == 1, clock, recency)
    uses += chosen
    fast = fast * FAST_DECAY
    slow = slow * SLOW_DECAY
    fast = tl.where(own == 1, fast + FAST_GAIN, fast)
    slow = tl.where(own == 1, slow + SLOW_GAIN, slow)
    return recency, uses, fast, slow, clock


@triton.jit
def mixing_weights(z, given, chosen, factor, WEIGHTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """What each expert's output is multiplied with, [EP] float32: no decision, so no bits are promised elsewhere."""
    if WEIGHTS < GIVEN:
        # Where every score is −inf, all weights are zero rather than no number.
        gate = tl.exp(z - tl.maximum(tl.max(z, 0), -3.0e38))
    else:
        gate = given
    if WEIGHTS == SOFTMAX:
        total = tl.sum(gate, 0)
    elif WEIGHTS == GIVEN:
        total = 1.0
    else:
        total = tl.sum(tl.where(chosen == 1, gate, 0.0), 0)
    return gate / tl.maximum(total, 1.0e-30) * factor
