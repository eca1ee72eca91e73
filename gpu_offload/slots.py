"""The slots: C places per layer on the device, which copies fill from the arena as the logical cache says."""

import numpy as np
import torch

from edgemoe.errors import UserError
from edgemoe.gpu_offload.arena import Arena, ExpertViews, expert_views

NOTHING = -1


class Slots:
    """`bytes` [L, C, bytes_per_expert] uint8 on the device; `held` [L, C] int64 says whose bytes each slot has."""

    def __init__(self, arena: Arena, capacity: int, device: torch.device) -> None:
        self.arena, self.capacity = arena, capacity
        n_layers = arena.shape.n_layers
        self.bytes = torch.empty((n_layers, capacity, arena.expert_bytes), dtype=torch.uint8, device=device)
        self.staging = torch.empty(arena.expert_bytes, dtype=torch.uint8, device=device)
        self.held = np.full((n_layers, capacity), NOTHING, np.int64)

    def copy(self, layer: int, expert: int, slot: int) -> None:
        """Bring an expert into a slot. Interrupted, the slot holds nothing."""
        self.put(layer, expert, slot, self.arena.bytes[layer, expert])

    def put(self, layer: int, expert: int, slot: int, content: torch.Tensor) -> None:
        """The same from wherever the expert's bytes are."""
        self.held[layer, slot] = NOTHING
        self.bytes[layer, slot].copy_(content)
        self.held[layer, slot] = expert

    def places(self, layer: int) -> dict[int, int]:
        """The slot of each expert whose bytes one of this layer's has."""
        return {expert: slot for slot, expert in enumerate(self.held[layer].tolist()) if expert != NOTHING}

    def stage(self, layer: int, expert: int) -> ExpertViews:
        """Bring an expert that has no slot into the staging buffer, where the next one replaces it."""
        self.staging.copy_(self.arena.bytes[layer, expert])
        return expert_views(self.staging, self.arena.shape, self.arena.dtype)

    def views(self, layer: int, slot: int) -> ExpertViews:
        return expert_views(self.bytes[layer, slot], self.arena.shape, self.arena.dtype)

    def settle(self, layer: int, slot_of: np.ndarray) -> list[int]:
        """Make the slots of a layer hold what the logical cache's `slot_of` [E] says; returns the experts copied."""
        experts = np.flatnonzero(slot_of >= 0)
        missing = experts[self.held[layer, slot_of[experts]] != experts]
        for expert in missing.tolist():
            self.copy(layer, expert, int(slot_of[expert]))
        return missing.tolist()

    def verify(self, slot_of: np.ndarray) -> None:
        """Compare every slot with the arena's bytes of the expert that `slot_of` [L, E] puts there.

        Raises `UserError` at the first difference: the text so far may be wrong.
        """
        for layer, expert in np.argwhere(slot_of >= 0).tolist():
            slot = int(slot_of[layer, expert])
            same = self.held[layer, slot] == expert and torch.equal(
                self.bytes[layer, slot].cpu(), self.arena.bytes[layer, expert]
            )
            if not same:
                raise UserError(
                    f"slot {slot} of layer {layer} does not hold the bytes of expert {expert}: memory or a copy is at "
                    "fault, and the text so far may be wrong"
                )
