"""At which alignment does O_DIRECT read a file? As statx(2) tells, else the disk's logical block."""

import ctypes
import os
import struct

_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
_STATX_BYTES = 256
_DIO_FIELDS_AT = 152


def declared_alignment(descriptor: int) -> tuple[int, int] | None:
    """(memory, offset and length) in bytes, from the DIO fields of statx; (0, 0) if the file refuses O_DIRECT.

    None where the kernel (before 6.1), the C library or the file system does not tell.
    """
    statx = getattr(ctypes.CDLL(None, use_errno=True), "statx", None)
    if statx is None:
        return None
    buffer = ctypes.create_string_buffer(_STATX_BYTES)
    if statx(descriptor, b"", _AT_EMPTY_PATH, ctypes.c_uint(_STATX_DIOALIGN), buffer) != 0:
        return None
    (mask,) = struct.unpack_from("I", buffer)
    if not mask & _STATX_DIOALIGN:
        return None
    memory, offset = struct.unpack_from("II", buffer, _DIO_FIELDS_AT)
    return memory, offset


def open_direct(descriptor: int, logical_block: int) -> tuple[int, int] | None:
    """Another descriptor of the same file, opened with O_DIRECT, and the alignment of offsets and lengths.

    Works for files that have no name any more. None where the file system refuses O_DIRECT.
    """
    declared = declared_alignment(descriptor)
    if not hasattr(os, "O_DIRECT") or declared == (0, 0):
        return None
    try:
        direct = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return None
    return direct, declared[1] if declared else logical_block
