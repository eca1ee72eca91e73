"""Small graphs on ggml's own CPU backend: the products that decoding is made of, without a model around them."""

import ctypes
import mmap
import sys
import time
from collections.abc import Sequence
from concurrent.futures import wait
from types import TracebackType

import numpy as np

from edgemoe.errors import UserError
from edgemoe.llamacpp.ggml import Context, Int, Pointer, Size, cpu_device, ggml, of_cpu_backend
from edgemoe.llamacpp.layout import TYPE_F16, TYPE_F32, TYPE_I32, Tensor
from edgemoe.llamacpp.session import decoder
from edgemoe.llamacpp.weights import PLAIN, buffer_type_handles, type_ids

_SUCCESS = 0
_INPUTS = {TYPE_F32: (1, np.float32), TYPE_F16: (1, np.float16), TYPE_I32: (0, np.int32)}
_NO_HUGE_PAGES = 15  # madvise's MADV_NOHUGEPAGE, which Python's mmap module does not name everywhere


class CpuGraph:
    """A graph of independent products: build it, `allocate`, then `compute` as often as needed.

    Computing happens on the thread that decodes for sessions too, so that both use one team of OpenMP workers.
    A context manager; everything is freed at its end.
    """

    def __init__(self, max_nodes: int) -> None:
        self._weights = Context(max_nodes)
        self._rest = Context(4 * max_nodes)  # a node, its inputs, and ids
        self._filling: dict[int, np.ndarray] = {}
        self._filled: set[int] = set()
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
        self.weight_bytes += ggml("ggml_nbytes")(tensor)
        return tensor

    def product(self, weight: int) -> int:
        """The weight times one vector of its own (`MUL_MAT`, batch 1)."""
        n_in = Tensor.from_address(weight).ne[0]
        return self._node(ggml("ggml_mul_mat")(self._rest.pointer, weight, self._rest.tensor(TYPE_F32, (n_in, 1))))

    def expert_product(self, weight: int, top_k: int, shared_input: bool) -> int:
        """`MUL_MAT_ID` of `top_k` experts, batch 1: of one input, as gate and up are, or of one each, as down is."""
        n_in, ids = Tensor.from_address(weight).ne[0], self._rest.tensor(TYPE_I32, (top_k, 1))
        self._ids.append(ids)
        inputs = self._rest.tensor(TYPE_F32, (n_in, 1 if shared_input else top_k, 1))
        return self._node(ggml("ggml_mul_mat_id")(self._rest.pointer, weight, inputs, ids))

    def input(self, kind: str, *ne: int) -> int:
        """A tensor that no node computes."""
        return self._rest.tensor(type_ids()[kind], ne)

    def apply(self, operation: str, *arguments: object) -> int:
        """A node of any operation, by ggml's name without its prefix, `rms_norm`; arguments as in ggml.h."""
        return self._node(ggml(f"ggml_{operation}")(self._rest.pointer, *arguments))

    def _node(self, tensor: int) -> int:
        self._nodes.append(tensor)
        return tensor

    def allocate(self, buffer_type: str = PLAIN) -> None:
        """Take memory and fill it: weights in `buffer_type` (of `buffer_types`), everything else in plain memory."""
        allocate = ggml("ggml_backend_alloc_ctx_tensors_from_buft")
        handles = buffer_type_handles()
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
        self._graph = ggml("ggml_new_graph_custom")(self._rest.pointer, self._rest.n, False)
        for node in self._nodes:
            ggml("ggml_build_forward_expand")(self._graph, node)
        self._backend = ggml("ggml_backend_dev_init")(cpu_device(), None)

    def _fill_weights(self) -> None:
        """Weights of one shape hold the same values: where they lie is what matters here."""
        whole: np.ndarray | None = None
        for tensor, rows in self._filling.items():
            nbytes = ggml("ggml_nbytes")(tensor)
            if whole is None or whole.nbytes != nbytes:
                whole = np.resize(rows, (nbytes // rows.shape[1], rows.shape[1]))
            ggml("ggml_backend_tensor_set")(tensor, whole.ctypes.data, 0, nbytes)
        self._filled = set(self._filling)
        self._filling.clear()

    def _set_inputs(self) -> None:
        """Ones, and the first expert: uninitialised memory may hold denormals, which are slow, and ids out of range."""
        for node in self._nodes:
            for source in filter(None, Tensor.from_address(node).src[:3]):
                tensor = Tensor.from_address(source)
                if not tensor.op and source not in self._filled and tensor.type in _INPUTS:
                    values = np.full(tensor.ne[0] * tensor.ne[1] * tensor.ne[2], *_INPUTS[tensor.type])
                    ggml("ggml_backend_tensor_set")(source, values.ctypes.data, 0, values.nbytes)

    def choose(self, experts: Sequence[np.ndarray]) -> None:
        """Which experts each `expert_product` executes from now on, in the order of their making: [k] each."""
        for tensor, chosen in zip(self._ids, experts, strict=True):
            values = np.ascontiguousarray(chosen, np.int32)
            ggml("ggml_backend_tensor_set")(tensor, values.ctypes.data, 0, values.nbytes)

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
        for buffer in self._buffers:
            ggml("ggml_backend_buffer_free")(buffer)
        self._backend, self._buffers = None, []
        self._weights.close()
        self._rest.close()


def _without_huge_pages(buffer: int) -> None:
    """Weights that are not repacked stay in the mapped file, whose pages are small: so are these, for equal speed."""
    if sys.platform != "linux":
        return
    base, size = ggml("ggml_backend_buffer_get_base")(buffer), ggml("ggml_backend_buffer_get_size")(buffer)
    start = -(-base // mmap.PAGESIZE) * mmap.PAGESIZE
    advise = ctypes.CDLL(None).madvise
    advise.argtypes, advise.restype = (Pointer, Size, Int), Int
    advise(start, (base + size - start) // mmap.PAGESIZE * mmap.PAGESIZE, _NO_HUGE_PAGES)
