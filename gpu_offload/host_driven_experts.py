"""The executed experts of one token on a GPU whose host has chosen them: two Triton kernels over the slots.

By the time they start, every expert is there: the stream has waited. Mixing weights come from the unmodified scores.
"""

import torch
import triton
import triton.language as tl

ROWS, BLOCK, WARPS = 8, 512, 4  # rows of a matrix per block, columns at once


@triton.jit
def gate_and_up(  # type: ignore[no-untyped-def]
    h, slots, places, hidden,
    D: tl.constexpr, F: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """hidden [k, F] float32 = silu(gate · h) · (up · h), h [D] float32. Grid: (k, blocks of ROWS).

    slots [C, 3·F·D] in the storage type: gate [F, D], up [F, D], down [D, F] of each; places [k] int64.
    """
    nth = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside = row < F
    at = tl.arange(0, BLOCK)
    gate = slots + tl.load(places + nth) * (3 * F * D) + row.to(tl.int64)[:, None] * D
    gates = tl.zeros((ROWS, BLOCK), tl.float32)
    ups = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, D, BLOCK):
        there = start + at < D
        both = inside[:, None] & there[None, :]
        part = tl.load(h + start + at, mask=there, other=0.0)[None, :]
        line = gate + start + at[None, :]
        gates += tl.load(line, mask=both, other=0.0).to(tl.float32) * part
        ups += tl.load(line + F * D, mask=both, other=0.0).to(tl.float32) * part
    g = tl.sum(gates, 1)
    tl.store(hidden + nth * F + row, g / (1.0 + tl.exp(-g)) * tl.sum(ups, 1), mask=inside)


@triton.jit
def down(  # type: ignore[no-untyped-def]
    x, slots, executed, places, scores, hidden,
    K: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, D: tl.constexpr, F: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, RENORMALISED: tl.constexpr
):  # fmt: skip
    """x [D] float32 += Σ weight · (down · hidden) over executed [K] int64, −1 for an elided gate. Grid: blocks of ROWS.

    weight: softmax of scores [E], or with RENORMALISED that over the executed experts alone.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < D
    at = tl.arange(0, BLOCK)
    lane = tl.arange(0, EP)
    z = tl.load(scores + lane, mask=lane < E, other=float("-inf"))
    highest = tl.max(z, 0)
    total = tl.sum(tl.exp(z - highest), 0)
    if RENORMALISED:
        total = 0.0
        for nth in tl.static_range(K):
            e = tl.load(executed + nth)
            total += tl.where(e >= 0, tl.exp(tl.load(scores + tl.maximum(e, 0)) - highest), 0.0)
    sums = tl.zeros((ROWS, BLOCK), tl.float32)
    for nth in tl.static_range(K):
        e = tl.load(executed + nth)
        weight = tl.where(e >= 0, tl.exp(tl.load(scores + tl.maximum(e, 0)) - highest) / total, 0.0)
        line = slots + tl.load(places + nth) * (3 * F * D) + 2 * F * D + row.to(tl.int64)[:, None] * F
        for start in range(0, F, BLOCK):
            there = start + at < F
            both = inside[:, None] & there[None, :]
            part = tl.load(hidden + nth * F + start + at, mask=there, other=0.0) * weight
            sums += tl.load(line + start + at[None, :], mask=both, other=0.0).to(tl.float32) * part[None, :]
    old = tl.load(x + row, mask=inside, other=0.0)
    tl.store(x + row, old + tl.sum(sums, 1), mask=inside)


def run_executed(
    x: torch.Tensor,
    h: torch.Tensor,
    slots: torch.Tensor,
    decided: torch.Tensor,
    scores: torch.Tensor,
    hidden: torch.Tensor,
    *,
    renormalised: bool,
) -> None:
    """x [d] += the mixture of a layer. h [d], scores [E], hidden [k, f] float32; slots [C, 3·f·d] in the storage type;
    decided [2, k] int64: expert and slot of each; −1 and any filled slot for an elided gate, which weighs nothing."""
    executed, places = decided
    (k, f), d, n_experts = hidden.shape, len(x), len(scores)
    gate_and_up[(k, triton.cdiv(f, ROWS))](h, slots, places, hidden, D=d, F=f, ROWS=ROWS, BLOCK=BLOCK, num_warps=WARPS)
    down[(triton.cdiv(d, ROWS),)](
        x, slots, executed, places, scores, hidden,
        K=k, E=n_experts, EP=triton.next_power_of_2(n_experts), D=d, F=f, ROWS=ROWS, BLOCK=BLOCK,
        RENORMALISED=renormalised, num_warps=WARPS,
    )  # fmt: skip
