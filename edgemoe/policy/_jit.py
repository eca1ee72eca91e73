"""How kernels and callbacks are compiled: once per machine, without fast-math, into plain native code."""

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
        _depend_on(compiled._cache, _POLICY)
    except (RuntimeError, AttributeError):  # no writable directory, or a numba whose cache looks different
        compiled = numba.njit(error_model="numpy")(function)
    return compiled


def c_callback(function: Callable[..., Any], signature: Any, sources: str) -> Any:
    """Compile with numba to a C function pointer (`.address`); kept on disk, and compiled again, like a kernel.

    `sources` is the `source_digest` of the folder whose constants the callback is compiled with.
    """
    try:
        # What `numba.cfunc(cache=True)` does, with a stop before compiling. These are numba's own parts.
        from numba.core.ccallback import CFunc
        from numba.core.sigutils import normalize_signature

        compiled: Any = CFunc(function, normalize_signature(signature), locals={}, options={"nopython": True})
        compiled.enable_caching()
        _depend_on(compiled._cache, sources)
        compiled.compile()
    except (RuntimeError, AttributeError, TypeError, ImportError, OSError):
        compiled = numba.cfunc(signature, nopython=True)(function)
    return compiled


def source_digest(folder: Path) -> str:
    """Changes with any source file of a folder."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))).hexdigest()


def _depend_on(cache: Any, sources: str) -> None:
    """Let a change of any of these sources discard the machine code.

    numba looks at the compiled function's own file only, and would go on running with what another file used to say.
    """
    file = cache._cache_file
    file._source_stamp = (file._source_stamp, sources)


_POLICY = source_digest(Path(__file__).parent)
