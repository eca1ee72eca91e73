"""The streaming engine with its streams in lockstep and its routing replayed: what the tier does, without any text."""

import numpy as np

from edgemoe.bench.forced import ForcedDecider
from edgemoe.streaming import words as w
from edgemoe.streaming.engine import StreamingEngine
from edgemoe.streaming.replay_reads import ReadLog, Recorder


class ReplayedEngine(StreamingEngine):
    """Takes one token of every stream per step. `force` says which experts the next steps execute."""

    decider_type = ForcedDecider

    def force(self, ids: np.ndarray | None) -> None:  # [L, B, k] int32
        assert isinstance(self._decider, ForcedDecider)
        self._decider.force(ids)

    def step(self, tokens: np.ndarray) -> None:  # [B]
        self._decider.live[:] = True
        self._advance([(stream, tokens[i : i + 1]) for i, stream in enumerate(self._streams)])

    def rewind_all(self) -> None:
        """Begin every sequence again; what is in RAM, and in the logical caches, stays."""
        assert self._session is not None
        for stream in self._streams:
            stream.position = self._session.forget(0, stream.number)

    def log_reads(self) -> Recorder:
        """Note what is read from now on."""
        return ReadLog.begin(self._store)

    @property
    def distinct(self) -> int:
        """Running total over layers and steps: experts that any stream executes."""
        return int(self._decider.ctl[w.DISTINCT])
