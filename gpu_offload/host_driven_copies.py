"""Which copies a host sends when (PSR paper §4.2): demand at once, prefetches from a queue at the layers' boundaries.

Everything here follows decisions that are made; how many prefetches are in flight, and how long they take, changes no
decision on the logical cache.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from edgemoe.gpu_offload.executor import Counters
from edgemoe.gpu_offload.host_driven_link import Arrival, Link
from edgemoe.gpu_offload.slots import NOTHING, Slots

Copy = tuple[int, int]
"""(expert, slot)"""


@dataclass
class Prefetch:
    """A copy that part 1 asked for."""

    layer: int
    expert: int
    slot: int
    passed: bool = False
    """Its layer has run without it."""


class Copies:
    """The copies of one executor. `slots.held` says what each slot holds once the copies that were sent are there."""

    def __init__(self, slots: Slots, slot_of: np.ndarray, link: Link, in_flight: int, counters: Counters) -> None:
        """slot_of [L, E]: the logical cache's own array. in_flight: prefetch copies on the link at most."""
        self._slots, self._slot_of, self._link = slots, slot_of, link
        self._in_flight, self._counters = in_flight, counters
        self._queue: deque[Prefetch] = deque()
        self._flying: list[Arrival] = []
        self._arrivals: dict[tuple[int, int], Arrival] = {}  # of the last copy into a (layer, slot)
        self._asked: dict[int, list[Prefetch]] = {}  # for the next step of a layer

    def predict(self, layer: int, copies: Iterable[Copy]) -> None:
        """Queue what part 1 inserted for a layer. A slot that still holds an expert which comes back needs no copy."""
        held = self._slots.held[layer]
        asked = [Prefetch(layer, expert, slot) for expert, slot in copies if held[slot] != expert]
        self._asked[layer] = asked
        again = {(layer, p.expert) for p in asked}
        if again and self._queue:
            self._queue = deque(p for p in self._queue if (p.layer, p.expert) not in again)
        self._queue.extend(asked)

    def boundary(self) -> None:
        """Send queued prefetches, as many as may be in flight; one whose slot was given away, or that was sent on
        demand meanwhile, is dropped."""
        while self._queue and self.room():
            p = self._queue.popleft()
            if self._is_wanted(p):
                self._flying.append(self._send(p.layer, p.expert, p.slot))
                self._counters.prefetch += 1
                self._counters.unused += p.passed

    def room(self) -> int:
        """How many prefetches may be sent now."""
        self._flying = [arrival for arrival in self._flying if not arrival.done()]
        return self._in_flight - len(self._flying)

    def _is_wanted(self, p: Prefetch) -> bool:
        return bool(self._slot_of[p.layer, p.expert] == p.slot and self._slots.held[p.layer, p.slot] != p.expert)

    def need(self, layer: int, demand: list[Copy], executed: list[int]) -> list[Arrival]:
        """Send what part 2 asked for, and what it executes of the queue; the arrivals that the layer must wait for.

        Counts the layer's prefetches: in time, late, unused, or promoted to demand.
        """
        held, slot_of = self._slots.held[layer], self._slot_of[layer]
        sent = {p.expert for p in self._asked.get(layer, []) if held[p.slot] == p.expert}
        for p in self._asked.pop(layer, []):
            p.passed = True
            self._counters.unused += p.expert in sent and p.expert not in executed
        places = [(expert, int(slot_of[expert])) for expert in executed]
        for expert, slot in (*demand, *places):
            if held[slot] != expert:
                self._send(layer, expert, slot)
                self._counters.demand += 1
        arrivals = []
        for expert, slot in places:
            arrival = self._arrivals.get((layer, slot))
            waits = arrival is not None and not arrival.done()
            if expert in sent:
                self._counters.late += waits
                self._counters.in_time += not waits
            if waits:
                arrivals.append(arrival)
            else:
                self._arrivals.pop((layer, slot), None)
        return arrivals  # type: ignore[return-value]

    def _send(self, layer: int, expert: int, slot: int) -> Arrival:
        slots = self._slots
        slots.held[layer, slot] = NOTHING  # as long as an interruption could leave it half done
        arrival = self._link.send(slots.arena.bytes[layer, expert], slots.bytes[layer, slot])
        self._arrivals[layer, slot] = arrival
        slots.held[layer, slot] = expert
        return arrival

    def absent(self, layer: int, *, arrived: bool) -> np.ndarray:
        """[E] bool: residents of the logical cache whose copy has not been sent or, with `arrived`, is not over."""
        slot_of, held = self._slot_of[layer], self._slots.held[layer]
        out = (slot_of >= 0) & (held[slot_of] != np.arange(len(slot_of)))
        for (at, slot), arrival in self._arrivals.items() if arrived else ():
            if at == layer and not arrival.done():
                out[slot_of == slot] = True
        return out

    def queued(self) -> list[Prefetch]:
        """Prefetches that the logical cache counts on and that have not been sent."""
        return [p for p in self._queue if self._is_wanted(p)]

    def drain(self) -> None:
        """Forget the queue; return when what was sent has arrived."""
        self._queue.clear()
        self._asked.clear()
        self._link.drain()
        self._flying.clear()
        self._arrivals.clear()
