"""`ChunkExperts`: a chunk's experts on the device, several of them to a launch, as their bytes arrive."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton

from edgemoe.gpu_offload.kernels import grouped
from edgemoe.gpu_offload.shape import Shape

_COLUMNS = 64  # of a matrix at once
_DEPTH_BYTES = 128  # of a row: three stages of three blocks fit an Ada card's shared memory
_FEWEST, _MOST = 16, 64  # rows of a tile
_MOVED = 8192  # values that a block moves


class ChunkExperts:
    """Buffers that one layer's experts run in, and the next one's after it.

    An expert has a place: a slot, where it is held, or the buffer that it comes into. Which it is, and which others run
    in the same launch, changes no bit of `outputs`: rows are computed alike, each by itself.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype, chunk: int, width: int, device: torch.device) -> None:
        """chunk, width: tokens T, and experts k that a token executes, at most."""
        self._shape, self._width, rows = shape, width, chunk * width
        self._hidden = torch.empty((rows, shape.d_expert), dtype=dtype, device=device)
        self.outputs = torch.empty((rows, shape.d_model), dtype=torch.float32, device=device)
        """Of token t's i-th expert at t · k + i, once all have run; what no expert computed is undefined."""
        tiles = shape.n_experts + rows // _FEWEST
        told = torch.empty(rows + 3 * tiles + 2 * shape.n_experts, dtype=torch.int32)
        self._told = told.pin_memory() if device.type == "cuda" else told
        self._there = torch.empty_like(told, device=device)

    def plan(
        self,
        order: np.ndarray,
        bounds: np.ndarray,
        held: tuple[np.ndarray, np.ndarray],
        coming: tuple[Sequence[int], Sequence[int]],
        slots: np.ndarray,
    ) -> None:
        """What will run: `order` and `bounds` of `grouped.rows_by_expert`; held: experts and their slots; coming:
        experts and their buffers, in the order in which they come; slots: where each of these ends, or −1.

        An expert without rows may come: it runs nothing. What was planned before must have been read: the host has
        waited for the device since then.
        """
        experts = np.array([*held[0], *coming[0]], np.int64)
        places = np.array([*held[1], *coming[1]], np.int64)
        first, last = bounds[experts], bounds[experts + 1]
        mean = len(order) // max(int(np.count_nonzero(np.diff(bounds))), 1)
        self._rows = min(max(triton.next_power_of_2(max(mean, 1)), _FEWEST), _MOST)
        tiles = -(-(last - first) // self._rows)
        ends = np.cumsum(tiles)
        owner = np.repeat(np.arange(len(experts)), tiles)
        begin = first[owner] + (np.arange(len(owner)) - (ends - tiles)[owner]) * self._rows
        spans = np.stack([places[owner], begin, np.minimum(begin + self._rows, last[owner])], axis=1)
        moved = slots >= 0
        moves = np.stack([places[len(held[0]) :][moved], slots[moved]], axis=1)
        n = len(held[0])
        self._held = int(ends[n - 1]) if n else 0
        self._ends = [self._held, *ends[n:].tolist()]  # tiles up to the i-th that comes
        self._moved = [0, *np.cumsum(moved).tolist()]
        self._tell(order, spans.reshape(-1), moves.reshape(-1))

    def _tell(self, *parts: np.ndarray) -> None:
        sizes = np.cumsum([len(part) for part in parts]).tolist()
        np.concatenate(parts, out=self._told.numpy()[: sizes[-1]], casting="same_kind")
        there = self._there[: sizes[-1]]
        there.copy_(self._told[: sizes[-1]], non_blocking=True)
        self._order, self._spans, self._moves = there.tensor_split(sizes[:-1])

    def run_held(self, h: torch.Tensor, slots: torch.Tensor) -> None:
        """Those that have a slot. h [T, d] in the storage type; slots [C, bytes_per_expert] uint8 of this layer."""
        self._launch(h, 0, self._held, slots)

    def run(self, h: torch.Tensor, first: int, last: int, buffers: torch.Tensor) -> None:
        """From the `first` to before the `last` of those that come. buffers [n, bytes_per_expert] uint8."""
        self._launch(h, self._ends[first], self._ends[last] - self._ends[first], buffers)

    def move(self, first: int, last: int, buffers: torch.Tensor, slots: torch.Tensor) -> None:
        """The same experts into the slots that they end in, once whom they replace has run."""
        begin, count = self._moved[first], self._moved[last] - self._moved[first]
        if count:
            dtype, size = self._hidden.dtype, self._shape.expert_values
            grouped.move[count, triton.cdiv(size, _MOVED)](
                self._moves, begin, buffers.view(dtype), slots.view(dtype), SIZE=size, BLOCK=_MOVED, num_warps=8
            )

    def _launch(self, h: torch.Tensor, first: int, count: int, memory: torch.Tensor) -> None:
        if not count:
            return
        shape, experts = self._shape, memory.view(h.dtype)
        cut: dict[str, Any] = {
            "D": shape.d_model,
            "F": shape.d_expert,
            "ROWS": self._rows,
            "COLUMNS": _COLUMNS,
            "DEPTH": _DEPTH_BYTES // h.itemsize,
            "num_warps": 4,
            "num_stages": 3,
        }
        grouped.gate_and_up[count, triton.cdiv(shape.d_expert, _COLUMNS)](
            h, self._order, self._spans, first, experts, self._hidden, K=self._width, **cut
        )
        grouped.down[count, triton.cdiv(shape.d_model, _COLUMNS)](
            self._hidden, self._order, self._spans, first, experts, self.outputs, **cut
        )
