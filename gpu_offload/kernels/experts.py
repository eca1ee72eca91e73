"""The experts of one token, executed from their slots: a block waits only for the expert that it works on."""

import triton
import triton.language as tl

from edgemoe.gpu_offload.kernels.copying import await_copy


@triton.jit(do_not_specialize=["layer"])
def gate_and_up(  # type: ignore[no-untyped-def]
    x, norm, slots, executed_slots, counts, hidden, stop, eps,
    arena, raw, experts, claims, after, done, current, queue, layer,
    E: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, F: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, WORDS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, CHUNKS: tl.constexpr
):  # fmt: skip
    """hidden [WIDTH, F] float32 = silu(gate · h) · (up · h) of each executed expert, h = RMSNorm(x [D]).

    Grid: (WIDTH, blocks of ROWS). slots [L, C, 3·F·D] in the storage type: gate [F, D], up [F, D], down [D, F] of each;
    raw, the same in words of four bytes; executed_slots [L, WIDTH], counts [L, 3], as `steps.step` writes them.
    """
    if tl.load(stop) == 0:
        place = tl.program_id(0)
        if place < tl.load(counts + layer * 3):
            slot = layer * C + tl.load(executed_slots + layer * WIDTH + place)
            record = 2 * slot + tl.load(current + slot)
            await_copy(record, arena, raw, experts, claims, after, done, queue, E, C, WORDS, CHUNK, TILE, CHUNKS)
            row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
            inside = row < F
            gate = slots + slot.to(tl.int64) * (3 * F * D) + row.to(tl.int64)[:, None] * D
            gates = tl.zeros((ROWS, BLOCK), tl.float32)
            ups = tl.zeros((ROWS, BLOCK), tl.float32)
            squares = tl.zeros((BLOCK,), tl.float32)
            for start in range(0, D, BLOCK):
                at = start + tl.arange(0, BLOCK)
                there = at < D
                both = inside[:, None] & there[None, :]
                part = tl.load(x + at, mask=there, other=0.0)
                h = (part * tl.load(norm + at, mask=there, other=0.0))[None, :]
                gates += tl.load(gate + at[None, :], mask=both, other=0.0).to(tl.float32) * h
                ups += tl.load(gate + F * D + at[None, :], mask=both, other=0.0).to(tl.float32) * h
                squares += part * part
            scale = tl.rsqrt(tl.sum(squares, 0) / D + eps)
            g = tl.sum(gates, 1) * scale
            u = tl.sum(ups, 1) * scale
            tl.store(hidden + place * F + row, g / (1.0 + tl.exp(-g)) * u, mask=inside)


@triton.jit(do_not_specialize=["layer"])
def down(  # type: ignore[no-untyped-def]
    x, slots, executed_slots, weights, counts, hidden, stop, layer,
    C: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, F: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """x [D] float32 += Σ weight · (down · hidden) over the executed experts. Grid: blocks of ROWS."""
    if tl.load(stop) == 0:
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        inside = row < D
        sums = tl.zeros((ROWS, BLOCK), tl.float32)
        for place in range(tl.load(counts + layer * 3)):
            slot = layer * C + tl.load(executed_slots + layer * WIDTH + place)
            weight = tl.load(weights + layer * WIDTH + place)
            line = slots + slot.to(tl.int64) * (3 * F * D) + 2 * F * D + row.to(tl.int64)[:, None] * F
            for start in range(0, F, BLOCK):
                at = start + tl.arange(0, BLOCK)
                there = at < F
                h = tl.load(hidden + place * F + at, mask=there, other=0.0) * weight
                both = inside[:, None] & there[None, :]
                sums += tl.load(line + at[None, :], mask=both, other=0.0).to(tl.float32) * h[None, :]
        old = tl.load(x + row, mask=inside, other=0.0)
        tl.store(x + row, old + tl.sum(sums, 1), mask=inside)
