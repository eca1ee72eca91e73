"""Executors with a clock: each token of a window, decoded alone and teacher-forced (PSR paper §6.1), and its time."""

import time
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from edgemoe.bench.gpu.subject import Subject
from edgemoe.errors import UserError
from edgemoe.gpu_offload.cpu import CpuExecutor
from edgemoe.gpu_offload.decisions import Decisions
from edgemoe.gpu_offload.executor import Executor
from edgemoe.gpu_offload.weights import Weights
from edgemoe.policy import Policy

DEVICE, HOST, PHYSICAL, THROTTLED, CPU = "device", "host", "physical", "throttled", "cpu"
EXECUTORS = (DEVICE, HOST, PHYSICAL, THROTTLED, CPU)
TIMED: dict[str, dict[str, Any]] = {PHYSICAL: {"physical": "issued"}, THROTTLED: {"throttled": True}}
"""What the host-driven executor is given to be one whose decisions depend on the time that copies take: no other order
of events can tell them."""
_CALLED = {HOST: ", host-driven", PHYSICAL: ", physical cache", THROTTLED: ", throttled"}
CHUNK = 64


@dataclass(frozen=True)
class Arm:
    """One row of the tables: a policy with C slots per layer on one executor."""

    name: str
    policy: Policy
    slots: int
    executor: str = DEVICE
    share: str = ""
    """The residency as it was asked for."""
    options: dict[str, Any] = field(default_factory=dict)
    """More of the executor's own arguments."""

    @property
    def key(self) -> str:
        return f"{self.name}@{self.slots}/{self.executor}"


def label(name: str, executor: str) -> str:
    """A row's name with the executor's, where that is not the usual one."""
    return name + _CALLED.get(executor, "")


class Clock(Protocol):
    """An executor that also times."""

    executor: Executor

    def times(self, window: int) -> np.ndarray:  # [T] float64, seconds
        """Decode a window of the subject from the start of a sequence (which is not timed)."""

    def warm(self, tokens: np.ndarray) -> None:
        """Run once what `times` runs, on a few tokens, so that nothing is compiled while the clock runs."""

    def close(self) -> None: ...


def clock(subject: Subject, arm: Arm, shared: "Shared") -> Clock:
    """Make an arm's executor. Raises `UserError` where it does not fit, or cannot be had here."""
    if arm.executor == DEVICE:
        if subject.device != "cuda":
            raise UserError("the device-resident executor needs a GPU: the CPU has the executors cpu and host")
        return _Enqueued(subject, arm, shared)
    return _Stepped(stepped(subject, arm, shared.buffer), subject, shared)


def executor_of(subject: Subject, arm: Arm, *, n_ctx: int, chunk: int) -> Executor:
    """An arm's executor as `edgemoe run` has it, deciding by the model's own routers."""
    if arm.executor == DEVICE:
        from edgemoe.gpu_offload.device import DeviceExecutor

        cache = subject.cache(arm.policy, arm.slots)
        return DeviceExecutor(subject.weights, cache, n_ctx=n_ctx, chunk=chunk, **arm.options)
    return stepped(subject, arm, None, n_ctx=n_ctx, chunk=chunk)


def stepped(
    subject: Subject, arm: Arm, recorded: torch.Tensor | None, *, n_ctx: int | None = None, chunk: int = CHUNK
) -> Executor:
    """An executor with a host in its loop. n_ctx: `context` unless given."""
    n_ctx = n_ctx or context(subject)
    cache = subject.cache(arm.policy, arm.slots)
    decisions = Decisions(cache, chunk, cache.prior)  # type: ignore[arg-type]
    if arm.executor == CPU:
        return _RecordedCpu(subject.weights, decisions, n_ctx=n_ctx, recorded=recorded)
    from edgemoe.gpu_offload.host_driven import HostDrivenExecutor

    options = {**TIMED.get(arm.executor, {}), **arm.options}
    return HostDrivenExecutor(subject.weights, decisions, n_ctx=n_ctx, recorded=recorded, **options)


class Shared:
    """Recorded routing in the device's memory, one window at a time, for all executors."""

    def __init__(self, subject: Subject) -> None:
        self._subject, self._window = subject, -1
        self.buffer: torch.Tensor | None = None
        if subject.packed:
            first = subject.packed[0]
            self.buffer = torch.zeros((subject.longest, *first.shape[1:]), dtype=first.dtype, device=subject.device)

    def show(self, window: int) -> None:
        if self.buffer is not None and window != self._window:
            packed = self._subject.packed[window]
            self.buffer[: len(packed)].copy_(packed)
            self._window = window


class _RecordedCpu(CpuExecutor):
    """Decodes decide by recorded scores [T, L, 2, E], where there are any, in the place of the model's own."""

    def __init__(self, weights: Weights, decisions: Decisions, *, n_ctx: int, recorded: torch.Tensor | None) -> None:
        self._recorded, self._position = recorded, 0
        super().__init__(weights, decisions, n_ctx=n_ctx)

    def step(self, tokens: np.ndarray, position: int, *, all_rows: bool = False) -> np.ndarray:
        self._position = position
        return super().step(tokens, position, all_rows=all_rows)

    def _scores(self, layer: int, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        found = super()._scores(layer, h)  # computed all the same: it takes its time
        if self._recorded is None or len(h) > 1:
            return found
        scores, pregate = self._recorded[self._position, layer].unsqueeze(1)
        return scores, pregate if layer + 1 < self.weights.shape.n_layers else None


def context(subject: Subject) -> int:
    """Room for a window, or a prompt and what follows it."""
    return max(subject.longest, 128)


class _Stepped:
    """A host in the loop: the time of a step, from the host's call to the logits in its hands."""

    def __init__(self, executor: Executor, subject: Subject, shared: Shared) -> None:
        self.executor, self._subject, self._shared = executor, subject, shared

    def times(self, window: int) -> np.ndarray:
        self._shared.show(window)
        self.executor.reset()
        tokens = self._subject.windows[window]
        seconds = np.empty(len(tokens))
        for position in range(len(tokens)):
            start = time.perf_counter()
            self.executor.step(tokens[position : position + 1], position)
            seconds[position] = time.perf_counter() - start
        return seconds

    def warm(self, tokens: np.ndarray) -> None:
        for position in range(len(tokens)):
            self.executor.step(tokens[position : position + 1], position)

    def close(self) -> None:
        self.executor.close()


class _Enqueued:
    """The device-resident executor: a window is enqueued at once, with events between its tokens."""

    def __init__(self, subject: Subject, arm: Arm, shared: Shared) -> None:
        from edgemoe.bench.gpu.enqueued import ForcedDevice

        self._subject, self._shared = subject, shared
        self._forced = ForcedDevice(
            subject.weights,
            subject.cache(arm.policy, arm.slots),
            n_ctx=context(subject),
            chunk=CHUNK,
            recorded=shared.buffer,
            **arm.options,
        )
        self.executor: Executor = self._forced

    def times(self, window: int) -> np.ndarray:
        self._shared.show(window)
        self._forced.reset()
        return self._forced.forced(self._subject.windows[window], 0)

    def warm(self, tokens: np.ndarray) -> None:
        self._forced.forced(tokens, 0)

    def close(self) -> None:
        self._forced.close()
