"""Products of one token: a matrix in memory times a vector, at the speed at which the matrix can be read.

Every block takes some rows of the matrix and all of the vector, which the L2 cache holds. RMS norms cost no pass of
their own: the sum of squares is formed beside the products, and scales them at the end. Sums are float32. The rows'
first columns are asked for before the kernel before has ended.
"""

import triton
import triton.language as tl

from edgemoe.gpu_offload.kernels.copying import ERROR, NUMBER
from edgemoe.gpu_offload.kernels.ordering import await_previous


@triton.jit
def load_token(  # type: ignore[no-untyped-def]
    tokens, embedding, x, stop, queue, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    """A token begins: x [WIDTH] float32 becomes the embedding [V, WIDTH] of tokens[0], both queues of copies are empty,
    and it has a number. Errors stay until the host has seen them. Grid: blocks of BLOCK."""
    await_previous(EARLY)
    if tl.program_id(0) == 0:
        word = tl.arange(0, 8)
        tl.store(queue + word, 0, mask=word < ERROR)
        tl.store(queue + NUMBER, (tl.load(queue + NUMBER) + 1) & 0x7FFFFF)
    if tl.load(stop) == 0:
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        token = tl.load(tokens).to(tl.int64)
        row = tl.load(embedding + token * WIDTH + at, mask=at < WIDTH, other=0.0)
        tl.store(x + at, row.to(tl.float32), mask=at < WIDTH)


@triton.jit
def load_recorded(recorded, scores, position, N: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """scores [N] float32 becomes the row of recorded [T, N] at `position`. Grid: blocks of BLOCK."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = recorded + tl.load(position) * N
    tl.store(scores + at, tl.load(row + at, mask=at < N, other=0.0), mask=at < N)


@triton.jit
def normed_product(  # type: ignore[no-untyped-def]
    x, norm, matrix, out, stop, eps,
    N_ROWS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """out [N_ROWS] float32 = matrix [N_ROWS, WIDTH] · RMSNorm(x [WIDTH] float32) with weights norm [WIDTH] float32."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < N_ROWS
    lines = matrix + row.to(tl.int64)[:, None] * WIDTH
    at = tl.arange(0, BLOCK)
    first = tl.load(lines + at[None, :], mask=inside[:, None] & (at < WIDTH)[None, :], other=0.0)
    ended = tl.load(stop)
    await_previous(EARLY)
    if ended == 0:
        sums = tl.zeros((ROWS, BLOCK), tl.float32)
        squares = tl.zeros((BLOCK,), tl.float32)
        for start in tl.static_range(0, WIDTH, BLOCK):
            there = start + at < WIDTH
            weight = first
            if start > 0:
                weight = tl.load(lines + start + at[None, :], mask=inside[:, None] & there[None, :], other=0.0)
            part = tl.load(x + start + at, mask=there, other=0.0)
            scaled = part * tl.load(norm + start + at, mask=there, other=0.0)
            sums += weight.to(tl.float32) * scaled[None, :]
            squares += part * part
        scale = tl.rsqrt(tl.sum(squares, 0) / WIDTH + eps)
        tl.store(out + row, tl.sum(sums, 1) * scale, mask=inside)


@triton.jit
def added_product(  # type: ignore[no-untyped-def]
    y, matrix, x, stop,
    N_ROWS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """x [N_ROWS] float32 += matrix [N_ROWS, WIDTH] · y [WIDTH] float32. Grid: blocks of ROWS."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < N_ROWS
    lines = matrix + row.to(tl.int64)[:, None] * WIDTH
    at = tl.arange(0, BLOCK)
    first = tl.load(lines + at[None, :], mask=inside[:, None] & (at < WIDTH)[None, :], other=0.0)
    ended = tl.load(stop)
    old = tl.load(x + row, mask=inside, other=0.0, cache_modifier=".cg")  # the layer before wrote it
    await_previous(EARLY)
    if ended == 0:
        sums = tl.zeros((ROWS, BLOCK), tl.float32)
        for start in tl.static_range(0, WIDTH, BLOCK):
            there = start + at < WIDTH
            weight = first
            if start > 0:
                weight = tl.load(lines + start + at[None, :], mask=inside[:, None] & there[None, :], other=0.0)
            sums += weight.to(tl.float32) * tl.load(y + start + at, mask=there, other=0.0)[None, :]
        tl.store(x + row, old + tl.sum(sums, 1), mask=inside)
