"""Where an engine computes: the CPU, or one GPU by one of two executors; what is free there, and what it refuses."""

import ctypes
import platform
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass

import torch

from edgemoe.calibration import TokenPrior
from edgemoe.errors import UserError
from edgemoe.gpu_offload.cpu import CpuExecutor
from edgemoe.gpu_offload.decisions import Decisions
from edgemoe.gpu_offload.executor import Executor
from edgemoe.gpu_offload.kernels.layout import MOST_ENTRIES, MOST_EXECUTED, MOST_EXPERTS
from edgemoe.gpu_offload.memory import Room
from edgemoe.gpu_offload.refusals import ram_full
from edgemoe.gpu_offload.shape import Shape
from edgemoe.gpu_offload.weights import Weights
from edgemoe.machine.gpu_probe import uuid_of
from edgemoe.machine.gpus import nvidia_gpus
from edgemoe.machine.memory import ram
from edgemoe.policy import LogicalCache
from edgemoe.units import format_bytes

DEVICES = ("cpu", "cuda")
EXECUTORS = ("device", "host")
_AMPERE = (8, 0)
_UNIFIED_ADDRESSING = 41  # CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING
_WITHOUT = (
    "--device cpu runs the same policies in RAM, and edgemoe run without --device runs the model in llama.cpp, with "
    "--ram from disk"
)


@dataclass(frozen=True)
class Target:
    """A device, and how it is driven."""

    device: torch.device
    executor: str
    """cpu, device (one graph per token, decided on the GPU) or host (the host decides between two graphs per layer)."""
    name: str
    """What the driver calls the GPU; `cpu`."""
    note: str = ""
    """What a person should know of this choice."""

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def uuid(self) -> str:
        """As machine profiles name this GPU; empty on the CPU."""
        return uuid_of(torch.cuda.get_device_properties(self.device)) if self.is_gpu else ""

    def room(self) -> Room:
        """What is free now; on a GPU, with what this process's allocator could give back."""
        free = ram().available
        if not self.is_gpu:
            return Room(free, free, shared=True)
        with torch.cuda.device(self.device):
            torch.cuda.empty_cache()
            integrated = bool(torch.cuda.get_device_properties(self.device).is_integrated)
            return Room(torch.cuda.mem_get_info(self.device)[0], free, integrated)

    def release(self) -> None:
        """Wait for what is under way, and give back what is no longer held."""
        if self.is_gpu:
            # A GPU that has failed has nothing under way, and says so again.
            with suppress(RuntimeError), torch.cuda.device(self.device):
                torch.cuda.synchronize()
                torch.cuda.empty_cache()

    @property
    def held(self) -> int:
        """Bytes of the GPU's memory that this process's tensors hold."""
        return torch.cuda.memory_reserved(self.device) if self.is_gpu else 0

    @contextmanager
    def use(self) -> Iterator[None]:
        """Inside, this is the current GPU: streams, kernels and page-locking are of the current one. Memory that it, or
        the host, refuses is a `UserError` of one line; nothing that the failed call held is kept."""
        refused = None
        try:
            with self._current() if self.is_gpu else nullcontext():
                yield
        except (RuntimeError, MemoryError) as error:
            refused = ram_full(error)
            if refused is None:
                raise
            forget(error)
        if refused:
            raise refused from None

    @contextmanager
    def _current(self) -> Iterator[None]:
        full = False
        try:
            with torch.cuda.device(self.device):
                yield
        except RuntimeError as error:  # torch's, the driver's and Triton's refusals are different kinds of it
            if "launch timed out" in str(error):
                raise UserError(
                    f"{self._label}: the driver's watchdog ended a kernel that took too long: start again with "
                    "--executor host"
                ) from None
            if "out of memory" not in str(error).lower():
                raise
            forget(error)
            full = True
        if full:
            torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info(self.device)
            raise UserError(
                f"{self._label}: its memory is full ({format_bytes(free)} of {format_bytes(total)} are free now): "
                "close other programs on it, or give fewer slots (--residency), a smaller context (-c) or --chunk"
            )

    @property
    def _label(self) -> str:
        return f"GPU {self.device.index} ({self.name})"

    def check(self, shape: Shape, prior: TokenPrior | None = None) -> None:
        """Raises `UserError` for a model, or a token prior, that this executor cannot run, before anything of it is
        loaded."""
        beyond = _beyond_the_device(shape, prior) if self.executor == "device" else None
        if beyond:
            raise UserError(f"{beyond}: give --executor host")

    def open(self, weights: Weights, cache: LogicalCache, *, n_ctx: int, chunk: int) -> Executor:
        """An executor of these weights, which lie where this says; `cache` is at the start of a sequence."""
        if self.executor != "device":
            decisions = Decisions(cache, chunk, cache.prior)  # type: ignore[arg-type]
            if self.executor == "cpu":
                return CpuExecutor(weights, decisions, n_ctx=n_ctx)
            from edgemoe.gpu_offload.host_driven import HostDrivenExecutor

            return HostDrivenExecutor(weights, decisions, n_ctx=n_ctx)
        try:
            from edgemoe.gpu_offload.device import DeviceExecutor
        except ImportError as error:  # not there, or a Triton too old
            needed = (error.name or "triton").partition(".")[0]
            raise UserError(
                f"the executor on the device needs {needed}: pip install -U edgemoe[gpu], or give --executor host"
            ) from None
        executor = DeviceExecutor(weights, cache, n_ctx=n_ctx, chunk=chunk)
        executor.prepare()
        return executor


