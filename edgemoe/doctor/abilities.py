"""What a machine can run, given what the checks found."""

from dataclasses import dataclass
from pathlib import Path

from edgemoe.doctor.check import Check
from edgemoe.machine.gpus import Gpu
from edgemoe.machine.memory import Ram
from edgemoe.units import format_bytes

# Bits per weight of the usual files, whole file over all parameters: Q4_K_M and Q8_0.
FILE_BITS = {"4": 4.85, "8": 8.5}
# Context, work buffers and the process itself, beside the weights.
OVERHEAD = 1_500_000_000
# Billions of parameters, from the model cards; smallest first.
KNOWN_MODELS = {
    "OLMoE-1B-7B": 6.92,
    "gpt-oss-20b": 20.9,
    "Qwen3-30B-A3B": 30.5,
    "Mixtral-8x7B": 46.7,
    "GLM-4.5-Air": 106,
    "gpt-oss-120b": 117,
    "Qwen3-235B-A22B": 235,
    "DeepSeek-V3": 671,
}


@dataclass(frozen=True)
class Ability:
    """Something edgemoe can do here, with its scope, or why not."""

    name: str
    able: bool
    detail: str


def abilities(packages: Check, library: Check, tracing: Check, memory: Ram, gpus: list[Gpu]) -> list[Ability]:
    """The commands of this version that work here, and the size of model that fits each memory."""
    return [
        _ability("info", [library], "any GGUF file or safetensors directory"),
        _ability("trace", [library, tracing], "any Mixture-of-Experts GGUF that fits"),
        _ability("stats, simulate", [packages], "any trace file"),
        _demo([packages, library, tracing]),
        _fits("RAM", memory.available),
        *(_fits(f"VRAM ({gpu.name})", gpu.free) for gpu in gpus),
    ]


def _ability(name: str, needs: list[Check], scope: str) -> Ability:
    broken = [check.name for check in needs if check.status == "fix"]
    return Ability(name, not broken, f"after fixing: {', '.join(broken)}" if broken else scope)


def _demo(needs: list[Check]) -> Ability:
    from edgemoe import data

    if not any(any(Path(place).glob("*.gguf")) for place in data.__path__):
        return Ability("demo", False, "this install carries no demo model: reinstall edgemoe")
    return _ability("demo", needs, "the model that edgemoe carries")


def largest_model(free: int, bits: float) -> float:
    """Billions of parameters of the largest model whose file, at so many bits per weight, fits into `free` bytes."""
    return max(free - OVERHEAD, 0) * 8 / bits / 1e9


def _fits(place: str, free: int) -> Ability:
    sizes = {name: largest_model(free, bits) for name, bits in FILE_BITS.items()}
    if min(sizes.values()) < 0.1:
        return Ability(f"models in {place}", False, f"{format_bytes(free)} free is too little")
    text = " or ".join(f"{size:.3g} B parameters in {name} bits" for name, size in sizes.items())
    known = [name for name, size in KNOWN_MODELS.items() if size <= sizes["4"]]
    return Ability(f"models in {place}", True, f"up to {text}" + (f"; {known[-1]} fits" if known else ""))
