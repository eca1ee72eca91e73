"""The experts of a chunk, each executed once: the rows of all tokens that chose it, side by side."""

import numpy as np
import torch

from edgemoe.gpu_offload.arena import ExpertViews
from edgemoe.gpu_offload.arithmetic import Product, run_expert
from edgemoe.gpu_offload.executor import Counters


def rows_by_expert(executed: np.ndarray) -> tuple[np.ndarray, dict[int, tuple[int, int]]]:
    """executed [T, k], −1 where a gate was elided: the places t · k + i of all others [N], those of one expert side by
    side, and each expert's span of them, in index order."""
    flat = executed.reshape(-1)
    order = np.argsort(flat, kind="stable")
    order = order[flat[order] >= 0]
    experts, starts = np.unique(flat[order], return_index=True)
    ends = [*starts[1:].tolist(), len(order)]
    return order, dict(zip(experts.tolist(), zip(starts.tolist(), ends, strict=True), strict=True))


class Grouped:
    """Rows of h [T, d] by the expert that executes them; `experts` are all of them, in index order.

    executed [T, k] int: −1 where a gate was elided.
    """

    def __init__(self, h: torch.Tensor, executed: np.ndarray, multiply: Product) -> None:
        order, self._spans = rows_by_expert(executed)
        self.experts = list(self._spans)
        self._shape = executed.shape
        self._order = _on(torch.from_numpy(order), h.device)
        self._rows = h[self._order // executed.shape[1]]
        self._outputs = torch.zeros((executed.size, h.shape[1]), device=h.device)
        self._results = torch.empty((len(order), h.shape[1]), device=h.device)
        self._multiply = multiply

    def run(self, expert: int, views: ExpertViews) -> None:
        first, last = self._spans[expert]
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
