"""A layer's decision and the copies that follow from it, in one launch: `steps.step`, then `copying.issue`."""

import triton
import triton.language as tl

from edgemoe.gpu_offload.kernels.copying import issue
from edgemoe.gpu_offload.kernels.ordering import await_previous
from edgemoe.gpu_offload.kernels.steps import step


@triton.jit(do_not_specialize=["layer", "following"])
def decide(  # type: ignore[no-untyped-def]
    ints, reals, words, scales, scores, given, pregate, executed, slots, weights, own_list, copies, counts,
    layer, following, lam, log_keep, log_gate, factor,
    stop, claims, done, after, experts, current, asked, tickets, demand_queue, prefetch_queue, queue, tally,
    E: tl.constexpr, EP: tl.constexpr, WIDTH: tl.constexpr, BUDGET: tl.constexpr,
    SELECTS: tl.constexpr, FREEZES: tl.constexpr, PREFETCHES: tl.constexpr,
    ROUTING: tl.constexpr, EVICTION: tl.constexpr, PREFETCH: tl.constexpr, GATED: tl.constexpr, RUNNING: tl.constexpr,
    ELIDED: tl.constexpr, WEIGHTS: tl.constexpr, K: tl.constexpr, K_NEXT: tl.constexpr, J: tl.constexpr,
    W: tl.constexpr, ROUNDS: tl.constexpr, C: tl.constexpr, CHUNKS: tl.constexpr, LANES: tl.constexpr,
    EARLY: tl.constexpr
):  # fmt: skip
    """Nothing where the text has ended (`stop`)."""
    if tl.load(stop) == 0:
        step(
            ints, reals, words, scales, scores, given, pregate, executed, slots, weights, own_list, copies, counts,
            layer, following, lam, log_keep, log_gate, factor,
            E, EP, WIDTH, BUDGET, SELECTS, FREEZES, PREFETCHES, ROUTING, EVICTION, PREFETCH, GATED, RUNNING, ELIDED,
            WEIGHTS, K, K_NEXT, J, W, ROUNDS, EARLY,
        )  # fmt: skip
        tl.debug_barrier()  # the lists were written by other lanes
        issue(
            layer, following, slots, copies, counts, claims, done, after, experts, current, asked,
            tickets, demand_queue, prefetch_queue, queue, tally,
            C, WIDTH, BUDGET, CHUNKS, LANES, SELECTS, PREFETCHES, SELECTS and not FREEZES,
        )  # fmt: skip
    else:
        await_previous(EARLY)


@triton.jit
def begin(queue):  # type: ignore[no-untyped-def]
    """Before a token: both queues empty, nothing finished. Errors stay until the host has seen them."""
    word = tl.arange(0, 4)
    tl.store(queue + word, 0, mask=word < 3)
