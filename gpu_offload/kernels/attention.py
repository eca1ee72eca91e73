"""Attention of one token over the tokens before it: keys and values are read once, by as many blocks as there are
heads times splits, and only where there are tokens. The block of a head that ends last joins its splits.
"""

import triton
import triton.language as tl

from edgemoe.gpu_offload.kernels.ordering import await_previous


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
def asked_for(keys, values, rows, here, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Keys and values [N, D] of a head at positions rows [N], of those before here."""
    places = rows.to(tl.int64)[:, None] * D + tl.arange(0, D)[None, :]
    there = (rows < here)[:, None]
    k = tl.load(keys + places, mask=there, other=0.0, cache_modifier=".cg")
    v = tl.load(values + places, mask=there, other=0.0, cache_modifier=".cg")
    return k, v


@triton.jit
def taken_in(q, k, v, there, best, total, mixed):  # type: ignore[no-untyped-def]
    """Softmax over some more positions: k, v [N, D], there [N]. best, total and mixed [D] are of those so far."""
    score = tl.where(there, tl.sum(k.to(tl.float32) * q[None, :], 1), -float("inf"))
    above = tl.maximum(best, tl.max(score, 0))
    base = tl.where(above == -float("inf"), 0.0, above)
    weight = tl.exp(score - base)
    shrink = tl.exp(best - base)
    return above, total * shrink + tl.sum(weight, 0), mixed * shrink + tl.sum(v.to(tl.float32) * weight[:, None], 0)


@triton.jit
def attend(  # type: ignore[no-untyped-def]
    qkv, q_norm, k_norm, cos, sin, keys, values, position, partial, ended, y, stop, eps, clip, n_ctx,
    N_HEADS: tl.constexpr, N_KV: tl.constexpr, D: tl.constexpr, Q_P: tl.constexpr, KV_P: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, CLIPS: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """Append this token's key and value, and attend over the positions up to it. Grid: (heads, SPLITS + 1).

    Each split has every SPLITS-th block of the positions before; the last one has this token alone, whose key must be
    made first. Splits for which there is no block take no part.
    qkv [(H + 2·Hkv)·D] float32; keys, values [Hkv, n_ctx, D] of one layer; cos, sin [n_ctx, D] float32; position [1]
    int64. Out: y [H·D] float32. Between the blocks of a head: partial [H, SPLITS + 1, D + 2] float32, the maximum, the
    sum and the weighted values of each split that takes part; ended [H] int32, how many of them have ended, zero again
    afterwards.
    """
    head = tl.program_id(0)
    split = tl.program_id(1)
    kv = head // (N_HEADS // N_KV)
    at = tl.arange(0, D)
    nth = tl.arange(0, BLOCK)
    stopped = tl.load(stop)
    here = tl.load(position).to(tl.int32)
    used = tl.minimum(tl.cdiv(here, BLOCK), SPLITS)
    # The first block is asked for before this token's query is there.
    begin = tl.where(split == SPLITS, here, split * BLOCK)
    keys += kv.to(tl.int64) * n_ctx * D
    values += kv.to(tl.int64) * n_ctx * D
    k, v = asked_for(keys, values, begin + nth, here, D)
    angle_cos = tl.load(cos + here.to(tl.int64) * D + at)
    angle_sin = tl.load(sin + here.to(tl.int64) * D + at)
    await_previous(EARLY)
    if (stopped == 0) & ((split < used) | (split == SPLITS)):
        straight, crossed = normed(qkv, q_norm, head, eps, clip, N_HEADS * D, Q_P, D, CLIPS)
        q = rotated(straight, crossed, angle_cos, angle_sin, D) * (1.0 / tl.sqrt(float(D)))
        best = -float("inf")
        total = 0.0
        mixed = tl.zeros((D,), tl.float32)
        if split == SPLITS:
            new = qkv + N_HEADS * D
            straight, crossed = normed(new, k_norm, kv, eps, clip, N_KV * D, KV_P, D, CLIPS)
            new_k = rotated(straight, crossed, angle_cos, angle_sin, D).to(keys.dtype.element_ty)
            fresh = tl.load(new + N_KV * D + kv * D + at)
            if CLIPS:
                fresh = tl.minimum(tl.maximum(fresh, -clip), clip)
            new_v = fresh.to(keys.dtype.element_ty)
            tl.store(keys + here.to(tl.int64) * D + at, new_k)
            tl.store(values + here.to(tl.int64) * D + at, new_v)
            best = tl.sum(new_k.to(tl.float32) * q, 0)
            total = 1.0
            mixed = new_v.to(tl.float32)
        else:
            for start in range(begin, here, SPLITS * BLOCK):
                # The next block is asked for before this one is taken in.
                rows = start + nth
                next_k, next_v = asked_for(keys, values, rows + SPLITS * BLOCK, here, D)
                best, total, mixed = taken_in(q, k, v, rows < here, best, total, mixed)
                k, v = next_k, next_v
        out = partial + (head * (SPLITS + 1) + split) * (D + 2)
        tl.store(out, best)
        tl.store(out + 1, total)
        tl.store(out + 2 + at, mixed)
        tl.debug_barrier()  # all threads' stores come before the count
        if tl.atomic_add(ended + head, 1, sem="acq_rel") == used:
            each = tl.arange(0, triton.next_power_of_2(SPLITS + 1))
            there = (each < used) | (each == SPLITS)
            parts = partial + (head * (SPLITS + 1) + each) * (D + 2)
            bests = tl.load(parts, mask=there, other=-float("inf"), volatile=True)
            shares = tl.exp(bests - tl.max(bests, 0))
            whole = tl.sum(tl.load(parts + 1, mask=there, other=0.0, volatile=True) * shares, 0)
            all_mixed = tl.load(parts[:, None] + 2 + at[None, :], mask=there[:, None], other=0.0, volatile=True)
            tl.store(y + head * D + at, tl.sum(all_mixed * shares[:, None], 0) / whole)
            tl.store(ended + head, 0)
