"""One of the sequences that an engine decodes side by side."""

import numpy as np

from edgemoe.policy import LogicalCache


class Stream:
    """A sequence: its number in the context, its own logical cache, and how many tokens the memory holds of it.

    `logits` [V] are those after its last token, None before the first; `records` has its decisions, decode by decode,
    where the engine records.
    """

    def __init__(self, number: int, cache: LogicalCache) -> None:
        self.number, self.cache = number, cache
        self._before = cache.block.copy()
        self.live = False
        self.records: list[dict[str, np.ndarray]] = []
        self.start()

    def start(self) -> None:
        """A new sequence: nothing read, the cache as at the start."""
        self.cache.reset()
        self.position = 0
        self.logits: np.ndarray | None = None

    def mark(self) -> None:
        """Remember the cache, for `undo`."""
        np.copyto(self._before, self.cache.block)

    def undo(self) -> None:
        """The cache as it was at `mark`."""
        np.copyto(self.cache.block, self._before)
