"""The experts of one token, executed from their slots: a block waits only for the expert that it works on.

What a layer executes comes as tickets (`copying.issue_demand`): what was there before the token needs no look at any
record.
Slots are written beside these kernels, so they are read past the L1 cache.
"""

import triton
import triton.language as tl

from edgemoe.gpu_offload.kernels.copying import NO_TICKET, NUMBER, await_copy, place_of, take_turn
from edgemoe.gpu_offload.kernels.ordering import await_end_of_previous, await_previous, let_next_begin


@triton.jit(do_not_specialize=["layer"])
def gate_and_up(  # type: ignore[no-untyped-def]
    x, norm, slots, turns, hidden, stop, eps,
    arena, raw, experts, claims, after, done, queue, layer,
    E: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, F: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, WORDS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, CHUNKS: tl.constexpr,
    EARLY: tl.constexpr
):  # fmt: skip
    """hidden [WIDTH, F] float32 = silu(gate · h) · (up · h) of each executed expert, h = RMSNorm(x [D]).

    Grid: (blocks of ROWS, WIDTH), in the order of turns [L, WIDTH] int64: what waits comes last. slots [L, C, 3·F·D]
    in the storage type: gate [F, D], up [F, D], down [D, F] of each; raw, the same in words of four bytes.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < F
    at = tl.arange(0, BLOCK)
    ended = tl.load(stop)
    first = tl.load(x + at, mask=at < D, other=0.0, cache_modifier=".cg")  # three kernels old
    number = tl.load(queue + NUMBER, cache_modifier=".cg")
    let_next_begin(EARLY)  # though this kernel has not waited yet: see `ordering`
    ticket = NO_TICKET
    nth = 0
    if ended == 0:
        ticket, nth = take_turn(turns + layer * WIDTH + tl.program_id(1), number, queue)
    if ticket != NO_TICKET:
        if ticket >= 0:
            await_copy(ticket, arena, raw, experts, claims, after, done, queue, E, C, WORDS, CHUNK, TILE, CHUNKS)
        gate = slots + place_of(ticket).to(tl.int64) * (3 * F * D) + row.to(tl.int64)[:, None] * D
        gates = tl.zeros((ROWS, BLOCK), tl.float32)
        ups = tl.zeros((ROWS, BLOCK), tl.float32)
        squares = tl.zeros((BLOCK,), tl.float32)
        for start in tl.static_range(0, D, BLOCK):
            there = start + at < D
            both = inside[:, None] & there[None, :]
            line = gate + start + at[None, :]
            g = tl.load(line, mask=both, other=0.0, cache_modifier=".cg").to(tl.float32)
            u = tl.load(line + F * D, mask=both, other=0.0, cache_modifier=".cg").to(tl.float32)
            part = first
            if start > 0:
                part = tl.load(x + start + at, mask=there, other=0.0, cache_modifier=".cg")
            h = (part * tl.load(norm + start + at, mask=there, other=0.0))[None, :]
            gates += g * h
            ups += u * h
            squares += part * part
        scale = tl.rsqrt(tl.sum(squares, 0) / D + eps)
        g = tl.sum(gates, 1) * scale
        u = tl.sum(ups, 1) * scale
        tl.store(hidden + nth * F + row, g / (1.0 + tl.exp(-g)) * u, mask=inside)
    await_end_of_previous(EARLY)


@triton.jit(do_not_specialize=["layer"])
def down(  # type: ignore[no-untyped-def]
    x, slots, tickets, weights, hidden, stop, layer,
    WIDTH: tl.constexpr, D: tl.constexpr, F: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr
):  # fmt: skip
    """x [D] float32 += Σ weight · (down · hidden) over the executed experts, in the router's order whoever came first.

    Grid: blocks of ROWS. tickets [L, WIDTH] int32.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < D
    at = tl.arange(0, BLOCK)
    ended = tl.load(stop)
    old = tl.load(x + row, mask=inside, other=0.0, cache_modifier=".cg")
    await_previous(EARLY)
    if ended == 0:
        sums = tl.zeros((ROWS, BLOCK), tl.float32)
        for nth in tl.static_range(WIDTH):
            ticket = tl.load(tickets + layer * WIDTH + nth)
            columns = tl.where(ticket != NO_TICKET, F, 0)
            weight = tl.where(ticket != NO_TICKET, tl.load(weights + layer * WIDTH + nth), 0.0)
            line = slots + place_of(ticket).to(tl.int64) * (3 * F * D) + 2 * F * D + row.to(tl.int64)[:, None] * F
            for start in tl.static_range(0, F, BLOCK):
                there = start + at < columns
                h = tl.load(hidden + nth * F + start + at, mask=there, other=0.0) * weight
                both = inside[:, None] & there[None, :]
                part = tl.load(line + start + at[None, :], mask=both, other=0.0, cache_modifier=".cg")
                sums += part.to(tl.float32) * h[None, :]
        tl.store(x + row, old + tl.sum(sums, 1), mask=inside)
