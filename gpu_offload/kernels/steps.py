"""Algorithm 1 over the state in memory: the parts of one token's step (`deciding.decide` makes one of them), a chunk of
tokens, the prior.

One thread block of one warp each: a layer's decisions are a chain, and a warp needs no barriers. Launch them with
`OPTIONS`.
"""

import triton
import triton.language as tl

from edgemoe.gpu_offload.kernels import layout
from edgemoe.gpu_offload.kernels.policy import (
    GIVEN,
    bonus,
    comparable,
    experts_of,
    freeze,
    mixing_weights,
    part1,
    part2,
    update,
)

OPTIONS = {"num_warps": 1, "num_stages": 1, "enable_fp_fusion": False}

N_INTS = tl.constexpr(len(layout.INTS))
N_REALS = tl.constexpr(len(layout.REALS))
N_WORDS = tl.constexpr(len(layout.WORDS))
N_COUNTS = tl.constexpr(len(layout.COUNTS))
SLOT_OF = tl.constexpr(layout.INTS.index("slot_of"))
WARM_RANK = tl.constexpr(layout.INTS.index("warm_rank"))
RECENCY = tl.constexpr(layout.INTS.index("recency"))
USES = tl.constexpr(layout.INTS.index("uses"))
PROTECTED = tl.constexpr(layout.INTS.index("protected"))
PRIORITY = tl.constexpr(layout.INTS.index("priority"))
PREDICTED = tl.constexpr(layout.INTS.index("predicted"))
FAST = tl.constexpr(layout.REALS.index("fast"))
SLOW = tl.constexpr(layout.REALS.index("slow"))
PRIOR = tl.constexpr(layout.REALS.index("prior"))
MASKED_SCORE = tl.constexpr(float("-inf"))


@triton.jit
def recalled(ints, reals, words, scales, layer, index, EP: tl.constexpr):  # type: ignore[no-untyped-def]
    """What part 2 of a layer needs of its state. Asked for at once, so that the memory's latency is paid once, and past
    the L1 cache: none of it is the work of the kernel before, whose end is not waited for."""
    here = ints + layer * (N_INTS * EP) + index
    averages = reals + layer * (N_REALS * EP) + index
    slot = tl.load(here + SLOT_OF * EP, cache_modifier=".cg")
    protected = tl.load(here + PROTECTED * EP, cache_modifier=".cg")
    priority = tl.load(here + PRIORITY * EP, cache_modifier=".cg")
    predicted = tl.load(here + PREDICTED * EP, cache_modifier=".cg")
    recency = tl.load(here + RECENCY * EP, cache_modifier=".cg")
    uses = tl.load(here + USES * EP, cache_modifier=".cg")
    fast = tl.load(averages + FAST * EP, cache_modifier=".cg")
    slow = tl.load(averages + SLOW * EP, cache_modifier=".cg")
    clock = tl.load(words + layer * N_WORDS, cache_modifier=".cg")
    n_predicted = tl.load(words + layer * N_WORDS + 2, cache_modifier=".cg")
    scale = tl.load(scales + layer * 2, cache_modifier=".cg")
    range_sum = tl.load(scales + layer * 2 + 1, cache_modifier=".cg")
    return slot, protected, priority, predicted, recency, uses, fast, slow, clock, n_predicted, scale, range_sum


@triton.jit
def recalled_ahead(ints, reals, words, scales, layer, index, EP: tl.constexpr):  # type: ignore[no-untyped-def]
    """What freezing a layer and its part 1 need; as `recalled`."""
    here = ints + layer * (N_INTS * EP) + index
    averages = reals + layer * (N_REALS * EP) + index
    slot = tl.load(here + SLOT_OF * EP, cache_modifier=".cg")
    recency = tl.load(here + RECENCY * EP, cache_modifier=".cg")
    uses = tl.load(here + USES * EP, cache_modifier=".cg")
    rank = tl.load(here + WARM_RANK * EP, cache_modifier=".cg")
    fast = tl.load(averages + FAST * EP, cache_modifier=".cg")
    slow = tl.load(averages + SLOW * EP, cache_modifier=".cg")
    prior = tl.load(averages + PRIOR * EP, cache_modifier=".cg")
    clock = tl.load(words + layer * N_WORDS, cache_modifier=".cg")
    scale = tl.load(scales + layer * 2, cache_modifier=".cg")
    range_sum = tl.load(scales + layer * 2 + 1, cache_modifier=".cg")
    return slot, recency, uses, rank, (fast + slow) + prior, clock, scale, range_sum


@triton.jit
def list_decisions(  # type: ignore[no-untyped-def]
    z, given_row, chosen, place, own, own_place, slot, factor, index, executed, slots, weights, own_list,
    E: tl.constexpr, WEIGHTS: tl.constexpr
):  # fmt: skip
    """Write S by the router's own scores with slots and weights, and the router's own top-K."""
    given = z
    if WEIGHTS >= GIVEN:
        given = tl.load(given_row + index, mask=index < E, other=0.0)
    gate = mixing_weights(z, given, chosen, factor, WEIGHTS)
    tl.store(executed + place, index, mask=chosen == 1)
    tl.store(slots + place, slot, mask=chosen == 1)
    tl.store(weights + place, gate, mask=chosen == 1)
    tl.store(own_list + own_place, index, mask=own == 1)


