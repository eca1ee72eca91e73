"""The store's native half: what is where, and the queue of reads that the threads of `reader` take theirs from.

Everything lies in plain memory that `store.ExpertStore` lays out; `ctl` is its control block (int64, the words below).
An expert of a layer is ABSENT, QUEUED, READING or PRESENT. Only the callback's thread makes an expert QUEUED or ABSENT,
only readers go from QUEUED to PRESENT, and both under one mutex: so what the callback sees as ABSENT or PRESENT stays
so until it says otherwise, and pages can be given back without a lock. Two slices can share a page: it is given back
only when no expert that has bytes in it is wanted.

A layer does not need all of an expert at once. Where its last product can be waited for by itself, the slices of that
product are read after those of all the others, and are on their way while the others are computed with.
"""

import numpy as np
from numba import carray, types

from edgemoe.llamacpp.native import _pointer
from edgemoe.streaming import frames
from edgemoe.streaming.jit import kernel

ABSENT, QUEUED, READING, PRESENT = 0, 1, 2, 3
DEMAND, PREFETCH = 0, 1
FIRST, WHOLE = 0, 1  # of an expert: all but the slices of its layer's last product, or those too

# ctl: geometry, then addresses, then what changes
(LAYERS, EXPERTS, TENSORS, PAGE, PIECE, RING) = range(6)
(PLACES, STATE, LEFT, TICKET, RINGS, MUTEX, WORK, DONE) = range(6, 14)
(STOP, ABORT, FAILED, FAILED_READ, FAILED_GOT, DELAY, VERIFY, IN_FLIGHT, WAITING, FRAMES) = range(14, 24)
(QUEUED_AT, LOG, LOG_ROOM, LOG_COUNT, GROUP, LEFT_FIRST, LEAVING, LEAVING_ROOM) = range(24, 32)
CTL_WORDS = 32
# what FAILED says
READ_FAILED, READ_DIFFERS = 1, 2

# a tensor's place, [L, J, PLACE_WORDS]: descriptor, another for buffered reads, offset in the file, bytes per expert
# (0: the layer has fewer tensors), address, whether the page cache has to be told to forget, and whether it is the
# layer's last product, whose slices are read last
FD, FD_BUFFERED, OFFSET, LENGTH, ADDRESS, FORGET, LAST, PLACE_WORDS = range(8)
# a line of the log, [LOG_ROOM, LOG_WORDS]: the read, nanoseconds at which it was queued, begun and done, what was
# waited for before
LOG_READ, LOG_QUEUED, LOG_BEGUN, LOG_DONE, LOG_GROUP, LOG_WORDS = 0, 1, 2, 3, 4, 5
# a ring, [2, RING_WORDS + 2·capacity]: where reads are taken and put, then (read, ticket)
TAKE, PUT, RING_WORDS = 0, 1, 2

_lock = types.ExternalFunction("pthread_mutex_lock", types.int32(types.intp))
_unlock = types.ExternalFunction("pthread_mutex_unlock", types.int32(types.intp))
_wait = types.ExternalFunction("pthread_cond_wait", types.int32(types.intp, types.intp))
_signal = types.ExternalFunction("pthread_cond_signal", types.int32(types.intp))
_broadcast = types.ExternalFunction("pthread_cond_broadcast", types.int32(types.intp))
_madvise = types.ExternalFunction("madvise", types.int32(types.intp, types.uintp, types.int32))
_clock_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.intp))
_MADV_DONTNEED = 4
_MONOTONIC = 1


@kernel
def words(address, count):  # type: ignore[no-untyped-def]
    return carray(_pointer(address), (count,), np.int64)


@kernel
def now(clock):  # type: ignore[no-untyped-def]
    """Nanoseconds; `clock` is int64 [2] of working memory."""
    _clock_gettime(_MONOTONIC, clock.ctypes.data)
    return clock[0] * 1_000_000_000 + clock[1]


@kernel
def table(ctl, which):  # type: ignore[no-untyped-def]
    """STATE, LEFT (pieces still to be read), LEFT_FIRST (those that are read first), TICKET (which a queued read must
    show), QUEUED_AT: int64 [L·E]."""
    return words(ctl[which], ctl[LAYERS] * ctl[EXPERTS])


