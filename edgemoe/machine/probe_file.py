"""The bytes that the disk probe reads: a model's own, or a temporary file of noise.

The temporary file has no name (O_TMPFILE, or its name is removed as soon as it exists): the kernel frees it when the
process ends, however it ends, kill -9 included. Its content is incompressible and nowhere repeated, so that no file
system can store less than it is; and both kinds are refused if they have holes, which read without the disk.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from edgemoe.errors import UserError
from edgemoe.progress import Advance, no_progress
from edgemoe.units import format_bytes

CHUNK = 1 << 24
# Room that stays free on the disk: file systems that are full are slow, and other programs need some.
MARGIN = 1 << 26
_FULL_ENOUGH = 0.98


@contextmanager
def temporary_file(directory: Path, size: int, advance: Advance = no_progress) -> Iterator[int]:
    """A descriptor of `size` bytes of noise on the disk under `directory`, written out and out of the page cache.

    Raises `UserError` for a directory that is missing or cannot be written, and for a disk without the room.
    """
    descriptor = _nameless(directory)
    try:
        _check_space(directory, size)
        _fill(descriptor, size, directory, advance)
        check_not_sparse(descriptor, f"the temporary file in {directory}")
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def model_file(path: Path) -> Iterator[int]:
    """A descriptor of a model's file, for reading. Raises `UserError` if it cannot be read or has holes."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    try:
        check_not_sparse(descriptor, str(path))
        yield descriptor
    finally:
        os.close(descriptor)


def n_pieces(size: int) -> int:
    """How often a temporary file of `size` bytes calls `advance`."""
    return -(-size // CHUNK)


def check_not_sparse(descriptor: int, name: str) -> None:
    """Raise `UserError` for a file with holes, or compressed: reading it would not read its size from the disk."""
    status = os.fstat(descriptor)
    allocated = 512 * status.st_blocks
    if allocated < _FULL_ENOUGH * status.st_size:
        raise UserError(
            f"{name} is sparse or compressed: {format_bytes(allocated)} on the disk for {format_bytes(status.st_size)},"
            " so reading it says nothing about the disk; give a file that is wholly there"
        )


def _nameless(directory: Path) -> int:
    try:
        return os.open(directory, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    except OSError:  # no such directory or right, or a file system without O_TMPFILE
        pass
    try:
        descriptor, name = tempfile.mkstemp(dir=directory, prefix=".edgemoe-probe-")
    except OSError as error:
        what = "give --dir a directory that you can write to, or --model FILE to read a model's own bytes"
        raise UserError(f"cannot write in {directory} ({error.strerror or error}): {what}") from None
    Path(name).unlink()
    return descriptor


def _check_space(directory: Path, size: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < size + MARGIN:
        raise UserError(
            f"{format_bytes(size + MARGIN)} are needed under {directory} and {format_bytes(free)} are free: make room,"
            " give --dir another disk, or --model FILE to read a model's own bytes"
        )


def _fill(descriptor: int, size: int, directory: Path, advance: Advance) -> None:
    generator = np.random.Generator(np.random.SFC64())
    try:
        for start in range(0, size, CHUNK):
            length = min(CHUNK, size - start)
            view = memoryview(generator.bytes(length))
            while view:
                view = view[os.write(descriptor, view) :]
            # In step with the disk: a gigabyte of dirty pages would be written back all at once, uninterruptibly.
            os.fdatasync(descriptor)
            advance(1)
        os.fsync(descriptor)
    except OSError as error:
        raise UserError(
            f"writing {format_bytes(size)} under {directory} failed ({error.strerror or error}): make room, or give"
            " --dir another disk"
        ) from None
