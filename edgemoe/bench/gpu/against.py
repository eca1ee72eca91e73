"""llama.cpp on the same GPU with as much of its memory for experts: what a person would run instead.

llama.cpp keeps whole layers' experts on the GPU and computes the others' on the CPU (`--n-cpu-moe`); nothing is copied.
At equal expert memory, C of E slots per layer buy it C/E of the layers. Its best is taken over splits with no more
than that on the GPU, and over numbers of threads. Needs a llama-cpp-python with CUDA.
"""

import ctypes
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from edgemoe.bench.gpu.geometry import geometry
from edgemoe.bench.gpu.routing import Watch
from edgemoe.errors import UserError
from edgemoe.gpu_offload.shape import Shape
from edgemoe.progress import Advance
from edgemoe.units import format_bytes

_WARM, _TOKENS = 16, 64
_EVERY_LAYER = 999
_SPARE = 1 << 28


@dataclass(frozen=True)
class Split:
    """llama.cpp with the experts of `n_cpu_moe` layers on the CPU."""

    share: str
    """Of the residency that it is held against; `100%` with everything on the GPU."""
    n_cpu_moe: int
    threads: int
    token_s: float
    """Median over tokens behind a context of `position` tokens."""
    position: int
    best: bool = False
    """The fastest of its residency."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def check_llamacpp() -> None:
    """Raises `UserError`, which says how to get one, where the installed llama.cpp has no GPU support."""
    from edgemoe.llamacpp.libraries import llama

    if not llama().llama_supports_gpu_offload():
        raise UserError(
            "--against llama.cpp: the installed llama-cpp-python was built without CUDA: CMAKE_ARGS=-DGGML_CUDA=on pip "
            "install --force-reinstall --no-binary llama-cpp-python llama-cpp-python==0.3.36 builds one that has it"
        )


def splits_of(n_layers: int, share: float) -> list[int]:
    """Numbers of layers whose experts are on the CPU, with no more than this share of all experts on the GPU."""
    least = n_layers - int(n_layers * share + 1e-9)
    return sorted({least, (least + n_layers + 1) // 2, n_layers})


def thread_counts() -> list[int]:
    from edgemoe.llamacpp.session import default_threads

    cores = default_threads()
    return sorted({cores, max(cores // 2, 1)}, reverse=True)


def against_llamacpp(
    model: Path,
    n_layers: int,
    shares: dict[str, float],
    *,
    position: int,
    watch: Watch,
    n_gpu_layers: int | None = None,
    threads: Sequence[int] | None = None,
) -> list[Split]:
    """Time a GGUF file in llama.cpp with everything on the GPU, and at each residency (its name and its share)."""
    threads = threads or thread_counts()
    offloaded = _EVERY_LAYER if n_gpu_layers is None else n_gpu_layers
    wanted = {"100%": [0], **{name: splits_of(n_layers, share) for name, share in shares.items()}}
    numbers = sorted({number for found in wanted.values() for number in found})
    timed: dict[tuple[int, int], float] = {}
    with watch("llama.cpp", len(numbers) * len(threads), "splits") as advance:
        for number in numbers:
            for count, seconds in _time(model, number, threads, position, offloaded, advance):
                timed[number, count] = seconds
    found = []
    for name, splits in wanted.items():
        best = min(((split, count) for split in splits for count in threads), key=lambda at: timed[at])
        found += [
            Split(name, split, count, timed[split, count], position, (split, count) == best)
            for split in splits
            for count in threads
        ]
    return found


def _time(
    model: Path, n_cpu_moe: int, threads: Sequence[int], position: int, n_gpu_layers: int, advance: Advance
) -> Iterator[tuple[int, float]]:
    """(threads, median seconds per token) of one split, loaded once."""
    with _session(model, n_cpu_moe, max(threads), position + _WARM + _TOKENS, n_gpu_layers) as session:
        for at in range(0, position, session.n_batch):
            session.decode([7] * min(session.n_batch, position - at), at)
        for count in threads:
            session.use_threads(count)
            session.forget(position)
            seconds = []
            for i in range(_WARM + _TOKENS):
                start = time.perf_counter()
                session.decode([11 + i], position + i)
                seconds.append(time.perf_counter() - start)
            yield count, median(seconds[_WARM:])
            advance(1)


def _session(model: Path, n_cpu_moe: int, n_threads: int, n_ctx: int, n_gpu_layers: int) -> Any:
    from edgemoe.llamacpp.session import Session
    from edgemoe.llamacpp.weights import PLAIN, buffer_type_handles

    class Override(ctypes.Structure):  # llama_model_tensor_buft_override
        _fields_ = (("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p))

    class Split(Session):
        """Experts of the first layers in plain memory of the CPU, as `--n-cpu-moe` has it."""

        def _model_params(self, n_gpu_layers: int) -> Any:
            params = super()._model_params(n_gpu_layers)
            plain = buffer_type_handles()[PLAIN]
            patterns = [rf"blk\.{layer}\.ffn_(up|down|gate)_exps".encode() for layer in range(n_cpu_moe)]
            rows = [Override(pattern, plain) for pattern in patterns]
            self._overrides = (Override * (len(rows) + 1))(*rows)  # the last one, empty, ends the list
            params.tensor_buft_overrides = ctypes.addressof(self._overrides)
            return params

        def use_threads(self, count: int) -> None:
            self._lib.llama_set_n_threads(self._context, count, count)

    return Split(model, n_ctx=n_ctx, n_gpu_layers=n_gpu_layers, n_threads=n_threads)


@contextmanager
def written(shape: Shape, directory: Path, watch: Watch) -> Iterator[Path]:
    """A GGUF file of a geometry, random weights in bf16, removed at the end. Raises `UserError` without the room."""
    from edgemoe.model.synthetic import tensor_bytes, write_synthetic

    fields = fields_of(shape)
    size = tensor_bytes(**fields)
    free = shutil.disk_usage(directory).free
    if free < size + _SPARE:
        raise UserError(
            f"{directory}: {format_bytes(free)} are free, llama.cpp's model takes {format_bytes(size)}: make room, or "
            "give --dir another disk"
        )
    with tempfile.TemporaryDirectory(prefix="edgemoe-bench-", dir=directory) as folder:
        with watch("writing llama.cpp's model", size, "bytes") as advance:
            [path] = write_synthetic(Path(folder) / "model.gguf", advance=advance, **fields)
        yield path


def fields_of(shape: Shape) -> dict[str, Any]:
    """What `write_synthetic` is told for a shape."""
    return {
        "arch": "olmoe",
        "n_layers": shape.n_layers,
        "n_experts": shape.n_experts,
        "top_k": shape.top_k,
        "d_model": shape.d_model,
        "d_expert": shape.d_expert,
        "n_heads": shape.n_heads,
        "n_kv_heads": shape.n_kv_heads,
        "head_dim": shape.d_head,
        "n_vocab": shape.n_vocab,
        "expert_type": "BF16",
        "dense_type": "BF16",
    }


def compare(
    model: Path | None,
    geometry_name: str,
    shares: dict[str, float],
    *,
    directory: Path,
    position: int,
    watch: Watch,
) -> list[Split]:
    """llama.cpp on a GGUF model, or on one that is written for the geometry. Raises `UserError` for a folder."""
    if model is None:
        shape = geometry(geometry_name)
        with written(shape, directory, watch) as path:
            return against_llamacpp(path, shape.n_layers, shares, position=position, watch=watch)
    from edgemoe.gpu_offload.hub import resolve
    from edgemoe.model import read_model

    described = read_model(resolve(model))
    if described.format != "GGUF":
        raise UserError(f"--against llama.cpp: {model} is no GGUF file: convert it, or leave the model out")
    return against_llamacpp(described.files[0], described.geometry.n_layers, shares, position=position, watch=watch)
