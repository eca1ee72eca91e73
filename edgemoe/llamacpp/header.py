"""The header of a GGUF file, read by ggml's own parser: the one whose verdict on a file counts.

gguf-py needs seconds for a vocabulary of 152k tokens; libggml-base needs milliseconds and is in the wheel anyway.
"""

import ctypes
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from edgemoe.errors import UserError
from edgemoe.llamacpp.libraries import ggml_base
from edgemoe.units import format_bytes

Scalar = int | float | bool | str
Value = Scalar | list[int] | list[float] | list[bool]

# Longer arrays are vocabularies (scores, token types): nobody wants them from a header, only their length.
MAX_ARRAY = 4096

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: ("u8", ctypes.c_uint8),
    1: ("i8", ctypes.c_int8),
    2: ("u16", ctypes.c_uint16),
    3: ("i16", ctypes.c_int16),
    4: ("u32", ctypes.c_uint32),
    5: ("i32", ctypes.c_int32),
    6: ("f32", ctypes.c_float),
    7: ("bool", ctypes.c_bool),
    10: ("u64", ctypes.c_uint64),
    11: ("i64", ctypes.c_int64),
    12: ("f64", ctypes.c_double),
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of the file. `ne` is ggml's order (row length first), trailing ones dropped."""

    name: str
    type: str  # F32, Q8_0, Q4_K, …
    ne: tuple[int, ...]
    offset: int  # in the file
    nbytes: int


@dataclass(frozen=True)
class Header:
    """What a GGUF file says about itself. Arrays longer than `MAX_ARRAY`, and of strings, are in `lengths` only."""

    path: Path
    version: int
    alignment: int
    values: dict[str, Value]
    lengths: dict[str, int]
    tensors: tuple[TensorEntry, ...]
    data_offset: int
    file_bytes: int

    @property
    def promised_bytes(self) -> int:
        """Where the last tensor ends: a shorter file is truncated."""
        return max((tensor.offset + tensor.nbytes for tensor in self.tensors), default=self.data_offset)


def read_header(path: str | Path) -> Header:
    """Read the header of one GGUF file (of one shard, if it is split).

    Raises `UserError`, one line, for a file that is missing, unreadable, no GGUF, corrupt, or shorter than its header
    says. llama.cpp's own complaint goes into that line and not to stderr.
    """
    path = Path(path)
    file_bytes = _check_is_gguf(path)
    library = _gguf()
    with _captured_log() as complaints:
        context = library.gguf_init_from_file(str(path).encode(), _InitParams(True, None))
    if not context:
        raise UserError(f"{path}: not a readable GGUF file ({_reason(complaints)}): download or convert it again")
    try:
        header = _copy(library, context, path, file_bytes)
    finally:
        library.gguf_free(context)
    if header.promised_bytes > file_bytes:
        raise UserError(
            f"{path}: truncated: {format_bytes(file_bytes)} of the {format_bytes(header.promised_bytes)} that its "
            f"header promises ({header.promised_bytes - file_bytes:,} bytes missing): download it again"
        )
    return header


def header_fingerprint(path: Path) -> str:
    """SHA-256 of a GGUF file up to its tensor data: hyperparameters, vocabulary, names, types and places of tensors."""
    with path.open("rb") as file:
        return hashlib.sha256(file.read(read_header(path).data_offset)).hexdigest()


def _check_is_gguf(path: Path) -> int:
    """The file's size; the common mistakes get a plainer line than the parser's."""
    try:
        with path.open("rb") as file:
            magic = file.read(4)
            file_bytes = file.seek(0, 2)
    except IsADirectoryError:
        raise UserError(f"{path}: a directory, expected a GGUF file") from None
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    if magic != b"GGUF":
        found = "an empty file" if not magic else f"a file that starts with {magic!r}"
        raise UserError(f"{path}: {found}, expected a GGUF file (they start with b'GGUF')")
    return file_bytes


