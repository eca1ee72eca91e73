"""One of the sequences that an engine decodes side by side."""

import numpy as np

from edgemoe.generation.engine import Observer
from edgemoe.policy import LogicalCache


class Stream:
    """A sequence: its number in the context, its own logical cache, and how many tokens the memory holds of it.

    `records` has its decisions, decode by decode (`Decider.record`), where the engine records them.
    """

    def __init__(self, number: int, cache: LogicalCache, observer: Observer | None = None) -> None:
        self.number, self.cache, self.observer = number, cache, observer
        self._before = cache.block.copy()
        self._logits: np.ndarray | None = None
        self.records: list[dict[str, np.ndarray]] = []
        self.cache.reset()
        self.position = 0

    def start(self) -> None:
        """A new sequence: nothing read, the cache as at the start."""
        self.cache.reset()
        self.position = 0
        if self.observer:
            self.observer.reset()

    @property
    def logits(self) -> np.ndarray:
        """After its last token, [V] float32."""
        assert self._logits is not None
        return self._logits

    def accept(self, logits: np.ndarray) -> None:
        self._logits = logits

    def mark(self) -> None:
        """Remember the cache, for `undo`."""
        np.copyto(self._before, self.cache.block)

    def undo(self) -> None:
        """The cache as it was at `mark`."""
        np.copyto(self.cache.block, self._before)
