"""Small graphs on ggml's own CPU backend: the products that decoding is made of, without a model around them.

What llama.cpp does with a weight depends on the buffer that it lies in: its loader offers each weight to the CPU's
"extra" buffer types (repacked rows, AMX tiles) before the plain one. `buffer_types` asks the same question of the same
functions, so a rate is measured, and later applied, in the state in which llama.cpp really keeps such a weight.
"""

import ctypes
import functools
import mmap
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import ClassVar

import numpy as np

from edgemoe.errors import UserError
from edgemoe.llamacpp.layout import TYPE_F32, TYPE_I32, Tensor, verify_layout
from edgemoe.llamacpp.libraries import ggml_base, library_file
from edgemoe.llamacpp.session import decoder, quiet

PLAIN = "CPU"
_CPU_DEVICE = 0  # enum ggml_backend_dev_type
_SUCCESS = 0
_TYPE_COUNT = 43  # GGML_TYPE_COUNT of the pinned release: ggml stops the process at numbers beyond its table
_NO_HUGE_PAGES = 15  # madvise's MADV_NOHUGEPAGE, which Python's mmap module does not name everywhere
_BATCH = 512  # rows with which llama.cpp's loader asks whether a buffer type suits a weight
_pointer, _size, _int = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


class _InitParams(ctypes.Structure):
    _fields_: ClassVar = [("mem_size", _size), ("mem_buffer", _pointer), ("no_alloc", ctypes.c_bool)]


_FUNCTIONS: dict[str, tuple[object, tuple[object, ...]]] = {
    "ggml_init": (_pointer, (_InitParams,)),
    "ggml_free": (None, (_pointer,)),
    "ggml_tensor_overhead": (_size, ()),
    "ggml_graph_overhead_custom": (_size, (_size, ctypes.c_bool)),
    "ggml_new_tensor": (_pointer, (_pointer, _int, _int, ctypes.POINTER(ctypes.c_int64))),
    "ggml_mul_mat": (_pointer, (_pointer, _pointer, _pointer)),
    "ggml_mul_mat_id": (_pointer, (_pointer, _pointer, _pointer, _pointer)),
    "ggml_add": (_pointer, (_pointer, _pointer, _pointer)),
    "ggml_new_graph_custom": (_pointer, (_pointer, _size, ctypes.c_bool)),
    "ggml_build_forward_expand": (None, (_pointer, _pointer)),
    "ggml_nbytes": (_size, (_pointer,)),
    "ggml_type_name": (ctypes.c_char_p, (_int,)),
    "ggml_blck_size": (ctypes.c_int64, (_int,)),
    "ggml_type_size": (_size, (_int,)),
    "ggml_is_quantized": (ctypes.c_bool, (_int,)),
    "ggml_quantize_chunk": (_size, (_int, _pointer, _pointer, *[ctypes.c_int64] * 3, _pointer)),
    "ggml_quantize_requires_imatrix": (ctypes.c_bool, (_int,)),
    "ggml_backend_dev_by_type": (_pointer, (_int,)),
    "ggml_backend_load_all": (None, ()),
    "ggml_backend_dev_init": (_pointer, (_pointer, ctypes.c_char_p)),
    "ggml_backend_dev_backend_reg": (_pointer, (_pointer,)),
    "ggml_backend_dev_buffer_type": (_pointer, (_pointer,)),
    "ggml_backend_dev_supports_op": (ctypes.c_bool, (_pointer, _pointer)),
    "ggml_backend_reg_get_proc_address": (_pointer, (_pointer, ctypes.c_char_p)),
    "ggml_backend_buft_name": (ctypes.c_char_p, (_pointer,)),
    "ggml_backend_buft_alloc_buffer": (_pointer, (_pointer, _size)),
    "ggml_backend_buffer_get_base": (_pointer, (_pointer,)),
    "ggml_backend_buffer_get_size": (_size, (_pointer,)),
    "ggml_backend_buffer_free": (None, (_pointer,)),
    "ggml_backend_alloc_ctx_tensors_from_buft": (_pointer, (_pointer, _pointer)),
    "ggml_backend_tensor_set": (None, (_pointer, _pointer, _size, _size)),
    "ggml_backend_tensor_get": (None, (_pointer, _pointer, _size, _size)),
    "ggml_backend_graph_compute": (_int, (_pointer, _pointer)),
    "ggml_backend_free": (None, (_pointer,)),
}
# The registry of backends is a library of its own, which brings the CPU backend with it.
_IN_REGISTRY = {"ggml_backend_dev_by_type", "ggml_backend_load_all"}


