"""The eval callback as native code: asked about every graph node, it answers in nanoseconds and never enters Python.

numba compiles it to a C function pointer (cached on disk), so no compiler and no change to llama.cpp is needed. It
works on plain memory that `hub.Hub` lays out: `state` (the control words below), `table` (which node names are
wanted) and `taps` (where rows go). Field positions come from `layout.Tensor`, which is verified at run time.
"""

import ctypes
import functools
from pathlib import Path
from typing import Any

import llvmlite.binding  # type: ignore[import-untyped]
import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core.errors import TypingError
from numba.extending import intrinsic

from edgemoe.llamacpp.layout import MAX_NAME, TYPE_F32, TYPE_I32, Tensor
from edgemoe.llamacpp.libraries import ggml_base
from edgemoe.policy._jit import c_callback, source_digest

# state: int64 [STATE_WORDS]
MODE, STOP, ERROR, IGNORED = 0, 1, 2, 3
NODES, NODE_COUNT, NODE_CAPACITY = 4, 5, 6
STEMS, STEM_COUNT, TABLE, LAYER_COUNT = 7, 8, 9, 10
TAPS, SCRATCH, SCRATCH_BYTES = 11, 12, 13
STATE_WORDS = 14
OFF, SURVEY, CAPTURE = 0, 1, 2
ERROR_OVERFLOW, ERROR_TYPE, ERROR_SCRATCH = 1, 2, 3

# table: int64 [stems, layers, TABLE_WORDS]; a tap is an index or −1
OWN_TAP, INPUT_TAP, SEEN, PERIOD, PICK, TABLE_WORDS = 0, 1, 2, 3, 4, 5
# taps: int64 [taps, TAP_WORDS]
DESTINATION, WIDTH, CAPACITY, FILLED, TAP_WORDS = 0, 1, 2, 3, 4

