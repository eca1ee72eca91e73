"""The native libraries that the installed llama-cpp-python wheel carries, found without importing it.

`ggml_base` is enough to read a header and costs milliseconds; `llama` imports the wheel's own bindings (and with them
every backend that it was built with), so only what runs a model asks for it.
"""

import ctypes
import functools
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

from edgemoe.errors import UserError

LIBRARY_PATH_VARIABLE = "LLAMA_CPP_LIB_PATH"  # the same override that llama-cpp-python honours


@functools.cache
def library_directory() -> Path:
    """Where the wheel keeps libllama and libggml-base; a `UserError` if llama-cpp-python is not installed."""
    override = os.environ.get(LIBRARY_PATH_VARIABLE)
    if override:
        return Path(override)
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or not spec.submodule_search_locations:
        raise UserError("llama-cpp-python is not installed: run pip install llama-cpp-python==0.3.36")
    return Path(next(iter(spec.submodule_search_locations))) / "lib"


def library_file(name: str) -> Path:
    """The file to load for `ggml-base`, `llama`, …

    The wheel holds copies of each library, not links. libllama asks for libggml-base by its soname
    (`libggml-base.so.0`), so loading any other copy by path would put a second ggml into the process.
    """
    directory = library_directory()
    suffix = ".dylib" if sys.platform == "darwin" else ".so"
    plain = directory / f"lib{name}{suffix}"
    pattern = f"lib{name}.*{suffix}" if sys.platform == "darwin" else f"lib{name}{suffix}.*"
    named = sorted(directory.glob(pattern), key=lambda path: len(path.name))
    found = [*named[:1], plain] if plain.exists() or named else []
    if not found:
        raise UserError(
            f"{directory}: no {plain.name} there: reinstall llama-cpp-python, or unset {LIBRARY_PATH_VARIABLE}"
        )
    return found[0]


@functools.cache
def ggml_base() -> ctypes.CDLL:
    """libggml-base: tensors, types, GGUF headers, backend buffers. Callers set `restype` and `argtypes` themselves."""
    path = library_file("ggml-base")
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise UserError(f"{path}: cannot be loaded ({error}): reinstall llama-cpp-python") from None


@functools.cache
def llama() -> ModuleType:
    """llama-cpp-python's low-level bindings (`llama_cpp.llama_cpp`): every `llama_*` function and struct."""
    ggml_base()
    try:
        from llama_cpp import llama_cpp
    except (ImportError, OSError, RuntimeError, FileNotFoundError) as error:
        raise UserError(f"llama-cpp-python cannot be loaded ({error}): reinstall it") from None
    return llama_cpp
