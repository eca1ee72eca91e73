"""RAM loads while the link copies: a hybrid executes experts from RAM and copies others at the same time.

Both take from the same memory controllers, so what each gets together is less than what each gets alone.
"""

import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from edgemoe.machine.caches import last_level_cache
from edgemoe.machine.memory import ram
from edgemoe.machine.profile import Overlap
from edgemoe.machine.rounds import Effort, rate
from edgemoe.progress import Advance

if TYPE_CHECKING:
    from torch import Tensor

ROUND_S = 0.25
_LEAST_BYTES = 256 << 20


def measure_overlap(pinned: "Tensor", target: "Tensor", effort: Effort, advance: Advance) -> Overlap | None:
    """Both rates while both run, with a loading thread on every core but the one that issues copies.

    None where too little RAM is free for arrays that no cache holds, or where there is no second core.
    """
    threads = len(os.sched_getaffinity(0)) - 1
    size = max(4 * last_level_cache(), _LEAST_BYTES)
    if threads < 1 or size > ram().available // 2:
        return None
    arrays = np.array_split(np.ones(size // 8, np.int64), threads)
    load = _loader()
    load(arrays[0][:1024])
    ram_rounds, copy_rounds = [], []
    for _ in range(effort.least):
        loaded, copied = _round(load, arrays, pinned, target)
        ram_rounds.append(loaded)
        copy_rounds.append(copied)
        advance(1)
    advance(effort.most - effort.least)
    return Overlap(threads, rate(ram_rounds), rate(copy_rounds))


def _round(load: Callable[[Any], int], arrays: list[Any], pinned: "Tensor", target: "Tensor") -> tuple[float, float]:
    """(bytes per second loaded, bytes per second copied), each counted over the time in which both ran."""
    import torch

    stop, ready = threading.Event(), threading.Barrier(len(arrays) + 1)
    loads = [Loads() for _ in arrays]
    workers = [
        threading.Thread(target=_keep_loading, args=(load, array, stop, ready, count), daemon=True)
        for array, count in zip(arrays, loads, strict=True)
    ]
    for worker in workers:
        worker.start()
    stream = torch.cuda.Stream()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    ready.wait()
    began, copies = time.perf_counter(), 0
    with torch.cuda.stream(stream):
        start.record()
        while time.perf_counter() - began < ROUND_S:
            target.copy_(pinned, non_blocking=True)
            copies += 1
            if copies % 2 == 0:
                stream.synchronize()  # keeps the queue short, or the loads would end long before the copies
        end.record()
    end.synchronize()
    stop.set()
    for worker in workers:
        worker.join()
    copied = copies * pinned.numel() * pinned.element_size() / (start.elapsed_time(end) / 1e3)
    return sum(count.per_second for count in loads), copied


class Loads:
    """Bytes that one thread has loaded, and how long it took."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.seconds = 0.0

    @property
    def per_second(self) -> float:
        return self.nbytes / self.seconds


def _keep_loading(
    load: Callable[[Any], int], array: Any, stop: threading.Event, ready: threading.Barrier, count: Loads
) -> None:
    ready.wait()
    start = time.perf_counter()
    while not stop.is_set():
        if load(array) != len(array):
            raise RuntimeError("RAM loads return other values than were written")
        count.nbytes += array.nbytes
    count.seconds = time.perf_counter() - start


def _loader() -> Callable[[Any], int]:
    """The sum of an int64 array, computed without the interpreter's lock: by numba, else by torch."""
    try:
        from edgemoe.machine.ram_probe import load_sum
    except ImportError:
        import torch

        torch.set_num_threads(1)
        return lambda array: int(torch.from_numpy(array).sum())
    return lambda array: int(load_sum(array.view(np.uint64), 1))
