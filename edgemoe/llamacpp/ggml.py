"""libggml's functions by name: what building and running a graph on the CPU backend takes."""

import ctypes
import functools
from collections.abc import Sequence
from typing import ClassVar

from edgemoe.errors import UserError
from edgemoe.llamacpp.layout import verify_layout
from edgemoe.llamacpp.libraries import ggml_base, library_file
from edgemoe.llamacpp.session import quiet

Pointer, Size, Int = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_CPU_DEVICE = 0  # enum ggml_backend_dev_type


class _InitParams(ctypes.Structure):
    _fields_: ClassVar = [("mem_size", Size), ("mem_buffer", Pointer), ("no_alloc", ctypes.c_bool)]


_FUNCTIONS: dict[str, tuple[object, tuple[object, ...]]] = {
    "ggml_init": (Pointer, (_InitParams,)),
    "ggml_free": (None, (Pointer,)),
    "ggml_tensor_overhead": (Size, ()),
    "ggml_graph_overhead_custom": (Size, (Size, ctypes.c_bool)),
    "ggml_new_tensor": (Pointer, (Pointer, Int, Int, ctypes.POINTER(ctypes.c_int64))),
    "ggml_mul_mat": (Pointer, (Pointer, Pointer, Pointer)),
    "ggml_mul_mat_id": (Pointer, (Pointer, Pointer, Pointer, Pointer)),
    **dict.fromkeys(
        ("ggml_add_inplace", "ggml_mul", "ggml_mul_inplace", "ggml_swiglu_split"),
        (Pointer, (Pointer, Pointer, Pointer)),
    ),
    "ggml_soft_max": (Pointer, (Pointer, Pointer)),
    "ggml_argsort": (Pointer, (Pointer, Pointer, Int)),
    "ggml_rms_norm": (Pointer, (Pointer, Pointer, ctypes.c_float)),
    "ggml_rope": (Pointer, (Pointer, Pointer, Pointer, Int, Int)),
    "ggml_flash_attn_ext": (Pointer, (*[Pointer] * 5, *[ctypes.c_float] * 3)),
    "ggml_new_graph_custom": (Pointer, (Pointer, Size, ctypes.c_bool)),
    "ggml_build_forward_expand": (None, (Pointer, Pointer)),
    "ggml_view_2d": (Pointer, (Pointer, Pointer, *[ctypes.c_int64] * 2, *[Size] * 2)),
    "ggml_view_3d": (Pointer, (Pointer, Pointer, *[ctypes.c_int64] * 3, *[Size] * 3)),
    "ggml_backend_view_init": (Int, (Pointer,)),
    "ggml_nbytes": (Size, (Pointer,)),
    "ggml_type_name": (ctypes.c_char_p, (Int,)),
    "ggml_blck_size": (ctypes.c_int64, (Int,)),
    "ggml_type_size": (Size, (Int,)),
    "ggml_is_quantized": (ctypes.c_bool, (Int,)),
    "ggml_quantize_chunk": (Size, (Int, Pointer, Pointer, *[ctypes.c_int64] * 3, Pointer)),
    "ggml_quantize_requires_imatrix": (ctypes.c_bool, (Int,)),
    "ggml_backend_dev_by_type": (Pointer, (Int,)),
    "ggml_backend_load_all": (None, ()),
    "ggml_backend_dev_init": (Pointer, (Pointer, ctypes.c_char_p)),
    "ggml_backend_dev_backend_reg": (Pointer, (Pointer,)),
    "ggml_backend_dev_buffer_type": (Pointer, (Pointer,)),
    "ggml_backend_dev_supports_op": (ctypes.c_bool, (Pointer, Pointer)),
    "ggml_backend_reg_get_proc_address": (Pointer, (Pointer, ctypes.c_char_p)),
    "ggml_backend_buft_name": (ctypes.c_char_p, (Pointer,)),
    "ggml_backend_cpu_buffer_from_ptr": (Pointer, (Pointer, Size)),
    "ggml_backend_buft_alloc_buffer": (Pointer, (Pointer, Size)),
    "ggml_backend_buffer_get_base": (Pointer, (Pointer,)),
    "ggml_backend_buffer_get_size": (Size, (Pointer,)),
    "ggml_backend_buffer_free": (None, (Pointer,)),
    "ggml_backend_alloc_ctx_tensors_from_buft": (Pointer, (Pointer, Pointer)),
    "ggml_backend_tensor_set": (None, (Pointer, Pointer, Size, Size)),
    "ggml_backend_tensor_get": (None, (Pointer, Pointer, Size, Size)),
    "ggml_backend_graph_compute": (Int, (Pointer, Pointer)),
    "ggml_backend_free": (None, (Pointer,)),
}
# The registry of backends is a library of its own, which brings the CPU backend with it.
_IN_REGISTRY = {"ggml_backend_dev_by_type", "ggml_backend_load_all"}


@functools.cache
def _registry() -> ctypes.CDLL:
    verify_layout()
    quiet()  # repacking announces every tensor
    return ctypes.CDLL(str(library_file("ggml")))


@functools.cache
def _base() -> ctypes.CDLL:
    """The one libggml-base, by a handle of its own: another module declares some of its functions differently."""
    return ctypes.CDLL(ggml_base()._name)


@functools.cache
def ggml(name: str) -> "ctypes._NamedFuncPointer":
    library = _registry() if name in _IN_REGISTRY else _base()
    function = getattr(library, name)
    function.restype, function.argtypes = _FUNCTIONS[name]
    return function


@functools.cache
def cpu_device() -> int:
    """The CPU as a ggml device; builds that load backends on demand are told to."""
    for attempt in range(2):
        if device := ggml("ggml_backend_dev_by_type")(_CPU_DEVICE):
            return int(device)
        if attempt == 0:
            ggml("ggml_backend_load_all")()
    raise UserError("this llama.cpp build has no CPU backend: reinstall llama-cpp-python==0.3.36")


def of_cpu_backend(name: str, result: object, *arguments: object) -> "ctypes._FuncPointer | None":
    """A function that a backend offers by name only, or None."""
    address = ggml("ggml_backend_reg_get_proc_address")(
        ggml("ggml_backend_dev_backend_reg")(cpu_device()), name.encode()
    )
    return ctypes.CFUNCTYPE(result, *arguments)(address) if address else None  # type: ignore[arg-type]


class Context:
    """A ggml context with room for the descriptions of `n` tensors (no data), and of a graph of as many nodes."""

    def __init__(self, n: int) -> None:
        self.n = n
        room = n * ggml("ggml_tensor_overhead")() + ggml("ggml_graph_overhead_custom")(n, False)
        self.pointer = ggml("ggml_init")(_InitParams(room, None, True))

    def tensor(self, number: int, ne: Sequence[int]) -> int:
        return int(ggml("ggml_new_tensor")(self.pointer, number, len(ne), (ctypes.c_int64 * len(ne))(*ne)))

    def __enter__(self) -> "Context":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self.pointer:
            ggml("ggml_free")(self.pointer)
        self.pointer = None
