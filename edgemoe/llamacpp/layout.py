"""`struct ggml_tensor` of the pinned build, and the test that this build really lays it out so.

The native callback reads tensors at these offsets, because a call into ggml for every field of every graph node
would cost more than the reading. `verify_layout` holds them against ggml's own accessors; sessions and
`edgemoe doctor` call it before anything is read.
"""

import ctypes
import functools
from typing import ClassVar

from edgemoe.errors import UserError
from edgemoe.llamacpp.libraries import ggml_base

MAX_NAME = 64
TYPE_F32, TYPE_F16, TYPE_I32 = 0, 1, 26


class Tensor(ctypes.Structure):
    """ggml.h, `struct ggml_tensor`."""

    _fields_: ClassVar = [
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),  # elements per dimension, innermost first
        ("nb", ctypes.c_size_t * 4),  # stride in bytes per dimension
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * MAX_NAME),
        ("extra", ctypes.c_void_p),
        ("padding", ctypes.c_char * 8),
    ]


class _InitParams(ctypes.Structure):
    _fields_: ClassVar = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


def _function(name: str, result: object, *arguments: object) -> "ctypes._NamedFuncPointer":
    function = getattr(ggml_base(), name)
    function.restype, function.argtypes = result, arguments
    return function


def operation(pointer: int) -> str:
    """What a node computes, in ggml's words: `MUL_MAT`, `SOFT_MAX`, `SIGMOID`, …; `NONE` for a weight."""
    return _function("ggml_op_desc", ctypes.c_char_p, ctypes.c_void_p)(pointer).decode()


def layout_mismatches() -> list[str]:
    """One line per field of `Tensor` that this build of ggml keeps elsewhere; empty if all is well."""
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    shape = (ctypes.c_int64,) * 3
    context = _function("ggml_init", pointer, _InitParams)(_InitParams(1 << 16, None, False))
    try:
        new = _function("ggml_new_tensor_3d", pointer, pointer, ctypes.c_int, *shape)
        made = new(context, TYPE_F32, 5, 3, 2)
        other = new(context, TYPE_I32, 7, 1, 1)
        _function("ggml_set_name", pointer, pointer, ctypes.c_char_p)(made, b"ffn_moe_topk-12")
        view = _function("ggml_view_2d", pointer, pointer, pointer, *shape[:2], size, size)(context, made, 2, 3, 20, 8)
        sigmoid = _function("ggml_sigmoid", pointer, pointer, pointer)(context, made)
        product = _function("ggml_mul_mat", pointer, pointer, pointer, pointer)(
            context, made, new(context, TYPE_F32, 5, 4, 2)
        )
        data = _function("ggml_get_data", pointer, pointer)
        count = _function("ggml_nelements", ctypes.c_int64, pointer)
        bytes_of = _function("ggml_nbytes", size, pointer)
        dimensions = _function("ggml_n_dims", ctypes.c_int, pointer)
        element = _function("ggml_element_size", size, pointer)
        name = _function("ggml_get_name", ctypes.c_char_p, pointer)
        tensor, integers, part = (Tensor.from_address(address) for address in (made, other, view))
        pairs = {
            "type": ((tensor.type, integers.type), (TYPE_F32, TYPE_I32)),
            "buffer": (tensor.buffer, None),
            "ne": (tuple(tensor.ne), (5, 3, 2, 1)),
            "ne (against ggml_nelements)": (tensor.ne[0] * tensor.ne[1] * tensor.ne[2], count(made)),
            "ne (against ggml_n_dims)": (sum(n > 1 for n in tensor.ne), dimensions(made)),
            "nb (against ggml_nbytes)": (tensor.nb[3], bytes_of(made)),
            "nb (against ggml_element_size)": (tensor.nb[0], element(made)),
            "nb (of a view)": (tuple(part.nb[:2]), (4, 20)),
            "op": (Tensor.from_address(sigmoid).op > 0 == tensor.op, True),
            "op (against ggml_op_desc)": ((operation(sigmoid), operation(product)), ("SIGMOID", "MUL_MAT")),
            "src": (tuple(Tensor.from_address(product).src[:1]), (made,)),
            "view_src": ((part.view_src, part.view_offs), (made, 8)),
            "data": ((tensor.data, part.data), (data(made), data(made) + 8)),
            "name": (tensor.name, name(made)),
            "size": (ctypes.sizeof(Tensor) <= _function("ggml_tensor_overhead", size)(), True),
        }
        return [f"{field}: read {read}, ggml says {truth}" for field, (read, truth) in pairs.items() if read != truth]
    finally:
        _function("ggml_free", None, pointer)(context)


@functools.cache
def verify_layout() -> None:
    """Raise `UserError` unless this build's tensors are laid out as `Tensor` says; tested once per process."""
    wrong = layout_mismatches()
    if wrong:
        raise UserError(
            f"this llama.cpp build lays tensors out differently ({wrong[0]}): install llama-cpp-python==0.3.36"
        )
