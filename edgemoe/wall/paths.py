"""Every way of running a model, as legs over tiers: what lies where, and what each token moves because of it."""

from edgemoe.model.memory import memory_needs
from edgemoe.wall.hits import slots_for
from edgemoe.wall.tiers import COPY, EXPERTS, Path, Wall

ALL_IN_RAM = "all in RAM"
_SIDE_BY_SIDE = "GPU and CPU execute experts of a layer side by side"
_REST = "other weights, KV cache"


def paths(wall: Wall) -> list[Path]:
    """Every way of running the model, each with its range or with what it lacks; a dense model has two."""
    ways = [_all_in_vram(wall)]
    if wall.geometry.is_moe:
        ways += [_mixed(wall), _slots_in_vram(wall), _experts_on_cpu(wall)]
    ways += [_all_in_ram(wall)]
    if wall.geometry.is_moe:
        ways += [_from_ssd_with_gpu(wall), _from_ssd(wall)]
    return ways


def _needs(wall: Wall, way: str) -> tuple[int, int]:
    """The least (VRAM, RAM) of one of `edgemoe info`'s ways, with a KV cache for every stream."""
    need = next(need for need in memory_needs(wall.geometry, wall.n_ctx) if need.way == way)
    more = (wall.streams - 1) * wall.geometry.kv.at(wall.n_ctx)
    return (need.vram + more, need.ram) if need.vram else (0, need.ram + more)


def _all_in_vram(wall: Wall) -> Path:
    legs = [wall.leg("vram", _REST, wall.fixed), wall.leg("vram", "experts", wall.routed, EXPERTS)]
    return wall.path("all in VRAM", "-ngl 99", legs, _needs(wall, "vram"))


def _all_in_ram(wall: Wall) -> Path:
    legs = [wall.leg("ram", _REST, wall.fixed), wall.leg("cpu", "experts", wall.routed, EXPERTS)]
    return wall.path(ALL_IN_RAM, "CPU only", legs, _needs(wall, "ram"), extra=wall.cpu_extra)


def _experts_on_cpu(wall: Wall) -> Path:
    legs = [wall.leg("vram", _REST, wall.fixed), wall.leg("cpu", "experts", wall.routed, EXPERTS)]
    return wall.path("experts on the CPU", "--cpu-moe", legs, _needs(wall, "experts-in-ram"))


def _slots_in_vram(wall: Wall) -> Path:
    """RAM → VRAM: slots in VRAM, every expert in pinned RAM."""
    needs = _needs(wall, "ram-to-vram")
    slots = _slots(wall, wall.machine.vram_bytes - needs[0])
    hit = wall.caching.dynamic.at(slots)
    legs = [
        wall.leg("vram", _REST, wall.fixed),
        wall.leg("vram", "experts", wall.routed, EXPERTS),
        wall.leg("pcie", "missing experts", hit.copied, COPY),
    ]
    why = [f"hit rate {hit}: {hit.why}"]
    how = "missing experts from RAM over PCIe"
    return wall.path("slots in VRAM", how, legs, needs, slots=slots, hit=hit, why=why)


def _from_ssd(wall: Wall) -> Path:
    """SSD → RAM, executed on the CPU, which also computes the rest."""
    needs = _needs(wall, "ssd-to-ram")
    return _streamed(wall, "slots in RAM", "missing experts from SSD, no GPU", "ram", needs)


def _from_ssd_with_gpu(wall: Wall) -> Path:
    """SSD → RAM, executed on the CPU, while the GPU keeps everything else."""
    g = wall.geometry
    needs = (_needs(wall, "experts-in-ram")[0], g.embedding_bytes + g.active_expert_bytes)
    how = "missing experts from SSD, the rest in VRAM"
    return _streamed(wall, "slots in RAM, GPU", how, "vram", needs)


def _streamed(wall: Wall, name: str, how: str, rest: str, needs: tuple[int, int]) -> Path:
    ram, room = wall.machine.ram_bytes, wall.room
    if room is None:
        slots = _slots(wall, ram - needs[1])
    else:
        needs = (needs[0], room.least(wall.streams))
        enough = ram >= needs[1]
        slots = (room.slots(wall.streams, ram),) * wall.geometry.n_moe_layers if enough else wall.geometry.layer_top_k
    hit = (wall.caching.store or wall.caching.dynamic).at(slots)
    legs = [
        wall.leg(rest, _REST, wall.fixed),
        wall.leg("cpu", "experts", wall.routed, EXPERTS),
        wall.leg("ssd", "missing experts", hit.copied, COPY),
    ]
    why = [f"hit rate {hit}: {hit.why}"]
    extra = wall.cpu_extra if rest == "ram" else 0.0
    return wall.path(name, how, legs, needs, slots=slots, hit=hit, why=why, extra=extra)


def _mixed(wall: Wall) -> Path:
    """Path-Mapped Serving (arXiv 2608.18261, §5) over three tiers: experts pinned by heat, hot ones in VRAM, warm ones
    in RAM on the CPU, cold ones read from SSD and executed on the CPU."""
    g, machine = wall.geometry, wall.machine
    if wall.caching.rate is not None:
        return Path("placed", "by heat", missing="a given hit rate does not say how much of it VRAM serves")
    vram, _ = _needs(wall, "experts-in-ram")
    hot = slots_for(g, machine.vram_bytes - vram)
    warm = slots_for(g, machine.ram_bytes - g.embedding_bytes)
    both = tuple(min(a + c, g.n_experts) for a, c in zip(hot, warm, strict=True))
    in_vram, in_memory = wall.caching.pinned.at(hot), wall.caching.pinned.at(both)
    cpu = in_vram.copied
    gpu = (max(wall.routed[0] - cpu[0], 0.0), max(wall.routed[1] - cpu[1], 0.0))
    legs = [
        wall.leg("vram", _REST, wall.fixed),
        wall.leg("vram", "hot experts", gpu, EXPERTS),
        wall.leg("cpu", "other experts", cpu, EXPERTS),
    ]
    why = [f"{in_vram} of the loads in VRAM: {in_vram.why}"]
    cold = g.routed_bytes - sum(count * size for count, size in zip(both, g.expert_bytes, strict=True))
    if cold > 0:
        legs.append(wall.leg("ssd", "cold experts", in_memory.copied, COPY))
        why.append(f"{in_memory} in VRAM or RAM: {in_memory.why}")
    least_ram = g.embedding_bytes + (g.active_expert_bytes if cold > 0 else 0)
    how = "by heat: hot in VRAM, warm in RAM on the CPU" + (", cold on SSD" if cold > 0 else "")
    return wall.path("placed", how, legs, (vram, least_ram), _SIDE_BY_SIDE, hot, in_memory, why)


def _slots(wall: Wall, beyond: int) -> tuple[int, ...]:
    """The k slots per layer that every way with slots has, and what the budget beyond its least need buys."""
    g = wall.geometry
    return g.layer_top_k if beyond < 0 else slots_for(g, beyond + g.active_expert_bytes)
