"""Replay recorded routing in llama.cpp: write the recorded experts over the router's own before anything looks.

A synthetic model routes at random, which is the worst case of every cache. Real models do not; with their recorded
choices written into `ffn_moe_topk`, a synthetic one reads and computes what the real one would, byte for byte, while
the mixing weights are still its own.
"""

import functools
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from numba import carray, njit, types

from edgemoe.llamacpp import native
from edgemoe.llamacpp.hub import Hub
from edgemoe.llamacpp.layout import TYPE_I32, Tensor
from edgemoe.llamacpp.native import _find, _pointer, _words
from edgemoe.model import Model
from edgemoe.policy._jit import c_callback
from edgemoe.streaming import jit, step
from edgemoe.streaming.decider import Decider

_NE, _NB, _DATA = (getattr(Tensor, name).offset // 8 for name in ("ne", "nb", "data"))
_WORDS = Tensor.name.offset // 8
# The word after those of either callback holds the address of `forced`: int64 [4].
_FORCED = step.STATE_WORDS
_STATE_WORDS = _FORCED + 1
IDS, ROWS, WIDTH, LAYERS = range(4)  # the ids' address (0: leave the router's), int32 [LAYERS, ROWS, WIDTH]


@njit
def _write(tensor: int, state: np.ndarray) -> None:
    """Put this step's recorded experts into a node of chosen ids, row by row: its rows lie as far apart as E ids."""
    forced = _words(state[_FORCED], 4)
    found = _find(tensor, state)
    fields = _words(tensor, _WORDS)
    if forced[IDS] == 0 or found < 0 or (fields[0] & 0xFFFFFFFF) != TYPE_I32 or fields[_NE] != forced[WIDTH]:
        return
    layer = found % state[native.LAYER_COUNT]
    if layer >= forced[LAYERS]:
        return
    ids = carray(_pointer(forced[IDS]), (forced[LAYERS], forced[ROWS], forced[WIDTH]), np.int32)
    for row in range(min(fields[_NE + 1], forced[ROWS])):
        out = carray(_pointer(fields[_DATA] + row * fields[_NB + 1]), (forced[WIDTH],), np.int32)
        for i in range(forced[WIDTH]):
            out[i] = ids[layer, row, i]


_plain, _streaming = njit(native._on_node), njit(step.on_node)


def _on_plain_node(tensor: int, ask: int, user_data: Any) -> int:
    state = carray(user_data, (_STATE_WORDS,), np.int64)
    if not ask and state[native.MODE] == native.CAPTURE:
        _write(tensor, state)
    return _plain(tensor, ask, user_data)


def _on_streaming_node(tensor: int, ask: int, user_data: Any) -> int:
    state = carray(user_data, (_STATE_WORDS,), np.int64)
    if not ask and state[native.MODE] == native.CAPTURE:
        _write(tensor, state)
    return _streaming(tensor, ask, user_data)


@functools.cache
def _address(streaming: bool) -> int:
    """Of the compiled callback; a `Hub` must exist."""
    signature = types.uint8(types.intp, types.uint8, types.CPointer(types.int64))
    sources = hashlib.sha256(Path(__file__).read_bytes() + jit.SOURCES.encode()).hexdigest()
    return int(c_callback(_on_streaming_node if streaming else _on_plain_node, signature, sources).address)


def compile_streaming() -> None:
    """Have the streaming engine's callback ready: compiling takes memory, which nobody's budget is for."""
    Hub()
    _address(True)


class _Forced(Hub):
    """What both hubs below share."""

    _streams_experts = False

    def _prepare(self) -> None:
        self._forced = np.zeros(4, np.int64)
        self.state = np.append(self.state, np.zeros(_STATE_WORDS - len(self.state), np.int64))
        self.state[_FORCED] = self._forced.ctypes.data
        self.callback = _address(self._streams_experts)

    def force(self, ids: np.ndarray | None) -> None:  # [L, B, k] int32, contiguous; L: block numbers from 0
        """What the next decodes execute: row b of a batch the experts `ids[:, b]`. None: what the router chooses."""
        self._ids = ids
        if ids is None:
            self._forced[IDS] = 0
            return
        assert ids.dtype == np.int32 and ids.flags.c_contiguous
        self._forced[:] = ids.ctypes.data, ids.shape[1], ids.shape[2], ids.shape[0]


class ForcedHub(_Forced):
    """A plain hub that replays routing."""

    def __init__(self) -> None:
        super().__init__()
        self._prepare()


class ForcedDecider(Decider, _Forced):
    """The streaming engine's callback, which then sees the replayed routing as the router's own."""

    _streams_experts = True

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._prepare()
