"""What a long evaluation has finished so far, a line of JSON for each, so that an interrupted one goes on.

The first line is a header: all that the finished lines depend on. A line is on disk before `add` returns; a kill in the
middle of one loses that one. A run holds the lock of its journal.
"""

import fcntl
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

from edgemoe.errors import UserError
from edgemoe.files import parse_json


class Journal:
    """The lines of one run; a context manager, which keeps them. `resume` has to be called first.

    Raises `UserError` where `path` cannot be written, or is being written by another run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = self._opened()
        self._ours = False
        self.lines = 0
        """Finished ones; the header does not count."""

    def resume(self, header: Mapping[str, Any], overwrite: bool = False) -> list[bytes]:
        """The finished lines of an earlier run with the very same header, which JSON must be able to hold.

        Raises `UserError` for a file that was begun under another header; with `overwrite` it is begun afresh.
        """
        self._file.seek(0)
        raw = self._file.read()
        whole, _, torn = raw.rpartition(b"\n")
        lines = whole.split(b"\n") if whole else []
        if lines and overwrite and _other(lines[0], header):
            lines, torn = [], raw
        if lines and (other := _other(lines[0], header)):
            raise UserError(f"{self.path}: {other}: delete it to start again, or name another file")
        self._ours = True
        if not lines:
            self._file.truncate(0)
            self._write(header)
            return []
        if torn:
            self._file.truncate(len(whole) + 1)
        self.lines = len(lines) - 1
        return lines[1:]

    def add(self, line: Any) -> None:
        """Keep one more. Raises `UserError` where the disk is full."""
        self._write(line)
        self.lines += 1

    def damaged(self, at: int) -> UserError:
        """What to raise for the line at this index of what `resume` gave."""
        return UserError(f"{self.path}: line {at + 2} is damaged: delete the file to start again")

    def kept(self) -> str:
        """What to do when the disk is full."""
        return f"make room and run the same command again, {self.lines:,} finished items are kept"

    def remove(self) -> None:
        """Take the file away: what it kept is elsewhere."""
        with suppress(OSError):
            self.path.unlink()
        self._file.close()

    def close(self) -> None:
        """Let go of the file; the finished lines in it stay, and without any it goes. May be called again."""
        if self._ours and not self.lines and not self._file.closed:
            with suppress(OSError):
                self.path.unlink()
        self._file.close()

    def __enter__(self) -> "Journal":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _opened(self) -> FileIO:
        """The file, locked: a new one, or what a run that is over has left."""
        try:
            file = self.path.open("ab+", buffering=0)  # a line that fails must not be tried again by close
        except OSError as error:
            raise UserError(f"{self.path}: cannot be written ({error.strerror}): name another file") from None
        try:
            with suppress(OSError):  # a network file system without locks
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise self._busy() from None
            if not self.path.exists() or not os.path.samestat(os.fstat(file.fileno()), self.path.stat()):
                raise self._busy()  # the other run finished just now, and this is the file that it took away
        except BaseException:
            file.close()
            raise
        return file

    def _busy(self) -> UserError:
        return UserError(f"{self.path}: another run is writing it: wait for that one, or choose another name")

    def _write(self, line: Any) -> None:
        left = json.dumps(line, allow_nan=False).encode() + b"\n"
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            raise UserError(f"{self.path}: cannot be written ({error.strerror}): {self.kept()}") from None


def _other(line: bytes, header: Mapping[str, Any]) -> str:
    """In what the header of an earlier run differs; empty where it is this one."""
    try:
        found = parse_json(line)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or found.get("format") != header["format"]:
        return "not what an interrupted evaluation leaves"
    changed = _changed(found, json.loads(json.dumps(header)))
    return f"begun under another configuration ({changed})" if changed else ""


def _changed(old: Any, new: Any, place: str = "") -> str:
    """The first field in which two headers differ, with both values: `config.policy.lam was 0.2, is now 0.3`."""
    if isinstance(old, dict) and isinstance(new, dict):
        names = {**old, **new}
        found = {name: _changed(old.get(name), new.get(name), f"{place}.{name}".strip(".")) for name in names}
        # The hash follows from the config, and says less.
        said = [text for name, text in found.items() if text and name != "config_hash"]
        return said[0] if said else found.get("config_hash", "")
    return "" if old == new else f"{place} was {_shown(old)}, is now {_shown(new)}"


def _shown(value: Any) -> str:
    text = "absent" if value is None or value == "" else str(value)
    return text if len(text) <= 24 else f"{text[:21]}..."
