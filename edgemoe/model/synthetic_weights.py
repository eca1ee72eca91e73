"""Random weights of synthetic models, as ggml blocks: drawn in float32, quantised by ggml itself, in bounded memory."""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal
from zlib import crc32

import gguf
import numpy as np

# Values drawn afresh per tensor. A larger tensor repeats this many from random starting rows: a file of tens of GB
# is then written at the disk's speed, and still no two experts hold the same bytes in the same place.
FRESH_VALUES = 1 << 23


@dataclass(frozen=True)
class SyntheticTensor:
    """A tensor to be written. `ne` is in ggml's order: the row length comes first."""

    name: str
    ne: tuple[int, ...]
    type: gguf.GGMLQuantizationType
    fill: Literal["ones", "matrix", "router", "embedding", "bias"] = "matrix"

    @property
    def n_rows(self) -> int:
        return int(np.prod(self.ne[1:], dtype=np.int64))

    @property
    def row_bytes(self) -> int:
        block, size = gguf.GGML_QUANT_SIZES[self.type]
        if self.ne[0] % block:
            raise ValueError(
                f"{self.name}: rows of {self.ne[0]} values do not divide into {self.type.name} blocks of {block}"
            )
        return self.ne[0] // block * size

    @property
    def nbytes(self) -> int:
        return self.n_rows * self.row_bytes


# Standard deviations that keep activations of order one: inputs of matrices and routers are RMS-normalised.
_GAIN = {"matrix": 1.0, "router": 2.0, "embedding": 1.0, "bias": 0.1}


def blocks(tensor: SyntheticTensor, seed: int) -> Iterator[np.ndarray]:
    """The tensor's bytes in pieces [rows, row_bytes] uint8; a function of name, shape, type and `seed` alone."""
    rng = np.random.default_rng([seed, crc32(tensor.name.encode())])
    rows = min(tensor.n_rows, max(1, FRESH_VALUES // tensor.ne[0]))
    if tensor.n_rows == rows:
        yield _draw(rng, rows, tensor.ne[0], tensor.fill, tensor.type)
        return
    pool = _pool(seed, rows, tensor.ne[0], tensor.fill, tensor.type)
    for done in range(0, tensor.n_rows, rows):
        start = int(rng.integers(rows))
        yield np.concatenate((pool[start:], pool[:start]))[: tensor.n_rows - done]


@lru_cache(maxsize=4)
def _pool(seed: int, rows: int, length: int, fill: str, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    return _draw(np.random.default_rng(seed), rows, length, fill, kind)


def _draw(rng: np.random.Generator, rows: int, length: int, fill: str, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    if fill == "ones":
        values = np.ones((rows, length), dtype=np.float32)
    else:
        values = rng.standard_normal((rows, length), dtype=np.float32)
        values *= _GAIN[fill] / (length**0.5 if fill in ("matrix", "router") else 1.0)
    return quantize(values, kind)


def quantize(values: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Float32 rows [R, n] as ggml blocks [R, bytes] uint8, by ggml's own quantiser (k-quants included)."""
    from edgemoe.llamacpp.libraries import ggml_base

    block, size = gguf.GGML_QUANT_SIZES[kind]
    rows, length = values.shape
    values = np.ascontiguousarray(values, dtype=np.float32)
    out = np.empty((rows, length // block * size), dtype=np.uint8)
    run = ggml_base().ggml_quantize_chunk
    run.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    run.restype = ctypes.c_size_t
    written = run(int(kind), values.ctypes.data, out.ctypes.data, 0, rows, length, None)
    if written != out.nbytes:
        raise ValueError(f"ggml wrote {written} bytes for {rows}×{length} values as {kind.name}, expected {out.nbytes}")
    return out
