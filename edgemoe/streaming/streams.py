"""Many sequences side by side: they join and leave at any step, and each step takes all of them one token further.

with Streams("model.gguf", 8, ram=6_000_000_000) as streams:
    one, other = (streams.join(streams.tokenize(text)) for text in (b"Once upon a time", b"In the beginning"))
    streams.step({one: int(one.logits.argmax()), other: int(other.logits.argmax())})

What a layer executes for any stream is read once for all. Each stream is decided by a logical cache of its own, whose
decisions the others do not touch; what it holds may have left the one store for their sake, and is then read again.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edgemoe.errors import UserError
from edgemoe.streaming import words as w
from edgemoe.streaming.stream import Stream
from edgemoe.streaming.tier import Tier

_UNION = [w.DISTINCT, w.TURNS]


class Streams(Tier):
    """The tier with room for `places` sequences of `n_ctx` tokens each; `settings` are those of `Tier`.

    With an exact policy the logits are bit-identical to those of the same llama.cpp with the whole model in RAM that
    decodes the same batches. Which streams share a batch changes the last bits of llama.cpp's products, so that a
    stream's scores, and in near-ties its tokens, are not those that it has alone.
    """

    def __init__(self, path: str | Path, places: int, **settings: Any) -> None:
        super().__init__(path, streams=places, **settings)
        self._decider.live[:] = False
        self._union = np.zeros(len(_UNION), np.int64)

    @property
    def places(self) -> int:
        """Streams that may be there at once."""
        return len(self._streams)

    @property
    def live(self) -> list[Stream]:
        """The streams that joined and have not left, by number."""
        return [stream for stream, live in zip(self._streams, self._decider.live, strict=True) if live]

    def join(self, tokens: Sequence[int] | np.ndarray) -> Stream:
        """A new stream that has read these tokens (at least one), in chunks of its own; its cache is as at the start.

        Raises `UserError` where there is no place, and for tokens that do not fit. After any exception it has not
        joined, and the others are as they were.
        """
        number = next((n for n, live in enumerate(self._decider.live) if not live), None)
        if number is None:
            raise UserError(f"all {self.places} streams are in use: let one leave first, or load with more")
        if not len(tokens):
            raise UserError("the prompt is empty: give some text")
        stream = self._streams[number] = Stream(number, self._streams[number].cache)
        self._decider.live[number] = True
        try:
            stream.accept(self._read(stream, tokens))
        except BaseException:
            self.leave(stream)
            raise
        return stream

    def step(self, tokens: Mapping[Stream, int]) -> None:
        """Decode one token of each of these streams in one batch, a row each in this order; their `logits` are new.

        Raises `UserError`, before anything is decoded, for a stream that has left or whose context is full. After any
        exception (Ctrl-C, a disk that fails) no stream has its token: all are as before the step.
        """
        for stream in tokens:
            if self._streams[stream.number] is not stream or not self._decider.live[stream.number]:
                raise UserError(f"stream {stream.number} has left: let it join again")
            if stream.position == 0:
                raise UserError(f"{self.model.path}: its memory cannot take one token back: let the stream join again")
            if stream.position >= self.n_ctx:
                raise UserError(f"the context of {self.n_ctx:,} tokens is full: let the stream leave")
        before = self._decider.ctl[_UNION]
        self._advance([(stream, np.array([token], np.int32)) for stream, token in tokens.items()])
        self._union += self._decider.ctl[_UNION] - before
        assert self._session is not None
        for row, stream in enumerate(tokens):
            stream.accept(self._session.row_logits(row))

    def leave(self, stream: Stream) -> None:
        """Give the stream's place and memory to whoever joins next; again is allowed."""
        if self._streams[stream.number] is stream and self._session is not None:
            self._session.forget(0, stream.number)
            self._decider.live[stream.number] = False

    @property
    def union(self) -> tuple[int, int]:
        """Running totals over the layers of all steps: distinct experts executed, and layers. Their ratio is the mean
        number of experts that a layer executes for all streams together."""
        return int(self._union[0]), int(self._union[1])
