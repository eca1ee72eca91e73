"""From pieces to printable text: whole characters only, and nothing of what may still become a stop string."""

import codecs
from collections.abc import Sequence


class TextStream:
    """Turns the bytes of tokens into text as early as it is sure.

    Byte-level tokenizers split characters over tokens: a part of one is held back until the rest arrives, bytes that no
    rest can complete become U+FFFD. The end of the text is held back while it is the beginning of a stop string; once
    one is complete, the text ends before it.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stops = tuple(stops)
        self._held = ""
        self.stopped: str | None = None
        """The stop string that was found."""

    def feed(self, piece: bytes) -> str:
        """The text that `piece` makes certain; nothing more after a stop string."""
        return self._release(self._decoder.decode(piece))

    def finish(self) -> str:
        """What was still held back, at the end of the text."""
        rest = self._release(self._decoder.decode(b"", final=True))
        rest, self._held = rest + self._held, ""
        return rest

    def _release(self, text: str) -> str:
        if self.stopped is not None:
            return ""
        self._held += text
        found = [(at, -len(stop), stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            at, _, self.stopped = min(found)
            released, self._held = self._held[:at], ""
            return released
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        released, self._held = self._held[:cut], self._held[cut:]
        return released


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
