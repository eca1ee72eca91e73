"""Where every routed expert lies in host memory: one piece, contiguous per expert, page-locked where a GPU reads it."""

import math
import mmap
import sys
from contextlib import suppress
from dataclasses import dataclass

import torch

from edgemoe.errors import UserError
from edgemoe.gpu_offload.refusals import limit, ram_refused
from edgemoe.gpu_offload.shape import Shape
from edgemoe.machine.memory import ram
from edgemoe.units import format_bytes

_PORTABLE_AND_MAPPED = 1 | 2  # cudaHostRegisterPortable, cudaHostRegisterMapped


@dataclass(frozen=True)
class ExpertViews:
    """The matrices of one expert, or of many along leading axes: views, nothing is copied."""

    gate: torch.Tensor  # [..., f, d]
    up: torch.Tensor  # [..., f, d]
    down: torch.Tensor  # [..., d, f]


def expert_views(raw: torch.Tensor, shape: Shape, dtype: torch.dtype) -> ExpertViews:
    """`raw` [..., bytes_per_expert] uint8, as the arena and slots hold it: gate, up, down, one after the other."""
    values = raw.view(dtype)
    part = shape.d_expert * shape.d_model
    gate, up, down = (values[..., i * part : (i + 1) * part] for i in range(3))
    narrow = (shape.d_expert, shape.d_model)
    return ExpertViews(gate.unflatten(-1, narrow), up.unflatten(-1, narrow), down.unflatten(-1, narrow[::-1]))


def _launch() -> None:
    """CUDA hands a refusal to the next launch, too: let this be it."""
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")


def _lock_limit() -> str:
    """What this process may lock, as far as the system says."""
    try:
        allowed = limit("RLIMIT_MEMLOCK")
    except OSError:
        return "unknown"
    return "unlimited" if allowed is None else format_bytes(allowed)


def _pages(size: int) -> torch.Tensor:
    """`size` bytes of memory, huge pages of it where the system has them: they are page-locked in half the time.

    They begin with a page: kernels read host memory in lines of 128 bytes, and what torch's allocator gives begins
    within one, which costs 4% of the link (docs/benchmarks-gpu.md). Raises `OSError` where the system refuses.
    """
    if sys.platform == "win32":
        return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


class Arena:
    """`bytes` [L, E, bytes_per_expert] uint8.

    Page-locking registers memory that exists: torch's own pinned allocator would round 13 GB up to 16. Raises
    `UserError` where the memory, or its page-locking, is refused.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype, *, pinned: bool) -> None:
        self.shape, self.dtype = shape, dtype
        self.expert_bytes = shape.expert_values * dtype.itemsize
        size = (shape.n_layers, shape.n_experts, self.expert_bytes)
        self.pinned = False
        try:
            self.bytes = _pages(math.prod(size)).view(size)
        except OSError:
            what = f"{format_bytes(math.prod(size))} of RAM for the experts are"
            raise ram_refused(what, "use a smaller model") from None
        if pinned:
            self._lock()

    def _lock(self) -> None:
        cuda = torch.cuda.cudart()
        status = int(cuda.cudaHostRegister(self.bytes.data_ptr(), self.bytes.nbytes, _PORTABLE_AND_MAPPED))
        if status != 0:
            _launch()
            size, free = format_bytes(self.bytes.nbytes), format_bytes(ram().available)
            raise UserError(
                f"{size} of RAM cannot be page-locked for the GPU (cudaHostRegister: error {status}; {free} are free, "
                f"`ulimit -l` is {_lock_limit()}): raise that limit, free RAM, use a smaller model, or --device cpu"
            )
        self.pinned = True

    def expert(self, layer: int, expert: int) -> ExpertViews:
        return expert_views(self.bytes[layer, expert], self.shape, self.dtype)

    def close(self) -> None:
        """Unlock; may be called again. The memory goes with the object."""
        if self.pinned:
            torch.cuda.cudart().cudaHostUnregister(self.bytes.data_ptr())
            self.pinned = False
