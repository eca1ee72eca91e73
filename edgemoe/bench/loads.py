"""What is run: a synthetic model of a real geometry, and the routing that it executes.

The geometry is Qwen3-30B-A3B's, with fewer layers, so that a token reads as much per layer as it would there. Its own
random router is the worst case. Recorded routing of a real model, layer by layer, is the usual one.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from edgemoe.errors import UserError
from edgemoe.machine.probe_file import check_not_sparse
from edgemoe.machine.ssd_probe import LEAST_FILE
from edgemoe.model import Model, read_model
from edgemoe.model.synthetic import QWEN3_30B_A3B, tensor_bytes, write_synthetic
from edgemoe.progress import Advance, no_progress
from edgemoe.tracing import Trace
from edgemoe.units import format_bytes

LEAST_BYTES, MOST_BYTES = 16_000_000, 100_000_000_000
_MARGIN = 1 << 26
# A small vocabulary: the real one's two tables would be a sixth of a 4 GB file, and are no experts.
_VOCABULARY = 32_000
_LEAST_LAYERS = 4
# (d_model, d_expert, heads, vocabulary): the real widths, then narrower ones for sizes that hold too few such layers.
_WIDTHS = ((2048, 768, 32, _VOCABULARY), (1024, 512, 16, _VOCABULARY), (512, 256, 8, 8192), (256, 256, 4, 2048))


@dataclass(frozen=True)
class Shape:
    """A model to write: the fields of `write_synthetic`, and the bytes that it will take."""

    fields: dict[str, Any]
    nbytes: int

    @property
    def real_widths(self) -> bool:
        return bool(self.fields["d_expert"] == QWEN3_30B_A3B["d_expert"])

    @property
    def name(self) -> str:
        """Of the file, the same for the same shape."""
        digest = hashlib.sha256(json.dumps(self.fields, sort_keys=True).encode()).hexdigest()[:12]
        return f"edgemoe-bench-{digest}.gguf"


def shape_of(size: int, n_experts: int = 128, top_k: int = 8) -> Shape:
    """The shape nearest to `size` bytes. Raises `UserError` for a size outside of 16 MB to 100 GB."""
    if not LEAST_BYTES <= size <= MOST_BYTES:
        raise UserError(
            f"a model of {format_bytes(size)}: expected {format_bytes(LEAST_BYTES)} to {format_bytes(MOST_BYTES)}"
        )
    for d_model, d_expert, heads, vocabulary in _WIDTHS:
        fields = QWEN3_30B_A3B | {
            **{"d_model": d_model, "d_expert": d_expert, "n_heads": heads, "n_vocab": vocabulary, "n_ctx": 4096},
            **{"n_experts": n_experts, "top_k": top_k, "n_layers": 1},
        }
        one, two = tensor_bytes(**fields), tensor_bytes(**fields | {"n_layers": 2})
        layers = 1 + max(round((size - one) / (two - one)), 0)
        if layers >= _LEAST_LAYERS:
            break
    least = 1 + -(-(LEAST_FILE - one) // (two - one))  # or the disk could not be probed by reading it
    fields["n_layers"] = layers = max(layers, least, 2)
    return Shape(fields, one + (layers - 1) * (two - one))


@contextmanager
def written(shape: Shape, directory: Path, keep: bool, advance: Advance = no_progress) -> Iterator[Model]:
    """The model of a shape, written into `directory` and removed at the end unless `keep`.

    One that an earlier run kept is used again and stays. `advance` is told `shape.nbytes` in all. An interrupt leaves
    nothing. Raises `UserError` for a directory that cannot be written, and for a disk without the room.
    """
    path = directory / shape.name
    known = path.exists()
    try:
        if known:
            advance(shape.nbytes)
        else:
            _write(shape, path, advance)
        yield checked(path)
    finally:
        if not known and not keep:
            path.unlink(missing_ok=True)


def checked(path: Path) -> Model:
    """A model whose bytes are really on the disk, and out of the page cache."""
    model = read_model(path)
    for file in model.files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            check_not_sparse(descriptor, str(file))
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    return model


def check_room(shape: Shape, directory: Path) -> None:
    """Raise `UserError` where the disk has no room for a model of this shape."""
    free = shutil.disk_usage(directory).free
    if free < shape.nbytes + _MARGIN:
        raise UserError(
            f"{directory}: {format_bytes(free)} are free, the model takes {format_bytes(shape.nbytes)}: "
            "make room, lower --size, or give --dir another disk"
        )


def _write(shape: Shape, path: Path, advance: Advance) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    for left in path.parent.glob(f".{path.name}.*.partial"):  # of a run that was killed
        if not Path(f"/proc/{left.name.split('.')[-2]}").exists():
            with suppress(OSError):
                left.unlink()
    try:
        check_room(shape, path.parent)
        write_synthetic(partial, advance=advance, **shape.fields)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.rename(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror or error}): give another --dir") from None
    finally:
        partial.unlink(missing_ok=True)


def fit_trace(trace: Trace, n_layers: int) -> Trace:
    """A trace as if it had been recorded on a model of `n_layers`: layer i is its layer i, from the start again where
    it has fewer."""
    which = np.arange(n_layers) % trace.n_layers
    return replace(
        trace,
        experts=np.ascontiguousarray(trace.experts[which]),
        layers=np.arange(n_layers, dtype=np.int32),
        scores=None,
        pregate=None,
        weights=None,
        delta=None,
        warm=None,
    )


def forced_ids(trace: Trace, streams: int) -> np.ndarray:  # [steps, L, streams, k] int32
    """Which experts each stream executes at each step: B windows that start at equal distances, as the wall counts.

    Raises `UserError` where the trace has layers of several k.
    """
    if int(trace.experts.min()) < 0:
        raise UserError(f"{trace.name}: its layers choose different numbers of experts, which cannot be replayed")
    steps = trace.n_tokens // streams
    windows = trace.experts[:, : steps * streams].reshape(trace.n_layers, streams, steps, trace.top_k)
    return np.ascontiguousarray(windows.transpose(2, 0, 1, 3), dtype=np.int32)
