"""What the engine asks of an executor: one step at a time on one device, for one sequence.

The engine knows positions, chunks, snapshots and text; an executor knows a device. It holds the KV cache, the slots and
the logical cache (on the host, or as its own copy on the device), and decides every step by Algorithm 1.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from edgemoe.errors import UserError
from edgemoe.generation.options import Options


@dataclass
class Counters:
    """Running totals of an executor. A copy moves one expert, `expert_bytes`."""

    loads: int = 0
    """Executions of one expert for one token in one layer."""
    misses: int = 0
    """Loads whose expert had no slot in the logical cache when part 2 chose it."""
    demand: int = 0
    """Demand copies. A chunk brings an expert once, however many of its tokens execute it."""
    prefetch: int = 0
    """Prefetch copies: one that is in no step executed counts, one promoted to a demand copy does not."""
    in_time: int = 0
    late: int = 0
    unused: int = 0
    reset_copies: int = 0
    """Experts moved to start a sequence, or to go back to a snapshot."""
    reset_s: float = 0.0
    wait_s: float = 0.0
    """Time that layers stood still for experts."""
    policy_s: float = 0.0


@dataclass(frozen=True)
class Snapshot:
    """The logical cache of a moment: a copy of `LogicalCache.block`. The KV cache of earlier positions stays valid."""

    block: np.ndarray


class Executor(Protocol):
    """One model on one device.

    A step either happens, or raises and leaves the KV cache of earlier positions intact; the engine then restores the
    snapshot that it took before. Positions count from 0, and a step overwrites what the KV cache held from there on.
    """

    name: str
    """For the config hash: device and design, like `cpu`."""

    @property
    def counters(self) -> Counters:
        """Running totals, as of now."""

    def step(self, tokens: np.ndarray, position: int, *, all_rows: bool = False) -> np.ndarray:
        """Append tokens [T] int, at most a chunk; the logits after the last, [V] float32, or after each, [T, V].

        One token goes through the layers as a decode does: part 1 one layer early, experts executed from slots.
        Several go layer by layer: both parts for each in turn, then the union of what they execute, each brought once;
        afterwards the slots hold what the logical cache says.
        """

    def extend(self, token: int, position: int, count: int, options: Options, ends: frozenset[int]) -> Sequence[int]:
        """Append `token`, choose the next by `options` (`kernels.draw.choose`), append that, …: the `count` tokens
        chosen, fewer after one of `ends`. The last one is chosen and not appended."""

    def record(self, count: int) -> dict[str, np.ndarray]:
        """What the last step, of `count` tokens, decided, and from what: `edgemoe.gpu_offload.decisions.Decisions`."""

    def reset(self) -> None:
        """Start a sequence: the logical cache as at the start; warm experts that have a slot keep it."""

    def snapshot(self) -> Snapshot: ...

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot of this executor; the slots follow, whatever an interrupted step left in them."""

    def slot_of(self) -> np.ndarray:
        """[L, E]: the logical cache's slot of each expert, −1 without one (a copy)."""

    def verify(self) -> None:
        """Raise `UserError` unless every slot holds the arena's bytes of the expert that it should have."""

    def close(self) -> None:
        """Free the device's memory; may be called again."""


def memory_full(error: RuntimeError) -> UserError:
    """What torch says in a paragraph when a GPU's memory is full, in one line."""
    asked = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
    more = f": {asked[1]} more are needed" if asked else ""
    return UserError(
        f"the GPU's memory is full{more}: close other programs on it, or give fewer slots (--residency), a smaller "
        "context (-c) or --chunk"
    )


def kept_in_place(slot_of: np.ndarray, held: np.ndarray) -> np.ndarray:
    """The same residents in slots that need the fewest copies: who is in a slot stays, the others fill what is free.

    slot_of [E]: −1 or a slot; held [C]: the expert in each slot, −1 for none. Which slot an expert has decides nothing.
    """
    out = np.full_like(slot_of, -1)
    slots = np.flatnonzero(held >= 0)
    slots = slots[slot_of[held[slots]] >= 0][::-1]  # of two with one expert, the first stays
    out[held[slots]] = slots
    taken = np.zeros(len(held), bool)
    taken[out[out >= 0]] = True
    rest = np.flatnonzero((slot_of >= 0) & (out < 0))
    out[rest] = np.flatnonzero(~taken)[: len(rest)]
    return out
