"""Stock llama.cpp with the model mapped into memory: what people run, and what the tier is compared with.

Nothing is repacked, since a repacked model is a copy in RAM and no mapping. The kernel decides what stays.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edgemoe.llamacpp.hub import Hub
from edgemoe.llamacpp.session import Session


class MappedSession(Session):
    """A session of `streams` sequences of at most `n_ctx` tokens each. A step takes one token of every stream."""

    def __init__(self, path: str | Path, *, streams: int, n_ctx: int, n_threads: int, hub: Hub) -> None:
        super().__init__(
            path, n_ctx=streams * n_ctx, n_batch=streams, n_sequences=streams, n_threads=n_threads, hub=hub
        )

    def step(self, tokens: Sequence[int] | np.ndarray, position: int) -> None:
        """Decode tokens [streams], each at `position` of its own sequence."""
        streams = self.n_sequences
        assert len(tokens) == streams
        sequences = np.arange(streams, dtype=np.int32)
        self.decode(tokens, positions=np.full(streams, position), sequences=sequences)

    def _model_params(self, n_gpu_layers: int) -> Any:
        params = super()._model_params(n_gpu_layers)
        params.use_extra_bufts = False
        return params
