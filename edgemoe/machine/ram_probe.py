"""What RAM gives to a CPU that multiplies by experts: loads, with 1…n threads, from arrays no cache can hold.

A matrix–vector product only reads its weights, so the load rate is its ceiling; STREAM's copy, which the vendors quote,
counts reads and writes together and is shown beside it.
"""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numba
import numpy as np

from edgemoe.errors import UserError
from edgemoe.machine.caches import last_level_cache
from edgemoe.machine.memory import ram
from edgemoe.machine.profile import RamRates, ThreadsRate
from edgemoe.machine.rounds import Effort, settle
from edgemoe.progress import Advance, no_progress
from edgemoe.units import format_bytes

FULL, QUICK = Effort(5, 25, 20), Effort(3, 7, 2)
TIMES_CACHE = 4
# Below this, one pass would be over before all threads have begun.
LEAST_BYTES = 128 << 20
_ROUND_BYTES = 1 << 30
_SHARE_OF_FREE = 0.8


@numba.njit(nogil=True, cache=True)
def load_sum(array, passes):  # type: ignore[no-untyped-def]
    """Sum uint64 `array` `passes` times. LLVM keeps several vector sums, so loads and not additions limit it."""
    total = np.uint64(0)
    for _ in range(passes):
        for at in range(len(array)):
            total += array[at]
    return total


@numba.njit(nogil=True, cache=True)
def _copy(source, target, passes):  # type: ignore[no-untyped-def]
    for _ in range(passes):
        target[:] = source


def probe_ram(
    effort: Effort = FULL, threads: tuple[int, ...] | None = None, advance: Advance = no_progress
) -> RamRates:
    """Measure loads and copies with so many threads: 1, 2, 4, … and all the cores of this process unless given.

    `advance` is told rounds, `n_rounds(effort, threads)` in all. Raises `UserError` where too little RAM is free for
    arrays that the caches cannot hold.
    """
    cache, free = last_level_cache(), ram().available
    size = max(TIMES_CACHE * cache, LEAST_BYTES)
    if 2 * size > _SHARE_OF_FREE * free:
        raise UserError(
            f"measuring RAM behind {format_bytes(cache)} of cache takes two arrays of {format_bytes(size)}, and"
            f" {format_bytes(free)} are free: close other programs"
        )
    counts = threads or thread_counts()
    with ThreadPoolExecutor(counts[-1], "edgemoe-ram") as pool:
        source, target = (np.empty(size // 8, np.uint64) for _ in range(2))
        for array in (source, target):  # each part touched by a thread of its own, to lie near the cores that read it
            list(pool.map(lambda part: part.fill(1), np.array_split(array, counts[-1])))
        _warm_up(source, target)
        cells: dict[tuple[str, int], Callable[[], float]] = {}
        for count in counts:
            cells["load", count] = partial(_round, pool, load_sum, count, (source,))
            cells["copy", count] = partial(_round, pool, _copy, count, (source, target))
        rates = settle(cells, effort, advance)
    load, copy = (tuple(ThreadsRate(count, rates[kind, count]) for count in counts) for kind in ("load", "copy"))
    return RamRates(size, cache, load, copy)


def n_rounds(effort: Effort, threads: tuple[int, ...] | None = None) -> int:
    """Rounds that `advance` is told, in all."""
    return 2 * len(threads or thread_counts()) * effort.most


def thread_counts() -> tuple[int, ...]:
    """1, 2, 4, … and all the cores that this process may use."""
    cores = len(os.sched_getaffinity(0))
    return tuple(sorted({1 << power for power in range(cores.bit_length())} | {cores}))


def quick_thread_counts() -> tuple[int, ...]:
    """One thread, and all."""
    counts = thread_counts()
    return tuple(sorted({counts[0], counts[-1]}))


def _warm_up(source: np.ndarray, target: np.ndarray) -> None:
    """Compile, wake the cores, and see that the kernels do what they are timed for."""
    target[:] = 0
    _copy(source, target, 1)
    if int(load_sum(target, 1)) != len(target):
        raise RuntimeError("the load kernel does not read what the copy kernel wrote")


def _round(
    pool: ThreadPoolExecutor, kernel: Callable[..., object], threads: int, arrays: tuple[np.ndarray, ...]
) -> float:
    """Bytes per second of one round, in equal parts for the threads. Every array counts: it is read, or written."""
    size = sum(array.nbytes for array in arrays)
    passes = -(-_ROUND_BYTES // size)
    parts = list(zip(*(np.array_split(array, threads) for array in arrays), strict=True))
    start = time.perf_counter()
    for future in [pool.submit(kernel, *part, passes) for part in parts]:
        future.result()
    return size * passes / (time.perf_counter() - start)
