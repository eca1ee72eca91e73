"""Files that appear whole or not at all, and JSON that is read strictly, with every mistake told in one line."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from edgemoe.errors import UserError


@contextmanager
def whole_file(path: str | Path) -> Iterator[IO[bytes]]:
    """A file to write into. `path` is it once the block has ended and the disk holds every byte; until then, and for
    good if the block raises or the disk is full, `path` is what it was.

    Raises `UserError` where it cannot be written.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror or error})") from None
    finally:
        with suppress(OSError):
            temporary.unlink()


def write_json(path: str | Path, said: Any, indent: int | None = None) -> None:
    """Write `said` as UTF-8 JSON, whole or not at all. Raises ValueError for a number that JSON lacks, and `UserError`
    where it cannot be written."""
    text = json.dumps(said, indent=indent, ensure_ascii=False, allow_nan=False) + "\n"
    with whole_file(path) as file:
        file.write(text.encode())


def read_json(path: str | Path, what: str, again: str) -> Any:
    """The content of a JSON file. what: as a message calls it, "result file". again: what to do about a file that is
    missing or damaged. Raises `UserError`."""
    path = Path(path)
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{path}: no such {what}: {again}") from None
    except IsADirectoryError:
        raise UserError(f"{path}: a folder, expected a {what}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None
    try:
        return parse_json(raw)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not a {what} (not JSON: {reason_of(error)}): {again}") from None


def parse_json(raw: bytes) -> Any:
    """JSON, strictly: UTF-8, no NaN, no infinity. Raises ValueError or RecursionError."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not a number")

    return json.loads(raw.decode(), parse_constant=refuse)


def reason_of(error: Exception) -> str:
    """What a reader's exception says, short and in one line, to be put into a `UserError`."""
    if isinstance(error, KeyError):
        return f"no {error.args[0]}"
    first = str(error).splitlines()[0] if str(error) else type(error).__name__
    return first.replace("__init__() ", "")[:120]
