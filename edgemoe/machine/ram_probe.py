"""What RAM gives to a CPU that multiplies by experts: loads, with 1…n threads, from arrays no cache can hold.

A matrix–vector product only reads its weights, so the load rate is its ceiling; STREAM's copy, which the vendors quote,
counts reads and writes together and is shown beside it.
"""

from pathlib import Path

import numba
import numpy as np

from edgemoe.machine.rounds import Effort

FULL, QUICK = Effort(5, 25, 20), Effort(3, 7, 3)
CPUS = Path("/sys/devices/system/cpu")
TIMES_CACHE = 4
# What an unknown or a small last-level cache is taken for.
LEAST_CACHE = 32 << 20
_ROUND_BYTES = 1 << 30


@numba.njit(nogil=True, cache=True)
def _load(array, passes):  # type: ignore[no-untyped-def]
    """The sum of uint64 `array`, `passes` times: eight sums side by side, so that loads and not additions are waited for."""
    a = b = c = d = e = f = g = h = np.uint64(0)
    for _ in range(passes):
        for at in range(0, len(array), 8):
            a += array[at]
            b += array[at + 1]
            c += array[at + 2]
            d += array[at + 3]
            e += array[at + 4]
            f += array[at + 5]
            g += array[at + 6]
            h += array[at + 7]
    return a + b + c + d + e + f + g + h


@numba.njit(nogil=True, cache=True)
def _load2(array, passes):  # type: ignore[no-untyped-def]
    total = np.uint64(0)
    for _ in range(passes):
        for at in range(len(array)):
            total += array[at]
    return total


@numba.njit(nogil=True, cache=True)
def _load32(array, passes):  # type: ignore[no-untyped-def]
    a = np.zeros(64, np.uint64)
    n = len(array) // 4
    for _ in range(passes):
        x = np.uint64(0)
        y = np.uint64(0)
        z = np.uint64(0)
        w = np.uint64(0)
        for at in range(n):
            x += array[at]
            y += array[at + n]
            z += array[at + 2 * n]
            w += array[at + 3 * n]
        a[0] += x + y + z + w
    return a[0]


@numba.njit(nogil=True, cache=True)
def _copy(a, b, passes):  # type: ignore[no-untyped-def]
    for _ in range(passes):
        b[:] = a
