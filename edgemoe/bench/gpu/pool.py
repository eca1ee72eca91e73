"""Executors that stay alive between rounds, as many as the device's memory holds."""

import gc
from collections import OrderedDict

import torch

from edgemoe.bench.gpu.clocks import Arm, Clock, Shared, clock
from edgemoe.bench.gpu.subject import Subject
from edgemoe.errors import UserError

_SPARE = 1 << 30


class Pool:
    """Clocks by arm. The one that was used longest ago is closed where memory is short, and made again when asked."""

    def __init__(self, subject: Subject) -> None:
        self._subject, self._shared = subject, Shared(subject)
        self._open: OrderedDict[str, Clock] = OrderedDict()

    def get(self, arm: Arm) -> Clock:
        """Raises `UserError` where the arm does not fit even alone."""
        if arm.key in self._open:
            self._open.move_to_end(arm.key)
            return self._open[arm.key]
        while self._open and not self._fits(arm):
            self._drop()
        while True:
            try:
                made = clock(self._subject, arm, self._shared)
                break
            except torch.cuda.OutOfMemoryError as error:
                if not self._open:
                    reason = str(error).splitlines()[0]
                    raise UserError(f"the GPU's memory does not hold {arm.slots} slots per layer ({reason})") from None
            except UserError:
                if not self._open:
                    raise
            self._drop()
        self._open[arm.key] = made
        return made

    def _fits(self, arm: Arm) -> bool:
        if self._subject.device == "cpu":
            return True
        weights = self._subject.weights
        free, _ = torch.cuda.mem_get_info()
        cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return free + cached > arm.slots * weights.shape.n_layers * weights.arena.expert_bytes + _SPARE

    def _drop(self) -> None:
        _, oldest = self._open.popitem(last=False)
        oldest.close()
        del oldest
        gc.collect()  # graphs and their launches refer to each other
        if self._subject.device == "cuda":
            torch.cuda.empty_cache()

    def forget(self, arm: Arm) -> None:
        """Close an arm's executor: it failed."""
        found = self._open.pop(arm.key, None)
        if found is not None:
            found.close()

    def close(self) -> None:
        while self._open:
            self._drop()