def _beyond_the_device(shape: Shape, prior: TokenPrior | None) -> str | None:
    """What of a model, or of its token prior, kernels that decide cannot take."""
    if shape.d_head & (shape.d_head - 1):
        return f"heads of width {shape.d_head}: deciding on the device needs a power of two"
    if shape.n_experts > MOST_EXPERTS:
        return f"{shape.n_experts} experts per layer: deciding on the device takes {MOST_EXPERTS} at most"
    if shape.top_k > MOST_EXECUTED:
        return f"{shape.top_k} experts per token: deciding on the device takes {MOST_EXECUTED} at most"
    entries = 0 if prior is None else max(len(prior.counts), len(prior.tokens) * shape.n_layers)
    if entries > MOST_ENTRIES:
        return f"a token prior of {entries:,} entries: deciding on the device takes {MOST_ENTRIES:,} at most"
    return None


def find_target(device: str, gpu: int | None = None, executor: str | None = None) -> Target:
    """The target that a person named. gpu: which one, 0 by default; executor: `device` unless the system is Windows'
    (WSL, WDDM), whose watchdog and limits on page-locked memory the host-driven one is made for.

    Raises `UserError`, one line, for a GPU that is not there or cannot be used; nothing is allocated.
    """
    if device not in DEVICES:
        raise UserError(f"device {device!r} is not one of {', '.join(DEVICES)}")
    if executor is not None and executor not in EXECUTORS:
        raise UserError(f"executor {executor!r} is not one of {', '.join(EXECUTORS)}")
    if device == "cpu":
        for option, value in (("gpu", gpu), ("executor", executor)):
            if value is not None:
                raise UserError(f"--{option} is about --device cuda: give that, or leave it out")
        return Target(torch.device("cpu"), "cpu", "cpu")
    found = _gpu(gpu or 0)
    note = ""
    if executor is None and on_windows():
        executor = "host"
        note = (
            "this is Windows' driver: the host drives the GPU; --executor device lets the GPU decide, where the "
            "driver's watchdog and its limit on page-locked memory allow it"
        )
    executor = executor or "device"
    name = torch.cuda.get_device_name(found)
    if executor == "device":
        _check_abilities(found, name)
    _check_it_runs(found, name)
    return Target(found, executor, name, note)


def on_windows() -> bool:
    """Whether the GPU's driver is Windows': here, or behind WSL."""
    return sys.platform == "win32" or "microsoft" in platform.release().lower()


def _gpu(index: int) -> torch.device:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch says of the driver comes in the refusal
        there = torch.version.cuda is not None and torch.cuda.is_available()
        reason = "" if there else _why_not()
    if not there:
        raise UserError(f"no CUDA device here that torch can use ({reason}): {_WITHOUT}")
    count = torch.cuda.device_count()
    if not 0 <= index < count:
        names = ", ".join(f"{i}: {torch.cuda.get_device_name(i)}" for i in range(count))
        raise UserError(f"--gpu {index}: this process sees {count} ({names}): give one of them")
    return torch.device("cuda", index)


def _why_not() -> str:
    if torch.version.cuda is None:
        seen = ", ".join(gpu.name for gpu in nvidia_gpus())
        build = f"torch {torch.__version__} is not built for CUDA"
        return f"{build}, the driver shows {seen}: install a torch that is" if seen else build
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return _first_sentence(error)
    return "CUDA_VISIBLE_DEVICES hides all"


def _check_abilities(device: torch.device, name: str) -> None:
    label = f"GPU {device.index} ({name})"
    capability = torch.cuda.get_device_capability(device)
    if capability < _AMPERE:
        raise UserError(
            f"{label} has compute capability {'.'.join(map(str, capability))}, deciding on the device needs 8.0 "
            "(Ampere): give --executor host"
        )
    if _attribute(device.index, _UNIFIED_ADDRESSING) == 0:
        raise UserError(
            f"{label}: its driver has no unified addressing, by which kernels read host memory: give --executor host"
        )


def _attribute(index: int, attribute: int) -> int | None:
    """What the driver says of a GPU; None where it cannot be asked."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    handle, value = ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(handle), index):
        return None
    return None if driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, handle) else value.value


def _check_it_runs(device: torch.device, name: str) -> None:
    """One addition: an exclusive GPU that is taken, a full one, or one that this torch has no kernels for, refuses."""
    try:
        _add_one(device)
    except RuntimeError as error:
        raise UserError(
            f"GPU {device.index} ({name}) cannot be used: {_first_sentence(error)}: give another with --gpu, or give "
            "--device cpu"
        ) from None


def _add_one(device: torch.device) -> None:
    with torch.cuda.device(device):
        torch.zeros(1, device=device).add_(1).item()


def _first_sentence(error: BaseException) -> str:
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0].split(". ")[0].rstrip(". :")


def forget(error: BaseException) -> None:
    """Let go of what an exception's frames, and those of the ones that it came from, hold: tensors among it."""
    found: BaseException | None = error
    while found is not None:
        traceback.clear_frames(found.__traceback__)
        found = found.__cause__ or found.__context__
