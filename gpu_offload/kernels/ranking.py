"""Rankings on the device that are the host's to the last tie: everything that is compared is an integer.

A float32 score becomes an int32 with the same order (`ordered`), since Ampere and later reduce 32-bit integers over a
warp in one instruction. The best of E is then two reductions (the largest key; the lowest index that has it) and the
top k are k times that, which for one warp is cheaper than sorting.
"""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-(2**31))  # below the key of every score: already taken
NOTHING = tl.constexpr(2**31 - 1)  # above every index: none found
MASKED = tl.constexpr(-2139095041)  # ordered(−inf)


@triton.jit
def ordered(x):  # type: ignore[no-untyped-def]
    """float32 → int32 keys that compare as the scores do. −0 and 0 are equal, as on the host; no NaN."""
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(bits == LOWEST, 0, bits)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def unordered(key):  # type: ignore[no-untyped-def]
    """The score of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def top(key, index, K: tl.constexpr):  # type: ignore[no-untyped-def]
    """The K best by key, then by index: 1 for each that is among them, and its place from 0, both [E] int32."""
    taken = tl.zeros_like(index)
    place = tl.zeros_like(index)
    for i in range(K):
        e = tl.min(tl.where(key == tl.max(key, 0), index, NOTHING), 0)
        taken = tl.where(index == e, 1, taken)
        place = tl.where(index == e, i, place)
        key = tl.where(index == e, LOWEST, key)
    return taken, place


@triton.jit
def ahead(own, e_own, e, index):  # type: ignore[no-untyped-def]
    """1 for each expert that comes after expert e by the router's own key, then by index."""
    return ((e_own > own) | ((e_own == own) & (e < index))).to(tl.int32)


@triton.jit
def top_by(key, own, index, K: tl.constexpr):  # type: ignore[no-untyped-def]
    """The K best by key, then by the router's own key, then by index.

    1 for each that is among them, and its place among them by the router's own key and index: the order in which a
    selection is listed. Both [E] int32; a place means something for the K only.
    """
    taken = tl.zeros_like(index)
    place = tl.zeros_like(index)
    for _ in range(K):
        tied = key == tl.max(key, 0)
        e_own = tl.max(tl.where(tied, own, LOWEST), 0)
        e = tl.min(tl.where(tied & (own == e_own), index, NOTHING), 0)
        taken = tl.where(index == e, 1, taken)
        key = tl.where(index == e, LOWEST, key)
        place += ahead(own, e_own, e, index)
    return taken, place
