"""Triton kernels of the GPU probe: copies that the device decides and issues itself, and reads of its own memory.

Imported only where Triton is installed. Nothing here needs more than Ampere.
"""

import triton
import triton.language as tl


@triton.jit
def gather_pieces(  # type: ignore[no-untyped-def]
    source, target, order, N: tl.constexpr, WORDS: tl.constexpr, CTAS: tl.constexpr, BLOCK: tl.constexpr
):
    """Copy the N pieces of `source` that `order` (on the device) names to `target`, one after the other.

    `source` is pinned host memory, read across the link in 8-byte words; each of the CTAS thread blocks takes its share
    of every piece. source [n, WORDS] int64, order [N] int32 → target [N, WORDS] int64.
    """
    for number in range(N):
        piece = source + tl.load(order + number).to(tl.int64) * WORDS
        for step in range((WORDS + CTAS * BLOCK - 1) // (CTAS * BLOCK)):
            at = (step * CTAS + tl.program_id(0)) * BLOCK + tl.arange(0, BLOCK)
            tl.store(target + at, tl.load(piece + at, mask=at < WORDS), mask=at < WORDS)
        target += WORDS


@triton.jit
def add_up(source, sums, N: tl.constexpr, CTAS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum of each thread block's share of int64 `source` [N], into `sums` [CTAS]: loads, and little else."""
    total = tl.zeros((BLOCK,), tl.int64)
    for step in range((N + CTAS * BLOCK - 1) // (CTAS * BLOCK)):
        at = (step * CTAS + tl.program_id(0)) * BLOCK + tl.arange(0, BLOCK)
        total += tl.load(source + at, mask=at < N, other=0)
    tl.store(sums + tl.program_id(0), tl.sum(total))