@triton.jit
def remember(  # type: ignore[no-untyped-def]
    ints, reals, words, scales, layer, index, slot, recency, uses, fast, slow, clock, range_sum, chosen, own,
    EP: tl.constexpr
):  # fmt: skip
    """Line 21, and the layer's state as part 2 leaves it."""
    here = ints + layer * (N_INTS * EP) + index
    averages = reals + layer * (N_REALS * EP) + index
    recency, uses, fast, slow, clock = update(recency, uses, fast, slow, chosen, own, clock)
    tl.store(here + SLOT_OF * EP, slot)
    tl.store(here + RECENCY * EP, recency)
    tl.store(here + USES * EP, uses)
    tl.store(averages + FAST * EP, fast)
    tl.store(averages + SLOW * EP, slow)
    tl.store(words + layer * N_WORDS, clock)
    tl.store(words + layer * N_WORDS + 1, 0)
    tl.store(scales + layer * 2 + 1, range_sum)


@triton.jit
def look_ahead(  # type: ignore[no-untyped-def]
    ints, words, pregate, copies, counts, layer, index, lam, slot, recency, uses, rank, tally, clock, scale, range_sum,
    E: tl.constexpr, EP: tl.constexpr, WIDTH: tl.constexpr, BUDGET: tl.constexpr, PREFETCHES: tl.constexpr,
    EVICTION: tl.constexpr, PREFETCH: tl.constexpr, GATED: tl.constexpr, RUNNING: tl.constexpr, K: tl.constexpr,
    W: tl.constexpr, ROUNDS: tl.constexpr
):  # fmt: skip
    """The freeze of a layer and its part 1 (if PREFETCHES); state and lists of it.

    Returns the place of each copied expert among the copies (else −1), the slots, and how many copies.
    """
    here = ints + layer * (N_INTS * EP) + index
    priority = freeze(recency, uses, rank, tally, EVICTION)
    protected = tl.zeros_like(index)
    predicted = tl.zeros_like(index)
    turn = protected - 1
    n = 0
    if PREFETCHES:
        g = tl.load(pregate + index, mask=index < E, other=MASKED_SCORE)
        slot, protected, predicted, turn, n = part1(
            g, tally, slot, comparable(priority, EVICTION), bonus(lam, scale, range_sum, clock, RUNNING), index,
            copies + layer * (2 * (WIDTH + BUDGET)) + 2 * WIDTH, PREFETCH, GATED, K, W, BUDGET, ROUNDS,
        )  # fmt: skip
        tl.store(here + SLOT_OF * EP, slot)
    tl.store(here + PROTECTED * EP, protected)
    tl.store(here + PRIORITY * EP, priority)
    tl.store(here + PREDICTED * EP, predicted)
    tl.store(words + layer * N_WORDS + 1, 1)
    tl.store(words + layer * N_WORDS + 2, tl.sum((predicted > 0).to(tl.int32), 0))
    tl.store(counts + layer * N_COUNTS + 2, n)
    return turn, slot, n


