"""How the policy's kernels are compiled: once per machine, without fast-math, into plain native code."""

from collections.abc import Callable
from typing import TypeVar

import numba

F = TypeVar("F", bound=Callable[..., object])


def kernel(function: F) -> F:
    """Compile with numba: no Python objects, no exceptions, IEEE float32 in the order written.

    The result is callable from other kernels and from a `numba.cfunc`. Machine code is kept on disk where the
    package or the user's cache directory is writable; a read-only installation compiles at each start instead.
    """
    try:
        compiled = numba.njit(cache=True, error_model="numpy")(function)
    except RuntimeError:  # numba found no writable directory for its cache
        compiled = numba.njit(error_model="numpy")(function)
    return compiled