@kernel
def place(ctl, layer, tensor):  # type: ignore[no-untyped-def]
    return words(ctl[PLACES] + 8 * PLACE_WORDS * (layer * ctl[TENSORS] + tensor), PLACE_WORDS)


@kernel
def cover(ctl, at, expert):  # type: ignore[no-untyped-def]
    """The slice of `expert` in a tensor in whole pages: first and last byte, as offsets in the file."""
    page = ctl[PAGE]
    start = at[OFFSET] + expert * at[LENGTH]
    end = start + at[LENGTH]
    return start // page * page, (end + page - 1) // page * page


@kernel
def pieces(ctl, layer, expert, tensor):  # type: ignore[no-untyped-def]
    """How many reads bring an expert's slice of a tensor."""
    at = place(ctl, layer, tensor)
    if at[LENGTH] == 0:
        return 0
    start, end = cover(ctl, at, expert)
    return (end - start + ctl[PIECE] - 1) // ctl[PIECE]


@kernel
def put(ctl, kind, layer, chosen):  # type: ignore[no-untyped-def]
    """Queue the reads of experts (int64 [n]): of all their first slices, then of the last product's. Returns how many
    of them there was room for. The mutex is held."""
    room = ctl[RING]
    ring = words(ctl[RINGS] + kind * 8 * (RING_WORDS + 2 * room), RING_WORDS + 2 * room)
    ticket, first = table(ctl, TICKET), layer * ctl[EXPERTS]
    queued, free = 0, room - ring[PUT] + ring[TAKE]
    for expert in chosen:
        cell, count, count_first = first + expert, 0, 0
        for tensor in range(ctl[TENSORS]):
            found = pieces(ctl, layer, expert, tensor)
            count += found
            if place(ctl, layer, tensor)[LAST] == 0:
                count_first += found
        if count > free:
            break
        free -= count
        queued += 1
        ticket[cell] += 1  # whatever is queued of it already is void
        table(ctl, LEFT)[cell], table(ctl, LEFT_FIRST)[cell] = count, count_first
        table(ctl, STATE)[cell] = QUEUED
        if ctl[LOG] != 0:
            table(ctl, QUEUED_AT)[cell] = now(np.empty(2, np.int64))
    for last in range(2):
        for expert in chosen[:queued]:
            piece = 0
            for tensor in range(ctl[TENSORS]):
                for _ in range(pieces(ctl, layer, expert, tensor)):
                    if place(ctl, layer, tensor)[LAST] == last:
                        slot = RING_WORDS + 2 * (ring[PUT] % room)
                        ring[slot], ring[slot + 1] = (first + expert) * 65536 + piece, ticket[first + expert]
                        ring[PUT] += 1
                    piece += 1
    return queued


