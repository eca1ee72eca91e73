"""`ChunkExperts`: the products of a chunk's experts on the device, launched as their bytes arrive."""

import numpy as np
import torch
import triton

from edgemoe.gpu_offload.grouped import rows_by_expert
from edgemoe.gpu_offload.kernels import grouped
from edgemoe.gpu_offload.shape import Shape

_COLUMNS = 64  # of a matrix at once
_DEPTH_BYTES = 128  # of a row: three stages of three blocks fit an Ada card's shared memory
_FEWEST, _MOST = 16, 64  # rows of a tile


class ChunkExperts:
    """Rows of a chunk by the expert that executes them; `experts` are all of them, in index order.

    h [T, d] in the storage type; executed [T, k] int, −1 where a gate was elided; held: the slot of each expert that
    has one. Of the others, each comes alone.
    """

    def __init__(self, h: torch.Tensor, executed: np.ndarray, held: dict[int, int], shape: Shape) -> None:
        order, spans = rows_by_expert(executed)
        self.experts = list(spans)
        mean = len(order) // max(len(spans), 1)
        self._rows = min(max(triton.next_power_of_2(max(mean, 1)), _FEWEST), _MOST)
        here = [e for e in self.experts if e in held]
        tiles: list[tuple[int, int, int]] = []
        self._tiles: dict[int, tuple[int, int]] = {}  # of those that come
        for e in [*here, *(e for e in self.experts if e not in held)]:
            first, (a, b) = len(tiles), spans[e]
            tiles += [(held.get(e, 0), at, min(at + self._rows, b)) for at in range(a, b, self._rows)]
            self._tiles[e] = (first, len(tiles) - first)
        self._held = sum(self._tiles[e][1] for e in here)
        told = torch.from_numpy(np.concatenate([order.astype(np.int32), np.array(tiles, np.int32).reshape(-1)]))
        if h.device.type == "cuda":
            told = told.pin_memory().to(h.device, non_blocking=True)
        self._order, self._spans = told[: len(order)], told[len(order) :]
        self._h, self._shape, self._size = h, shape, executed.shape
        self._hidden = torch.empty((len(order), shape.d_expert), dtype=h.dtype, device=h.device)
        self._outputs = torch.zeros((executed.size, shape.d_model), device=h.device)

    def run_held(self, slots: torch.Tensor) -> None:
        """Those that have a slot. slots [C, bytes_per_expert] uint8 of this layer."""
        self._launch(0, self._held, slots)

    def run(self, expert: int, content: torch.Tensor) -> None:
        """One that came: content [bytes_per_expert] uint8."""
        self._launch(*self._tiles[expert], content)

    def _launch(self, first: int, count: int, memory: torch.Tensor) -> None:
        if not count:
            return
        shape, h = self._shape, self._h
        experts = memory.view(h.dtype)
        cut = {
            "D": shape.d_model,
            "F": shape.d_expert,
            "ROWS": self._rows,
            "COLUMNS": _COLUMNS,
            "DEPTH": _DEPTH_BYTES // h.itemsize,
            "num_warps": 4,
            "num_stages": 3,
        }
        grouped.gate_and_up[count, triton.cdiv(shape.d_expert, _COLUMNS)](
            h, self._order, self._spans, first, experts, self._hidden, K=self._size[1], **cut
        )
        grouped.down[count, triton.cdiv(shape.d_model, _COLUMNS)](
            self._hidden, self._order, self._spans, first, experts, self._outputs, **cut
        )

    def mixed(self, weights: torch.Tensor) -> torch.Tensor:
        """[T, d] float32, once all experts have run; weights [T, k, 1], zero where a gate was elided.

        Summed in each token's own order: the bits do not depend on what was resident.
        """
        return (self._outputs.view(*self._size, -1) * weights).sum(1)
