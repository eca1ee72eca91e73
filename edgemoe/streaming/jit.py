"""How the tier's kernels are compiled: native, without the interpreter's lock, kept on disk while no source changes."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba

from edgemoe.llamacpp import native
from edgemoe.policy import algorithm1
from edgemoe.policy._jit import source_digest

F = TypeVar("F", bound=Callable[..., object])


def kernel(function: F) -> F:
    """Compile with numba, callable from a `numba.cfunc` and from threads that must not wait for the interpreter.

    Machine code is kept where the package or the user's cache directory is writable, until any source that it is made
    of changes: this package's, the policy's, or the base callback's.
    """
    try:
        compiled: Any = numba.njit(cache=True, nogil=True, error_model="numpy")(function)
        file = compiled._cache._cache_file
        file._source_stamp = (file._source_stamp, SOURCES)
    except (RuntimeError, AttributeError):  # no writable directory, or a numba whose cache looks different
        compiled = numba.njit(nogil=True, error_model="numpy")(function)
    return compiled


def _stamp() -> str:
    here, base = Path(__file__).parent, Path(str(native.__file__)).parent
    names = "frames", "jit", "keeping", "pregate", "reader", "reads", "step", "words"
    files = [here / f"{name}.py" for name in names]
    files += [base / "native.py", base / "layout.py"]
    policy = source_digest(Path(str(algorithm1.__file__)).parent)
    return hashlib.sha256(b"".join(file.read_bytes() for file in files) + policy.encode()).hexdigest()


SOURCES = _stamp()
