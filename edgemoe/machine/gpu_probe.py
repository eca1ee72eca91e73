"""What a GPU and its link give: copies both ways, copies that the device issues itself, its own memory, and overlap.

Everything is timed with CUDA events, and every copy is compared with what was to be copied. Torch is imported when
the first GPU is measured; where it is missing, the GPU is named in a note and nothing else.
"""

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from edgemoe.machine.gpus import nvidia_gpus
from edgemoe.machine.profile import GpuRates, Transfer, ZeroCopy
from edgemoe.machine.rounds import Effort, settle
from edgemoe.progress import Advance, no_progress
from edgemoe.units import format_bytes

if TYPE_CHECKING:
    from torch import Tensor

MIB = 1 << 20
EXPERT = 12 * MIB  # three 2048 × 1024 matrices in bf16: an OLMoE expert
WORD = 8  # bytes
Cell = tuple[str, int]


@dataclass(frozen=True)
class GpuGrid:
    """Sizes of copies, thread blocks that read host memory, bytes of VRAM to read, and how long to try."""

    sizes: tuple[int, ...]
    ctas: tuple[int, ...]
    buffer_bytes: int
    vram_bytes: int
    effort: Effort

    @property
    def cells(self) -> list[Cell]:
        copies = [(kind, size) for kind in ("h2d", "pageable", "d2h") for size in self.sizes]
        return [*copies, *(("zero", count) for count in self.ctas), ("vram", 0)]


FULL = GpuGrid(
    (64 << 10, MIB, 4 * MIB, EXPERT, 48 * MIB, 192 * MIB), (2, 4, 8, 16, 32), 192 * MIB, 4096 * MIB, Effort(5, 15, 25)
)
QUICK = GpuGrid((MIB, EXPERT, 96 * MIB), (8, 16), 96 * MIB, 2048 * MIB, Effort(3, 5, 3))


def grid_of(quick: bool) -> GpuGrid:
    return QUICK if quick else FULL


def n_rounds(quick: bool = False) -> int:
    """Rounds that `advance` is told, over all GPUs of this machine."""
    grid = grid_of(quick)
    return (len(grid.cells) + 1) * grid.effort.most * max(len(nvidia_gpus()), 1)


def probe_gpus(quick: bool = False, advance: Advance = no_progress) -> tuple[tuple[GpuRates, ...], tuple[str, ...]]:
    """Measure every GPU, one after the other; the second part says which could not be measured, and why."""
    names = [gpu.name for gpu in nvidia_gpus()]
    if importlib.util.find_spec("torch") is None:
        return (), _missing(names, "torch is not installed: pip install 'edgemoe[gpu]'")
    import torch

    if not torch.cuda.is_available():
        return (), _missing(names, f"torch {torch.__version__} cannot use it: install a build for its CUDA version")
    notes: list[str] = []
    measured: list[GpuRates] = []
    for index in range(torch.cuda.device_count()):
        try:
            measured.append(_probe(torch.device("cuda", index), grid_of(quick), advance, notes))
        except torch.cuda.OutOfMemoryError:
            notes.append(f"{torch.cuda.get_device_name(index)} was not measured: its memory is full: free some")
    return tuple(measured), tuple(dict.fromkeys(notes))


def _missing(names: list[str], why: str) -> tuple[str, ...]:
    return tuple(f"{name} was not measured: {why}" for name in names)


def _probe(device: Any, grid: GpuGrid, advance: Advance, notes: list[str]) -> GpuRates:
    import torch

    from edgemoe.machine.overlap import measure_overlap

    facts = torch.cuda.get_device_properties(device)
    kernels = _kernels(facts, notes)
    with torch.cuda.device(device), _buffers(device, grid) as buffers:
        cells = {cell: partial(measure, buffers, *cell) for cell, measure in _measures(grid, kernels).items()}
        for cell in cells.values():
            cell()  # compiles kernels, wakes the link
        rates = settle(cells, grid.effort, advance)
        overlap = measure_overlap(buffers.pinned, buffers.target, grid.effort, advance)
    copies = {
        kind: tuple(Transfer(size, rates[kind, size]) for size in grid.sizes) for kind in ("h2d", "pageable", "d2h")
    }
    return GpuRates(
        uuid=uuid_of(facts),
        name=facts.name,
        vram_bytes=facts.total_memory,
        h2d_pinned=copies["h2d"],
        h2d_pageable=copies["pageable"],
        zero_copy=tuple(ZeroCopy(EXPERT, count, rates["zero", count]) for count in grid.ctas if kernels),
        d2h=copies["d2h"],
        vram_read=rates["vram", 0],
        ram_while_h2d=overlap,
    )


def uuid_of(facts: Any) -> str:
    """The UUID of a GPU, from torch's properties, as the driver's library writes it and a profile is keyed by."""
    text = str(facts.uuid)
    return text if text.startswith(("GPU-", "MIG-")) else f"GPU-{text}"


def _kernels(facts: Any, notes: list[str]) -> Any:
    """The Triton kernels, or None with a note."""
    if importlib.util.find_spec("triton") is None:
        notes.append("copies issued by the device were not measured: triton is not installed")
        return None
    if facts.major < 8:
        notes.append(f"copies issued by the device were not measured: {facts.name} is older than Ampere")
        return None
    from edgemoe.machine import gpu_kernels

    return gpu_kernels


