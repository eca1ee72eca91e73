"""Load a model whose expert weights take no memory: llama.cpp's own loader, told where to put them.

llama.cpp lets a caller name the buffer type of tensors that match a pattern. The one given here is the CPU's, with one
function replaced: its buffers are address space in which every `WINDOW` bytes are the same few pages. The loader fills
it with the zeros of a skeleton file (`edgemoe.streaming.skeleton`), and no memory is spent; afterwards the tensors'
`data` are pointed at the real place of the experts. Nothing else is told from a model that was loaded normally, and
without `use_extra_bufts` the products run on the plain layout of the file.
"""

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgemoe.errors import UserError
from edgemoe.llamacpp.ggml import cpu_device, ggml
from edgemoe.llamacpp.hub import Hub
from edgemoe.llamacpp.session import Session

EXPERT_WEIGHTS = r"\.ffn_(gate|up|down|gate_up)_exps\.weight"
WINDOW = 1 << 26
_NAME, _ALLOCATE, _IS_HOST, _WORDS = 0, 1, 5, 8  # ggml-backend-impl.h: six functions, the device, a context
_PROT_NONE, _PROT_READ_WRITE = 0, 3
_SHARED, _PRIVATE, _FIXED, _ANONYMOUS, _NORESERVE = 0x01, 0x02, 0x10, 0x20, 0x4000
_HUGE_PAGES, _NO_HUGE_PAGES = 14, 15
_LOAD_WITHOUT_MMAP = b"none"
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def _map(address: int | None, size: int, protection: int, flags: int, descriptor: int = -1) -> int:
    found = _libc.mmap(address, size, protection, flags, descriptor, 0)
    if found == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(found)


class Reserve:
    """Address space without memory behind it until it is written; pages are small, so that slices come and go."""

    def __init__(self, size: int, huge_pages: bool = False) -> None:
        self.size = size
        try:
            self.address = _map(None, size, _PROT_READ_WRITE, _PRIVATE | _ANONYMOUS | _NORESERVE)
        except OSError as error:
            raise UserError(
                f"no address space for {size / 1e9:.1f} GB of experts ({error.strerror}): raise the limit (ulimit -v)"
            ) from None
        _libc.madvise(self.address, size, _HUGE_PAGES if huge_pages else _NO_HUGE_PAGES)

    def close(self) -> None:
        if self.size:
            _libc.munmap(self.address, self.size)
        self.size = 0


class _Window:
    """A buffer type like the CPU's whose buffers repeat the same `WINDOW` bytes."""

    def __init__(self) -> None:
        plain = ggml("ggml_backend_dev_buffer_type")(cpu_device())
        self._type = (ctypes.c_void_p * _WORDS).from_buffer_copy((ctypes.c_void_p * _WORDS).from_address(plain))
        name = ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_void_p)(self._type[_NAME] or 0)(plain)
        is_host = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)(self._type[_IS_HOST] or 0)(plain)
        if name != ggml("ggml_backend_buft_name")(plain) or not is_host:
            raise UserError("this llama.cpp build keeps buffer types differently: install llama-cpp-python==0.3.36")
        self._allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(self._buffer)
        self._type[_ALLOCATE] = ctypes.cast(self._allocate, ctypes.c_void_p).value
        # By name, llama.cpp tells apart which tensors share a buffer.
        label = ctypes.create_string_buffer(b"edgemoe window")
        self._name = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda _type: ctypes.addressof(label))
        self._type[_NAME] = ctypes.cast(self._name, ctypes.c_void_p).value
        self.address = ctypes.addressof(self._type)
        self._mapped: list[tuple[int, int]] = []
        self.problem: OSError | None = None

    def _buffer(self, _type: int, size: int) -> int | None:
        try:
            return int(ggml("ggml_backend_cpu_buffer_from_ptr")(self._repeat(size), size))
        except OSError as error:  # llama.cpp says that it cannot allocate; why is told by `problem`
            self.problem = error
            return None

    def _repeat(self, size: int) -> int:
        room = -(-size // WINDOW) * WINDOW
        start = _map(None, room, _PROT_NONE, _PRIVATE | _ANONYMOUS | _NORESERVE)
        self._mapped.append((start, room))
        descriptor = os.memfd_create("edgemoe-window")
        try:
            os.ftruncate(descriptor, WINDOW)
            for at in range(start, start + room, WINDOW):
                _map(at, WINDOW, _PROT_READ_WRITE, _SHARED | _FIXED, descriptor)
        finally:
            os.close(descriptor)
        return start

    def close(self) -> None:
        while self._mapped:
            _libc.munmap(*self._mapped.pop())


class SkeletonSession(Session):
    """A session on skeleton files whose expert tensors have no memory of their own; see `repoint`.

    `files` are the skeleton's shards, `name` is the model to name in errors. llama.cpp keeps all other weights in its
    own anonymous buffers, without a mapping of any file.
    """

    def __init__(self, name: Path, files: Sequence[str], *, kv_type: int, hub: Hub, **more: Any) -> None:
        self._files, self._kv_type = [file.encode() for file in files], kv_type
        self._window = _Window()
        super().__init__(name, hub=hub, **more)

    def _model_params(self, n_gpu_layers: int) -> Any:
        params = super()._model_params(n_gpu_layers)
        params.load_mode = self._lib.llama_load_mode_from_str(_LOAD_WITHOUT_MMAP)
        params.use_extra_bufts = False
        self._overrides = (ctypes.c_void_p * 4)()  # pattern, buffer type; the end
        self._pattern = ctypes.create_string_buffer(EXPERT_WEIGHTS.encode())
        self._overrides[0], self._overrides[1] = ctypes.addressof(self._pattern), self._window.address
        params.tensor_buft_overrides = ctypes.cast(self._overrides, ctypes.c_void_p)
        return params

    def _open(self, params: Any) -> Any:
        paths = (ctypes.c_char_p * len(self._files))(*self._files)
        model = self._call(self._lib.llama_model_load_from_splits, paths, len(self._files), params)
        if self._window.problem:
            raise UserError(f"{self.path}: no address space for its experts ({self._window.problem.strerror})")
        return model

    def _context_params(self) -> Any:
        params = super()._context_params()
        params.op_offload = False
        params.type_k = params.type_v = self._kv_type
        return params

    def drop_window(self) -> None:
        """Give up the memory that expert tensors had while loading: from now on they must point elsewhere."""
        self._window.close()

    def close(self) -> None:
        super().close()
        self._window.close()
