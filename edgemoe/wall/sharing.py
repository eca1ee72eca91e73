"""What a step of several streams must read: the SSD tier's caches and its one store, replayed on recorded routing.

Every stream has its own LRU cache of C slots. The store keeps C experts per layer, those that most caches hold and then
those that ran last (`edgemoe.streaming.keeping`). A plain LRU that served the streams one by one would be flushed by
each step whose union exceeds it, which the store is not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from edgemoe.model.geometry import ModelGeometry
from edgemoe.policy._jit import kernel
from edgemoe.wall.hits import Hit

if TYPE_CHECKING:
    from edgemoe.tracing import Trace


@dataclass(frozen=True, eq=False)
class StoreHits:
    """`edgemoe.wall.hits.Hits` of `streams` windows of each text that share one store. Hit rates are shares of the
    distinct experts of a step; the range is over texts."""

    geometry: ModelGeometry
    texts: list["Trace"]
    streams: int

    @property
    def label(self) -> str:
        many = f"{len(self.texts)} {'text' if len(self.texts) == 1 else 'texts'}"
        return f"an LRU cache for each of {self.streams} streams and one store for all, replayed on {many}"

    def at(self, capacities: Sequence[int]) -> Hit:
        """With so many slots in each MoE layer. Where all experts fit they are read once, which is no step's."""
        rates, copied = [], []
        for text in self.texts:
            steps = text.n_tokens // self.streams
            missed, executed = replayed(text, self.streams, capacities, 0, steps)
            missed[np.asarray(capacities) >= text.n_experts] = 0
            rates.append(1 - float(missed.sum() / executed.sum()))
            copied.append(float((missed * self.geometry.expert_bytes).sum() / steps))
        slots = sorted(set(capacities))
        said = "–".join(map(str, dict.fromkeys((slots[0], slots[-1]))))
        return Hit(min(rates), max(rates), (min(copied), max(copied)), f"{self.label}, {said} slots per layer")


def replayed_misses(
    trace: "Trace", streams: int, slots: int, first: int, count: int
) -> tuple[float, float]:  # per layer and step
    """Experts read, and distinct experts executed, in steps `first` … `first + count − 1`: means of `replayed`."""
    missed, executed = replayed(trace, streams, [slots] * trace.n_layers, first, count)
    steps = trace.n_layers * count
    return float(missed.sum() / steps), float(executed.sum() / steps)


def replayed(
    trace: "Trace", streams: int, capacities: Sequence[int], first: int, count: int
) -> tuple[np.ndarray, np.ndarray]:  # [L], [L] int64
    """Experts that each layer reads, and distinct experts that it executes, in steps `first` … `first + count − 1`.

    Stream i decodes the trace from token i·⌊T/B⌋ on, from its start again where it ends. capacities: slots of each
    layer. Every cache starts with experts 0 … C − 1, none of which is in RAM.
    """
    length = trace.n_tokens // streams
    windows = trace.experts[:, : length * streams].reshape(trace.n_layers, streams, length, -1)
    counts = [
        _layer(np.ascontiguousarray(loads), trace.n_experts, max(slots, 1), first, count)
        for loads, slots in zip(windows, capacities, strict=True)
    ]
    missed, executed = np.array(counts, dtype=np.int64).reshape(-1, 2).T
    return missed.copy(), executed.copy()


@kernel
def _layer(loads: np.ndarray, n_experts: int, slots: int, first: int, count: int) -> tuple[int, int]:
    """One layer. loads: [streams, steps, k] int16, −1 for no expert."""
    streams, length, top_k = loads.shape
    at_once = max(min(streams * top_k, n_experts), slots)
    cached = np.zeros((streams, n_experts), dtype=np.bool_)
    cached[:, :slots] = True
    last = np.full((streams, n_experts), -1, dtype=np.int64)
    present = np.zeros(n_experts, dtype=np.bool_)
    needed, nobody = np.zeros(n_experts, dtype=np.bool_), np.zeros(n_experts, dtype=np.bool_)
    worth = np.zeros(n_experts, dtype=np.int64)
    missed = executed = 0
    for step in range(first + count):
        needed[:] = False
        for stream in range(streams):
            for e in loads[stream, step % length]:
                if e >= 0:
                    needed[e] = True
                    last[stream, e] = step
                    cached[stream, e] = True
            _evict(cached[stream], last[stream], slots)
        distinct = needed.sum()
        for e in range(n_experts):
            if step >= first:
                executed += needed[e]
                missed += needed[e] and not present[e]
            present[e] |= needed[e]
            worth[e] = cached[:, e].sum() * (first + count + 1) + last[:, e].max()
        _trim(present, worth, slots if distinct <= slots else at_once, needed)
        _trim(present, worth, slots, nobody)
    return missed, executed


@kernel
def _evict(cached: np.ndarray, last: np.ndarray, slots: int) -> None:
    """Leave a stream's cache with its `slots` most recent experts; the lowest index goes first among equals."""
    for _ in range(cached.sum() - slots):
        worst = -1
        for e in range(len(cached)):
            if cached[e] and (worst < 0 or last[e] < last[worst]):
                worst = e
        cached[worst] = False


@kernel
def _trim(present: np.ndarray, worth: np.ndarray, room: int, wanted: np.ndarray) -> None:
    """Give experts back, the least worth first, until there are at most `room` or none that is not wanted."""
    for _ in range(present.sum() - room):
        worst = -1
        for e in range(len(present)):
            if present[e] and not wanted[e] and (worst < 0 or worth[e] < worth[worst]):
                worst = e
        if worst < 0:
            return
        present[worst] = False
