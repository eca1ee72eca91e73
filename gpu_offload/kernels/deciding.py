"""A layer's decision and the copies that follow from it, in one launch.

All of it happens in the registers of one warp, expert by expert; what the copies are asked for with is not read back
from the lists that the decision leaves behind. Where all that a layer executes is there, nothing is read after the
router's scores, and nothing is asked for.
"""

import triton
import triton.language as tl

from edgemoe.gpu_offload.kernels.copying import (
    DEMAND,
    DEMAND_TAIL,
    FINISHED,
    IN_TIME,
    LATE,
    LOADS,
    MISSES,
    PREFETCHED,
    UNUSED,
    issue_demand,
    issue_prefetch,
    look,
)
from edgemoe.gpu_offload.kernels.ordering import await_previous
from edgemoe.gpu_offload.kernels.steps import N_INTS, SLOT_OF, both_parts


@triton.jit(do_not_specialize=["layer", "following"])
def decide(  # type: ignore[no-untyped-def]
    ints, reals, words, scales, scores, given, pregate, executed, slots, weights, own_list, copies, counts,
    layer, following, lam, log_keep, log_gate, factor,
    stop, claims, done, after, experts, current, asked, tickets, turns, demand_queue, prefetch_queue, queue, tally,
    E: tl.constexpr, EP: tl.constexpr, WIDTH: tl.constexpr, BUDGET: tl.constexpr,
    SELECTS: tl.constexpr, FREEZES: tl.constexpr, PREFETCHES: tl.constexpr,
    ROUTING: tl.constexpr, EVICTION: tl.constexpr, PREFETCH: tl.constexpr, GATED: tl.constexpr, RUNNING: tl.constexpr,
    ELIDED: tl.constexpr, WEIGHTS: tl.constexpr, K: tl.constexpr, K_NEXT: tl.constexpr, J: tl.constexpr,
    W: tl.constexpr, ROUNDS: tl.constexpr, C: tl.constexpr, CHUNKS: tl.constexpr, LANES: tl.constexpr,
    EARLY: tl.constexpr
):  # fmt: skip
    """Nothing where the text has ended (`stop`). Lists as `steps.both_parts` has them, the rest as `Records` has it."""
    if tl.load(stop) == 0:
        index = tl.arange(0, EP)
        word = tl.arange(0, 8)
        totals = tl.load(tally + word, cache_modifier=".cg")
        if SELECTS:
            tail = tl.load(queue + DEMAND_TAIL, cache_modifier=".cg")
            held = tl.load(ints + (layer * N_INTS + SLOT_OF) * EP + index, cache_modifier=".cg")
            bit, marked, there = look(layer, held, done, current, asked, C, CHUNKS)
        chosen, place, before, slot, m, n, turn, next_slot, n_prefetch = both_parts(
            ints, reals, words, scales, scores, given, pregate, executed, slots, weights, own_list, copies, counts,
            layer, following, lam, log_keep, log_gate, factor,
            E, EP, WIDTH, BUDGET, SELECTS, FREEZES, PREFETCHES, ROUTING, EVICTION, PREFETCH, GATED, RUNNING, ELIDED,
            WEIGHTS, K, K_NEXT, J, W, ROUNDS, EARLY,
        )  # fmt: skip
        if SELECTS:
            demand, promoted, in_time, late, unused = issue_demand(
                layer, index, chosen, place, before, slot, m, n, bit, marked, there, tail,
                claims, done, after, experts, current, asked, tickets, turns, demand_queue, queue,
                C, WIDTH, CHUNKS, LANES,
            )  # fmt: skip
            totals += tl.where(word == LOADS, m, 0) + tl.where(word == MISSES, n, 0)
            totals += tl.where(word == DEMAND, demand, 0) - tl.where(word == PREFETCHED, promoted, 0)
            totals += tl.where(word == IN_TIME, in_time, 0) + tl.where(word == LATE, late, 0)
            totals += tl.where(word == UNUSED, unused, 0)
        if PREFETCHES:
            issue_prefetch(
                following, index, turn, next_slot, n_prefetch, claims, done, after, experts, current, asked,
                prefetch_queue, queue, C, CHUNKS,
            )  # fmt: skip
            totals += tl.where(word == PREFETCHED, n_prefetch, 0)
        tl.store(tally + word, totals)
        if SELECTS and not FREEZES:  # the last layer
            tl.debug_barrier()
            tl.atomic_xchg(queue + FINISHED, 1, sem="release")
    else:
        await_previous(EARLY)
