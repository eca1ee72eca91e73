"""Attention of a chunk's tokens over themselves and the tokens before them: two launches beside its products.

Keys and values are rounded to the cache's type before they are used, as a decode finds them there.
"""

import triton
import triton.language as tl


@triton.jit
def _turned(  # type: ignore[no-untyped-def]
    line, norm, cos, sin, eps, clip, WIDTH: tl.constexpr, WIDTH_P: tl.constexpr, D: tl.constexpr, CLIPS: tl.constexpr
):
    """All heads of one token, line [WIDTH]: RMS-normalised over all, clipped, and each head of D rotated (NEOX)."""
    at = tl.arange(0, WIDTH_P)
    there = at < WIDTH
    nth = at % D
    other = at - nth + (nth + D // 2) % D  # its partner in the other half of the head
    straight = tl.load(line + at, mask=there, other=0.0)
    scale = tl.rsqrt(tl.sum(straight * straight, 0) / WIDTH + eps)
    straight = straight * scale * tl.load(norm + at, mask=there, other=0.0)
    crossed = tl.load(line + other, mask=there, other=0.0) * scale * tl.load(norm + other, mask=there, other=0.0)
    if CLIPS:
        straight = tl.minimum(tl.maximum(straight, -clip), clip)
        crossed = tl.minimum(tl.maximum(crossed, -clip), clip)
    return straight * tl.load(cos + nth) + tl.where(nth < D // 2, -crossed, crossed) * tl.load(sin + nth)


@triton.jit(do_not_specialize=["position"])
def place(  # type: ignore[no-untyped-def]
    qkv, q_norm, k_norm, cos, sin, q, keys, values, position, n_ctx, eps, clip,
    N_HEADS: tl.constexpr, N_KV: tl.constexpr, D: tl.constexpr, Q_P: tl.constexpr, KV_P: tl.constexpr,
    CLIPS: tl.constexpr
):  # fmt: skip
    """Queries, keys and values of tokens from `position` on, from qkv [T, (H + 2·Hkv)·D] float32. Grid: (T, 3).

    cos, sin [n_ctx, D] float32. Out: q [T, H·D]; keys, values [Hkv, n_ctx, D] of one layer, the tokens' own rows.
    """
    token = tl.program_id(0).to(tl.int64)
    row = position + token
    line = qkv + token * ((N_HEADS + 2 * N_KV) * D)
    if tl.program_id(1) == 0:
        query = _turned(line, q_norm, cos + row * D, sin + row * D, eps, clip, N_HEADS * D, Q_P, D, CLIPS)
        whole = tl.arange(0, Q_P)
        tl.store(q + token * (N_HEADS * D) + whole, query.to(q.dtype.element_ty), mask=whole < N_HEADS * D)
    else:
        at = tl.arange(0, KV_P)
        there = at < N_KV * D
        home = (at // D).to(tl.int64) * n_ctx * D + row * D + at % D
        if tl.program_id(1) == 1:
            new = line + N_HEADS * D
            key = _turned(new, k_norm, cos + row * D, sin + row * D, eps, clip, N_KV * D, KV_P, D, CLIPS)
            tl.store(keys + home, key.to(keys.dtype.element_ty), mask=there)
        else:
            value = tl.load(line + (N_HEADS + N_KV) * D + at, mask=there, other=0.0)
            if CLIPS:
                value = tl.minimum(tl.maximum(value, -clip), clip)
            tl.store(values + home, value.to(values.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["position", "count"])
def attend(  # type: ignore[no-untyped-def]
    q, keys, values, y, position, count, n_ctx, scale,
    N_HEADS: tl.constexpr, N_KV: tl.constexpr, D: tl.constexpr, D_P: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """y [T, H·D] = causal attention of q [T, H·D] at `position` and after, over keys and values [Hkv, n_ctx, D].

    `count` tokens; scores are multiplied by `scale`. Grid: (blocks of ROWS of T, H), the longest first.
    """
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    head = tl.program_id(1)
    row = first + tl.arange(0, ROWS)
    at = tl.arange(0, D_P)
    mine = (row < count)[:, None] & (at < D)[None, :]
    places = row.to(tl.int64)[:, None] * (N_HEADS * D) + head * D + at[None, :]
    query = tl.load(q + places, mask=mine, other=0.0)
    cache = (head // (N_HEADS // N_KV)).to(tl.int64) * n_ctx * D
    end = position + tl.minimum(first + ROWS, count)
    best = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, D_P), tl.float32)
    for start in range(0, end, BLOCK):
        nth = start + tl.arange(0, BLOCK)
        where = cache + nth.to(tl.int64) * D
        there = nth < end
        k = tl.load(keys + where[None, :] + at[:, None], mask=there[None, :] & (at < D)[:, None], other=0.0)
        score = tl.dot(query, k, input_precision="ieee") * scale
        score = tl.where(nth[None, :] <= position + row[:, None], score, -float("inf"))
        above = tl.maximum(best, tl.max(score, 1))  # the first block has a position for every row
        weight = tl.exp(score - above[:, None])
        shrink = tl.exp(best - above)
        v = tl.load(values + where[:, None] + at[None, :], mask=there[:, None] & (at < D)[None, :], other=0.0)
        total = total * shrink + tl.sum(weight, 1)
        mixed = tl.dot(weight.to(v.dtype), v, mixed * shrink[:, None], input_precision="ieee")
        best = above
    tl.store(y + places, (mixed / total[:, None]).to(y.dtype.element_ty), mask=mine)
