"""Members of a trace file as the spool writes it, a layer or a block at a time: the whole may not fit in memory."""

import zipfile
from collections.abc import Iterator
from typing import IO

import numpy as np

BLOCK_BYTES = 1 << 24


def member(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """A short member, whole."""
    with archive.open(f"{name}.npy") as file:
        array: np.ndarray = np.lib.format.read_array(file, allow_pickle=False)
    return array


def layers(archive: zipfile.ZipFile, name: str) -> Iterator[np.ndarray]:
    """The layers [T, width] of a member in turn."""
    with archive.open(f"{name}.npy") as file:
        (n_layers, n_tokens, width), dtype = _shape(file)
        for _ in range(n_layers):
            yield _read(file, n_tokens, width, dtype)


def blocks(archive: zipfile.ZipFile, name: str) -> Iterator[Iterator[np.ndarray]]:
    """The layers of a member in turn, each as blocks [t, width]; take all of one layer before the next."""
    with archive.open(f"{name}.npy") as file:
        (n_layers, n_tokens, width), dtype = _shape(file)
        step = max(1, BLOCK_BYTES // (width * dtype.itemsize))
        for _ in range(n_layers):
            yield (_read(file, min(step, n_tokens - at), width, dtype) for at in range(0, n_tokens, step))


def _shape(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype]:
    """The header of an npy member, [L, T, width] in C order."""
    np.lib.format.read_magic(file)
    shape, _, dtype = np.lib.format.read_array_header_2_0(file)
    return shape, dtype


def _read(file: IO[bytes], count: int, width: int, dtype: np.dtype) -> np.ndarray:
    return np.frombuffer(file.read(count * width * dtype.itemsize), dtype).reshape(count, width)
