"""Where a trace is to go: refuse what would lose something, before any work is done."""

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edgemoe.errors import UserError
from edgemoe.tracing.spool import Spool, is_being_written, spool_path


def claim(out: Path, overwrite: bool, inputs: Sequence[Path]) -> None:
    """Raise `UserError` unless a trace can be written to `out`: a writable folder, nothing there that may not go.

    `inputs` are what the run reads: the files of the model and the texts. None of them is ever replaced.
    """
    if out.is_dir():
        raise UserError(f"{out}: a folder, expected a file to write, like {out / 'trace.npz'}")
    for read in inputs:
        if out.exists() and read.exists() and out.samefile(read):
            raise UserError(f"{out}: is what the trace would be made of: choose another name for it")
    if out.exists() and not overwrite:
        raise UserError(f"{out}: exists already: choose another name, or give --overwrite")
    spool = spool_path(out)
    _refuse_if_written(spool)
    if spool.exists() and not overwrite:
        raise UserError(f"{spool}: what an interrupted run captured: read it or move it away, or give --overwrite")
    if not out.parent.is_dir():
        raise UserError(f"{out}: no folder {out.parent}: make it first")
    try:
        with tempfile.TemporaryFile(dir=out.parent):
            pass
    except OSError as error:
        raise UserError(f"{out}: the folder {out.parent} cannot be written to ({error.strerror})") from None


def prepare(
    out: Path, overwrite: bool, layers: Sequence[int], widths: Mapping[str, int], meta: dict[str, Any]
) -> Spool:
    """Make the spool of a trace to `out`, in place of one that an earlier run left if `overwrite`.

    Raises `UserError` if it cannot be written, and if another run has begun to write it since `claim`.
    """
    path = spool_path(out)
    try:
        if overwrite and path.is_dir():
            _refuse_if_written(path)
            shutil.rmtree(path)
        return Spool.create(path, layers, widths, meta)
    except OSError as error:
        _refuse_if_written(path)
        raise UserError(f"{path}: cannot be written ({error.strerror})") from None


def _refuse_if_written(spool: Path) -> None:
    if is_being_written(spool):
        raise UserError(f"{spool}: another run is writing it: wait for that one, or choose another name")
