"""Copies one by one in Triton's interpreter: run as a program, since Triton asks for the interpreter once, when it is
imported. Prints one JSON object: what each case left behind."""

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton
import triton.language as tl

from edgemoe.gpu_offload.kernels import copying
from edgemoe.gpu_offload.kernels.comparing import Alone, Case, compare
from edgemoe.gpu_offload.kernels.copying import await_copy, issue_demand, look, open_records, serve, take_turn, turn_of
from edgemoe.gpu_offload.kernels.device_policy import DevicePolicy
from edgemoe.policy import preset

E, C, WORDS, CHUNK = 6, 2, 40, 16
CHUNKS = -(-WORDS // CHUNK)
SIZES = {"E": E, "C": C, "WORDS": WORDS, "CHUNK": CHUNK, "TILE": CHUNK, "CHUNKS": CHUNKS}
SLOT, PREDICTED, DEMANDED = 1, 3, 5


@triton.jit
def wait(  # type: ignore[no-untyped-def]
    record, arena, slots, experts, claims, after, done, queue,
    E: tl.constexpr, C: tl.constexpr, WORDS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
    CHUNKS: tl.constexpr
):  # fmt: skip
    await_copy(record, arena, slots, experts, claims, after, done, queue, E, C, WORDS, CHUNK, TILE, CHUNKS)


@triton.jit
def begin(expert, slot, claims, done, after, experts, current, CHUNKS: tl.constexpr, EP: tl.constexpr):  # type: ignore[no-untyped-def]
    index = tl.arange(0, EP)
    open_records(index, index * 0 + slot, index == expert, claims, done, after, experts, current, CHUNKS)


@triton.jit
def demand(  # type: ignore[no-untyped-def]
    chosen, place, before, slot, m, n, claims, done, after, experts, current, asked, tickets, turns, demand_queue,
    queue, out, C: tl.constexpr, WIDTH: tl.constexpr, CHUNKS: tl.constexpr, EP: tl.constexpr
):  # fmt: skip
    index = tl.arange(0, EP)
    held = tl.load(before + index)
    bit, marked, there = look(0, held, done, current, asked, C, CHUNKS)
    wanted, promoted, in_time, late, unused = issue_demand(
        0, index, tl.load(chosen + index), tl.load(place + index), held, tl.load(slot + index), m, n,
        bit, marked, there, tl.load(queue), 7, claims, done, after, experts, current, asked, tickets, turns,
        demand_queue, queue, C, WIDTH, CHUNKS,
    )  # fmt: skip
    tl.store(out, wanted)
    tl.store(out + 1, promoted)
    tl.store(out + 2, in_time)
    tl.store(out + 3, late)
    tl.store(out + 4, unused)


@triton.jit
def take(turn, ticket, place, dealt, number, queue, out):  # type: ignore[no-untyped-def]
    tl.store(turn, turn_of(ticket, place, dealt))
    ticket, place = take_turn(turn, number, queue)
    tl.store(out, ticket)
    tl.store(out + 1, place)


class Copies:
    """One layer's slots, and what the kernels keep beside them: every slot is whole."""

    def __init__(self) -> None:
        self.arena = torch.arange(E * WORDS, dtype=torch.int32).view(E, WORDS)
        self.slots = torch.full((C, WORDS), -1, dtype=torch.int32)
        self.claims, self.done = (torch.full((2 * C,), CHUNKS, dtype=torch.int32) for _ in range(2))
        self.after, self.experts = (torch.zeros(2 * C, dtype=torch.int32) for _ in range(2))
        self.current = torch.zeros(C, dtype=torch.int32)
        self.queues = [torch.zeros(8, dtype=torch.int32) for _ in range(2)]  # demand, prefetch
        self.queue, self.stop = torch.zeros(8, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)

    def ask(self, expert: int, which: int) -> int:
        """A copy into `SLOT`, queued: its record."""
        begin[(1,)](expert, SLOT, self.claims, self.done, self.after, self.experts, self.current, CHUNKS=CHUNKS, EP=8)
        record = 2 * SLOT + int(self.current[SLOT])
        self.queues[which][int(self.queue[which])] = record
        self.queue[which] += 1
        return record

    def serve(self, most: int) -> None:
        serve[(1,)](
            self.arena, self.slots, self.experts, self.claims, self.after, self.done, *self.queues, self.queue,
            self.stop, DELAY=2, DRAIN=most, **SIZES,
        )  # fmt: skip

    def wait(self, record: int) -> None:
        wait[(1,)](
            record, self.arena, self.slots, self.experts, self.claims, self.after, self.done, self.queue, **SIZES
        )

    def holds(self, expert: int) -> list[int]:
        """Which chunks of the slot are this expert's, and whether another slot was touched."""
        same = (self.slots[SLOT] == self.arena[expert]).tolist()
        assert (self.slots[1 - SLOT] == -1).all()
        return [at for at in range(CHUNKS) if all(same[at * CHUNK : (at + 1) * CHUNK])]

    def error(self) -> int:
        return int(self.queue[copying.ERROR.value])


def cancelled(moved: int) -> dict[str, object]:
    """A demand copy into the slot of a prefetch of which so many chunks have been moved."""
    copies = Copies()
    old = copies.ask(PREDICTED, 1)
    if moved:
        copies.serve(moved)
    before = copies.holds(PREDICTED)
    new = copies.ask(DEMANDED, 0)
    after = int(copies.after[new])
    copies.serve(100)
    return {
        "before": before,
        "waits_for": after,
        "holds": copies.holds(DEMANDED),
        "moved_of_the_old": int(copies.done[old]),
        "records": [old != new, old ^ new],
        "error": copies.error(),
    }


def reused() -> list[list[int]]:
    """What the records of one slot have counted after each of some tokens, each with a prefetch that is cancelled and
    with two copy blocks: claims, then done, then errors and whether the slot has all of the expert it was demanded
    for."""
    copies, found = Copies(), []
    for moved in (1, 0, 3, 2):
        copies.queue[:2] = 0
        copies.ask(PREDICTED, 1)
        if moved:
            copies.serve(moved)
        new = copies.ask(DEMANDED, 0)
        for _ in range(2):
            copies.serve(100)
        both = (new, new ^ 1)
        counted = [int(counts[record]) for counts in (copies.claims, copies.done) for record in both]
        found.append([*counted, copies.error(), len(copies.holds(DEMANDED))])
    return found


def turns() -> dict[str, object]:
    """A layer of 8 experts and 6 slots that executes 5 of at most 6, best first: 3 is new, 0 was prefetched and nobody
    has begun, 5 was prefetched and is on its way, 1 is there, 4 was prefetched and has just arrived. 6 was prefetched
    for nothing; 3 takes the slot of 2."""
    experts, slots, width = 8, 6, 6

    def integers(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    chosen, place = integers(1, 1, 0, 1, 1, 1, 0, 0), integers(1, 3, 0, 0, 4, 2, 0, 0)
    before, slot = integers(0, 1, 2, -1, 3, 4, 5, -1), integers(0, 1, -1, 2, 3, 4, 5, -1)
    asked, current = integers(1, 0, 0, 1, 1, 1), integers(0, 0, 1, 0, 1, 0)
    claims, done = (torch.full((2 * slots,), CHUNKS, dtype=torch.int32) for _ in range(2))
    for at, claimed, arrived in ((0, 0, 0), (4, 2, 1), (5, 0, 0)):
        record = 2 * at + int(current[at])
        claims[record], done[record] = claimed, arrived
    after, of = (torch.zeros(2 * slots, dtype=torch.int32) for _ in range(2))
    tickets, order = torch.zeros(width, dtype=torch.int32), torch.zeros(width, dtype=torch.int64)
    wanted, queue, out = (torch.zeros(8, dtype=torch.int32) for _ in range(3))
    queue[0] = 2  # two copies were asked for before
    demand[(1,)](
        chosen, place, before, slot, 5, 1, claims, done, after, of, current, asked, tickets, order, wanted, queue, out,
        C=slots, WIDTH=width, CHUNKS=CHUNKS, EP=experts,
    )  # fmt: skip
    return {
        "tickets": tickets.tolist(),
        "turns": [[turn >> 40, turn >> 32 & 255, int(np.int64(turn).astype(np.int32))] for turn in order.tolist()],
        "queue": [wanted.tolist()[2:5], int(queue[0])],
        "counts": out.tolist()[:5],
        "marks": int(asked.sum()),
        "fresh": [int(of[4]), int(claims[4]), int(done[4]), int(claims[5]), int(current[2])],
    }


def most() -> dict[str, object]:
    """Tokens of which each layer replaces all that it has by what is predicted, and then executes nothing of that: as
    many copies as there can be. What the device lists is compared with the host's."""
    k, n, tokens, layers, n_experts = 2, 4, 3, 3, 14
    scores, pregate = (np.zeros((tokens, layers, n_experts), np.float32) for _ in range(2))
    for t in range(tokens):
        pregate[t, :, 4 * (t % 2) : 4 * (t % 2) + n] = 1
        scores[t, :, 8 + k * t : 8 + k * (t + 1)] = 1
    policy, delta = preset("exact-prefetch", window=n, budget=n), np.ones(layers, np.float32)
    case = Case(policy, n_experts, k, n, scores, pregate, np.zeros(tokens, np.int64), None, delta)
    compared = compare(case, "cpu") + compare(case, "cpu", chunk=tokens)
    alone = Alone(DevicePolicy(case.cache(), device="cpu"), n)
    given = torch.from_numpy(scores), torch.from_numpy(pregate)
    for t in range(tokens):
        alone.begin()
        alone.decide(None, 0)
        for layer in range(layers):
            following = layer + 1 if layer + 1 < layers else None
            alone.decide(layer, following, given[0][t, layer], None if following is None else given[1][t, following])
    copies = alone.copies
    return {
        "compared": compared,
        "counts": alone.policy.decisions.counts.tolist(),
        "asked": copies.queue[:2].tolist(),
        "places": [len(copies.demand_queue), len(copies.prefetch_queue)],
    }


def taken(dealt: int) -> list[int]:
    """What a block that waits for token 7's turn finds where this token's is: ticket, place, error."""
    turn, queue, out = torch.zeros(1, dtype=torch.int64), *(torch.zeros(8, dtype=torch.int32) for _ in range(2))
    take[(1,)](turn, -5, 3, dealt, 7, queue, out)
    return [*out.tolist()[:2], int(queue[copying.ERROR.value])]


def main() -> None:
    copying.PATIENCE = tl.constexpr(20)
    found: dict[str, object] = {f"cancelled/{moved}": cancelled(moved) for moved in range(CHUNKS + 1)}

    copies = Copies()  # nobody serves: the waiter moves all of it
    copies.wait(copies.ask(DEMANDED, 0))
    found["waited"] = [copies.holds(DEMANDED), copies.error()]

    copies = Copies()  # demand comes first, though it was asked for last
    copies.ask(PREDICTED, 1)
    other = Copies()
    copies.queues[0][0] = 2 * (1 - SLOT)
    copies.claims[2 * (1 - SLOT)] = copies.done[2 * (1 - SLOT)] = 0
    copies.experts[2 * (1 - SLOT)] = DEMANDED
    copies.queue[0] = 1
    copies.serve(CHUNKS)
    found["first"] = [
        bool((copies.slots[1 - SLOT] == other.arena[DEMANDED]).all()), bool((copies.slots[SLOT] == -1).all()),
    ]  # fmt: skip

    copies = Copies()  # the text has ended: nothing is moved
    copies.ask(DEMANDED, 0)
    copies.stop[0] = 1
    copies.serve(100)
    found["stopped"] = copies.holds(DEMANDED)

    copies = Copies()  # who claimed the last chunk never moves it
    record = copies.ask(DEMANDED, 0)
    copies.claims[record], copies.done[record] = CHUNKS, CHUNKS - 1
    copies.wait(record)
    found["gave_up"], found["claimed"] = copies.error(), int(copies.claims[record])
    copies = Copies()  # nor does a cancelled copy's
    old = copies.ask(PREDICTED, 1)
    copies.claims[old] = 1
    copies.ask(DEMANDED, 0)
    copies.serve(100)
    found["gave_up_on_the_old"] = copies.error()
    found["taken"], found["gave_up_on_a_turn"] = taken(7), taken(6)
    found["turns"], found["reused"] = turns(), reused()
    found["most"] = most()
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
