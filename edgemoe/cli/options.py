"""Options that several commands read the same way, and what they refuse before the work begins."""

from pathlib import Path
from tempfile import TemporaryFile

from edgemoe.errors import UserError


def layer_option(text: str | None) -> int | str | None:
    """`--layer`: a layer's number, "all", or None where the option was left out."""
    from edgemoe.units import parse_count, shown

    if text is None or text == "all":
        return text
    number = parse_count(text)
    if number is None:
        raise UserError(f"--layer {shown(text)}: expected a layer number or all")
    return number


def count_option(name: str, text: str, what: str) -> int:
    """A whole number from 0; `what` is what it counts."""
    from edgemoe.units import parse_count, shown

    number = parse_count(text)
    if number is None:
        raise UserError(f"{name} {shown(text)}: expected {what}")
    return number


def budget_option(text: str | None) -> int | str | None:
    """`--budget`: a number of prefetches, "unbounded", or None where the option was left out."""
    if text is None or text == "unbounded":
        return text
    return count_option("--budget", text, "a number of prefetches or unbounded")


def writable_file(option: str, path: Path | None, endings: tuple[str, ...] = ()) -> None:
    """Make the folder of a file that will be written, and refuse, before the work, what could not be written after it.

    `endings` are the endings that the file's name may have, if not any.
    """
    if path is None:
        return
    if path.is_dir():
        raise UserError(f"{option} {path}: a folder, expected a file's name")
    if endings and path.suffix.lower() not in endings:
        raise UserError(f"{option} {path}: expected a name ending in {', '.join(endings)}")
    existed = path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
        if not existed:
            path.unlink()
    except OSError as error:
        raise UserError(f"{option} {path}: cannot be written ({_reason(error)}): name another") from None


def writable_folder(option: str, path: Path | None) -> None:
    """Make a folder that will be written into, and refuse, before the work, one that cannot be."""
    if path is None:
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise UserError(f"{option} {path}: cannot be written into ({_reason(error)}): name another folder") from None


def _reason(error: OSError) -> str:
    blocked = isinstance(error, FileExistsError | NotADirectoryError)
    return "a file is where the folder would be" if blocked else error.strerror or str(error)
