"""The kernels inside a C callback: the llama.cpp tier has only an address there, and no Python."""

import ctypes

import numpy as np
from numba import carray, cfunc, types

from edgemoe.policy import LogicalCache, preset
from edgemoe.policy.algorithm1 import freeze, prefetch, select
from edgemoe.policy.state import attach_address

E, K = 16, 4


@cfunc(types.int64(types.CPointer(types.float32), types.CPointer(types.float32), types.voidptr))
def step(scores, pregate, block):
    """One token of layer 1, as a callback with a user_data pointer sees it."""
    c = attach_address(block)
    freeze(c, 1)
    prefetch(c, 1, carray(pregate, (E,)))
    copies = c.n_copies[0]
    select(c, 1, carray(scores, (E,)))
    return copies + c.n_copies[0]


def test_a_c_callback_decides_what_python_decides():
    rng = np.random.default_rng(5)
    scores = rng.normal(size=(50, E)).astype(np.float32)
    pregate = (scores + rng.normal(scale=0.3, size=scores.shape)).astype(np.float32)
    caches = [
        LogicalCache(preset("psr", window=6), n_layers=2, n_experts=E, top_k=K, capacity=7, delta=np.full(2, 3.5))
        for _ in range(2)
    ]
    native, python = caches
    floats = ctypes.POINTER(ctypes.c_float)
    copied = 0
    for z, g in zip(scores, pregate, strict=True):
        python.begin_token()
        prefetched = python.prefetch(1, g)
        executed, demanded = python.select(1, z)
        n = step.ctypes(z.ctypes.data_as(floats), g.ctypes.data_as(floats), native.block.ctypes.data)
        assert n == len(prefetched) + len(demanded)
        assert native.state.executed[:K].tolist() == executed
        assert native.resident(1) == python.resident(1)
        copied += n
    assert copied > 50
