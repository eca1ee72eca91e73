"""Copies that the device decides, issues and waits for by itself, out of page-locked host memory.

Every slot of every layer has two records, of the copy that fills it and of the one before; `current` says which is
which. A record is done when all chunks of its expert have arrived. Who moves a chunk claims it first, with one atomic
addition, so that anybody may: the copy blocks (`serve`), which run beside a whole token, or an expert's own block that
waits for it (`await_copy`). That is what makes waiting safe:

- A waiter never depends on a block that may not be scheduled: an unclaimed chunk it moves itself, and a claimed one is
  in the hands of a block that runs. Spins are bounded; one that ends sets `error`.
- Demand goes before prefetch: the blocks look at the demand queue before each chunk. An unused late prefetch delays a
  layer by no more than the chunks in flight, one for each copy block.
- A demand copy into a slot with a prefetch on its way cancels that prefetch: its claims jump past all chunks, and the
  new copy's chunks wait (`after`) for those that were in flight. At most two copies go into a slot during a token, one
  from part 1 and one from part 2, so two records are enough; at the end of a token nothing is in flight.
- No slot is written before its last reader has finished: a slot of a layer is read by that layer's products only, and
  what goes into it is decided after those of the token before.
- Bytes are seen by who may read them: all threads store, the block meets (barrier), one thread adds to `done` with
  release; the reader's thread reads it with acquire, its block meets, and loads follow that go past the L1 cache and
  never the read-only path. Only what arrived before the token began needs no such look: the kernel that moved it has
  ended. Records are seen likewise: a turn that sends others to one is dealt with release, and taken with acquire.
- Counters cannot wrap: they start anew with every copy, and grow by at most one per block and look.

A prefetch that nobody began before the token ended stays where it is: the next token that executes the expert finds its
record undone and demands it.
"""

import triton
import triton.language as tl

CANCELLED = tl.constexpr(1 << 20)  # more claims than any copy has chunks
PATIENCE = tl.constexpr(1 << 22)  # looks before a spin gives up: seconds

# Tickets, [L, k] int32: what a layer executes, for those who execute it, in the router's order. Not negative: a record
# that this token may have filled, to look at and wait for; negative: −1 − the place of a slot that was filled before.
# Turns, [L, k] int64: the same tickets (low half), each with its number in the router's order (8 bits) and the token's
# number (23 bits: the sign stays clear), in the order in which they are best worked on: what is there, then what is on
# its way, then what nobody has begun, as the demand queue has it. Blocks that wait keep others from starting, so those
# that need not wait must come first.
NO_TICKET = tl.constexpr(-(1 << 30))
NOWHERE = tl.constexpr(2**31 - 1)  # behind every turn

# Words of `queue`, [8] int32.
DEMAND_TAIL = tl.constexpr(0)
PREFETCH_TAIL = tl.constexpr(1)
FINISHED = tl.constexpr(2)
ERROR = tl.constexpr(3)  # bits, one for each kind of spin that gave up
CANCELLED_COPY = tl.constexpr(1)
EXPERT = tl.constexpr(2)
DECISION = tl.constexpr(4)
TURN = tl.constexpr(8)
NUMBER = tl.constexpr(4)  # of the token, modulo 2²³

# Words of `tally`, [8] int64: running totals, as `edgemoe.gpu_offload.executor.Counters` has them.
LOADS = tl.constexpr(0)
MISSES = tl.constexpr(1)
DEMAND = tl.constexpr(2)
PREFETCHED = tl.constexpr(3)
IN_TIME = tl.constexpr(4)
LATE = tl.constexpr(5)
UNUSED = tl.constexpr(6)


