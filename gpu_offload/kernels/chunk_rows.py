"""The rows of a chunk between its products: a launch each for what would be many, since the host sends them one by one.

The residual stream is float32; what products read is in the storage type.
"""

import triton
import triton.language as tl


@triton.jit
def normed(  # type: ignore[no-untyped-def]
    x, y, outputs, weights, counts, norm, single, stored, eps,
    WIDTH: tl.constexpr, WIDTH_P: tl.constexpr, K: tl.constexpr, COUNTS: tl.constexpr,
    ADDS: tl.constexpr, MIXES: tl.constexpr, SINGLE: tl.constexpr
):  # fmt: skip
    """stored [T, WIDTH] = RMSNorm(x [T, WIDTH] float32) with weights norm, in its own type; also in `single`, float32.

    Before, x grows by y [T, WIDTH] float32, or by the mixture of the outputs [T·K, WIDTH] float32 of each token's
    experts: the first counts[t · COUNTS] of them, by weights [T, K], in the token's own order. Grid: (T,).
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH_P)
    there = at < WIDTH
    value = tl.load(x + row * WIDTH + at, mask=there, other=0.0)
    if MIXES:
        mixed = tl.zeros((WIDTH_P,), tl.float32)
        for i in range(tl.load(counts + row * COUNTS)):
            output = tl.load(outputs + (row * K + i) * WIDTH + at, mask=there, other=0.0)
            mixed += tl.load(weights + row * K + i) * output
        value += mixed
    if ADDS:
        value += tl.load(y + row * WIDTH + at, mask=there, other=0.0)
    if MIXES or ADDS:
        tl.store(x + row * WIDTH + at, value, mask=there)
    out = value * tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps) * tl.load(norm + at, mask=there, other=0.0)
    if SINGLE:
        tl.store(single + row * WIDTH + at, out, mask=there)
    tl.store(stored + row * WIDTH + at, out.to(stored.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["count"])
def tell(  # type: ignore[no-untyped-def]
    pregate, executed, counts, slot_of, told, count,
    E: tl.constexpr, EP: tl.constexpr, WIDTH: tl.constexpr, WIDTH_P: tl.constexpr, COUNTS: tl.constexpr,
    K_NEXT: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Gather what the host asks of a layer's decision. Grid: blocks of ROWS of `count` tokens.

    pregate [T, E]: the next layer's; executed [T, WIDTH] and counts [T, COUNTS] as in `Decisions`; slot_of [E]. Out, in
    told int32, zero before: how many tokens' pre-gate chooses each expert [E] among its first K_NEXT, slot_of [E], the
    misses of all tokens [1], and executed [T, WIDTH] with −1 beyond a token's.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = row < count
    expert = tl.arange(0, EP)
    if tl.program_id(0) == 0:
        tl.store(told + E + expert, tl.load(slot_of + expert, mask=expert < E, other=0), mask=expert < E)
    if K_NEXT > 0:
        inside = there[:, None] & (expert < E)[None, :]
        gates = tl.load(pregate + row[:, None] * E + expert[None, :], mask=inside, other=-float("inf"))
        for _ in range(K_NEXT):
            best = tl.argmax(gates, 1)
            tl.atomic_add(told + best, 1, mask=there & (best < E))
            gates = tl.where(expert[None, :] == best[:, None], -float("inf"), gates)
    size = tl.load(counts + row * COUNTS, mask=there, other=0)
    misses = tl.load(counts + row * COUNTS + 1, mask=there, other=0)
    tl.atomic_add(told + 2 * E, tl.sum(misses, 0))
    nth = tl.arange(0, WIDTH_P)
    inside = there[:, None] & (nth < WIDTH)[None, :]
    place = row[:, None] * WIDTH + nth[None, :]
    ran = tl.load(executed + place, mask=inside, other=-1)
    tl.store(told + 2 * E + 1 + place, tl.where(nth[None, :] < size[:, None], ran, -1), mask=inside)
