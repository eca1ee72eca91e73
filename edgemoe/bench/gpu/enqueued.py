"""The device-resident executor, teacher-forced: a text's tokens are enqueued one after the other, and timed between."""

import time
from itertools import pairwise

import numpy as np
import torch

from edgemoe.gpu_offload.device import DeviceExecutor
from edgemoe.gpu_offload.kernels.sampling import RUNNING


class ForcedDevice(DeviceExecutor):
    """A `DeviceExecutor` whose next token is the text's, not the model's choice."""

    @torch.inference_mode()
    def forced(self, tokens: np.ndarray, position: int) -> np.ndarray:  # [T] float64, seconds
        """Decode tokens [T] alone, one after the other, without a host between them.

        A token's time ends where the next one's begins: what lies between graphs counts. Raises `UserError` where a
        copy did not arrive.
        """
        self.prepare()
        device = self._control.device
        rows = np.stack([[0, position + i, RUNNING, int(token)] for i, token in enumerate(tokens)])
        words = torch.from_numpy(rows.astype(np.int64)).to(device)
        self._aim(0, position, int(tokens[0]))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        marks = [_mark(device)]
        for row in words:
            self._control.copy_(row, non_blocking=True)
            self._run("token", self._program.launch)
            marks.append(_mark(device))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.records.check()
        return np.array([_between(*pair) for pair in pairwise(marks)])


def _mark(device: torch.device) -> "torch.cuda.Event | float":
    """Now, on the device's clock."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(before: "torch.cuda.Event | float", after: "torch.cuda.Event | float") -> float:
    if isinstance(before, float) or isinstance(after, float):
        return float(after) - float(before)
    return float(before.elapsed_time(after)) / 1e3
