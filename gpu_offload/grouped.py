"""The experts of a chunk, each executed once: the rows of all tokens that chose it, side by side."""

import numpy as np
import torch

from edgemoe.gpu_offload.arena import ExpertViews
from edgemoe.gpu_offload.arithmetic import Product, run_expert
from edgemoe.gpu_offload.executor import Counters


def rows_by_expert(executed: np.ndarray, n_experts: int) -> tuple[np.ndarray, np.ndarray]:
    """executed [T, k], −1 where a gate was elided: the places t · k + i of all others [N], those of one expert side by
    side, and where each expert's begin and the last one's end [E + 1]."""
    flat = executed.reshape(-1).astype(np.int16)  # few bits are sorted in one pass
    counts = np.bincount(flat + 1, minlength=n_experts + 1)
    order = np.argsort(flat, kind="stable")[counts[0] :]
    bounds = np.zeros(n_experts + 1, np.int64)
    np.cumsum(counts[1:], out=bounds[1:])
    return order, bounds


class Grouped:
    """Rows of h [T, d] by the expert that executes them; `experts` are all of them, in index order.

    executed [T, k] int: −1 where a gate was elided.
    """

    def __init__(self, h: torch.Tensor, executed: np.ndarray, multiply: Product) -> None:
        order, bounds = rows_by_expert(executed, int(executed.max(initial=-1)) + 1)
        self._bounds = bounds.tolist()
        self.experts = np.flatnonzero(np.diff(bounds)).tolist()
        self._shape = executed.shape
        self._order = _on(torch.from_numpy(order), h.device)
        self._rows = h[self._order // executed.shape[1]]
        self._outputs = torch.zeros((executed.size, h.shape[1]), device=h.device)
        self._results = torch.empty((len(order), h.shape[1]), device=h.device)
        self._multiply = multiply

    def run(self, expert: int, views: ExpertViews) -> None:
        first, last = self._bounds[expert : expert + 2]
        self._results[first:last] = run_expert(self._rows[first:last], views, self._multiply)

    def mixed(self, weights: torch.Tensor) -> torch.Tensor:
        """[T, d] float32, once all experts have run; weights [T, k, 1], zero where a gate was elided.

        Summed in each token's own order: the bits do not depend on what was resident.
        """
        self._outputs[self._order] = self._results
        return (self._outputs.view(*self._shape, -1) * weights).sum(1)


def _on(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """On the device, without waiting for it."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values


def count_settled(counters: Counters, moved: int) -> None:
    """Experts that are moved when a chunk's layer ends: predicted, and executed by none of its tokens. Who was executed
    is there already, in the slot that it keeps (`kept_in_place`)."""
    counters.prefetch, counters.unused = counters.prefetch + moved, counters.unused + moved
