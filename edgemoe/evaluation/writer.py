"""Writing a result file while it grows: an interrupted evaluation goes on where it stopped.

`OUT.partial` holds a line with the header and then a line per finished item; a kill in the middle of a line loses that
line. `finish` writes OUT in one step and takes the partial file away. A run holds the lock of its partial file.
"""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

from edgemoe.errors import UserError
from edgemoe.evaluation.results import DAMAGE, PARTIAL, Header, Item, Results, check_item, one_line
from edgemoe.files import parse_json, whole_file


def partial_path(out: Path) -> Path:
    """Where the items of a run to `out` are until it is finished."""
    return out.with_name(out.name + PARTIAL)


class ResultWriter:
    """Takes the items of one evaluation as they are finished; a context manager.

        with ResultWriter(out, header) as writer:
            for question in questions:
                if not writer.has(task, question.id):
                    writer.add(Item(task, question.id, {"acc": 1}))
            results = writer.finish()

    What an earlier run with the very same header left is taken over. Raises `UserError` where `out` exists already
    (unless `overwrite`), cannot be written, is being written by another run, or was begun under another header; with
    `overwrite` such a beginning is dropped, too.
    """

    def __init__(self, out: str | Path, header: Header, overwrite: bool = False) -> None:
        self.out, self.header = Path(out), header
        self._path = partial_path(self.out)
        self._like: dict[str, Item] = {}
        self._items: dict[tuple[str, str], Item] = {}
        if self.out.is_dir():
            raise UserError(f"{self.out}: a folder, expected a file to write, like {self.out / 'results.json'}")
        self._refuse_existing(overwrite)
        self._file = self._opened()
        try:
            self._refuse_existing(overwrite)  # another run may have finished while this one waited for the disk
            self._resume(overwrite)
        except BaseException:
            self.close()
            raise
        self.resumed = len(self._items)
        """Items that an earlier run had finished."""

    def has(self, task: str, id: str) -> bool:
        """Whether this item is finished, now or by the run that was interrupted."""
        return (task, id) in self._items

    def __len__(self) -> int:
        """Finished items."""
        return len(self._items)

    def __iter__(self) -> Iterator[Item]:
        """The finished items, in the order in which they were."""
        return iter(self._items.values())

    def add(self, item: Item) -> None:
        """Keep a finished item, on disk before this returns. Raises ValueError for one that does not belong or is
        there already, `UserError` where the disk is full."""
        self._check(item)
        self._write(one_line(item))
        self._keep(item)

    def finish(self) -> Results:
        """Write the result file, whole or not at all. Raises ValueError while items are missing."""
        results = Results(self.header, tuple(self._items.values()))
        try:
            with whole_file(self.out) as file:
                file.write(results.as_bytes())
        except UserError as refusal:
            raise UserError(f"{refusal}: {self._kept()}") from None
        with suppress(OSError):
            self._path.unlink()
        self.close()
        return results

    def close(self) -> None:
        """Let go of the partial file; what is in it stays. May be called again."""
        self._file.close()

    def __enter__(self) -> "ResultWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _refuse_existing(self, overwrite: bool) -> None:
        if self.out.exists() and not overwrite:
            raise UserError(f"{self.out}: exists already: choose another name, or give --overwrite")

    def _opened(self) -> FileIO:
        """The partial file, locked: a new one, or what a run that is over has left."""
        try:
            file = self._path.open("ab+", buffering=0)  # a line that fails must not be tried again by close
        except OSError as error:
            raise UserError(f"{self._path}: cannot be written ({error.strerror}): name another file") from None
        try:
            with suppress(OSError):  # a network file system without locks
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise self._busy() from None
            if not self._path.exists() or not os.path.samestat(os.fstat(file.fileno()), self._path.stat()):
                raise self._busy()  # the other run finished just now, and this is the file that it took away
        except BaseException:
            file.close()
            raise
        return file

    def _busy(self) -> UserError:
        return UserError(f"{self._path}: another run is writing it: wait for that one, or choose another name")

    def _resume(self, overwrite: bool) -> None:
        self._file.seek(0)
        raw = self._file.read()
        whole, _, torn = raw.rpartition(b"\n")
        lines = whole.split(b"\n") if whole else []
        if lines and overwrite and self._other(lines[0]):
            lines, torn = [], raw
        if not lines:
            self._file.truncate(0)
            self._write(json.dumps(self.header.as_json(), allow_nan=False))
            return
        if other := self._other(lines[0]):
            raise UserError(f"{self._path}: {other}: delete it to start again, or name another file")
        if torn:
            self._file.truncate(len(whole) + 1)
        for number, line in enumerate(lines[1:], 2):
            try:
                item = Item.from_json(parse_json(line))
                self._check(item)
                self._keep(item)
            except DAMAGE:
                raise UserError(f"{self._path}: line {number} is damaged: delete the file to start again") from None

    def _other(self, line: bytes) -> str:
        """In what the header of an earlier run differs; empty where it is this one."""
        try:
            found = Header.from_json(parse_json(line)).as_json()
        except DAMAGE:
            return "not what an interrupted evaluation leaves"
        changed = _changed(found, self.header.as_json())
        return f"begun under another configuration ({changed})" if changed else ""

    def _check(self, item: Item) -> None:
        check_item(self.header, item, self._like.get(item.task, item))
        if item.key in self._items:
            raise ValueError(f"item {item.id} of {item.task} is there already")

    def _keep(self, item: Item) -> None:
        self._like.setdefault(item.task, item)
        self._items[item.key] = item

    def _write(self, line: str) -> None:
        left = line.encode() + b"\n"
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            raise UserError(f"{self._path}: cannot be written ({error.strerror}): {self._kept()}") from None

    def _kept(self) -> str:
        return f"make room and run the same command again, {len(self._items):,} finished items are kept"


def _changed(old: Any, new: Any, place: str = "") -> str:
    """The first field in which two headers differ, with both values: `config.policy.lam was 0.2, is now 0.3`."""
    if isinstance(old, dict) and isinstance(new, dict):
        found = {name: _changed(old.get(name), new.get(name), f"{place}.{name}".strip(".")) for name in {**old, **new}}
        # The hash follows from the config, and says less.
        return next((text for name, text in found.items() if text and name != "config_hash"), "")
    return "" if old == new else f"{place} was {_shown(old)}, is now {_shown(new)}"


def _shown(value: Any) -> str:
    text = "absent" if value is None else str(value)
    return text if len(text) <= 24 else f"{text[:21]}..."
