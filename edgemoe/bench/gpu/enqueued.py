"""The device-resident executor, teacher-forced: a text's tokens are enqueued one after the other, and timed between."""

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
        rows = np.stack([[0, position + i, RUNNING, int(token)] for i, token in enumerate(tokens)])
        words = torch.from_numpy(rows.astype(np.int64)).to(self._control.device)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(tokens) + 1)]
        self._aim(0, position, int(tokens[0]))
        # A graph is made, where there is none yet, before the clock starts.
        if "token" not in self._graphs:
            self._graphs["token"] = self._captured(self._program.launch)
        replay = self._graphs["token"]
        torch.cuda.synchronize(self._control.device)
        for i in range(len(tokens)):
            marks[i].record()
            self._control.copy_(words[i], non_blocking=True)
            replay()
        marks[-1].record()
        torch.cuda.synchronize(self._control.device)
        self.records.check()
        return np.array([before.elapsed_time(after) for before, after in pairwise(marks)]) / 1e3
