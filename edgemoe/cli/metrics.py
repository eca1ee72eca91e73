"""Figures per token as they come (--metrics): a line of JSON each, in a file, or in a pipe that somebody reads."""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import IO, Any

_OPTION = "--metrics"
_DESCRIPTOR = re.compile(r"(?:/dev|/proc/self)/fd/(\d+)")
_STANDARD = {"/dev/stdin": 0, "/dev/stdout": 1, "/dev/stderr": 2}


class Metrics:
    """The lines, and where they go: `check` before the work, then `add`, then `close`.

    A file is made, or an old one emptied, with the first line: what is refused before it leaves everything as it was.
    What is no file, /dev/stdout or a named pipe, is written to as it is.
    """

    def __init__(self, path: Path, overwrite: bool) -> None:
        self.path, self._overwrite = path, overwrite
        self._given = _given(path)
        self._out: IO[str] | None = None

    def check(self) -> None:
        """Raise `UserError` where lines cannot go to, or would replace what may not be replaced."""
        from edgemoe.errors import UserError

        if self.path.is_dir():
            raise UserError(f"{_OPTION} {self.path}: a folder, expected a file's name")
        if self._given is not None:
            try:
                os.fstat(self._given)
            except OSError as error:
                raise self._failure(error) from None
            return
        if os.path.lexists(self.path) and not self._special():
            self._check_old()
        elif not self.path.parent.is_dir():
            raise UserError(f"{_OPTION} {self.path}: no folder {self.path.parent}: make it first")
        elif not self._special():
            self._check_folder()

    def _special(self) -> bool:
        return self.path.exists() and not self.path.is_file()

    def _check_old(self) -> None:
        from edgemoe.errors import UserError

        if not self._overwrite:
            raise UserError(f"{_OPTION} {self.path}: exists already: choose another name, or give --overwrite")
        if self.path.exists() and not os.access(self.path, os.W_OK):
            raise UserError(f"{_OPTION} {self.path}: cannot be written (it may only be read): name another")

    def _check_folder(self) -> None:
        from tempfile import TemporaryFile

        try:
            with TemporaryFile(dir=self.path.parent):
                pass
        except OSError as error:
            raise self._failure(error) from None

    def add(self, record: dict[str, Any]) -> None:
        """A line, at once. Raises `UserError` where it cannot be written, BrokenPipeError where its reader has gone."""
        try:
            self._out = self._out or self._open()
            self._out.write(json.dumps(record) + "\n")
            self._out.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise self._failure(error) from None

    def _open(self) -> IO[str]:
        if self._given is not None:
            # Not opened again: that would start at the beginning of the file that the descriptor is in the middle of.
            return os.fdopen(os.dup(self._given), "w", encoding="utf-8")
        mode = "w" if self._overwrite or self._special() else "x"
        return self.path.open(mode, encoding="utf-8")

    def close(self) -> None:
        """Every line has been written: what is left in the buffer is what could not be."""
        if self._out is not None:
            with suppress(OSError):
                self._out.close()

    def _failure(self, error: OSError) -> Exception:
        from edgemoe.errors import UserError

        reason = "it exists by now" if isinstance(error, FileExistsError) else error.strerror or error
        return UserError(f"{_OPTION} {self.path}: cannot be written ({reason}): name another")


def _given(path: Path) -> int | None:
    """The descriptor that the path is a name of, if it is one."""
    named = _DESCRIPTOR.fullmatch(str(path))
    return int(named[1]) if named else _STANDARD.get(str(path))
