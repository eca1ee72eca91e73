"""The pre-gate inside the callback: the next layer's router on this layer's MoE input (PSR paper §4.1), in float32.

What makes scores of the product is read from the graph (`edgemoe.llamacpp.graph.Gate`). The product may sum in any
order, as every matrix product does; decisions are made from what it gives, and records hold just that.
"""

import numba
import numpy as np
from numba import carray

from edgemoe.llamacpp.native import _pointer
from edgemoe.streaming import words as w
from edgemoe.streaming.jit import kernel


@numba.njit(nogil=True, cache=True, fastmath={"reassoc", "contract", "nsz"})
def product(weight, x, out):  # type: ignore[no-untyped-def]
    """out [E] = weight [E, d] · x [d]."""
    for e in range(len(out)):
        total = np.float32(0)
        for i in range(len(x)):
            total += weight[e, i] * x[i]
        out[e] = total


@kernel
def pregate(row, x, out):  # type: ignore[no-untyped-def]
    """The scores [E] that a layer (`words`, row) would rank for a router input x [d]."""
    experts, width = len(out), row[w.WIDTH]
    product(carray(_pointer(row[w.WEIGHT]), (experts, width), np.float32), x, out)
    for i in range(row[w.STEPS]):
        code, operand = row[w.FIRST_STEP + 2 * i], row[w.FIRST_STEP + 2 * i + 1]
        if code == 0:
            bias = carray(_pointer(operand), (experts,), np.float32)
            for e in range(experts):
                out[e] += bias[e]
        elif code == 2:
            softmax(out)
        else:
            for e in range(experts):
                out[e] = activation(code, out[e])
    if row[w.GROUPS] > 0:
        mask_groups(row, out)


@kernel
def activation(code, x):  # type: ignore[no-untyped-def]
    if code == 1:
        return np.float32(1 / (1 + np.exp(-x)))
    if code == 3:
        return np.float32(max(x, np.float32(0)) + np.log1p(np.exp(-abs(x))))
    return np.float32(np.sqrt(x))


@kernel
def softmax(values):  # type: ignore[no-untyped-def]
    top, total = values.max(), np.float32(0)
    for e in range(len(values)):
        values[e] = np.exp(values[e] - top)
        total += values[e]
    for e in range(len(values)):
        values[e] /= total


@kernel
def mask_groups(row, values):  # type: ignore[no-untyped-def]
    """−inf outside the groups with the largest sum of their two best (DeepSeek-V3, as llama.cpp computes it)."""
    groups, used = row[w.GROUPS], row[w.GROUPS_USED]
    ranked = values.copy()
    if row[w.OF_SOFTMAX]:
        softmax(ranked)
    size = len(values) // groups
    sums = np.empty(groups, np.float32)
    for g in range(groups):
        best, second = np.float32(-np.inf), np.float32(-np.inf)
        for e in range(g * size, (g + 1) * size):
            if ranked[e] > best:
                best, second = ranked[e], best
            elif ranked[e] > second:
                second = ranked[e]
        sums[g] = best + second
    for g in range(groups):
        above = 0
        for other in range(groups):
            above += sums[other] > sums[g] or (sums[other] == sums[g] and other < g)
        if above >= used:
            values[g * size : (g + 1) * size] = np.float32(-np.inf)
