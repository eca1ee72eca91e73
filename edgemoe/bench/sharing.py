"""What a step of several streams must read: the tier's caches and its one store, replayed on recorded routing.

Every stream has its own LRU cache of C slots. The store keeps C experts per layer, those that most caches hold and then
those that ran last (`edgemoe.streaming.keeping`). A plain LRU that served the streams one by one would be flushed by
each step whose union exceeds it, which the store is not.
"""

import numpy as np

from edgemoe.tracing import Trace


def replayed_misses(
    trace: Trace, streams: int, slots: int, first: int, count: int
) -> tuple[float, float]:  # per layer and step
    """Experts read, and distinct experts executed, in steps `first` … `first + count − 1` of `streams` windows of a
    trace that start at equal distances (`loads.forced_ids`), from a start with experts 0 … C − 1."""
    length = trace.n_tokens // streams
    windows = trace.experts[:, : length * streams].reshape(trace.n_layers, streams, length, trace.top_k)
    missed = executed = 0
    for layer in windows:
        one, other = _layer(layer, trace.n_experts, slots, first, count)
        missed, executed = missed + one, executed + other
    steps = trace.n_layers * count
    return missed / steps, executed / steps


def _layer(loads: np.ndarray, n_experts: int, slots: int, first: int, count: int) -> tuple[int, int]:
    streams, length, top_k = loads.shape
    rows, at_once = np.arange(streams)[:, None], max(min(streams * top_k, n_experts), slots)
    last = np.full((streams, n_experts), -2, np.int64)
    last[:, :slots] = -1
    present = np.zeros(n_experts, bool)
    missed = executed = 0
    for step in range(first + count):
        needed = np.zeros(n_experts, bool)
        needed[loads[:, step % length]] = True
        distinct = int(needed.sum())
        if step >= first:
            missed += int((needed & ~present).sum())
            executed += distinct
        present |= needed
        last[rows, loads[:, step % length]] = step
        recent = np.argsort(last, axis=1, kind="stable")[:, -slots:]
        held = np.bincount(recent.ravel(), minlength=n_experts)
        worth = held * (first + count + 3) + last.max(axis=0)
        _trim(present, worth, slots if distinct <= slots else at_once, needed)
        _trim(present, worth, slots, np.zeros(n_experts, bool))
    return missed, executed


def _trim(present: np.ndarray, worth: np.ndarray, room: int, wanted: np.ndarray) -> None:
    """Give experts back, the least worth first, until there are at most `room` or none that is not wanted."""
    free = np.flatnonzero(present & ~wanted)
    surplus = max(int(present.sum()) - room, 0)
    present[free[np.argsort(worth[free], kind="stable")[:surplus]]] = False