def _copy(library: ctypes.CDLL, context: int, path: Path, file_bytes: int) -> Header:
    values: dict[str, Value] = {}
    lengths: dict[str, int] = {}
    for index in range(library.gguf_get_n_kv(context)):
        key = library.gguf_get_key(context, index).decode(errors="replace")
        kind = library.gguf_get_kv_type(context, index)
        if kind == _STRING:
            values[key] = library.gguf_get_val_str(context, index).decode(errors="replace")
        elif kind == _ARRAY:
            lengths[key] = library.gguf_get_arr_n(context, index)
            element = library.gguf_get_arr_type(context, index)
            if element in _SCALARS and lengths[key] <= MAX_ARRAY:
                values[key] = _array(library, context, index, element, lengths[key])
        else:
            values[key] = getattr(library, f"gguf_get_val_{_SCALARS[kind][0]}")(context, index)
    data_offset = library.gguf_get_data_offset(context)
    return Header(
        path=path,
        version=library.gguf_get_version(context),
        alignment=library.gguf_get_alignment(context),
        values=values,
        lengths=lengths,
        tensors=tuple(_tensor(library, context, i, data_offset) for i in range(library.gguf_get_n_tensors(context))),
        data_offset=data_offset,
        file_bytes=file_bytes,
    )


def _array(library: ctypes.CDLL, context: int, index: int, element: int, length: int) -> list[int]:
    kind: Any = ctypes.c_int8 if element == _BOOL else _SCALARS[element][1]
    return list((kind * length).from_address(library.gguf_get_arr_data(context, index))) if length else []


def _tensor(library: ctypes.CDLL, context: int, index: int, data_offset: int) -> TensorEntry:
    ne = list(library.gguf_get_tensor_ne(context, index)[:4])
    while len(ne) > 1 and ne[-1] == 1:
        ne.pop()
    return TensorEntry(
        name=library.gguf_get_tensor_name(context, index).decode(errors="replace"),
        type=library.ggml_type_name(library.gguf_get_tensor_type(context, index)).decode().upper(),
        ne=tuple(ne),
        offset=data_offset + library.gguf_get_tensor_offset(context, index),
        nbytes=library.gguf_get_tensor_size(context, index),
    )


class _InitParams(ctypes.Structure):
    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))


@cache
def _gguf() -> ctypes.CDLL:
    """libggml-base with the signatures of gguf.h on the functions used here."""
    library = ggml_base()
    pointer, number, text = ctypes.c_void_p, ctypes.c_int64, ctypes.c_char_p
    library.gguf_init_from_file.argtypes, library.gguf_init_from_file.restype = [text, _InitParams], pointer
    library.gguf_free.argtypes, library.gguf_free.restype = [pointer], None
    library.ggml_type_name.argtypes, library.ggml_type_name.restype = [ctypes.c_int], text
    of_context = {
        "version": ctypes.c_uint32,
        "alignment": ctypes.c_size_t,
        "data_offset": ctypes.c_size_t,
        "n_kv": number,
        "n_tensors": number,
    }
    of_index = {
        "key": text,
        "kv_type": ctypes.c_int,
        "arr_type": ctypes.c_int,
        "arr_n": ctypes.c_size_t,
        "arr_data": pointer,
        "val_str": text,
        "tensor_name": text,
        "tensor_ne": ctypes.POINTER(number),
        "tensor_type": ctypes.c_int,
        "tensor_offset": ctypes.c_size_t,
        "tensor_size": ctypes.c_size_t,
        **{f"val_{name}": kind for name, kind in _SCALARS.values()},
    }
    for name, result in (of_context | of_index).items():
        function = getattr(library, f"gguf_get_{name}")
        function.argtypes, function.restype = [pointer] if name in of_context else [pointer, number], result
    return library


@contextmanager
def _captured_log() -> Iterator[list[str]]:
    """Collect what ggml logs instead of printing it, and give its log back afterwards."""
    library = ggml_base()
    lines: list[str] = []
    callback_type = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
    collect = callback_type(lambda _level, text, _data: lines.append((text or b"").decode(errors="replace")))
    library.ggml_log_get.argtypes, library.ggml_log_get.restype = [ctypes.c_void_p, ctypes.c_void_p], None
    library.ggml_log_set.argtypes, library.ggml_log_set.restype = [ctypes.c_void_p, ctypes.c_void_p], None
    before, before_data = ctypes.c_void_p(), ctypes.c_void_p()
    library.ggml_log_get(ctypes.byref(before), ctypes.byref(before_data))
    library.ggml_log_set(ctypes.cast(collect, ctypes.c_void_p), None)
    try:
        yield lines
    finally:
        library.ggml_log_set(before, before_data)


def _reason(complaints: list[str]) -> str:
    """The parser's first complaint without the name of the C function that made it."""
    first = next((line for line in "".join(complaints).splitlines() if line.strip()), "no reason given")
    return first.split(": ", 1)[-1].strip() if first.startswith("gguf_") else first.strip()
