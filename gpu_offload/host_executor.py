"""What executors share whose logical cache is the host's own: everything but how a step is computed and moved."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from edgemoe.generation.options import Options
from edgemoe.gpu_offload.decisions import Decisions
from edgemoe.gpu_offload.executor import Counters, Snapshot, kept_in_place
from edgemoe.gpu_offload.kernels import draw
from edgemoe.gpu_offload.slots import Slots
from edgemoe.gpu_offload.weights import Weights


class HostExecutor(ABC):
    """Most of an `edgemoe.gpu_offload.executor.Executor`."""

    def __init__(self, weights: Weights, decisions: Decisions) -> None:
        self.weights, self.decisions, self.counters = weights, decisions, Counters()
        self._state = decisions.cache.state
        self.slots = Slots(weights.arena, int(self._state.capacity), weights.embedding.device)

    @abstractmethod
    def step(self, tokens: np.ndarray, position: int, *, all_rows: bool = False) -> np.ndarray:
        """As the protocol says."""

    def extend(self, token: int, position: int, count: int, options: Options, ends: frozenset[int]) -> Sequence[int]:
        chosen: list[int] = []
        while len(chosen) < count and not (chosen and chosen[-1] in ends):
            logits = self.step(np.array([token]), position)
            token = draw.choose(logits, options, options.seed or 0, position)
            chosen.append(token)
            position += 1
        return chosen

    def record(self, count: int) -> dict[str, np.ndarray]:
        return self.decisions.record(count)

    def reset(self) -> None:
        state = self._state
        for layer in range(state.n_layers):
            state.warm_slot[layer] = kept_in_place(state.warm_slot[layer], self.slots.held[layer])
        self.decisions.cache.reset()
        self._settle()

    def snapshot(self) -> Snapshot:
        return Snapshot(self.decisions.cache.block.copy())

    def restore(self, snapshot: Snapshot) -> None:
        state = self._state
        self.decisions.cache.block[:] = snapshot.block
        for layer in range(state.n_layers):
            state.slot_of[layer] = kept_in_place(state.slot_of[layer], self.slots.held[layer])
        self._settle()

    def _settle(self) -> None:
        with self._timed("reset_s"):
            for layer in range(self._state.n_layers):
                self.counters.reset_copies += len(self.slots.settle(layer, self._state.slot_of[layer]))

    def slot_of(self) -> np.ndarray:
        found: np.ndarray = self._state.slot_of.copy()
        return found

    def verify(self) -> None:
        self.slots.verify(self._state.slot_of)

    @contextmanager
    def _timed(self, counter: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            setattr(self.counters, counter, getattr(self.counters, counter) + time.perf_counter() - start)
