"""What the machine offers: GPUs and the packages that use them, RAM, disk, reads past the page cache."""

import shutil
from pathlib import Path

from edgemoe.doctor.check import Check, first_line
from edgemoe.doctor.install import llama_requirement, version_of
from edgemoe.machine.direct_io import DirectIoError, direct_io_alignment
from edgemoe.machine.gpus import Gpu
from edgemoe.machine.memory import Ram
from edgemoe.units import format_bytes

LITTLE_RAM = 2_000_000_000
LITTLE_DISK = 5_000_000_000
_GPU_EXTRA = "pip install 'edgemoe[gpu]'"


def check_offload(gpus: list[Gpu], library: Check) -> Check:
    """Can this build of llama.cpp use a GPU? Only worth a warning where there is one."""
    if library.status != "ok":
        return Check("GPU offload", "warn", "unknown, because llama.cpp does not load", "mend llama.cpp first")
    from edgemoe.llamacpp.libraries import llama

    if llama().llama_supports_gpu_offload():
        return Check("GPU offload", "ok", "this llama.cpp can keep layers on a GPU (--n-gpu-layers)")
    if gpus:
        fix = f"--force-reinstall --no-cache-dir --no-binary llama-cpp-python {llama_requirement()}"
        found = "there is a GPU, but this llama.cpp is compiled for the CPU only"
        return Check("GPU offload", "warn", found, f'CMAKE_ARGS="-DGGML_CUDA=on" pip install {fix}')
    return Check("GPU offload", "ok", "none, and no NVIDIA GPU: models run on the CPU")


def check_gpus(gpus: list[Gpu]) -> list[Check]:
    """Each GPU, then torch and triton: optional, but missed where there is a GPU."""
    if not gpus:
        return [Check("GPU", "ok", "no NVIDIA GPU (optional)"), _optional("torch"), _optional("triton")]
    found = [f"{gpu.name}, {format_bytes(gpu.free)} of {format_bytes(gpu.total)} VRAM free" for gpu in gpus]
    return [*(Check("GPU", "ok", line) for line in found), _torch(), _optional("triton", _GPU_EXTRA)]


def _optional(package: str, fix: str = "") -> Check:
    version = version_of(package)
    if version:
        return Check(package, "ok", f"{version} (optional)")
    return Check(package, "warn" if fix else "ok", "not installed (optional)", fix)


def _torch() -> Check:
    version = version_of("torch")
    if version is None:
        return _optional("torch", _GPU_EXTRA)
    again = "pip install --force-reinstall torch"
    try:
        import torch

        if torch.cuda.is_available():
            return Check("torch", "ok", f"{version}, CUDA {torch.version.cuda}")
    except Exception as error:  # a broken CUDA installation raises whatever it likes
        return Check("torch", "warn", f"{version} fails to load ({first_line(error)})", again)
    return Check("torch", "warn", f"{version} does not see the GPU", again)


def check_ram(memory: Ram) -> Check:
    where = "that this container may use" if memory.limited else "in this machine"
    found = f"{format_bytes(memory.available)} free of {format_bytes(memory.total)} {where}"
    if memory.available < LITTLE_RAM:
        return Check("RAM", "warn", found, "close other programs, or raise the container's memory limit")
    return Check("RAM", "ok", found)


def check_disk(directory: Path) -> Check:
    usage = shutil.disk_usage(directory)
    found = f"{format_bytes(usage.free)} free of {format_bytes(usage.total)} under {directory}"
    if usage.free < LITTLE_DISK:
        return Check("disk", "warn", found, "make room, or give --dir another disk: models are large")
    return Check("disk", "ok", found)


def check_direct_io(directory: Path) -> Check:
    """Streaming from SSD reads past the page cache; nothing else needs it, so its absence is a warning."""
    try:
        alignment = direct_io_alignment(directory)
    except DirectIoError as error:
        advice = "give --dir a writable directory on a local disk (ext4, xfs)"
        return Check("O_DIRECT", "warn", f"does not work in {directory} ({error})", advice)
    return Check("O_DIRECT", "ok", f"reads {directory} at {alignment}-byte alignment")