@triton.jit
def place_of(ticket):  # type: ignore[no-untyped-def]
    """layer · C + slot."""
    return tl.where(ticket >= 0, ticket // 2, -1 - ticket)


@triton.jit
def move_chunk(  # type: ignore[no-untyped-def]
    record, chunk, arena, slots, experts, after, done, queue,
    E: tl.constexpr, C: tl.constexpr, WORDS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Move a claimed chunk. arena [L, E, WORDS], slots [L, C, WORDS] int32: experts in units of four bytes."""
    before = tl.load(after + record)
    looks = 0
    seen = tl.where(before > 0, 0, before)
    while (seen < before) & (looks < PATIENCE):  # the cancelled copy's last chunks
        seen = tl.atomic_add(done + (record ^ 1), 0, sem="acquire")
        looks += 1
    if seen < before:
        tl.atomic_or(queue + ERROR, CANCELLED_COPY)
    place = record // 2
    source = arena + ((place // C) * E + tl.load(experts + record)).to(tl.int64) * WORDS
    target = slots + place.to(tl.int64) * WORDS
    for start in range(0, CHUNK, TILE):
        at = chunk * CHUNK + start + tl.arange(0, TILE)
        tl.store(target + at, tl.load(source + at, mask=at < WORDS, other=0), mask=at < WORDS)
    tl.debug_barrier()
    tl.atomic_add(done + record, 1, sem="release")


@triton.jit
def await_copy(  # type: ignore[no-untyped-def]
    record, arena, slots, experts, claims, after, done, queue,
    E: tl.constexpr, C: tl.constexpr, WORDS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
    CHUNKS: tl.constexpr
):  # fmt: skip
    """Return when a record's bytes may be read, having moved what nobody had claimed."""
    arrived = tl.atomic_add(done + record, 0, sem="acquire")
    looks = 0
    while (arrived < CHUNKS) & (looks < PATIENCE):
        # Not a plain load: its threads could see different values, and part ways at the barriers below.
        if tl.atomic_add(claims + record, 0, sem="relaxed") < CHUNKS:
            chunk = tl.atomic_add(claims + record, 1, sem="relaxed")
            if chunk < CHUNKS:
                move_chunk(record, chunk, arena, slots, experts, after, done, queue, E, C, WORDS, CHUNK, TILE)
        arrived = tl.atomic_add(done + record, 0, sem="acquire")
        looks += 1
    if arrived < CHUNKS:
        tl.atomic_or(queue + ERROR, EXPERT)
    tl.debug_barrier()


@triton.jit
def turn_of(ticket, place, number):  # type: ignore[no-untyped-def]
    return (((number << 8) | place).to(tl.int64) << 32) | (ticket.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def take_turn(turn, number, queue):  # type: ignore[no-untyped-def]
    """(ticket, its number in the router's order) of a turn, once the decision under way has dealt it out: all of it is
    in one word, so that one load needs no order with any other. If it never does, no ticket, and an error."""
    word = tl.load(turn, volatile=True)
    looks = 0
    # A plain load, though threads could see it at different times: once it is there, all see the same.
    while ((word >> 40) != number) & (looks < PATIENCE):
        word = tl.load(turn, volatile=True)
        looks += 1
    ticket = word.to(tl.int32)
    if (word >> 40) != number:
        tl.atomic_or(queue + ERROR, TURN)
        ticket = NO_TICKET
    if ticket >= 0:
        tl.atomic_or(turn, 0, sem="acquire")  # what it was dealt with: its record
    return ticket, ((word >> 32) & 0xFF).to(tl.int32)


@triton.jit
def look(  # type: ignore[no-untyped-def]
    layer, slot, done, current, asked, C: tl.constexpr, CHUNKS: tl.constexpr
):
    """What is known of each resident's slot [EP] while its layer's router still works: which of its two records counts,
    whether it was prefetched for this token, and whether all of it has arrived, which then stays so."""
    at = layer * C + slot
    bit = tl.load(current + at, mask=slot >= 0, other=0, cache_modifier=".cg")
    marked = tl.load(asked + at, mask=slot >= 0, other=0, cache_modifier=".cg")
    arrived = tl.load(done + 2 * at + bit, mask=slot >= 0, other=0, volatile=True)
    return bit, marked, arrived >= CHUNKS


@triton.jit
def issue_demand(  # type: ignore[no-untyped-def]
    layer, index, chosen, place, before, slot, m, n, bit, marked, there, tail, number,
    claims, done, after, experts, current, asked, tickets, turns, demand_queue, queue,
    C: tl.constexpr, WIDTH: tl.constexpr, CHUNKS: tl.constexpr
):  # fmt: skip
    """After part 2: records for its copies, tickets and turns for what the layer executes, and of that what is not
    there into the demand queue.

    By expert, [EP]: chosen and place as `policy.part2` gives them, the slots before and after it, what `look` found. m
    experts are executed, n of them copied; tail: of the demand queue; number: the token's. Returns how many copies were
    asked for, and what became of the marks: demand, promoted, in time, late, unused. One block of one warp.
    """
    LANES: tl.constexpr = triton.next_power_of_2(WIDTH)
    executed = chosen == 1
    fresh = executed & (before < 0)
    at = layer * C + slot
    record = 2 * at + bit
    predicted = (marked == 1) & executed & (before >= 0)
    waits = executed & ((before < 0) | (there == 0))
    in_time = tl.sum((predicted & (waits == 0)).to(tl.int32), 0)
    unused = tl.sum(marked, 0) - tl.sum(predicted.to(tl.int32), 0)
    tl.store(asked + layer * C + before, 0, mask=marked == 1)
    ticket = tl.where(predicted, record, -1 - at)
    turn = place
    any_waits = tl.sum(waits.to(tl.int32), 0) > 0
    demand = 0
    promoted = 0
    late = 0
    if any_waits:
        # Of those who were there already, some may have arrived by now, or be on their way.
        arrived = tl.load(done + record, mask=waits & (before >= 0), other=0, volatile=True)
        begun = tl.load(claims + record, mask=waits & (before >= 0), other=0, volatile=True)
        if n > 0:
            opened = open_records(index, at, fresh, claims, done, after, experts, current, CHUNKS)
            record = tl.where(fresh, opened, record)
        wanted = waits & (fresh | (arrived < CHUNKS))
        n_wanted = tl.sum(wanted.to(tl.int32), 0)
        ticket = tl.where(wanted, record, ticket)
        key = tl.where(wanted, tl.where(begun > 0, LANES, 2 * LANES), 0) + place
        key = tl.where(executed, key, NOWHERE)
        for i in range(m):
            least = tl.min(key, 0)
            turn = tl.where(key == least, i, turn)
            key = tl.where(key == least, NOWHERE, key)
        tl.store(demand_queue + tail + turn - (m - n_wanted), record, mask=wanted)
        # A prefetch that nobody has begun is promoted: a demand copy after all. What is neither new nor predicted is an
        # older prefetch that no token began, or that was cut short when one ended.
        promoted = tl.sum((wanted & predicted & (begun == 0)).to(tl.int32), 0)
        late = tl.sum((wanted & predicted & (begun > 0)).to(tl.int32), 0)
        in_time += tl.sum((waits & predicted & (wanted == 0)).to(tl.int32), 0)
        demand = n_wanted - late
        tl.debug_barrier()  # other lanes wrote records and queue
        tl.atomic_xchg(queue + DEMAND_TAIL, tail + n_wanted, sem="release")
    tl.store(tickets + layer * WIDTH + place, ticket, mask=executed)
    dealt = turns + layer * WIDTH + turn
    if any_waits:
        tl.atomic_xchg(dealt, turn_of(ticket, place, number), mask=executed, sem="release")
    else:
        tl.store(dealt, turn_of(ticket, place, number), mask=executed)
    lane = tl.arange(0, LANES)
    nobody = (lane >= m) & (lane < WIDTH)
    tl.store(tickets + layer * WIDTH + lane, NO_TICKET, mask=nobody)
    tl.store(turns + layer * WIDTH + lane, turn_of(lane * 0 + NO_TICKET, lane, number), mask=nobody)
    return demand, promoted, in_time, late, unused


@triton.jit
def issue_prefetch(  # type: ignore[no-untyped-def]
    layer, index, turn, slot, n, claims, done, after, experts, current, asked, prefetch_queue, queue,
    C: tl.constexpr, CHUNKS: tl.constexpr
):  # fmt: skip
    """After part 1 of `layer`: records for its n copies, which go into the prefetch queue and leave a mark on their
    slots. turn [EP]: the place of each expert among the copies, −1 for others."""
    if n > 0:
        mine = turn >= 0
        at = layer * C + slot
        tail = tl.load(queue + PREFETCH_TAIL, volatile=True)
        record = open_records(index, at, mine, claims, done, after, experts, current, CHUNKS)
        tl.store(asked + at, 1, mask=mine)
        tl.store(prefetch_queue + tail + turn, record, mask=mine)
        tl.debug_barrier()  # as above
        tl.atomic_xchg(queue + PREFETCH_TAIL, tail + n, sem="release")


@triton.jit
def open_records(  # type: ignore[no-untyped-def]
    index, at, mine, claims, done, after, experts, current, CHUNKS: tl.constexpr
):
    """A new record for each expert in `mine`, in place of what its slot had, which is cancelled. The records, [EP]."""
    old = 2 * at + tl.load(current + at, mask=mine, other=0)
    claimed = tl.atomic_xchg(claims + old, tl.full(index.shape, CANCELLED, tl.int32), mask=mine, sem="acq_rel")
    new = old ^ 1
    tl.store(experts + new, index, mask=mine)
    tl.store(after + new, tl.minimum(claimed, CHUNKS), mask=mine)
    tl.store(claims + new, 0, mask=mine)
    tl.store(done + new, 0, mask=mine)
    tl.store(current + at, new & 1, mask=mine)
    return new


@triton.jit
def looks_of_delay(record, chunk, block, DELAY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Anything from 0 to twice DELAY, another for each chunk and block."""
    mixed = (record * 5003 + chunk * 1009 + block * 211 + 12345) & 0xFFFF
    mixed = (mixed * 25173 + 13849) & 0xFFFF
    return (2 * DELAY * (mixed >> 8)) >> 8


@triton.jit
def serve(  # type: ignore[no-untyped-def]
    arena, slots, experts, claims, after, done, demand_queue, prefetch_queue, queue, stop,
    E: tl.constexpr, C: tl.constexpr, WORDS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
    CHUNKS: tl.constexpr, DELAY: tl.constexpr, DRAIN: tl.constexpr
):  # fmt: skip
    """The copy blocks of one token: chunks of the demand queue, else of the prefetch queue, until the last layer has
    decided and its demand is served; with DRAIN, until both queues are empty or so many chunks have been moved. DELAY
    slows each chunk by up to twice so many looks, as tests do."""
    if tl.load(stop) == 0:
        wanted = 0  # places in the queues
        guessed = 0
        looks = 0
        moved = 0
        running = 1
        while running == 1:
            finished = tl.atomic_add(queue + FINISHED, 0, sem="acquire")
            record = -1
            demanded = wanted < tl.atomic_add(queue + DEMAND_TAIL, 0, sem="acquire")
            if demanded:
                record = tl.load(demand_queue + wanted, volatile=True)
            elif (finished == 1) & (DRAIN == 0):
                running = 0
            elif guessed < tl.atomic_add(queue + PREFETCH_TAIL, 0, sem="acquire"):
                record = tl.load(prefetch_queue + guessed, volatile=True)
            if record >= 0:
                looks = 0
                chunk = tl.atomic_add(claims + record, 1, sem="relaxed")
                if chunk < CHUNKS:
                    for _ in range(looks_of_delay(record, chunk, tl.program_id(0), DELAY)):
                        tl.atomic_add(queue + FINISHED, 0, sem="relaxed")
                    move_chunk(record, chunk, arena, slots, experts, after, done, queue, E, C, WORDS, CHUNK, TILE)
                    moved += 1
                    if (DRAIN > 0) & (moved >= DRAIN):
                        running = 0
                elif demanded:
                    wanted += 1
                else:
                    guessed += 1
            elif DRAIN > 0:
                running = 0
            else:
                looks += 1
                if looks >= PATIENCE:
                    tl.atomic_or(queue + ERROR, DECISION)
                    running = 0
