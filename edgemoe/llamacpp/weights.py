"""How weights are stored on the CPU: types, blocks, and the buffer that llama.cpp's loader chooses for each.

What llama.cpp does with a weight depends on the buffer that it lies in: its loader offers each weight to the CPU's
"extra" buffer types (repacked rows, AMX tiles) before the plain one. `buffer_types` asks the same question of the same
functions, so a rate is measured, and later applied, in the state in which llama.cpp really keeps such a weight.
"""

import ctypes
import functools

import numpy as np

from edgemoe.errors import UserError
from edgemoe.llamacpp.ggml import Context, Pointer, cpu_device, ggml, of_cpu_backend
from edgemoe.llamacpp.layout import TYPE_F32, TYPE_I32, Tensor

PLAIN = "CPU"
_TYPE_COUNT = 43  # GGML_TYPE_COUNT of the pinned release: ggml stops the process at numbers beyond its table
_BATCH = 512  # rows with which llama.cpp's loader asks whether a buffer type suits a weight


@functools.cache
def buffer_type_handles() -> dict[str, int]:
    """Every buffer type that the CPU keeps weights in, in llama.cpp's order of trying; the plain one last."""
    offered = of_cpu_backend("ggml_backend_dev_get_extra_bufts", ctypes.POINTER(Pointer), Pointer)
    handles: dict[str, int] = {}
    extra = offered(cpu_device()) if offered else None
    for i in range(64):
        if not extra or not extra[i]:
            break
        handles[ggml("ggml_backend_buft_name")(extra[i]).decode()] = extra[i]
    handles[PLAIN] = ggml("ggml_backend_dev_buffer_type")(cpu_device())
    return handles


@functools.cache
def type_ids() -> dict[str, int]:
    """ggml's number of every storage type of this build, by the name that GGUF files show (`Q8_0`, `Q4_K`, …)."""
    known = [number for number in range(_TYPE_COUNT) if ggml("ggml_type_size")(number)]
    return {ggml("ggml_type_name")(number).decode().upper(): number for number in known}


def block_length(kind: str) -> int:
    """Values that the type stores together; a `UserError` for a type that this build does not know."""
    if kind not in type_ids():
        raise UserError(f"{kind} is no type of this llama.cpp build: it has {', '.join(type_ids())}")
    return int(ggml("ggml_blck_size")(type_ids()[kind]))


def row_bytes(kind: str, n: int) -> int:
    """Bytes of a row of `n` values; `ValueError` where they do not divide into the type's blocks."""
    block = block_length(kind)
    if n % block:
        raise ValueError(f"rows of {n} values do not divide into {kind} blocks of {block}")
    return int(n // block * ggml("ggml_type_size")(type_ids()[kind]))


def random_rows(kind: str, rows: int, n: int, seed: int = 0) -> np.ndarray:
    """Valid random weights, [rows, bytes] uint8: normal values of unit RMS products, by ggml's own quantiser."""
    number = type_ids()[kind]
    values = np.random.default_rng(seed).standard_normal((rows, n), dtype=np.float32) / np.float32(n**0.5)
    out = np.empty((rows, row_bytes(kind, n)), np.uint8)
    importance = np.ones(n, np.float32) if ggml("ggml_quantize_requires_imatrix")(number) else None
    pointer = importance.ctypes.data if importance is not None else None
    if number == TYPE_F32:
        return values.view(np.uint8)
    written = ggml("ggml_quantize_chunk")(number, values.ctypes.data, out.ctypes.data, 0, rows, n, pointer)
    if written != out.nbytes:
        raise ValueError(f"ggml wrote {written} bytes of {kind}, expected {out.nbytes}")
    return out


@functools.cache
def buffer_types(kind: str, ne: tuple[int, ...], top_k: int = 0) -> tuple[str, ...]:
    """Buffer types that can hold a weight of this type and shape, in llama.cpp's order of preference.

    `ne` is (row length, rows) of a dense weight, or (row length, rows, experts), of which `top_k` are executed. The
    first is where llama.cpp puts it by default; with `use_extra_bufts=False` it is the plain `CPU`.
    """
    return tuple(name for name, handle in buffer_type_handles().items() if _suits(handle, kind, ne, top_k))


def _suits(handle: int, kind: str, ne: tuple[int, ...], top_k: int) -> bool:
    """As `weight_buft_supported` of llama.cpp's loader: would the device run the product from such a buffer?"""
    if handle == buffer_type_handles()[PLAIN]:
        return True
    buffer = ggml("ggml_backend_buft_alloc_buffer")(handle, 0)
    with Context(16) as context:
        weight = context.tensor(type_ids()[kind], ne)
        Tensor.from_address(weight).buffer = buffer
        if len(ne) == 3:
            ids = context.tensor(TYPE_I32, (top_k, _BATCH))
            product = ggml("ggml_mul_mat_id")(
                context.pointer, weight, context.tensor(TYPE_F32, (ne[0], top_k, _BATCH)), ids
            )
        else:
            product = ggml("ggml_mul_mat")(context.pointer, weight, context.tensor(TYPE_F32, (ne[0], _BATCH)))
        suits = bool(ggml("ggml_backend_dev_supports_op")(cpu_device(), product))
    if buffer:
        ggml("ggml_backend_buffer_free")(buffer)
    return suits