@functools.cache
def _registry() -> ctypes.CDLL:
    verify_layout()
    quiet()  # repacking announces every tensor
    return ctypes.CDLL(str(library_file("ggml")))


@functools.cache
def _ggml(name: str) -> "ctypes._NamedFuncPointer":
    library = _registry() if name in _IN_REGISTRY else ggml_base()
    function = getattr(library, name)
    function.restype, function.argtypes = _FUNCTIONS[name]
    return function


@functools.cache
def _device() -> int:
    """The CPU as a ggml device; builds that load backends on demand are told to."""
    for attempt in range(2):
        if device := _ggml("ggml_backend_dev_by_type")(_CPU_DEVICE):
            return int(device)
        if attempt == 0:
            _ggml("ggml_backend_load_all")()
    raise UserError("this llama.cpp build has no CPU backend: reinstall llama-cpp-python==0.3.36")


def _of_registry(name: str, result: object, *arguments: object) -> "ctypes._FuncPointer | None":
    """A function that a backend offers by name only, or None."""
    address = _ggml("ggml_backend_reg_get_proc_address")(
        _ggml("ggml_backend_dev_backend_reg")(_device()), name.encode()
    )
    return ctypes.CFUNCTYPE(result, *arguments)(address) if address else None  # type: ignore[arg-type]


@functools.cache
def _buffer_type_handles() -> dict[str, int]:
    """Every buffer type that the CPU keeps weights in, in llama.cpp's order of trying; the plain one last."""
    offered = _of_registry("ggml_backend_dev_get_extra_bufts", ctypes.POINTER(_pointer), _pointer)
    handles: dict[str, int] = {}
    extra = offered(_device()) if offered else None
    for i in range(64):
        if not extra or not extra[i]:
            break
        handles[_ggml("ggml_backend_buft_name")(extra[i]).decode()] = extra[i]
    handles[PLAIN] = _ggml("ggml_backend_dev_buffer_type")(_device())
    return handles


@functools.cache
def type_ids() -> dict[str, int]:
    """ggml's number of every storage type of this build, by the name that GGUF files show (`Q8_0`, `Q4_K`, …)."""
    known = [number for number in range(_TYPE_COUNT) if _ggml("ggml_type_size")(number)]
    return {_ggml("ggml_type_name")(number).decode().upper(): number for number in known}


