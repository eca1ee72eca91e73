"""What the machine gives, measured in the same run: the link, the device's memory, and a token with nothing to copy."""

import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from statistics import median

import numpy as np
import torch

from edgemoe.bench.gpu.clocks import CPU, DEVICE, Arm, context
from edgemoe.bench.gpu.geometry import active_bytes, context_bytes, dense_bytes, expert_bytes
from edgemoe.bench.gpu.subject import Subject
from edgemoe.bench.gpu.timeline import Compute
from edgemoe.errors import UserError
from edgemoe.gpu_offload.weights import Weights
from edgemoe.policy import preset

RESIDENT = "resident"  # the row with a slot for every expert
REPEATS = 5
_LARGE = 1 << 29  # bytes of a large copy, at most a layer's experts
_VRAM = 1 << 32  # many times what a level-2 cache holds
_FAR = 1024  # the position of the bar for everything resident


@dataclass(frozen=True)
class Rates:
    """Bytes per second; medians, of the faster measurement where there are two: no row may outrun its limit."""

    link: float
    """Host to device, page-locked, in large copies."""
    link_expert: float
    """The same, an expert per copy."""
    memory: float
    """Reads of the device's own memory."""

    def or_faster(self, other: "Rates") -> "Rates":
        return Rates(*(max(pair) for pair in zip(astuple(self), astuple(other), strict=True)))


def measure_rates(weights: Weights, device: str) -> Rates:
    """Copies out of the experts' own memory. On the CPU "device" is the same RAM: memory to memory."""
    arena = weights.arena
    layer = arena.bytes[0]
    count = max(1, min(len(layer), _LARGE // arena.expert_bytes))
    layers = len(arena.bytes)
    target = torch.empty((count, arena.expert_bytes), dtype=torch.uint8, device=device)
    large, single = [], []
    for i in range(REPEATS + 1):  # other layers each time: nothing comes from a cache; the first wakes the link
        source = arena.bytes[i % layers, :count]
        large.append(_seconds(lambda source=source: target.copy_(source, non_blocking=True), device))  # type: ignore[misc]
        single.append(_seconds(lambda source=source: _one_by_one(target, source), device))  # type: ignore[misc]
    return Rates(
        link=target.nbytes / median(large[1:]),
        link_expert=target.nbytes / median(single[1:]),
        memory=_memory_rate(device),
    )


def _one_by_one(target: torch.Tensor, source: torch.Tensor) -> None:
    for to, of in zip(target, source, strict=True):
        to.copy_(of, non_blocking=True)


def _memory_rate(device: str) -> float:
    if device == "cpu":
        values = torch.ones(1 << 25, dtype=torch.int64)
        times = [_seconds(values.sum, device) for _ in range(REPEATS + 1)]
        return values.nbytes / median(times[1:])
    from edgemoe.machine import gpu_kernels

    free, _ = torch.cuda.mem_get_info()
    values = torch.ones(min(_VRAM, free // 2) // 8, dtype=torch.int64, device=device)
    blocks = 8 * torch.cuda.get_device_properties(values.device).multi_processor_count
    sums = torch.zeros(blocks, dtype=torch.int64, device=device)

    def read() -> None:
        gpu_kernels.add_up[(blocks,)](values, sums, N=values.numel(), CTAS=blocks, BLOCK=2048, num_warps=8)

    times = [_seconds(read, device) for _ in range(REPEATS + 1)]
    if int(sums.sum()) != values.numel():
        raise UserError("reads of the GPU's memory return other values than were written: is it faulty?")
    return values.nbytes / median(times[1:])


def _seconds(run: Callable[[], object], device: str) -> float:
    if device == "cpu":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    before.record()
    run()
    after.record()
    after.synchronize()
    return float(before.elapsed_time(after)) / 1e3


def resident_arm(subject: Subject) -> Arm:
    """Everything resident: no copy is ever needed."""
    executor = CPU if subject.device == "cpu" else DEVICE
    return Arm(RESIDENT, preset("exact-lru"), subject.weights.shape.n_experts, executor, "100%")


def compute_of(weights: Weights, token_s: float, position: float) -> Compute:
    """A token's measured seconds with everything resident, divided among its parts as their bytes are."""
    keys = context_bytes(weights, round(position))
    shares = np.array([dense_bytes(weights) + keys, expert_bytes(weights), weights.output.nbytes], np.float64)
    attention, experts, output = (token_s * shares / shares.sum()).tolist()
    n_layers = weights.shape.n_layers
    return Compute(attention / n_layers, experts / n_layers, output)


@dataclass(frozen=True)
class Far:
    """Everything resident, at a context of 1024 tokens, on the model's own routing."""

    position: int
    token_s: float
    memory_s: float
    """Its bytes over the memory's rate."""

    @property
    def share(self) -> float:
        """Of the memory's limit."""
        return self.memory_s / self.token_s


def measure_far(subject: Subject, rates: Rates, tokens: int) -> Far:
    """On the device-resident executor; what the context holds does not matter to the time. Raises `UserError` where it
    does not fit."""
    from edgemoe.bench.gpu.enqueued import ForcedDevice

    arm = resident_arm(subject)
    n_ctx = max(_FAR + tokens, context(subject))
    executor = ForcedDevice(subject.weights, subject.cache(arm.policy, arm.slots), n_ctx=n_ctx, chunk=64)
    try:
        ids = np.resize(subject.windows[0], tokens)
        executor.forced(ids[:8], _FAR)
        seconds = float(np.median(executor.forced(ids, _FAR)))
    finally:
        executor.close()
    return Far(_FAR, seconds, active_bytes(subject.weights, _FAR + tokens / 2) / rates.memory)