@triton.jit(do_not_specialize=["layer", "n_tokens"])
def chunk(  # type: ignore[no-untyped-def]
    ints, reals, words, scales, scores, given, pregate, priors, executed, slots, weights, own_list, copies, counts,
    layer, n_tokens, lam, log_keep, log_gate, factor,
    E: tl.constexpr, EP: tl.constexpr, WIDTH: tl.constexpr, BUDGET: tl.constexpr, PREFETCHES: tl.constexpr,
    ROUTING: tl.constexpr, EVICTION: tl.constexpr, PREFETCH: tl.constexpr, GATED: tl.constexpr, RUNNING: tl.constexpr,
    ELIDED: tl.constexpr, WEIGHTS: tl.constexpr, K: tl.constexpr, J: tl.constexpr, W: tl.constexpr,
    ROUNDS: tl.constexpr, HAS_PRIOR: tl.constexpr
):  # fmt: skip
    """Part 1, then part 2 of one layer for each of T tokens in order: a chunk of the prompt.

    scores, given, pregate [T, E]; priors [T, EP]. Out as in `deciding.decide`, with T in the place of L. The state
    stays in registers over all tokens.
    """
    index = experts_of(EP)
    here = ints + layer * (N_INTS * EP) + index
    averages = reals + layer * (N_REALS * EP) + index
    slot = tl.load(here + SLOT_OF * EP)
    warm_rank = tl.load(here + WARM_RANK * EP)
    recency = tl.load(here + RECENCY * EP)
    uses = tl.load(here + USES * EP)
    protected = tl.zeros_like(index)
    predicted = tl.zeros_like(index)
    priority = tl.load(here + PRIORITY * EP)
    fast = tl.load(averages + FAST * EP)
    slow = tl.load(averages + SLOW * EP)
    prior = tl.load(averages + PRIOR * EP)
    clock = tl.load(words + layer * N_WORDS)
    scale = tl.load(scales + layer * 2)
    range_sum = tl.load(scales + layer * 2 + 1)
    # The rows of the next token are asked for while this one is decided.
    coming_z = tl.load(scores + index, mask=index < E, other=MASKED_SCORE)
    coming_g = coming_z
    if PREFETCHES:
        coming_g = tl.load(pregate + index, mask=index < E, other=MASKED_SCORE)
    if HAS_PRIOR:
        prior = tl.load(priors + index)
    coming_prior = prior
    for t in range(n_tokens):
        z = coming_z
        g = coming_g
        prior = coming_prior
        row = (t + 1) * E + index
        more = (index < E) & (row < n_tokens * E)
        coming_z = tl.load(scores + row, mask=more, other=MASKED_SCORE)
        if PREFETCHES:
            coming_g = tl.load(pregate + row, mask=more, other=MASKED_SCORE)
        if HAS_PRIOR:
            coming_prior = tl.load(priors + (t + 1) * EP + index, mask=more, other=0.0)
        tally = (fast + slow) + prior
        priority = freeze(recency, uses, warm_rank, tally, EVICTION)
        key = comparable(priority, EVICTION)
        here_copies = copies + t * (2 * (WIDTH + BUDGET))
        if PREFETCHES:
            slot, protected, predicted, _, n_prefetch = part1(
                g, tally, slot, key, bonus(lam, scale, range_sum, clock, RUNNING), index, here_copies + 2 * WIDTH,
                PREFETCH, GATED, K, W, BUDGET, ROUNDS,
            )  # fmt: skip
            tl.store(counts + t * N_COUNTS + 2, n_prefetch)
        else:
            tl.store(counts + t * N_COUNTS + 2, 0)
        n_predicted = tl.sum((predicted > 0).to(tl.int32), 0)
        slot, chosen, place, own, own_place, n, range_sum = part2(
            z, slot, protected, predicted, n_predicted, key, clock, range_sum, scale, lam, log_keep, log_gate,
            index, here_copies, ROUTING, RUNNING, ELIDED, K, J,
        )  # fmt: skip
        list_decisions(
            z, given + t * E, chosen, place, own, own_place, slot, factor, index,
            executed + t * WIDTH, slots + t * WIDTH, weights + t * WIDTH, own_list + t * WIDTH, E, WEIGHTS,
        )  # fmt: skip
        tl.store(counts + t * N_COUNTS, tl.sum(chosen, 0))
        tl.store(counts + t * N_COUNTS + 1, n)
        recency, uses, fast, slow, clock = update(recency, uses, fast, slow, chosen, own, clock)
    tl.store(here + SLOT_OF * EP, slot)
    tl.store(here + RECENCY * EP, recency)
    tl.store(here + USES * EP, uses)
    tl.store(here + PROTECTED * EP, protected)
    tl.store(here + PRIORITY * EP, priority)
    tl.store(here + PREDICTED * EP, predicted)
    tl.store(averages + FAST * EP, fast)
    tl.store(averages + SLOW * EP, slow)
    if HAS_PRIOR:
        # Read again: compiled by Triton 3.6, the loop above leaves the first token's row in `prior`.
        prior = tl.load(priors + (n_tokens - 1) * EP + index)
    tl.store(averages + PRIOR * EP, prior)
    tl.store(words + layer * N_WORDS, clock)
    tl.store(words + layer * N_WORDS + 1, 0)
    tl.store(words + layer * N_WORDS + 2, tl.sum((predicted > 0).to(tl.int32), 0))
    tl.store(scales + layer * 2 + 1, range_sum)


@triton.jit(do_not_specialize=["first", "n_known"])
def prior_rows(  # type: ignore[no-untyped-def]
    tokens, row_of, starts, experts, shares, out, stride, first, n_known, N_LAYERS: tl.constexpr, EP: tl.constexpr
):
    """Unpack the sparse token prior: `out` row (t, i) [EP] float32 becomes π of layer `first` + i for token t.

    Grid (T, layers). tokens [T] int64, row_of [n_known] int32 (−1: nothing is known of the token), starts
    [rows · L + 1] int32 into experts [n] int32 and shares [n] float32. Consecutive rows of `out` lie `stride` apart.
    """
    index = experts_of(EP)
    target = out + (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * stride
    token = tl.load(tokens + tl.program_id(0))
    known = (token >= 0) & (token < n_known)
    row = tl.load(row_of + token, mask=known, other=-1)
    at = row * N_LAYERS + first + tl.program_id(1)
    start = tl.load(starts + at, mask=row >= 0, other=0)
    end = tl.load(starts + at + 1, mask=row >= 0, other=0)
    tl.store(target + index, tl.zeros((EP,), tl.float32))
    tl.debug_barrier()  # zeros first: another thread may store the share
    valid = start + index < end
    expert = tl.load(experts + start + index, mask=valid, other=0)
    tl.store(target + expert, tl.load(shares + start + index, mask=valid, other=0.0), mask=valid)
