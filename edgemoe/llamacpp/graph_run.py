"""Small graphs on ggml's own CPU backend: the products that decoding is made of, without a model around them."""

import ctypes
import mmap
import sys
import time
from collections.abc import Sequence
from concurrent.futures import wait
from math import prod
from types import TracebackType

import numpy as np

from edgemoe.errors import UserError
from edgemoe.llamacpp.ggml import Context, Int, Pointer, Size, cpu_device, ggml, of_cpu_backend
from edgemoe.llamacpp.layout import TYPE_F16, TYPE_F32, TYPE_I32, Tensor
from edgemoe.llamacpp.session import decoder
from edgemoe.llamacpp.weights import PLAIN, buffer_type_handles, random_rows, row_bytes, type_ids
from edgemoe.units import format_bytes

_SUCCESS = 0
_ROW = 4096  # values; a multiple of every type's block
_GROUP = 64  # rows; a multiple of every repacked group
_INPUTS = {TYPE_F32: (1, np.float32), TYPE_F16: (1, np.float16), TYPE_I32: (0, np.int32)}
_NO_HUGE_PAGES = 15  # madvise's MADV_NOHUGEPAGE, which Python's mmap module does not name everywhere


class Weights:
    """Valid random weights of one type in one buffer, of which products of any shape can read a part.

    A repacked row group, like a block, holds its rows by itself, so matrices of any row length may lie anywhere in it.
    A context manager; graphs that use it must be closed first.
    """

    def __init__(self, kind: str, nbytes: int, buffer_type: str = PLAIN, max_parts: int = 4096) -> None:
        """At least `nbytes`. Raises `UserError` where there is no memory for them."""
        self.kind = kind
        self._context = Context(max_parts + 1)
        self._next = 0
        row = row_bytes(kind, _ROW)
        rows = -(-nbytes // (row * _GROUP)) * _GROUP
        self.nbytes = rows * row
        self._whole = self._context.tensor(type_ids()[kind], (_ROW, rows))
        handle = buffer_type_handles()[buffer_type]
        self._buffer = ggml("ggml_backend_alloc_ctx_tensors_from_buft")(self._context.pointer, handle)
        if not self._buffer:
            self._context.close()
            raise UserError(f"no memory for {format_bytes(self.nbytes)} of weights: close other programs")
        if buffer_type == PLAIN:
            _without_huge_pages(self._buffer)
        values = np.resize(random_rows(kind, _GROUP, _ROW), (rows, row))
        ggml("ggml_backend_tensor_set")(self._whole, values.ctypes.data, 0, self.nbytes)

    def part(self, *ne: int) -> int:
        """The next part that has the shape (row length, rows[, experts]); after the last one, the first again."""
        row = row_bytes(self.kind, ne[0])
        strides, size = [row, row * ne[1]], row * prod(ne[1:])
        if size > self.nbytes:
            raise ValueError(f"{size} bytes of {self.nbytes}")
        start = self._next if self._next + size <= self.nbytes else 0
        self._next = start + size
        view = ggml(f"ggml_view_{len(ne)}d")
        made = view(self._context.pointer, self._whole, *ne, *strides[: len(ne) - 1], start)
        ggml("ggml_backend_view_init")(made)
        return int(made)

    def __enter__(self) -> "Weights":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free everything; may be called again."""
        if self._buffer:
            ggml("ggml_backend_buffer_free")(self._buffer)
            self._context.close()
        self._buffer = None


class CpuGraph:
    """A graph of independent nodes: build it, `allocate`, then `compute` as often as needed.

    Computing happens on the thread that decodes for sessions too, so that both use one team of OpenMP workers.
    A context manager; everything but the weights is freed at its end.
    """

    def __init__(self, max_nodes: int) -> None:
        self._context = Context(4 * max_nodes)  # a node, its inputs, and ids
        self._nodes: list[int] = []
        self._ids: list[int] = []
        self._inputs: list[int] = []
        self._buffer: int | None = None
        self._backend: int | None = None
        self._graph: int | None = None

    def product(self, weight: int) -> int:
        """A part of weights times one vector of its own (`MUL_MAT`, batch 1)."""
        return self.apply("mul_mat", weight, self.input("F32", Tensor.from_address(weight).ne[0], 1))

    def expert_product(self, weight: int, top_k: int, shared_input: bool) -> int:
        """`MUL_MAT_ID` of `top_k` experts, batch 1: of one input, as gate and up are, or of one each, as down is."""
        ids = self.input("I32", top_k, 1)
        self._ids.append(ids)
        inputs = self.input("F32", Tensor.from_address(weight).ne[0], 1 if shared_input else top_k, 1)
        return self.apply("mul_mat_id", weight, inputs, ids)

    def input(self, kind: str, *ne: int) -> int:
        """A tensor that no node computes: F32 or F16 ones, or I32 zeros."""
        self._inputs.append(self._context.tensor(type_ids()[kind], ne))
        return self._inputs[-1]

    def apply(self, operation: str, *arguments: object) -> int:
        """A node of any operation, by ggml's name without its prefix, `rms_norm`; arguments as in ggml.h."""
        self._nodes.append(ggml(f"ggml_{operation}")(self._context.pointer, *arguments))
        return self._nodes[-1]

    def allocate(self) -> None:
        """Take memory for everything but weights, set the inputs, and order the nodes."""
        handle = buffer_type_handles()[PLAIN]
        self._buffer = ggml("ggml_backend_alloc_ctx_tensors_from_buft")(self._context.pointer, handle)
        if not self._buffer:
            raise UserError("no memory for the inputs of a small graph: close other programs")
        for pointer in self._inputs:
            # Uninitialised memory may hold denormals, which are slow, and ids out of range, which are fatal.
            value, kind = _INPUTS[Tensor.from_address(pointer).type]
            self._set(pointer, np.full(ggml("ggml_nbytes")(pointer) // np.dtype(kind).itemsize, value, kind))
        self._graph = ggml("ggml_new_graph_custom")(self._context.pointer, self._context.n, False)
        for node in self._nodes:
            ggml("ggml_build_forward_expand")(self._graph, node)
        self._backend = ggml("ggml_backend_dev_init")(cpu_device(), None)

    def _set(self, pointer: int, values: np.ndarray) -> None:
        ggml("ggml_backend_tensor_set")(pointer, values.ctypes.data, 0, values.nbytes)

    def choose(self, experts: Sequence[np.ndarray]) -> None:
        """Which experts each `expert_product` executes from now on, in the order of their making: [k] each."""
        for tensor, chosen in zip(self._ids, experts, strict=True):
            self._set(tensor, np.ascontiguousarray(chosen, np.int32))

    def values(self, tensor: int) -> np.ndarray:
        """A float32 tensor's values, flat (a copy)."""
        out = np.empty(ggml("ggml_nbytes")(tensor) // 4, np.float32)
        ggml("ggml_backend_tensor_get")(tensor, out.ctypes.data, 0, out.nbytes)
        return out

    def compute(self, threads: int) -> float:
        """Run the graph on so many threads; seconds."""
        running = decoder().submit(self._compute, threads)
        try:
            return running.result()
        finally:
            wait([running])  # an interrupt must not free what a run of milliseconds still reads

    def _compute(self, threads: int) -> float:
        if set_threads := of_cpu_backend("ggml_backend_set_n_threads", None, Pointer, Int):
            set_threads(self._backend, threads)
        start = time.perf_counter()
        status = ggml("ggml_backend_graph_compute")(self._backend, self._graph)
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
            ggml("ggml_backend_free")(self._backend)
        if self._buffer:
            ggml("ggml_backend_buffer_free")(self._buffer)
        self._backend = self._buffer = None
        self._context.close()


def _without_huge_pages(buffer: int) -> None:
    """Weights that are not repacked stay in the mapped file, whose pages are small: so are these, for equal speed."""
    if sys.platform != "linux":
        return
    base, size = ggml("ggml_backend_buffer_get_base")(buffer), ggml("ggml_backend_buffer_get_size")(buffer)
    start = -(-base // mmap.PAGESIZE) * mmap.PAGESIZE
    advise = ctypes.CDLL(None).madvise
    advise.argtypes, advise.restype = (Pointer, Size, Int), Int
    advise(start, (base + size - start) // mmap.PAGESIZE * mmap.PAGESIZE, _NO_HUGE_PAGES)
