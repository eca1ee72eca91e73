"""How the policy's kernels are compiled: once per machine, without fast-math, into plain native code."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba

F = TypeVar("F", bound=Callable[..., object])


def kernel(function: F) -> F:
    """Compile with numba: no Python objects, no exceptions, IEEE float32 in the order written.

    The result is callable from other kernels and from a `numba.cfunc`. Machine code is kept on disk where the package
    or the user's cache directory is writable; a read-only installation compiles at each start instead.
    """
    try:
        compiled = numba.njit(cache=True, error_model="numpy")(function)
        _depend_on_every_source(compiled)
    except (RuntimeError, AttributeError):  # no writable directory, or a numba whose cache looks different
        compiled = numba.njit(error_model="numpy")(function)
    return compiled


def _depend_on_every_source(compiled: Any) -> None:
    """Let a change of any file of the policy discard this kernel's machine code.

    numba looks at the kernel's own file only, and would go on running what a kernel of another file used to be.
    """
    file = compiled._cache._cache_file
    file._source_stamp = (file._source_stamp, _SOURCES)


_SOURCES = hashlib.sha256(
    b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
).hexdigest()
