"""What `edgemoe run --ram` makes of the RAM that `edgemoe wall` reckons with, by the run's own formula.

A run also holds its interpreter and libraries, and while a chunk of the prompt is decoded, every expert that the chunk
executes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgemoe.model import Model
    from edgemoe.policy import Policy
    from edgemoe.streaming.budget import Budget
    from edgemoe.wall.report import Answer


@dataclass(frozen=True)
class RunRoom:
    """`edgemoe.wall.tiers.Room` of a run with default options."""

    model: Model
    policy: Policy
    n_ctx: int
    expert_bytes: list[int]  # [L]: an expert in whole pages

    def least(self, streams: int) -> int:
        slots = max(self.model.geometry.top_k, self.policy.window)
        return self._budget(streams, slots=slots).total

    def slots(self, streams: int, ram: int) -> int:
        return self._budget(streams, ram=ram).slots

    def for_pins(self, ram: int) -> int:
        sizes = zip(self.model.geometry.expert_bytes, self.expert_bytes, strict=True)
        return max(int((ram - self.least(1)) * min(size / pages for size, pages in sizes)), 0)

    def _budget(self, streams: int, ram: int | None = None, slots: int | None = None) -> Budget:
        from edgemoe.streaming.budget import budget_of_streams
        from edgemoe.streaming.engine import DEFAULT_CHUNK

        return budget_of_streams(
            self.model,
            self.policy,
            streams,
            n_ctx=self.n_ctx,
            kv_type="f16",
            expert_bytes=self.expert_bytes,
            chunk=min(DEFAULT_CHUNK, self.n_ctx),
            ram=ram,
            slots=slots,
        )


def run_room(model: Model, policy: str, n_ctx: int) -> RunRoom:
    """Of a preset by name; of any other policy, exact LRU's."""
    from edgemoe.policy import PRESETS, Policy
    from edgemoe.streaming.budget import expert_pages

    return RunRoom(model, PRESETS.get(policy, Policy()), n_ctx, expert_pages(model))


def notes_on_plan(answer: Answer) -> list[str]:
    """The RAM that a run needs for the plan, where there is less: it holds in RAM what the plan puts into VRAM, too."""
    from edgemoe.units import format_bytes

    room, ram = answer.wall.room, answer.wall.machine.ram_bytes
    if answer.plan is None or not isinstance(room, RunRoom):
        return []
    sizes = zip(answer.plan.layers, room.expert_bytes, strict=True)
    pinned = sum((len(layer.vram) + len(layer.ram)) * size for layer, size in sizes)
    need = room.least(1) + pinned
    if need <= ram:
        return []
    return [f"edgemoe run --plan needs about {format_bytes(need)} of RAM for this plan: its process on top"]
