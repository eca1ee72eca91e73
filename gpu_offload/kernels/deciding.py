"""A layer's decision and the copies that follow from it, in one launch.

All of it happens in the registers of one warp, expert by expert; what the copies are asked for with is not read back
from the lists that the decision leaves behind. Where all that a layer executes is there, its turns depend on nothing
that is read after the router's scores.
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
    NUMBER,
    PREFETCHED,
    UNUSED,
    issue_demand,
    issue_prefetch,
    look,
)
from edgemoe.gpu_offload.kernels.ordering import await_previous
from edgemoe.gpu_offload.kernels.policy import comparable, experts_of, part2
from edgemoe.gpu_offload.kernels.steps import (
    MASKED_SCORE,
    N_COUNTS,
    list_decisions,
    look_ahead,
    recalled,
    recalled_ahead,
    remember,
)


@triton.jit(do_not_specialize=["layer", "following"])
def decide(  # type: ignore[no-untyped-def]
    ints, reals, words, scales, scores, given, pregate, executed, slots, weights, own_list, copies, counts,
    layer, following, lam, log_keep, log_gate, factor,
    stop, claims, done, after, experts, current, asked, tickets, turns, demand_queue, prefetch_queue, queue, tally,
    E: tl.constexpr, EP: tl.constexpr, WIDTH: tl.constexpr, BUDGET: tl.constexpr,
    SELECTS: tl.constexpr, FREEZES: tl.constexpr, PREFETCHES: tl.constexpr,
    ROUTING: tl.constexpr, EVICTION: tl.constexpr, PREFETCH: tl.constexpr, GATED: tl.constexpr, RUNNING: tl.constexpr,
    ELIDED: tl.constexpr, WEIGHTS: tl.constexpr, K: tl.constexpr, K_NEXT: tl.constexpr, J: tl.constexpr,
    W: tl.constexpr, ROUNDS: tl.constexpr, C: tl.constexpr, CHUNKS: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """Part 2 of `layer` (if SELECTS), then the freeze (FREEZES) and part 1 (PREFETCHES) of layer `following`. Nothing,
    once the text has ended (`stop`). The layer's experts begin with it, and work as soon as their turns are there.

    State: ints [L, 8, EP], reals [L, 3, EP], words [L, 4], scales [L, 2] (see `layout`). scores [E] of `layer`, given
    [E] its gates where WEIGHTS says so, pregate [E] the scores that predict `following`. Out, in the rows of the layers
    concerned: executed, slots, own_list [L, WIDTH] int32, weights [L, WIDTH] float32, copies [L, WIDTH + BUDGET, 2]
    int32 as (expert, slot), counts [L, 3]. What follows `stop` is as `records.Records` has it.
    """
    if tl.load(stop) == 0:
        index = experts_of(EP)
        word = tl.arange(0, 8)
        totals = tl.load(tally + word, cache_modifier=".cg")
        if SELECTS:
            before, protected, priority, predicted, recency, uses, fast, slow, clock, n_predicted, scale, ranges = (
                recalled(ints, reals, words, scales, layer, index, EP)
            )
            tail = tl.load(queue + DEMAND_TAIL, cache_modifier=".cg")
            number = tl.load(queue + NUMBER, cache_modifier=".cg")
            bit, marked, there = look(layer, before, done, current, asked, C, CHUNKS)
        if FREEZES:
            next_slot, next_recency, next_uses, next_rank, next_tally, next_clock, next_scale, next_ranges = (
                recalled_ahead(ints, reals, words, scales, following, index, EP)
            )
        await_previous(EARLY)
        if SELECTS:
            z = tl.load(scores + index, mask=index < E, other=MASKED_SCORE)
            slot, chosen, place, own, own_place, n, ranges = part2(
                z, before, protected, predicted, n_predicted, comparable(priority, EVICTION), clock, ranges, scale,
                lam, log_keep, log_gate, index, copies + layer * (2 * (WIDTH + BUDGET)),
                ROUTING, RUNNING, ELIDED, K, J,
            )  # fmt: skip
            m = tl.sum(chosen, 0)
            demand, promoted, in_time, late, unused = issue_demand(
                layer, index, chosen, place, before, slot, m, n, bit, marked, there, tail, number,
                claims, done, after, experts, current, asked, tickets, turns, demand_queue, queue,
                C, WIDTH, CHUNKS,
            )  # fmt: skip
            at = layer * WIDTH
            list_decisions(
                z, given, chosen, place, own, own_place, slot, factor, index,
                executed + at, slots + at, weights + at, own_list + at, E, WEIGHTS,
            )  # fmt: skip
            tl.store(counts + layer * N_COUNTS, m)
            tl.store(counts + layer * N_COUNTS + 1, n)
            remember(
                ints, reals, words, scales, layer, index, slot, recency, uses, fast, slow, clock, ranges, chosen, own,
                EP,
            )  # fmt: skip
            totals += tl.where(word == LOADS, m, 0) + tl.where(word == MISSES, n, 0)
            totals += tl.where(word == DEMAND, demand, 0) - tl.where(word == PREFETCHED, promoted, 0)
            totals += tl.where(word == IN_TIME, in_time, 0) + tl.where(word == LATE, late, 0)
            totals += tl.where(word == UNUSED, unused, 0)
        if FREEZES:
            turn, next_slot, n_prefetch = look_ahead(
                ints, words, pregate, copies, counts, following, index, lam, next_slot, next_recency, next_uses,
                next_rank, next_tally, next_clock, next_scale, next_ranges,
                E, EP, WIDTH, BUDGET, PREFETCHES, EVICTION, PREFETCH, GATED, RUNNING, K_NEXT, W, ROUNDS,
            )  # fmt: skip
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
