"""Reading past the page cache: does O_DIRECT work in a directory, and at which alignment?"""

import mmap
import os
import tempfile
from pathlib import Path

ALIGNMENTS = (512, 4096)
_PROBE_BYTES = 64 * 1024


class DirectIoError(Exception):
    """Why O_DIRECT does not work there, in one line."""


def direct_io_alignment(directory: Path) -> int:
    """The smallest alignment of offset and length at which O_DIRECT reads there: writes a file and reads it back.

    Raises `DirectIoError` where the file system refuses, returns other bytes, or nothing can be written.
    """
    if not hasattr(os, "O_DIRECT"):
        raise DirectIoError("this operating system has no O_DIRECT")
    content = os.urandom(_PROBE_BYTES)
    try:
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".edgemoe-probe-") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            descriptor = os.open(file.name, os.O_RDONLY | os.O_DIRECT)
            try:
                return _smallest_alignment(descriptor, content)
            finally:
                os.close(descriptor)
    except OSError as error:
        raise DirectIoError(error.strerror or str(error)) from None


def _smallest_alignment(descriptor: int, content: bytes) -> int:
    refused: OSError | None = None
    for alignment in ALIGNMENTS:
        view = memoryview(mmap.mmap(-1, 2 * ALIGNMENTS[-1]))[: 2 * alignment]  # page-aligned
        try:
            count = os.preadv(descriptor, [view], alignment)
        except OSError as error:
            refused = error
            continue
        if count == 2 * alignment and view == content[alignment : 3 * alignment]:
            return alignment
        raise DirectIoError("reads return other bytes than were written")
    raise DirectIoError(f"reads are refused ({refused.strerror if refused else 'no reason given'})")
