"""What `edgemoe run --ram` makes of the RAM that `edgemoe wall` reckons with: its process and prompt need some too.

The wall counts weights, cache and work buffers, the same for every way and every program. A run also holds its
interpreter and libraries, and while a chunk of the prompt is decoded, every expert that the chunk executes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgemoe.model import Model
    from edgemoe.streaming.budget import Budget
    from edgemoe.wall.report import Answer


def notes_on_run(answer: Answer, policy: str) -> list[str]:
    """Where they differ: the slots per layer that a run gets in the same RAM, and the RAM that it needs for a plan."""
    from edgemoe.errors import UserError
    from edgemoe.units import format_bytes

    model, ram = answer.model, answer.wall.machine.ram_bytes
    if model is None or model.format != "GGUF" or not model.geometry.is_moe or not ram:
        return []
    notes = []
    way = next((way for way in answer.ways if way.name == "slots in RAM"), None)
    if way is not None and way.possible:
        try:
            slots = _budget(answer, policy, ram).slots
            if slots < min(way.slots):
                taken = "its process and a chunk of the prompt take the rest"
                notes.append(f"edgemoe run has {slots} slots per layer in that RAM, not {min(way.slots)}: {taken}")
        except UserError:
            least = format_bytes(_least(answer, policy))
            notes.append(
                f"edgemoe run needs {least} of RAM at least: its process and a chunk of the prompt come on top"
            )
    if answer.plan:
        sizes = zip(answer.plan.layers, _in_pages(model), strict=True)
        pinned = sum((len(layer.vram) + len(layer.ram)) * size for layer, size in sizes)
        need = _least(answer, policy) + pinned
        if pinned and need > ram:
            notes.append(
                f"edgemoe run --plan needs about {format_bytes(need)} of RAM for this plan: its process on top"
            )
    return notes


def _budget(answer: Answer, policy: str, ram: int | None, slots: int | None = None) -> Budget:
    from edgemoe.policy import PRESETS, Policy
    from edgemoe.streaming.budget import budget_of_streams
    from edgemoe.streaming.engine import DEFAULT_CHUNK

    assert answer.model is not None
    n_ctx = answer.wall.n_ctx
    return budget_of_streams(
        answer.model,
        PRESETS.get(policy, Policy()),
        1,
        n_ctx=n_ctx,
        kv_type="f16",
        expert_bytes=_in_pages(answer.model),
        chunk=min(DEFAULT_CHUNK, n_ctx),
        ram=ram,
        slots=slots,
    )


def _in_pages(model: Model) -> list[int]:  # [L]
    """An expert of each MoE layer, its slices in whole pages, as the store of a run holds them."""
    from mmap import PAGESIZE

    from edgemoe.streaming.skeleton import is_streamed

    sizes = dict.fromkeys(model.geometry.moe_layers, 0)
    for tensor in filter(is_streamed, model.tensors):
        assert tensor.layer is not None
        sizes[tensor.layer] += (-(-(tensor.nbytes // model.geometry.n_experts) // PAGESIZE) + 1) * PAGESIZE
    return list(sizes.values())


def _least(answer: Answer, policy: str) -> int:
    from edgemoe.policy import PRESETS, Policy

    assert answer.model is not None
    least = max(answer.model.geometry.top_k, PRESETS.get(policy, Policy()).window)
    return _budget(answer, policy, None, least).total
