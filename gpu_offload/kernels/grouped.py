"""The experts of a chunk of a prompt: products of many rows, each expert's rows side by side, several experts at once.

A tile is an expert's place in memory and a span of at most ROWS of its rows: tiles [n, 3] int32 as (place, first,
last). A launch runs the tiles of as many experts as are there. Row r of the sorted order belongs to token order[r] // k
of the chunk, and is its order[r] % k-th expert. Inputs are rounded to the storage type; sums are float32.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["first_tile"])
def gate_and_up(  # type: ignore[no-untyped-def]
    h, order, tiles, first_tile, experts, hidden,
    K: tl.constexpr, D: tl.constexpr, F: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr
):  # fmt: skip
    """hidden [N, F] = silu(gate · h) · (up · h) in the storage type; h [T, D], experts [places, 3·F·D] as in `Slots`.

    Grid: (tiles, blocks of COLUMNS of F).
    """
    tile = tiles + (first_tile + tl.program_id(0)) * 3
    row = tl.load(tile + 1) + tl.arange(0, ROWS)
    inside = row < tl.load(tile + 2)
    token = (tl.load(order + row, mask=inside, other=0) // K).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    gate = experts + tl.load(tile).to(tl.int64) * (3 * F * D) + column.to(tl.int64)[None, :] * D
    gates = tl.zeros((ROWS, COLUMNS), tl.float32)
    ups = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, D, DEPTH):
        at = start + tl.arange(0, DEPTH)
        x = tl.load(h + token[:, None] * D + at[None, :], mask=inside[:, None] & (at < D)[None, :], other=0.0)
        there = (at < D)[:, None] & (column < F)[None, :]
        gates = tl.dot(x, tl.load(gate + at[:, None], mask=there, other=0.0), gates, input_precision="ieee")
        ups = tl.dot(x, tl.load(gate + F * D + at[:, None], mask=there, other=0.0), ups, input_precision="ieee")
    product = gates / (1.0 + tl.exp(-gates)) * ups
    target = hidden + row.to(tl.int64)[:, None] * F + column[None, :]
    tl.store(target, product.to(hidden.dtype.element_ty), mask=inside[:, None] & (column < F)[None, :])


@triton.jit(do_not_specialize=["first_tile"])
def down(  # type: ignore[no-untyped-def]
    hidden, order, tiles, first_tile, experts, out,
    D: tl.constexpr, F: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr
):  # fmt: skip
    """out [T·k, D] float32, at order[r]: down · hidden [N, F] of row r. Grid: (tiles, blocks of COLUMNS of D)."""
    tile = tiles + (first_tile + tl.program_id(0)) * 3
    row = tl.load(tile + 1) + tl.arange(0, ROWS)
    inside = row < tl.load(tile + 2)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    line = experts + tl.load(tile).to(tl.int64) * (3 * F * D) + 2 * F * D + column.to(tl.int64)[None, :] * F
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, F, DEPTH):
        at = start + tl.arange(0, DEPTH)
        x = tl.load(
            hidden + row.to(tl.int64)[:, None] * F + at[None, :], mask=inside[:, None] & (at < F)[None, :], other=0.0
        )
        there = (at < F)[:, None] & (column < D)[None, :]
        sums = tl.dot(x, tl.load(line + at[:, None], mask=there, other=0.0), sums, input_precision="ieee")
    place = tl.load(order + row, mask=inside, other=0).to(tl.int64)
    tl.store(out + place[:, None] * D + column[None, :], sums, mask=inside[:, None] & (column < D)[None, :])


@triton.jit(do_not_specialize=["first_move"])
def move(moves, first_move, source, target, SIZE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """target [places, SIZE] at moves[i, 1] becomes source [places, SIZE] at moves[i, 0]; moves [n, 2] int32.

    Grid: (moves, blocks of BLOCK of SIZE).
    """
    pair = moves + (first_move + tl.program_id(0)) * 2
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = at < SIZE
    value = tl.load(source + tl.load(pair).to(tl.int64) * SIZE + at, mask=there)
    tl.store(target + tl.load(pair + 1).to(tl.int64) * SIZE + at, value, mask=there)
