"""Attention of one token over the tokens before it: keys and values are read once, by as many blocks as there are
heads times splits, and only where there are tokens. The block of a head that ends last joins its splits.
"""

import triton
import triton.language as tl


@triton.jit
def normed(  # type: ignore[no-untyped-def]
    vector, norm, head, eps, clip, WIDTH: tl.constexpr, WIDTH_P: tl.constexpr, D: tl.constexpr, CLIPS: tl.constexpr
):
    """One head [D] of an RMS-normalised vector [WIDTH], and the same with its halves exchanged."""
    whole = tl.arange(0, WIDTH_P)
    value = tl.load(vector + whole, mask=whole < WIDTH, other=0.0)
    scale = tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps)
    at = tl.arange(0, D)
    other = (at + D // 2) % D
    straight = tl.load(vector + head * D + at) * scale * tl.load(norm + head * D + at)
    crossed = tl.load(vector + head * D + other) * scale * tl.load(norm + head * D + other)
    if CLIPS:
        straight = tl.minimum(tl.maximum(straight, -clip), clip)
        crossed = tl.minimum(tl.maximum(crossed, -clip), clip)
    return straight, crossed


@triton.jit
def rotated(straight, crossed, cos, sin, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """NEOX rotation: x·cos + (−second half, first half)·sin."""
    at = tl.arange(0, D)
    return straight * cos + tl.where(at < D // 2, -crossed, crossed) * sin


@triton.jit
def attend(  # type: ignore[no-untyped-def]
    qkv, q_norm, k_norm, cos, sin, keys, values, position, partial, ended, y, stop, eps, clip, n_ctx,
    N_HEADS: tl.constexpr, N_KV: tl.constexpr, D: tl.constexpr, Q_P: tl.constexpr, KV_P: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, CLIPS: tl.constexpr
):  # fmt: skip
    """Append this token's key and value, and attend over one split of the positions up to it. Grid: (heads, SPLITS).

    qkv [(H + 2·Hkv)·D] float32; keys, values [Hkv, n_ctx, D] of one layer; cos, sin [n_ctx, D] float32; position [1]
    int32. Out: y [H·D] float32. Between the blocks of a head: partial [H, SPLITS, D + 2] float32, the maximum, the sum
    and the weighted values of each split; ended [H] int32, how many are there, zero again afterwards.
    """
    if tl.load(stop) == 0:
        head = tl.program_id(0)
        split = tl.program_id(1)
        kv = head // (N_HEADS // N_KV)
        here = tl.load(position)
        at = tl.arange(0, D)
        angle_cos = tl.load(cos + here.to(tl.int64) * D + at)
        angle_sin = tl.load(sin + here.to(tl.int64) * D + at)
        straight, crossed = normed(qkv, q_norm, head, eps, clip, N_HEADS * D, Q_P, D, CLIPS)
        q = rotated(straight, crossed, angle_cos, angle_sin, D) * (1.0 / tl.sqrt(float(D)))
        cache = kv.to(tl.int64) * n_ctx * D
        # Splits are whole blocks, so that the one with the last position is the only one that reads it.
        span = tl.cdiv(tl.cdiv(here + 1, BLOCK), SPLITS) * BLOCK
        first = split * span
        last = tl.minimum(first + span, here + 1)
        if (first <= here) & (here < first + span):
            new = qkv + N_HEADS * D
            straight, crossed = normed(new, k_norm, kv, eps, clip, N_KV * D, KV_P, D, CLIPS)
            k = rotated(straight, crossed, angle_cos, angle_sin, D)
            v = tl.load(new + N_KV * D + kv * D + at)
            if CLIPS:
                v = tl.minimum(tl.maximum(v, -clip), clip)
            tl.store(keys + cache + here.to(tl.int64) * D + at, k.to(keys.dtype.element_ty))
            tl.store(values + cache + here.to(tl.int64) * D + at, v.to(values.dtype.element_ty))
            tl.debug_barrier()  # the loop below reads them back, by other threads
        best = -float("inf")
        total = 0.0
        mixed = tl.zeros((D,), tl.float32)
        for start in range(first, last, BLOCK):
            rows = start + tl.arange(0, BLOCK)
            there = rows < last
            places = cache + rows.to(tl.int64)[:, None] * D + at[None, :]
            k = tl.load(keys + places, mask=there[:, None], other=0.0).to(tl.float32)
            score = tl.where(there, tl.sum(k * q[None, :], 1), -float("inf"))
            above = tl.maximum(best, tl.max(score, 0))
            weight = tl.exp(score - above)
            shrink = tl.exp(best - above)
            v = tl.load(values + places, mask=there[:, None], other=0.0).to(tl.float32)
            mixed = mixed * shrink + tl.sum(v * weight[:, None], 0)
            total = total * shrink + tl.sum(weight, 0)
            best = above
        out = partial + (head * SPLITS + split) * (D + 2)
        tl.store(out, best)
        tl.store(out + 1, total)
        tl.store(out + 2 + at, mixed)
        tl.debug_barrier()  # all threads' stores come before the count
        if tl.atomic_add(ended + head, 1, sem="acq_rel") == SPLITS - 1:
            each = tl.arange(0, SPLITS)
            parts = partial + (head * SPLITS + each) * (D + 2)
            bests = tl.load(parts, volatile=True)
            shares = tl.exp(bests - tl.max(bests, 0))
            whole = tl.sum(tl.load(parts + 1, volatile=True) * shares, 0)
            all_mixed = tl.load(parts[:, None] + 2 + at[None, :], volatile=True)
            tl.store(y + head * D + at, tl.sum(all_mixed * shares[:, None], 0) / whole)
            tl.store(ended + head, 0)