def row_bytes(kind: str, n: int) -> int:
    """Bytes of a row of `n` values; `ValueError` where they do not divide into the type's blocks."""
    number = type_ids()[kind]
    block = _ggml("ggml_blck_size")(number)
    if n % block:
        raise ValueError(f"rows of {n} values do not divide into {kind} blocks of {block}")
    return int(n // block * _ggml("ggml_type_size")(number))


def random_rows(kind: str, rows: int, n: int, seed: int = 0) -> np.ndarray:
    """Valid random weights, [rows, bytes] uint8: normal values of unit RMS products, by ggml's own quantiser."""
    number = type_ids()[kind]
    values = np.random.default_rng(seed).standard_normal((rows, n), dtype=np.float32) / np.float32(n**0.5)
    out = np.empty((rows, row_bytes(kind, n)), np.uint8)
    importance = np.ones(n, np.float32) if _ggml("ggml_quantize_requires_imatrix")(number) else None
    pointer = importance.ctypes.data if importance is not None else None
    if number == TYPE_F32:
        return values.view(np.uint8)
    written = _ggml("ggml_quantize_chunk")(number, values.ctypes.data, out.ctypes.data, 0, rows, n, pointer)
    if written != out.nbytes:
        raise ValueError(f"ggml wrote {written} bytes of {kind}, expected {out.nbytes}")
    return out


@functools.cache
def buffer_types(kind: str, ne: tuple[int, ...], top_k: int = 0) -> tuple[str, ...]:
    """Buffer types that can hold a weight of this type and shape, in llama.cpp's order of preference.

    `ne` is (row length, rows) of a dense weight, or (row length, rows, experts), of which `top_k` are executed. The
    first is where llama.cpp puts it by default; with `use_extra_bufts=False` it is the plain `CPU`.
    """
    return tuple(name for name, handle in _buffer_type_handles().items() if _suits(handle, kind, ne, top_k))


def _suits(handle: int, kind: str, ne: tuple[int, ...], top_k: int) -> bool:
    """As `weight_buft_supported` of llama.cpp's loader: would the device run the product from such a buffer?"""
    if handle == _buffer_type_handles()[PLAIN]:
        return True
    buffer = _ggml("ggml_backend_buft_alloc_buffer")(handle, 0)
    with _Context(16) as context:
        weight = context.tensor(type_ids()[kind], ne)
        Tensor.from_address(weight).buffer = buffer
        if len(ne) == 3:
            ids = context.tensor(TYPE_I32, (top_k, _BATCH))
            product = _ggml("ggml_mul_mat_id")(
                context.pointer, weight, context.tensor(TYPE_F32, (ne[0], top_k, _BATCH)), ids
            )
        else:
            product = _ggml("ggml_mul_mat")(context.pointer, weight, context.tensor(TYPE_F32, (ne[0], _BATCH)))
        suits = bool(_ggml("ggml_backend_dev_supports_op")(_device(), product))
    if buffer:
        _ggml("ggml_backend_buffer_free")(buffer)
    return suits


class _Context:
    """A ggml context with room for the descriptions of `n` tensors (no data), and of a graph of as many nodes."""

    def __init__(self, n: int) -> None:
        self.n = n
        room = n * _ggml("ggml_tensor_overhead")() + _ggml("ggml_graph_overhead_custom")(n, False)
        self.pointer = _ggml("ggml_init")(_InitParams(room, None, True))

    def tensor(self, number: int, ne: Sequence[int]) -> int:
        return int(_ggml("ggml_new_tensor")(self.pointer, number, len(ne), (ctypes.c_int64 * len(ne))(*ne)))

    def __enter__(self) -> "_Context":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self.pointer:
            _ggml("ggml_free")(self.pointer)
        self.pointer = None


class CpuGraph:
    """A graph of independent products: build it, `allocate`, then `compute` as often as needed.

    Computing happens on the thread that decodes for sessions too, so that both use one team of OpenMP workers.
    A context manager; everything is freed at its end.
    """

    def __init__(self, max_nodes: int) -> None:
        self._weights = _Context(max_nodes)
        self._rest = _Context(3 * max_nodes + 2)  # each node with an input and ids
        self._filling: dict[int, np.ndarray] = {}
        self._nodes: list[int] = []
        self._ids: list[int] = []
        self._buffers: list[int] = []
        self._backend: int | None = None
        self._graph: int | None = None
        self.weight_bytes = 0

    def weight(self, kind: str, ne: tuple[int, ...], rows: np.ndarray) -> int:
        """A weight (row length, rows[, experts]); filled with `rows` [R, bytes] uint8, repeated as often as needed."""
        tensor = self._weights.tensor(type_ids()[kind], ne)
        self._filling[tensor] = rows
        self.weight_bytes += _ggml("ggml_nbytes")(tensor)
        return tensor

    def product(self, weight: int) -> int:
        """The weight times one vector of its own (`MUL_MAT`, batch 1)."""
        n_in = Tensor.from_address(weight).ne[0]
        return self._node(_ggml("ggml_mul_mat")(self._rest.pointer, weight, self._rest.tensor(TYPE_F32, (n_in, 1))))

    def expert_product(self, weight: int, top_k: int, shared_input: bool) -> int:
        """`MUL_MAT_ID` of `top_k` experts, batch 1: of one input, as gate and up are, or of one each, as down is."""
        n_in, ids = Tensor.from_address(weight).ne[0], self._rest.tensor(TYPE_I32, (top_k, 1))
        self._ids.append(ids)
        inputs = self._rest.tensor(TYPE_F32, (n_in, 1 if shared_input else top_k, 1))
        return self._node(_ggml("ggml_mul_mat_id")(self._rest.pointer, weight, inputs, ids))

    def chain(self, width: int, length: int) -> None:
        """`length` additions of vectors, each of the one before: nothing but what every node costs."""
        end, step = self._rest.tensor(TYPE_F32, (width,)), self._rest.tensor(TYPE_F32, (width,))
        for _ in range(length):
            end = self._node(_ggml("ggml_add")(self._rest.pointer, end, step))

    def _node(self, tensor: int) -> int:
        self._nodes.append(tensor)
        return tensor

    def allocate(self, buffer_type: str = PLAIN) -> None:
        """Take memory and fill it: weights in `buffer_type` (of `buffer_types`), everything else in plain memory."""
        allocate = _ggml("ggml_backend_alloc_ctx_tensors_from_buft")
        handles = _buffer_type_handles()
        for context, handle in ((self._weights, handles[buffer_type]), (self._rest, handles[PLAIN])):
            if context is self._weights and not self._filling:
                continue
            if not (buffer := allocate(context.pointer, handle)):
                raise UserError(f"no memory for {self.weight_bytes / 1e6:.0f} MB of weights: close other programs")
            self._buffers.append(buffer)
            if context is self._weights and buffer_type == PLAIN:
                _without_huge_pages(buffer)
        self._fill_weights()
        self._set_inputs()
        self._graph = _ggml("ggml_new_graph_custom")(self._rest.pointer, self._rest.n, False)
        for node in self._nodes:
            _ggml("ggml_build_forward_expand")(self._graph, node)
        self._backend = _ggml("ggml_backend_dev_init")(_device(), None)

    def _fill_weights(self) -> None:
        """Weights of one shape hold the same values: where they lie is what matters here."""
        whole: np.ndarray | None = None
        for tensor, rows in self._filling.items():
            nbytes = _ggml("ggml_nbytes")(tensor)
            if whole is None or whole.nbytes != nbytes:
                whole = np.resize(rows, (nbytes // rows.shape[1], rows.shape[1]))
            _ggml("ggml_backend_tensor_set")(tensor, whole.ctypes.data, 0, nbytes)
        self._filling.clear()

    def _set_inputs(self) -> None:
        """Ones as inputs: uninitialised memory may hold denormals, which are slow to compute with."""
        for node in self._nodes:
            for source in Tensor.from_address(node).src[:2]:
                if source and Tensor.from_address(source).type == TYPE_F32 and not Tensor.from_address(source).op:
                    values = np.ones(_ggml("ggml_nbytes")(source) // 4, np.float32)
                    _ggml("ggml_backend_tensor_set")(source, values.ctypes.data, 0, values.nbytes)

    def choose(self, experts: Sequence[np.ndarray]) -> None:
        """Which experts each `expert_product` executes from now on, in the order of their making: [k] each."""
        for tensor, chosen in zip(self._ids, experts, strict=True):
            values = np.ascontiguousarray(chosen, np.int32)
            _ggml("ggml_backend_tensor_set")(tensor, values.ctypes.data, 0, values.nbytes)

    def values(self, tensor: int) -> np.ndarray:
        """A float32 tensor's values, flat (a copy)."""
        out = np.empty(_ggml("ggml_nbytes")(tensor) // 4, np.float32)
        _ggml("ggml_backend_tensor_get")(tensor, out.ctypes.data, 0, out.nbytes)
        return out

    def compute(self, threads: int) -> float:
        """Run the graph on so many threads; seconds."""
        return decoder().submit(self._compute, threads).result()

    def _compute(self, threads: int) -> float:
        if set_threads := _of_registry("ggml_backend_set_n_threads", None, _pointer, _int):
            set_threads(self._backend, threads)
        start = time.perf_counter()
        status = _ggml("ggml_backend_graph_compute")(self._backend, self._graph)
        taken = time.perf_counter() - start
        if status != _SUCCESS:
            raise RuntimeError(f"ggml_backend_graph_compute returned {status}")
        return taken

    def __enter__(self) -> "CpuGraph":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free everything; may be called again."""
        if self._backend:
            _ggml("ggml_backend_free")(self._backend)
        for buffer in self._buffers:
            _ggml("ggml_backend_buffer_free")(buffer)
        self._backend, self._buffers = None, []
        self._weights.close()
        self._rest.close()


def _without_huge_pages(buffer: int) -> None:
    """Weights that are not repacked stay in the mapped file, whose pages are small: so are these, for equal speed."""
    if sys.platform != "linux":
        return
    base, size = _ggml("ggml_backend_buffer_get_base")(buffer), _ggml("ggml_backend_buffer_get_size")(buffer)
    start = -(-base // mmap.PAGESIZE) * mmap.PAGESIZE
    advise = ctypes.CDLL(None).madvise
    advise.argtypes, advise.restype = (_pointer, _size, _int), _int
    advise(start, (base + size - start) // mmap.PAGESIZE * mmap.PAGESIZE, _NO_HUGE_PAGES)
