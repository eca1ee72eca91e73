"""A placement plan in the SSD→RAM tier: the experts that it keeps in RAM, or in VRAM, are read at the start and stay.

They have slots of their own, besides those that the policy works with (`LogicalCache`, `pinned`), so that a plan may
pin more in one layer than in another. Their bytes count within the RAM budget (Path-Mapped Serving, arXiv
2608.18261, §5).
"""

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from edgemoe.errors import UserError
from edgemoe.model import Model
from edgemoe.streaming import reads

if TYPE_CHECKING:
    from edgemoe.streaming.store import ExpertStore
    from edgemoe.wall.plan import Plan

Pins = tuple[tuple[int, ...], ...]  # [L]: experts of each MoE layer, hottest first


def pins_of(plan: "Plan | str | Path", model: Model) -> Pins:
    """The experts that a plan keeps out of the SSD. Raises `UserError` for another model's plan, and for a file that is
    none."""
    from edgemoe.wall.plan import load_plan

    geometry = model.geometry
    if isinstance(plan, str | Path):
        plan = load_plan(Path(plan), geometry, model.files)
    if (plan.n_experts, tuple(p.layer for p in plan.layers)) != (geometry.n_experts, geometry.moe_layers):
        raise UserError(f"a plan for {plan.model}, not for {geometry.name}: write one with `edgemoe wall --plan`")
    return tuple((*layer.vram, *layer.ram) for layer in plan.layers)


def pinned_bytes(pins: Pins, expert_bytes: list[int]) -> int:
    """RAM that pinned experts take, in whole pages. expert_bytes: [L]."""
    return sum(len(experts) * size for experts, size in zip(pins, expert_bytes, strict=True))


def digest(pins: Pins) -> str:
    """Names the pins in a config hash: "" without any, in no order."""
    text = json.dumps([sorted(experts) for experts in pins])
    return hashlib.sha256(text.encode()).hexdigest()[:12] if any(pins) else ""


def bring(store: "ExpertStore", pins: Pins) -> None:
    """Read the pinned experts of every layer, which must all be absent. Raises `UserError` where one cannot be read."""
    for row, experts in enumerate(pins):
        needed = np.zeros(store.model.geometry.n_experts, np.uint8)
        needed[list(experts)] = 1
        reads.lock(store.ctl)
        reads.put(store.ctl, reads.DEMAND, row, np.array(experts, np.int64))
        reads.unlock(store.ctl)
        reads.wake(store.ctl)
        if not reads.wait_for(store.ctl, row, needed, reads.WHOLE):
            raise store.settle() or UserError("reading the pinned experts was given up: start again")
