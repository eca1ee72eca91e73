"""The spool: what a running trace has captured so far, on disk, readable whatever ends the run.

`OUT.partial/` holds `meta.json`, one line per window in `windows.jsonl`, and raw arrays that only grow: `tokens.i32`
and, for each member of the trace file and each MoE layer, `<member>.<row>.raw`. Only whole tokens count: a kill in the
middle of a write loses that write. `assemble` streams it into the trace file, so memory does not grow with the trace.
"""

import json
import os
import shutil
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from edgemoe.errors import UserError

SUFFIX = ".partial"
MEMBER_TYPES = {"experts": np.int16, "scores": np.float32, "pregate": np.float32, "weights": np.float32}
_PIECE = 1 << 22  # bytes handed to the compressor at once
_TOKENS, _WINDOWS, _META = "tokens.i32", "windows.jsonl", "meta.json"


def spool_path(out: Path) -> Path:
    """Where a trace to `out` is spooled."""
    return out.with_name(out.name + SUFFIX)


@dataclass(frozen=True)
class Spool:
    """A directory of growing arrays. `widths` are elements per token and layer of each member."""

    path: Path
    layers: tuple[int, ...]
    widths: Mapping[str, int]
    meta: dict[str, Any]

    @classmethod
    def create(cls, path: Path, layers: Sequence[int], widths: Mapping[str, int], meta: dict[str, Any]) -> "Spool":
        """Make the directory, which must not exist: two runs never share one."""
        path.mkdir()
        try:
            text = json.dumps({"layers": list(layers), "widths": dict(widths), "meta": meta})
            (path / (_META + ".tmp")).write_text(text)
            (path / (_META + ".tmp")).rename(path / _META)
        except BaseException:
            shutil.rmtree(path)
            raise
        return cls(path, tuple(layers), dict(widths), meta)

    @classmethod
    def open(cls, path: Path) -> "Spool":
        """The spool that an earlier run left; a `UserError` if there is none."""
        try:
            said = json.loads((path / _META).read_text())
            return cls(path, tuple(said["layers"]), said["widths"], said["meta"])
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"{path}: not a trace in progress ({_META}: {error}): remove it") from None

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
        with (self.path / name).open("ab", buffering=0) as file:
            rest = memoryview(data).cast("B")
            while rest:
                rest = rest[file.write(rest) :]

    def _rows(self, name: str, row_bytes: int) -> int:
        path = self.path / name
        return path.stat().st_size // row_bytes if path.exists() else 0

    @property
    def n_tokens(self) -> int:
        """Whole tokens: those that every array holds."""
        counts = [self._rows(_TOKENS, 4)]
        for name, width in self.widths.items():
            row_bytes = width * np.dtype(MEMBER_TYPES[name]).itemsize
            counts += [self._rows(f"{name}.{row}.raw", row_bytes) for row in range(len(self.layers))]
        return min(counts)

    def windows(self) -> tuple[list[int], list[str]]:
        """First token and domain of each window that has a whole token."""
        n_tokens = self.n_tokens
        path = self.path / _WINDOWS
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        starts = [(window["start"], window["domain"]) for window in map(json.loads, lines)]
        kept = [(start, domain) for start, domain in starts if start < n_tokens]
        return [start for start, _ in kept], [domain for _, domain in kept]

    def tokens(self) -> np.ndarray:  # [T] int32
        return np.fromfile(self.path / _TOKENS, np.int32, self.n_tokens)

    def member(self, name: str) -> Iterator[np.ndarray]:
        """The layers of a member in turn, each [T, width] and mapped, not read."""
        for row in range(len(self.layers)):
            shape = (self.n_tokens, self.widths[name])
            yield np.memmap(self.path / f"{name}.{row}.raw", MEMBER_TYPES[name], "r", shape=shape)

    def read(self) -> dict[str, np.ndarray]:
        """All arrays of the trace file, in memory; a `UserError` if no whole token was captured."""
        if not self.n_tokens:
            raise UserError(f"{self.path}: the run ended before its first token was captured: remove it")
        arrays = {name: np.stack(list(self.member(name))) for name in self.widths}
        return {**arrays, "layers": np.array(self.layers, np.int32), **self._short_members()}

    def _short_members(self) -> dict[str, np.ndarray]:
        return {"windows": np.array(self.windows()[0], np.int64), "tokens": self.tokens()}

    def full_meta(self, **more: Any) -> dict[str, Any]:
        """The meta of the trace file: what was known at the start, what was captured, and `more`."""
        domains = self.windows()[1]
        captured = {"num_tokens": self.n_tokens, "domains": domains}
        return {**self.meta, **captured, **more}

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
        with zipfile.ZipFile(file, "w", allowZip64=True) as archive:
            _write_member(archive, "meta", [np.array(json.dumps(self.full_meta(**more_meta)))], ())
            short = {"layers": np.array(self.layers, np.int32), **self._short_members()}
            for name, array in short.items():
                _write_member(archive, name, [array], array.shape)
            for name, width in self.widths.items():
                _write_member(archive, name, self.member(name), (len(self.layers), self.n_tokens, width))

    def remove(self) -> None:
        shutil.rmtree(self.path)


def _write_member(
    archive: zipfile.ZipFile, name: str, parts: Iterator[np.ndarray] | list[np.ndarray], shape: tuple[int, ...]
) -> None:
    info = zipfile.ZipInfo(f"{name}.npy")
    file: Any = None
    for part in parts:
        if file is None:
            info.compress_type = zipfile.ZIP_STORED if part.dtype.kind == "f" else zipfile.ZIP_DEFLATED
            file = archive.open(info, "w", force_zip64=True)
            descr = np.lib.format.dtype_to_descr(part.dtype)
            header = {"descr": descr, "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_2_0(file, header)
        data = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
        for start in range(0, len(data), _PIECE):
            file.write(data[start : start + _PIECE])
    assert file is not None
    file.close()
