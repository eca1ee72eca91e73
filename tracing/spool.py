"""The spool: what a running trace has captured so far, on disk, readable whatever ends the run.

`OUT.partial/` holds `meta.json`, one line per window in `windows.jsonl`, and raw arrays that only grow: `tokens.i32`
and, for each member of the trace file and each MoE layer, `<member>.<row>.raw`. Only whole tokens count: a kill in the
middle of a write loses that write. `assemble` streams it into the trace file, so memory does not grow with the trace.

A run that writes holds the lock of its spool, and reaches its files through the folder's descriptor: whatever becomes
of the name `OUT.partial` meanwhile, two runs never write into one spool.
"""

import json
import os
import shutil
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from edgemoe.errors import UserError

SUFFIX = ".partial"
MEMBER_TYPES = {
    "experts": np.int16,
    "executed": np.int16,
    "scores": np.float32,
    "pregate": np.float32,
    "weights": np.float32,
}
_PIECE = 1 << 22  # bytes read, and handed to the compressor, at once
_TOKENS, _WINDOWS, _META, _LOCK = "tokens.i32", "windows.jsonl", "meta.json", "lock"


def spool_path(out: Path) -> Path:
    """Where a trace to `out` is spooled."""
    return out.with_name(out.name + SUFFIX)


def is_being_written(path: Path) -> bool:
    """Whether a run holds the lock of the spool at `path`. The lock goes with the run, however that ends."""
    if not path.is_dir():
        return False
    import fcntl  # not on Windows, where traces can be read

    try:
        with (path / _LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


@dataclass(frozen=True)
class Spool:
    """A directory of growing arrays; a context manager. `widths` are elements per token and layer of each member."""

    path: Path
    layers: tuple[int, ...]
    widths: Mapping[str, int]
    meta: dict[str, Any]
    descriptors: tuple[int, ...]  # of the folder and, where this run writes, of its lock

    @classmethod
    def create(cls, path: Path, layers: Sequence[int], widths: Mapping[str, int], meta: dict[str, Any]) -> "Spool":
        """Make the directory, which must not exist, and lock it."""
        import fcntl

        path.mkdir()
        descriptors: list[int] = []
        try:
            descriptors.append(os.open(path, os.O_RDONLY))
            descriptors.append(os.open(_LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=descriptors[0]))
            with suppress(OSError):  # a network file system without locks
                fcntl.flock(descriptors[1], fcntl.LOCK_EX)
            text = json.dumps({"layers": list(layers), "widths": dict(widths), "meta": meta})
            (path / (_META + ".tmp")).write_text(text)
            (path / (_META + ".tmp")).rename(path / _META)
        except BaseException:
            for descriptor in descriptors:
                os.close(descriptor)
            shutil.rmtree(path)
            raise
        return cls(path, tuple(layers), dict(widths), meta, tuple(descriptors))

    @classmethod
    def open(cls, path: Path) -> "Spool":
        """The spool that a run left, or is writing, to be read; a `UserError` if there is none."""
        if not (path / _META).exists():
            raise UserError(
                f"{path}: a folder, expected a trace file, or the folder OUT{SUFFIX} that an interrupted run left"
            )
        try:
            said = json.loads((path / _META).read_text())
            layers, widths, meta = said["layers"], said["widths"], said["meta"]
            sound = isinstance(meta, dict) and bool(layers) and all(type(layer) is int for layer in layers)
            sound &= "experts" in widths and all(
                name in MEMBER_TYPES and type(width) is int and width > 0 for name, width in widths.items()
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            sound = False
        except OSError as error:
            raise UserError(f"{path / _META}: cannot be read ({error.strerror})") from None
        if not sound:
            raise UserError(f"{path}: {_META} in it is damaged: what it holds cannot be read")
        return cls(path, tuple(layers), widths, meta, (os.open(path, os.O_RDONLY),))

    def __enter__(self) -> "Spool":
        return self

    def __exit__(self, *_: object) -> None:
        """Let go of the folder and its lock; what is in it stays."""
        for descriptor in self.descriptors:
            os.close(descriptor)

    def begin_window(self, domain: str) -> None:
        """The next token starts a window of `domain`."""
        self._append(_WINDOWS, json.dumps({"start": self._rows(_TOKENS, 4), "domain": domain}).encode() + b"\n")

    def append(self, tokens: np.ndarray, members: Mapping[str, Sequence[np.ndarray]]) -> None:
        """Add T tokens: ids [T], and per member one array [T, width] per layer."""
        for name, arrays in members.items():
            for row, array in enumerate(arrays):
                assert array.shape == (len(tokens), self.widths[name])
                self._append(f"{name}.{row}.raw", np.ascontiguousarray(array, MEMBER_TYPES[name]))
        self._append(_TOKENS, np.ascontiguousarray(tokens, np.int32))

    def _append(self, name: str, data: Any) -> None:
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666, dir_fd=self.descriptors[0])
        try:
            rest = memoryview(data).cast("B")
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        finally:
            os.close(descriptor)

    def _read(self, name: str) -> IO[bytes]:
        return os.fdopen(os.open(name, os.O_RDONLY, dir_fd=self.descriptors[0]), "rb")

    def _rows(self, name: str, row_bytes: int) -> int:
        try:
            return os.stat(name, dir_fd=self.descriptors[0]).st_size // row_bytes
        except FileNotFoundError:
            return 0

    def _row_bytes(self, name: str) -> int:
        return self.widths[name] * np.dtype(MEMBER_TYPES[name]).itemsize

    @property
    def n_tokens(self) -> int:
        """Whole tokens: those that every array holds."""
        counts = [self._rows(_TOKENS, 4)]
        for name in self.widths:
            counts += [self._rows(f"{name}.{row}.raw", self._row_bytes(name)) for row in range(len(self.layers))]
        return min(counts)

    def windows(self, n_tokens: int) -> tuple[list[int], list[str]]:
        """First token and domain of each window that starts within `n_tokens`."""
        if not self._rows(_WINDOWS, 1):
            return [], []
        with self._read(_WINDOWS) as file:
            lines = file.read().split(b"\n")[:-1]
        try:
            starts = [(window["start"], window["domain"]) for window in map(json.loads, lines)]
            kept = [(start, domain) for start, domain in starts if start < n_tokens]
            return [int(start) for start, _ in kept], [domain for _, domain in kept]
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{self.path}: {_WINDOWS} in it is damaged: what it holds cannot be read") from None

    def tokens(self, n_tokens: int) -> np.ndarray:  # [T] int32
        with self._read(_TOKENS) as file:
            return np.frombuffer(file.read(4 * n_tokens), np.int32)

    def pieces(self, name: str, row: int, n_tokens: int) -> Iterator[np.ndarray]:
        """One layer of a member, in arrays [≤ T, width] of a few megabytes: the whole may not fit in memory."""
        row_bytes, left = self._row_bytes(name), n_tokens
        with self._read(f"{name}.{row}.raw") as file:
            while left:
                count = min(left, max(1, _PIECE // row_bytes))
                piece = np.frombuffer(file.read(count * row_bytes), MEMBER_TYPES[name])
                yield piece.reshape(count, self.widths[name])
                left -= count

    def member(self, name: str, n_tokens: int) -> Iterator[np.ndarray]:
        """The layers of a member in turn, each [T, width] and in memory."""
        for row in range(len(self.layers)):
            yield np.concatenate(list(self.pieces(name, row, n_tokens)))

    def read(self, **more_meta: Any) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """All arrays of the trace file and its meta, in memory, as of now: a run may be writing.

        Raises `UserError` if no whole token was captured, or if it cannot be read.
        """
        n_tokens = self.n_tokens
        if not n_tokens:
            raise UserError(f"{self.path}: holds no tokens: the run ended before its first token was captured")
        try:
            arrays = {name: np.stack(list(self.member(name, n_tokens))) for name in self.widths}
            return {**arrays, **self._short_members(n_tokens)}, self.full_meta(n_tokens, **more_meta)
        except OSError as error:
            raise UserError(f"{self.path}: cannot be read ({error.strerror})") from None

    def _short_members(self, n_tokens: int) -> dict[str, np.ndarray]:
        return {
            "layers": np.array(self.layers, np.int32),
            "windows": np.array(self.windows(n_tokens)[0], np.int64),
            "tokens": self.tokens(n_tokens),
        }

    def full_meta(self, n_tokens: int, **more: Any) -> dict[str, Any]:
        """The meta of the trace file: what was known at the start, what was captured, and `more`."""
        return {**self.meta, "num_tokens": n_tokens, "domains": self.windows(n_tokens)[1], **more}

    def assemble(self, out: Path, **more_meta: Any) -> None:
        """Write the trace file, whole or not at all, and remove the spool. Integers are deflated, floats stored."""
        temporary = out.with_name(out.name + ".tmp")
        try:
            with temporary.open("wb") as file:
                self._write(file, more_meta)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(out)
        finally:
            temporary.unlink(missing_ok=True)
        self.remove()

    def _write(self, file: IO[bytes], more_meta: dict[str, Any]) -> None:
        n_tokens = self.n_tokens
        with zipfile.ZipFile(file, "w", allowZip64=True) as archive:
            meta = np.array(json.dumps(self.full_meta(n_tokens, **more_meta)))
            for name, array in {"meta": meta, **self._short_members(n_tokens)}.items():
                _write_member(archive, name, array.dtype, array.shape, iter([array]))
            for name, width in self.widths.items():
                shape = (len(self.layers), n_tokens, width)
                parts = (part for row in range(shape[0]) for part in self.pieces(name, row, n_tokens))
                _write_member(archive, name, np.dtype(MEMBER_TYPES[name]), shape, parts)

    def remove(self) -> None:
        shutil.rmtree(self.path)


def _write_member(
    archive: zipfile.ZipFile, name: str, dtype: np.dtype, shape: tuple[int, ...], parts: Iterator[np.ndarray]
) -> None:
    info = zipfile.ZipInfo(f"{name}.npy")
    info.compress_type = zipfile.ZIP_STORED if dtype.kind == "f" else zipfile.ZIP_DEFLATED
    with archive.open(info, "w", force_zip64=True) as file:
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_2_0(file, header)
        for part in parts:
            data = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
            for start in range(0, len(data), _PIECE):
                file.write(data[start : start + _PIECE].data)
