"""NVIDIA GPUs through the driver's own library (NVML): no torch, no nvidia-smi, milliseconds."""

import ctypes
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """One GPU; sizes in bytes."""

    name: str
    total: int
    free: int
    uuid: str = ""


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def nvidia_gpus() -> list[Gpu]:
    """The GPUs that the driver shows to this process; empty without a driver."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return []
    if nvml.nvmlInit_v2() != 0:
        return []
    try:
        count = ctypes.c_uint()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return []
        found = (_gpu(nvml, index) for index in range(count.value))
        return [gpu for gpu in found if gpu]
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: ctypes.CDLL, index: int) -> Gpu | None:
    handle, name, memory = ctypes.c_void_p(), ctypes.create_string_buffer(96), _Memory()
    if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) != 0:
        return None
    if nvml.nvmlDeviceGetName(handle, name, len(name)) != 0:
        return None
    if nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) != 0:
        return None
    uuid = ctypes.create_string_buffer(96)
    if nvml.nvmlDeviceGetUUID(handle, uuid, len(uuid)) != 0:
        return None
    return Gpu(name.value.decode(errors="replace"), memory.total, memory.free, uuid.value.decode(errors="replace"))
