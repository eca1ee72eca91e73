"""A line at the bottom of the terminal that stays while text scrolls above it.

The terminal itself keeps them apart (a scrolling region), so text may come in any pieces and be wrapped by it. Text
goes to standard output, the line to standard error; where that is no terminal, there is no line.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

_SAVE, _RESTORE, _DOWN, _UP, _CLEAR = "\0337", "\0338", "\033D", "\033[A", "\033[2K"
_DIM, _PLAIN = "\033[2m", "\033[0m"
_LEAST_ROWS = 4


class StatusLine:
    """Write text with `write`, and the line with `show`; from any thread."""

    def __init__(self, quiet: bool = False) -> None:
        self._active = not quiet and sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._dim = (_DIM, _PLAIN) if not os.environ.get("NO_COLOR") else ("", "")
        self._lock = threading.RLock()
        self._rows = 0  # of the terminal whose last one is reserved; 0 for none

    @property
    def active(self) -> bool:
        return self._active

    def write(self, text: str) -> None:
        """Text for standard output, at once."""
        with self._lock:
            sys.stdout.write(text)
            sys.stdout.flush()

    def show(self, text: str) -> None:
        """Replace the line; of its parts (between ` · `) those that do not fit are left out, the last ones first."""
        if not self._active:
            return
        size = shutil.get_terminal_size()
        with self._lock:
            if size.lines != self._rows:
                self._reserve(size.lines)
            if self._rows:
                on, off = self._dim
                shown = _fitting(text, size.columns - 1)
                self._send(f"{_SAVE}\033[{self._rows};1H{_CLEAR}{on}{shown}{off}{_RESTORE}")

    def _reserve(self, rows: int) -> None:
        """Take the last row from what scrolls; the cursor keeps its place, a row higher if it stood there."""
        if rows < _LEAST_ROWS:
            self._release()
            return
        whole = f"{_SAVE}\033[r{_RESTORE}" if self._rows else ""
        self._send(f"{whole}{_DOWN}{_SAVE}\033[1;{rows - 1}r{_RESTORE}{_UP}")
        self._rows = rows

    def _release(self) -> None:
        if self._rows:
            self._send(f"{_SAVE}\033[r\033[{self._rows};1H{_CLEAR}{_RESTORE}")
        self._rows = 0

    def _send(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()

    def __enter__(self) -> StatusLine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._release()
            self._active = False


def _fitting(text: str, columns: int) -> str:
    if len(text) <= columns:
        return text
    return text[: max(text.rfind(" · ", 0, columns + len(" · ")), 0)] or text[:columns]
