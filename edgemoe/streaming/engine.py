"""`StreamingEngine`: stock llama.cpp with its experts on the SSD, as an engine that generation can drive.

engine = StreamingEngine("model.gguf", ram=6_000_000_000)
logits = engine.prefill(engine.tokenize(b"Once upon a time"))
logits = engine.decode(int(logits.argmax()))
"""

from collections.abc import Sequence

import numpy as np

from edgemoe.streaming.fitting import DEFAULT_CHUNK
from edgemoe.streaming.tier import OBSERVED, Tier

__all__ = ["DEFAULT_CHUNK", "OBSERVED", "StreamingEngine"]


class StreamingEngine(Tier):
    """An `edgemoe.generation.engine.Engine` on the tier: one sequence. Linux; experts run on the CPU.

    Takes what `Tier` takes, which says what it means and what is refused. With an exact policy the logits are
    bit-identical to `ResidentEngine(…, repack=False, all_rows=True)` of the same ubatch size and threads.
    """

    @property
    def position(self) -> int:
        return self._streams[0].position

    @property
    def records(self) -> list[dict[str, np.ndarray]]:
        """What was decided, decode by decode (`Decider.record`), with `record=True`."""
        return self._streams[0].records

    def prefill(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        return self._read(self._streams[0], tokens)

    def decode(self, token: int) -> np.ndarray:
        return self.prefill([token])

    def rewind(self, position: int) -> int:
        stream = self._streams[0]
        assert 0 <= position <= stream.position and self._session is not None
        if position < stream.position:
            stream.position = self._session.forget(position)
        return stream.position

    def reset(self) -> None:
        assert self._session is not None
        self._session.clear()
        self._streams[0].start()
