"""A flag that stops a running graph: llama.cpp's abort callback as native code, so that Ctrl-C ends a long prompt."""

import functools

import numpy as np
from numba import carray, cfunc, types


def _stopped(flag):  # type: ignore[no-untyped-def]
    return carray(flag, (1,), np.uint8)[0]


@functools.cache
def brake_address() -> int:
    """Address of a `ggml_abort_callback` whose data is one byte: not zero ends the graph before its next node."""
    return int(cfunc(types.uint8(types.CPointer(types.uint8)), nopython=True, cache=True)(_stopped).address)