@dataclass(frozen=True)
class Buffers:
    """Host and device memory of one GPU. `reference` holds on the device what `pinned` and `pageable` hold."""

    pinned: "Tensor"  # [words] int64
    pageable: "Tensor"
    back: "Tensor"  # pinned, for copies to the host
    target: "Tensor"
    reference: "Tensor"
    vram: "Tensor"
    vram_sum: int  # modulo 2⁶⁴, as int64


@contextmanager
def _buffers(device: Any, grid: GpuGrid) -> Iterator[Buffers]:
    import torch

    words = max(grid.buffer_bytes, 2 * EXPERT) // WORD
    generator = torch.Generator().manual_seed(0)
    content = torch.randint(-(1 << 62), 1 << 62, (words,), generator=generator, dtype=torch.int64)
    free, _ = torch.cuda.mem_get_info(device)
    vram_words = min(grid.vram_bytes, max(free // 2 - 2 * words * WORD, 0)) // WORD
    if vram_words < words:
        raise torch.cuda.OutOfMemoryError(f"{format_bytes(free)} free")
    vram = torch.arange(vram_words, dtype=torch.int64, device=device)
    try:
        reference = content.to(device)
        if not torch.equal(reference.cpu(), content):
            raise RuntimeError(f"{device}: copies to the GPU and back return other bytes")
        yield Buffers(
            pinned=content.pin_memory(),
            pageable=content,
            back=torch.empty_like(content).pin_memory(),
            target=torch.empty_like(reference),
            reference=reference,
            vram=vram,
            vram_sum=_wrapped(vram_words * (vram_words - 1) // 2),
        )
    finally:
        del vram
        torch.cuda.empty_cache()


def _wrapped(value: int) -> int:
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def _measures(grid: GpuGrid, kernels: Any) -> dict[Cell, Callable[[Buffers, str, int], float]]:
    measures: dict[Cell, Callable[[Buffers, str, int], float]] = {}
    for cell in grid.cells:
        if cell[0] == "vram":
            measures[cell] = partial(_read_vram, kernels)
        elif cell[0] != "zero":
            measures[cell] = _copy
        elif kernels:
            measures[cell] = partial(_gather, kernels)
    return measures


def _copy(buffers: Buffers, kind: str, size: int) -> float:
    """Copies of `size` bytes one after the other through the whole buffer: bytes per second."""
    import torch

    source, target, expected = {
        "h2d": (buffers.pinned, buffers.target, buffers.reference),
        "pageable": (buffers.pageable, buffers.target, buffers.reference),
        "d2h": (buffers.reference, buffers.back, buffers.pinned),
    }[kind]
    words = size // WORD
    # A copy of 64 kB takes microseconds: a few hundred are enough.
    count = min(source.numel() // words, max(4, 256 * MIB // size), 256)
    pairs = [(target[i * words : (i + 1) * words], source[i * words : (i + 1) * words]) for i in range(count)]
    target[: count * words].zero_()

    def run() -> None:
        for to, of in pairs:
            to.copy_(of, non_blocking=kind != "pageable")

    seconds = _timed(run)
    if not torch.equal(target[: count * words], expected[: count * words]):
        raise RuntimeError(f"{kind} copies of {format_bytes(size)} arrive with other bytes")
    return count * size / seconds


def _gather(kernels: Any, buffers: Buffers, _: str, ctas: int) -> float:
    """Expert-sized pieces in an order that lies on the device, read by `ctas` thread blocks: bytes per second."""
    import torch

    words = EXPERT // WORD
    available = buffers.pinned.numel() // words
    order = torch.randperm(available, device=buffers.target.device).to(torch.int32)
    buffers.target.zero_()

    def run() -> None:
        kernels.gather_pieces[(ctas,)](
            buffers.pinned, buffers.target, order, N=available, WORDS=words, CTAS=ctas, BLOCK=2048, num_warps=8
        )

    seconds = _timed(run)
    pieces = (tensor[: available * words].view(available, words) for tensor in (buffers.target, buffers.reference))
    found, expected = pieces
    if not torch.equal(found, expected[order.long()]):
        raise RuntimeError("pieces that the device copied arrive with other bytes")
    return available * EXPERT / seconds


def _read_vram(kernels: Any, buffers: Buffers, _: str, __: int) -> float:
    """The sum of several GB, many times what L2 holds: bytes per second, one addition for each word."""
    import torch

    vram = buffers.vram
    n_blocks = 8 * torch.cuda.get_device_properties(vram.device).multi_processor_count
    sums = torch.zeros(n_blocks, dtype=torch.int64, device=vram.device)

    def run() -> None:
        if kernels:
            kernels.add_up[(n_blocks,)](vram, sums, N=vram.numel(), CTAS=n_blocks, BLOCK=2048, num_warps=8)
        else:
            sums[0] = vram.sum()

    seconds = _timed(run)
    if int(sums.sum()) != buffers.vram_sum:
        raise RuntimeError("VRAM reads return other values than were written")
    return vram.numel() * WORD / seconds


def _timed(run: Callable[[], None]) -> float:
    """Seconds on the device between an event before and one after."""
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
