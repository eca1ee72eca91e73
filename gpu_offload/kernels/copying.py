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
  never the read-only path. What was there when a layer decided, the end of that kernel has made visible.
- Counters cannot wrap: they start anew with every copy, and grow by at most one per block and look.

A prefetch that nobody began before the token ended stays where it is: the next token that executes the expert finds its
record undone and demands it.
"""

import triton
import triton.language as tl

CANCELLED = tl.constexpr(1 << 20)  # more claims than any copy has chunks
PATIENCE = tl.constexpr(1 << 22)  # looks before a spin gives up: seconds

# Tickets, [L, k] int32: what a layer executes, for those who execute it. Not negative: a record to wait for; negative:
# −1 − the place of a slot whose bytes are there.
NO_TICKET = tl.constexpr(-(1 << 30))

# Words of `queue`, [8] int32.
DEMAND_TAIL = tl.constexpr(0)
PREFETCH_TAIL = tl.constexpr(1)
FINISHED = tl.constexpr(2)
ERROR = tl.constexpr(3)  # bits, one for each kind of spin that gave up
CANCELLED_COPY = tl.constexpr(1)
EXPERT = tl.constexpr(2)
DECISION = tl.constexpr(4)

# Words of `tally`, [8] int64: running totals, as `edgemoe.gpu_offload.executor.Counters` has them.
LOADS = tl.constexpr(0)
MISSES = tl.constexpr(1)
DEMAND = tl.constexpr(2)
PREFETCH = tl.constexpr(3)
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
def issue(  # type: ignore[no-untyped-def]
    layer, following, slots_out, copies, counts, claims, done, after, experts, current, asked,
    tickets, demand_queue, prefetch_queue, queue, tally,
    C: tl.constexpr, WIDTH: tl.constexpr, BUDGET: tl.constexpr, CHUNKS: tl.constexpr, LANES: tl.constexpr,
    SELECTED: tl.constexpr, PREFETCHED: tl.constexpr, LAST: tl.constexpr
):  # fmt: skip
    """After a decision: records for its copies, tickets for what the layer executes, of that what is not there into the
    demand queue, and the next layer's prefetch copies into the other. One block of one warp; lists as
    `edgemoe.gpu_offload.kernels.steps.step` writes them. asked [L, C] int32: the slots that this token prefetched into.
    """
    lane = tl.arange(0, LANES)
    if SELECTED:
        list_of = copies + layer * (2 * (WIDTH + BUDGET))
        n = tl.load(counts + layer * 3 + 1)
        place = layer * C + tl.load(list_of + 2 * lane + 1, mask=lane < n, other=0)
        overwritten = tl.load(asked + place, mask=lane < n, other=0)
        tl.store(asked + place, 0, mask=lane < n)
        begin_copies(list_of, place, n, claims, done, after, experts, current, CHUNKS, LANES)
        tl.debug_barrier()  # other lanes read what these wrote
        m = tl.load(counts + layer * 3)
        place = layer * C + tl.load(slots_out + layer * WIDTH + lane, mask=lane < m, other=0)
        record = 2 * place + tl.load(current + place, mask=lane < m, other=0)
        arrived = tl.load(done + record, mask=lane < m, other=CHUNKS, volatile=True)
        begun = tl.load(claims + record, mask=lane < m, other=CHUNKS, volatile=True)
        predicted = tl.load(asked + place, mask=lane < m, other=0)
        wanted = (lane < m) & (arrived < CHUNKS)
        ticket = tl.where(wanted, record, -1 - place)
        tl.store(tickets + layer * WIDTH + lane, tl.where(lane < m, ticket, NO_TICKET), mask=lane < WIDTH)
        tail = tl.load(queue + DEMAND_TAIL, volatile=True)
        offset = tl.cumsum(wanted.to(tl.int32), 0)
        tl.store(demand_queue + tail + offset - 1, record, mask=wanted)
        tl.store(asked + place, 0, mask=lane < m)
        # A prefetch that nobody has begun is promoted: a demand copy after all.
        promoted = tl.sum((wanted & (predicted == 1) & (begun == 0)).to(tl.int32), 0)
        late = tl.sum((wanted & (predicted == 1) & (begun > 0)).to(tl.int32), 0)
        in_time = tl.sum(((arrived >= CHUNKS) & (predicted == 1) & (lane < m)).to(tl.int32), 0)
        # An older prefetch that no token began, or that was cut short when one ended.
        left_over = tl.sum((wanted & (predicted == 0)).to(tl.int32), 0) - n
        tl.debug_barrier()
        tl.atomic_xchg(queue + DEMAND_TAIL, tail + tl.sum(wanted.to(tl.int32), 0), sem="release")
        unused = count_unused(layer, asked, C) + tl.sum(overwritten, 0)
        add(tally + LOADS, m)
        add(tally + MISSES, n)
        add(tally + DEMAND, n + promoted + left_over)
        add(tally + PREFETCH, -promoted)
        add(tally + IN_TIME, in_time)
        add(tally + LATE, late)
        add(tally + UNUSED, unused)
    if PREFETCHED:
        list_of = copies + following * (2 * (WIDTH + BUDGET)) + 2 * WIDTH
        n = tl.load(counts + following * 3 + 2)
        place = following * C + tl.load(list_of + 2 * lane + 1, mask=lane < n, other=0)
        begin_copies(list_of, place, n, claims, done, after, experts, current, CHUNKS, LANES)
        tl.store(asked + place, 1, mask=lane < n)
        tl.debug_barrier()
        tail = tl.load(queue + PREFETCH_TAIL, volatile=True)
        record = 2 * place + tl.load(current + place, mask=lane < n, other=0)
        tl.store(prefetch_queue + tail + lane, record, mask=lane < n)
        add(tally + PREFETCH, n)
        tl.debug_barrier()
        tl.atomic_xchg(queue + PREFETCH_TAIL, tail + n, sem="release")
    if LAST:
        tl.atomic_xchg(queue + FINISHED, 1, sem="release")


@triton.jit
def begin_copies(  # type: ignore[no-untyped-def]
    list_of, place, n, claims, done, after, experts, current, CHUNKS: tl.constexpr, LANES: tl.constexpr
):
    """A new record for each of n copies (expert, slot), in place of what its slot had, which is cancelled."""
    lane = tl.arange(0, LANES)
    mine = lane < n
    old = 2 * place + tl.load(current + place, mask=mine, other=0)
    claimed = tl.atomic_xchg(claims + old, tl.full((LANES,), CANCELLED, tl.int32), mask=mine, sem="acq_rel")
    new = old ^ 1
    tl.store(experts + new, tl.load(list_of + 2 * lane, mask=mine, other=0), mask=mine)
    tl.store(after + new, tl.minimum(claimed, CHUNKS), mask=mine)
    tl.store(claims + new, 0, mask=mine)
    tl.store(done + new, 0, mask=mine)
    tl.store(current + place, new & 1, mask=mine)


@triton.jit
def count_unused(layer, asked, C: tl.constexpr):  # type: ignore[no-untyped-def]
    """Prefetches of this layer that it did not execute; their marks are taken off."""
    slot = tl.arange(0, triton.next_power_of_2(C))
    marks = tl.load(asked + layer * C + slot, mask=slot < C, other=0)
    tl.store(asked + layer * C + slot, 0, mask=slot < C)
    return tl.sum(marks, 0)


@triton.jit
def add(word, count):  # type: ignore[no-untyped-def]
    tl.store(word, tl.load(word) + count)


@triton.jit
def serve(  # type: ignore[no-untyped-def]
    arena, slots, experts, claims, after, done, demand_queue, prefetch_queue, queue, stop,
    E: tl.constexpr, C: tl.constexpr, WORDS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
    CHUNKS: tl.constexpr, DELAY: tl.constexpr, DRAIN: tl.constexpr
):  # fmt: skip
    """The copy blocks of one token: chunks of the demand queue, else of the prefetch queue, until the last layer has
    decided and its demand is served; with DRAIN, until both queues are empty or so many chunks have been moved. DELAY
    slows each chunk by so many turns, as tests do."""
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
                    for _ in range(DELAY):
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