_WORD = 8
_BUFFER, _NE, _NB, _SRC = (getattr(Tensor, name).offset // _WORD for name in ("buffer", "ne", "nb", "src"))
_VIEW, _DATA = Tensor.view_src.offset // _WORD, Tensor.data.offset // _WORD
_NAME = Tensor.name.offset
_TENSOR_WORDS = ctypes.sizeof(Tensor) // _WORD
_PREFIX_MARK, _DASH, _ZERO, _NINE = ord("#"), ord("-"), ord("0"), ord("9")

_IS_HOST = "edgemoe_ggml_backend_buffer_is_host"
_GET = "edgemoe_ggml_backend_tensor_get"
_SET = "edgemoe_ggml_backend_tensor_set"
_is_host = types.ExternalFunction(_IS_HOST, types.uint8(types.intp))
_get = types.ExternalFunction(_GET, types.void(types.intp, types.intp, types.intp, types.intp))
_set = types.ExternalFunction(_SET, types.void(types.intp, types.intp, types.intp, types.intp))


@intrinsic
def _pointer(_typing: Any, address: Any) -> Any:
    if not isinstance(address, types.Integer):
        raise TypingError("an address is an integer")

    def codegen(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(address), codegen


@njit
def _words(address: int, count: int) -> np.ndarray:
    return carray(_pointer(address), (count,), np.int64)


@njit
def _find(tensor: int, state: np.ndarray) -> int:
    """Index of the node's (stem, layer) in the table, or −1. `CUDA0#ffn_moe_topk-3#0` is `ffn_moe_topk-3`."""
    name = carray(_pointer(tensor + _NAME), (MAX_NAME,), np.uint8)
    start, end, dash = 0, 0, -1
    while end < MAX_NAME and name[end] != 0:
        if name[end] == _PREFIX_MARK:
            if start > 0:  # the mark after the name
                break
            start, dash = end + 1, -1
        elif name[end] == _DASH:
            dash = end
        end += 1
    if dash <= start or dash + 1 >= end:
        return -1
    layer = 0
    for i in range(dash + 1, end):
        if name[i] < _ZERO or name[i] > _NINE:
            return -1
        layer = layer * 10 + name[i] - _ZERO
    if layer >= state[LAYER_COUNT]:
        return -1
    stems = carray(_pointer(state[STEMS]), (state[STEM_COUNT], MAX_NAME), np.uint8)
    for stem in range(state[STEM_COUNT]):
        i = 0
        while start + i < dash and stems[stem, i] == name[start + i]:
            i += 1
        if start + i == dash and stems[stem, i] == 0:
            return stem * state[LAYER_COUNT] + layer
    return -1


@njit
def _copy(tensor: int, index: int, state: np.ndarray) -> None:
    """Append the rows of a tensor to tap `index`, honouring strides: [width, T] or [1, width, T]."""
    fields = _words(tensor, _TENSOR_WORDS)
    ne, nb = fields[_NE : _NE + 4], fields[_NB : _NB + 4]
    tap = _words(state[TAPS] + index * TAP_WORDS * _WORD, TAP_WORDS)
    width = tap[WIDTH]
    if ne[0] == width:
        step, inner, outer, inner_step, outer_step = nb[0], ne[1], ne[2], nb[1], nb[2]
    elif ne[0] == 1 and ne[1] == width:
        step, inner, outer, inner_step, outer_step = nb[1], 1, ne[2], 0, nb[2]
    else:  # a warm-up run executes every expert
        state[IGNORED] += 1
        return
    kind = fields[0] & 0xFFFFFFFF
    if kind != TYPE_F32 and kind != TYPE_I32:
        state[ERROR] = ERROR_TYPE
        return
    rows = inner * outer
    if rows == 0:
        return
    if tap[FILLED] + rows > tap[CAPACITY]:
        state[ERROR] = ERROR_OVERFLOW
        return
    base = fields[_DATA]
    buffer = fields[_BUFFER] if fields[_VIEW] == 0 else _words(fields[_VIEW], _TENSOR_WORDS)[_BUFFER]
    if buffer != 0 and _is_host(buffer) == 0:
        span = 4
        for axis in range(4):
            span += (ne[axis] - 1) * nb[axis]
        if span > state[SCRATCH_BYTES]:
            state[ERROR] = ERROR_SCRATCH
            return
        base = state[SCRATCH]
        _get(tensor, base, 0, span)
    out = carray(_pointer(tap[DESTINATION] + tap[FILLED] * width * 4), (rows, width), np.int32)
    for row in range(rows):
        place = base + (row % inner) * inner_step + (row // inner) * outer_step
        for column in range(width):
            out[row, column] = carray(_pointer(place + column * step), (1,), np.int32)[0]
    tap[FILLED] += rows


@njit
def _ask(tensor: int, state: np.ndarray) -> int:
    if state[MODE] == SURVEY:
        if state[NODE_COUNT] < state[NODE_CAPACITY]:
            _words(state[NODES], state[NODE_CAPACITY])[state[NODE_COUNT]] = tensor
        state[NODE_COUNT] += 1
        return 0
    found = _find(tensor, state)
    if found < 0:
        return 0
    entry = _words(state[TABLE] + found * TABLE_WORDS * _WORD, TABLE_WORDS)
    if entry[PERIOD] == 0:
        return 0
    occurrence = entry[SEEN] % entry[PERIOD]
    entry[SEEN] += 1
    return 1 if occurrence == entry[PICK] else 0


def _on_node(tensor: int, ask: int, user_data: Any) -> int:
    state = carray(user_data, (STATE_WORDS,), np.int64)
    if state[STOP] != 0:
        return ask  # wanted, so that the answer to "go on?" can be no
    if state[MODE] == OFF:
        return 0
    if ask:
        return _ask(tensor, state)
    found = _find(tensor, state)
    entry = _words(state[TABLE] + found * TABLE_WORDS * _WORD, TABLE_WORDS)
    if entry[OWN_TAP] >= 0:
        _copy(tensor, entry[OWN_TAP], state)
    if entry[INPUT_TAP] >= 0:
        _copy(_words(tensor, _TENSOR_WORDS)[_SRC + 1], entry[INPUT_TAP], state)
    return 1


@functools.cache
def callback() -> Any:
    """The compiled callback, a `ggml_backend_sched_eval_callback` at `.address` whose user data is `state`."""
    library = ggml_base()
    for symbol, name in (
        (_IS_HOST, "ggml_backend_buffer_is_host"),
        (_GET, "ggml_backend_tensor_get"),
        (_SET, "ggml_backend_tensor_set"),
    ):
        address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
        llvmlite.binding.add_symbol(symbol, address)
    # C's bool is one byte; numba's own boolean would be one bit of it
    signature = types.uint8(types.intp, types.uint8, types.CPointer(types.int64))
    # The offsets come from layout.py, so the machine code depends on this folder, not on this file alone.
    return c_callback(_on_node, signature, source_digest(Path(__file__).parent))