@kernel
def take(ctl):  # type: ignore[no-untyped-def]
    """The next read that still counts, demand first, or −1. The mutex is held."""
    room, ticket = ctl[RING], table(ctl, TICKET)
    for kind in range(2):
        ring = words(ctl[RINGS] + kind * 8 * (RING_WORDS + 2 * room), RING_WORDS + 2 * room)
        while ring[TAKE] < ring[PUT]:
            slot = RING_WORDS + 2 * (ring[TAKE] % room)
            ring[TAKE] += 1
            if ring[slot + 1] == ticket[ring[slot] // 65536]:
                return ring[slot]
    return -1


@kernel
def withdraw(ctl, layer, expert):  # type: ignore[no-untyped-def]
    """Drop an expert that no reader has begun. The mutex is held."""
    cell = layer * ctl[EXPERTS] + expert
    table(ctl, TICKET)[cell] += 1
    table(ctl, STATE)[cell] = ABSENT


@kernel
def part(ctl, read):  # type: ignore[no-untyped-def]
    """Which bytes a read brings: its expert's cell, the tensor, and first and last as offsets in the file."""
    cell, piece = read // 65536, read % 65536
    layer, expert = cell // ctl[EXPERTS], cell % ctl[EXPERTS]
    found = start = end = 0
    for tensor in range(ctl[TENSORS]):
        at = place(ctl, layer, tensor)
        if at[LENGTH] == 0:
            continue
        found = tensor
        start, end = cover(ctl, at, expert)
        count = (end - start + ctl[PIECE] - 1) // ctl[PIECE]
        if piece < count:
            break
        piece -= count
    start += piece * ctl[PIECE]
    end = min(end, start + ctl[PIECE])
    at = place(ctl, layer, found)
    first = max(start, at[OFFSET] + expert * at[LENGTH])
    last = min(end, at[OFFSET] + (expert + 1) * at[LENGTH])
    return cell, found, first, last


@kernel
def note(ctl, read):  # type: ignore[no-untyped-def]
    """A read has been done. The mutex is held."""
    cell, tensor, _, _ = part(ctl, read)
    left = table(ctl, LEFT)
    left[cell] -= 1
    if place(ctl, cell // ctl[EXPERTS], tensor)[LAST] == 0:
        table(ctl, LEFT_FIRST)[cell] -= 1
    if left[cell] == 0:
        table(ctl, STATE)[cell] = PRESENT


@kernel
def is_there(ctl, cell, much):  # type: ignore[no-untyped-def]
    """Whether so much (FIRST or WHOLE) of an expert has been read. The mutex is held."""
    state = table(ctl, STATE)[cell]
    return state == PRESENT or (much == FIRST and state != ABSENT and table(ctl, LEFT_FIRST)[cell] == 0)


@kernel
def is_awaited(ctl, cell):  # type: ignore[no-untyped-def]
    """Whether what was just read may be what the callback waits for. The mutex is held."""
    return ctl[WAITING] < 0 or (ctl[WAITING] == cell + 1 and table(ctl, LEFT_FIRST)[cell] == 0)


@kernel
def release(ctl, layer, expert):  # type: ignore[no-untyped-def]
    """Give an expert's pages back, or its frames to others, except pages in which another expert's bytes are wanted."""
    vacate(ctl, layer, expert)
    trim(ctl)


@kernel
def vacate(ctl, layer, expert):  # type: ignore[no-untyped-def]
    """Let others have an expert's frames; its other pages stay until `trim`, which takes longer and can wait."""
    cell = layer * ctl[EXPERTS] + expert
    table(ctl, STATE)[cell] = ABSENT
    pool = words(ctl[FRAMES], frames.WORDS)
    for tensor in range(ctl[TENSORS]):
        if place(ctl, layer, tensor)[LENGTH] > 0:
            frames.leave(pool, cell * ctl[TENSORS] + tensor)
    leaving = words(ctl[LEAVING], 1 + ctl[LEAVING_ROOM])
    if leaving[0] == ctl[LEAVING_ROOM]:
        trim(ctl)
    leaving[0] += 1
    leaving[leaving[0]] = cell


@kernel
def trim(ctl):  # type: ignore[no-untyped-def]
    """Give the pages back that vacated experts had besides their frames, unless other bytes in them are wanted."""
    page, experts = ctl[PAGE], ctl[EXPERTS]
    pool, state = words(ctl[FRAMES], frames.WORDS), table(ctl, STATE)
    leaving = words(ctl[LEAVING], 1 + ctl[LEAVING_ROOM])
    for i in range(leaving[0]):
        layer, expert = leaving[1 + i] // experts, leaving[1 + i] % experts
        if state[leaving[1 + i]] != ABSENT:  # wanted again
            continue
        for tensor in range(ctl[TENSORS]):
            at = place(ctl, layer, tensor)
            if at[LENGTH] == 0:
                continue
            start, end = cover(ctl, at, expert)
            if _shared(ctl, at, layer, start):
                start += page
            if end > start and _shared(ctl, at, layer, end - page):
                end -= page
            frame = (at[OFFSET] + expert * at[LENGTH] + page - 1) // page * page
            after = frames.frame_end(pool, leaving[1 + i] * ctl[TENSORS] + tensor, frame)
            _give_back(at, start, min(frame, end) if after > frame else end)
            if after > frame:
                _give_back(at, after, end)
    leaving[0] = 0


@kernel
def _give_back(at, start, end):  # type: ignore[no-untyped-def]
    if end > start:
        _madvise(at[ADDRESS] + start - at[OFFSET], end - start, _MADV_DONTNEED)


@kernel
def _shared(ctl, at, layer, start):  # type: ignore[no-untyped-def]
    """Whether any expert with bytes in the page at `start` is wanted."""
    first = max(start - at[OFFSET], 0) // at[LENGTH]
    last = min((start + ctl[PAGE] - 1 - at[OFFSET]) // at[LENGTH], ctl[EXPERTS] - 1)
    state = table(ctl, STATE)
    for expert in range(first, last + 1):  # noqa: SIM110 (numba has no generators)
        if state[layer * ctl[EXPERTS] + expert] != ABSENT:
            return True
    return False


@kernel
def lock(ctl):  # type: ignore[no-untyped-def]
    _lock(ctl[MUTEX])


@kernel
def unlock(ctl):  # type: ignore[no-untyped-def]
    _unlock(ctl[MUTEX])


@kernel
def wake(ctl):  # type: ignore[no-untyped-def]
    """After queueing: as many readers look again as there are reads. Waking one up in vain costs this thread, too."""
    room, count = ctl[RING], 0
    for kind in range(2):
        ring = words(ctl[RINGS] + kind * 8 * (RING_WORDS + 2 * room), RING_WORDS)
        count += ring[PUT] - ring[TAKE]
    if count > 4:
        _broadcast(ctl[WORK])
    else:
        for _ in range(count):
            _signal(ctl[WORK])


@kernel
def have_come(ctl, layer, needed, much):  # type: ignore[no-untyped-def]
    """Whether so much (FIRST or WHOLE) of every needed expert of a layer (uint8 [E]) is there."""
    fine, first = True, layer * ctl[EXPERTS]
    _lock(ctl[MUTEX])
    for expert in range(ctl[EXPERTS]):
        if needed[expert] and not is_there(ctl, first + expert, much):
            fine = False
    _unlock(ctl[MUTEX])
    return fine


@kernel
def wait_for(ctl, layer, needed, much):  # type: ignore[no-untyped-def]
    """Until so much (FIRST or WHOLE) of every needed expert of a layer (uint8 [E]) is there; False after a failed read,
    or when told to stop. What was queued last is waited for first: hardly anything is left to wake up for then."""
    fine, first = True, layer * ctl[EXPERTS]
    _lock(ctl[MUTEX])
    for expert in range(ctl[EXPERTS] - 1, -1, -1):
        while fine and needed[expert] and not is_there(ctl, first + expert, much):
            if ctl[FAILED] != 0 or ctl[ABORT] != 0 or ctl[STOP] != 0:
                fine = False
            else:
                ctl[WAITING] = first + expert + 1
                _wait(ctl[DONE], ctl[MUTEX])
    ctl[WAITING] = 0
    if much == WHOLE:
        ctl[GROUP] += 1
    _unlock(ctl[MUTEX])
    return fine


@kernel
def settle(ctl):  # type: ignore[no-untyped-def]
    """After a failure or an interrupt: no read is queued or under way, and what is not PRESENT is ABSENT."""
    state, ticket, room = table(ctl, STATE), table(ctl, TICKET), ctl[RING]
    _lock(ctl[MUTEX])
    for kind in range(2):
        ring = words(ctl[RINGS] + kind * 8 * (RING_WORDS + 2 * room), RING_WORDS + 2 * room)
        ring[TAKE] = ring[PUT]
    ctl[WAITING] = -1
    while ctl[IN_FLIGHT] > 0:
        _wait(ctl[DONE], ctl[MUTEX])
    ctl[WAITING] = 0
    ctl[FAILED] = ctl[ABORT] = 0
    _unlock(ctl[MUTEX])
    for cell in range(ctl[LAYERS] * ctl[EXPERTS]):
        if state[cell] != PRESENT:
            ticket[cell] += 1
            if state[cell] != ABSENT:
                vacate(ctl, cell // ctl[EXPERTS], cell % ctl[EXPERTS])
    trim(ctl)


@kernel
def stop(ctl, word):  # type: ignore[no-untyped-def]
    """Set STOP (readers end) or ABORT (the callback does not wait any longer)."""
    _lock(ctl[MUTEX])
    ctl[word] = 1
    _broadcast(ctl[WORK])
    _broadcast(ctl[DONE])
    _unlock(ctl[MUTEX])
