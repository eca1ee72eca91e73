"""The store's native half: what is where, a queue of reads, and the threads that do them.

Everything lies in plain memory that `store.ExpertStore` lays out; `ctl` is its control block (int64, the words below).
An expert of a layer is ABSENT, QUEUED, READING or PRESENT. Only the callback's thread makes an expert QUEUED or ABSENT,
only readers go from QUEUED to PRESENT, and both under one mutex: so what the callback sees as ABSENT or PRESENT stays
so until it says otherwise, and pages can be given back without a lock.

O_DIRECT reads whole pages, and the first and last page of a slice hold bytes of its neighbours too. Those two are read
into the reader's own memory, and only the slice's bytes are copied out of them: encrypted disks decrypt in place, so
that a page being read may hold anything meanwhile, and a neighbour may be computed with. A page is given back only when
no expert that has bytes in it is wanted.
"""

import numpy as np
from numba import carray, types

from edgemoe.llamacpp.native import _pointer
from edgemoe.streaming import frames
from edgemoe.streaming.jit import kernel

ABSENT, QUEUED, READING, PRESENT = 0, 1, 2, 3
DEMAND, PREFETCH = 0, 1

# ctl: geometry, then addresses, then what changes
(LAYERS, EXPERTS, TENSORS, PAGE, PIECE, RING) = range(6)
(PLACES, STATE, LEFT, TICKET, RINGS, MUTEX, WORK, DONE) = range(6, 14)
(STOP, ABORT, FAILED, FAILED_READ, FAILED_GOT, DELAY, VERIFY, IN_FLIGHT, WAITING, FRAMES) = range(14, 24)
(QUEUED_AT, LOG, LOG_ROOM, LOG_COUNT, GROUP) = range(24, 29)
CTL_WORDS = 32
# what FAILED says
READ_FAILED, READ_DIFFERS = 1, 2

# a tensor's place, [L, J, PLACE_WORDS]: descriptor, another for buffered reads, offset in the file, bytes per expert
# (0: the layer has fewer tensors), address, and whether the page cache has to be told to forget
FD, FD_BUFFERED, OFFSET, LENGTH, ADDRESS, FORGET, PLACE_WORDS = 0, 1, 2, 3, 4, 5, 6
# a line of the log, [LOG_ROOM, LOG_WORDS]: the read, nanoseconds at which it was queued, begun and done, what was
# waited for before
LOG_READ, LOG_QUEUED, LOG_BEGUN, LOG_DONE, LOG_GROUP, LOG_WORDS = 0, 1, 2, 3, 4, 5
# a ring, [2, RING_WORDS + 2·capacity]: where reads are taken and put, then (read, ticket)
TAKE, PUT, RING_WORDS = 0, 1, 2

_lock = types.ExternalFunction("pthread_mutex_lock", types.int32(types.intp))
_unlock = types.ExternalFunction("pthread_mutex_unlock", types.int32(types.intp))
_wait = types.ExternalFunction("pthread_cond_wait", types.int32(types.intp, types.intp))
_broadcast = types.ExternalFunction("pthread_cond_broadcast", types.int32(types.intp))
_pread = types.ExternalFunction("pread", types.int64(types.int32, types.intp, types.uintp, types.int64))
_preadv = types.ExternalFunction("preadv", types.int64(types.int32, types.intp, types.int32, types.int64))
_memcpy = types.ExternalFunction("memcpy", types.intp(types.intp, types.intp, types.uintp))
_memcmp = types.ExternalFunction("memcmp", types.int32(types.intp, types.intp, types.uintp))
_madvise = types.ExternalFunction("madvise", types.int32(types.intp, types.uintp, types.int32))
_fadvise = types.ExternalFunction("posix_fadvise", types.int32(types.int32, types.int64, types.int64, types.int32))
_nanosleep = types.ExternalFunction("nanosleep", types.int32(types.intp, types.intp))
_clock_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.intp))
_MADV_DONTNEED = _FADV_DONTNEED = 4
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
    """STATE, LEFT (pieces still to be read), TICKET (which a queued read must show), QUEUED_AT: int64 [L·E]."""
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
def pieces(ctl, layer, expert):  # type: ignore[no-untyped-def]
    """How many reads bring an expert."""
    count = 0
    for tensor in range(ctl[TENSORS]):
        at = place(ctl, layer, tensor)
        if at[LENGTH] > 0:
            start, end = cover(ctl, at, expert)
            count += (end - start + ctl[PIECE] - 1) // ctl[PIECE]
    return count


@kernel
def put(ctl, kind, layer, expert):  # type: ignore[no-untyped-def]
    """Queue the reads of an expert; False if the ring is full. The mutex is held."""
    room = ctl[RING]
    ring = words(ctl[RINGS] + kind * 8 * (RING_WORDS + 2 * room), RING_WORDS + 2 * room)
    cell = layer * ctl[EXPERTS] + expert
    count = pieces(ctl, layer, expert)
    if ring[PUT] - ring[TAKE] + count > room:
        return False
    ticket = table(ctl, TICKET)
    ticket[cell] += 1  # whatever is queued of it already is void
    table(ctl, LEFT)[cell] = count
    table(ctl, STATE)[cell] = QUEUED
    if ctl[LOG] != 0:
        table(ctl, QUEUED_AT)[cell] = now(np.empty(2, np.int64))
    for piece in range(count):
        slot = RING_WORDS + 2 * (ring[PUT] % room)
        ring[slot], ring[slot + 1] = cell * 65536 + piece, ticket[cell]
        ring[PUT] += 1
    return True


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
def _whole(fd, address, start, need, room):  # type: ignore[no-untyped-def]
    """pread at least `need` of `room` bytes: `need`, or less where the file ends, or −1 for an error."""
    done = 0
    while done < need:
        got = _pread(fd, address + done, room - done, start + done)
        if got < 0:
            return got
        done += got
        if got == 0 or (done < need and done % 512 != 0):  # the end of the file: no block ends there
            return done
    return need


@kernel
def _gather(ctl, at, first, last, scratch):  # type: ignore[no-untyped-def]
    """Read bytes first … last of a tensor's file to their place: what pread gave in all, `last − first` if all is well.

    Whole pages go there directly, what shares its page with others by way of `scratch`; one call reads them all.
    """
    page = ctl[PAGE]
    vectors = words(scratch.ctypes.data, 6)
    head, tail = scratch.ctypes.data + page, scratch.ctypes.data + 2 * page
    place_of = at[ADDRESS] - at[OFFSET]
    start, inner, outer = first // page * page, (first + page - 1) // page * page, last // page * page
    if outer < inner:  # all in one page
        got = _whole(at[FD], head, start, last - start, page)
        if got == last - start:
            _memcpy(place_of + first, head + first - start, last - first)
        return got if got < 0 else max(got - (first - start), 0)
    count = 0
    if first < inner:
        vectors[0], vectors[1] = head, page
        count = 1
    if outer > inner:
        vectors[2 * count], vectors[2 * count + 1] = place_of + inner, outer - inner
        count += 1
    if last > outer:
        vectors[2 * count], vectors[2 * count + 1] = tail, page
        count += 1
    need = last - start
    got = _preadv(at[FD], scratch.ctypes.data, count, start)
    if 0 <= got < need:  # the kernel may give less than was asked for: vector by vector, then
        got = 0
        for i in range(count):
            part = min(vectors[2 * i + 1], need - got)
            did = _whole(at[FD], vectors[2 * i], start + got, part, vectors[2 * i + 1])
            if did != part:
                return did if did < 0 else max(got + did - (first - start), 0)
            got += part
    if got < need:
        return got
    if first < inner:
        _memcpy(place_of + first, head + first - start, inner - first)
    if last > outer:
        _memcpy(place_of + outer, tail, last - outer)
    return last - first


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
def _read(ctl, read, scratch):  # type: ignore[no-untyped-def]
    """Do one read, a piece of a slice. Returns 0, or what FAILED becomes, and what pread gave."""
    cell, tensor, first, last = part(ctl, read)
    at = place(ctl, cell // ctl[EXPERTS], tensor)
    frames.hold(words(ctl[FRAMES], frames.WORDS), cell * ctl[TENSORS] + tensor)
    got = _gather(ctl, at, first, last, scratch)
    if got != last - first:
        return READ_FAILED, got
    if ctl[VERIFY]:
        buffer = scratch.ctypes.data + 3 * ctl[PAGE]
        got = _whole(at[FD_BUFFERED], buffer, first, last - first, last - first)
        if got != last - first or _memcmp(buffer, at[ADDRESS] + first - at[OFFSET], last - first) != 0:
            return READ_DIFFERS, got
    if at[FORGET] or ctl[VERIFY]:
        start = first // ctl[PAGE] * ctl[PAGE]
        _fadvise(at[FD_BUFFERED], start, last - start + ctl[PAGE], _FADV_DONTNEED)
    return 0, got


@kernel
def serve(ctl, scratch):  # type: ignore[no-untyped-def]
    """A reader: takes reads until STOP. `scratch` is aligned: 3 pages, and a piece where reads are verified."""
    pause, clock = np.zeros(2, np.int64), np.empty(2, np.int64)
    state, left = table(ctl, STATE), table(ctl, LEFT)
    _lock(ctl[MUTEX])
    while ctl[STOP] == 0:
        read = take(ctl)
        if read < 0:
            _wait(ctl[WORK], ctl[MUTEX])
            continue
        cell = read // 65536
        state[cell] = READING
        ctl[IN_FLIGHT] += 1
        line = -1
        if ctl[LOG] != 0 and ctl[LOG_COUNT] < ctl[LOG_ROOM]:
            line = ctl[LOG_COUNT]
            ctl[LOG_COUNT] += 1
            entry = words(ctl[LOG] + 8 * LOG_WORDS * line, LOG_WORDS)
            entry[LOG_READ], entry[LOG_QUEUED] = read, table(ctl, QUEUED_AT)[cell]
            entry[LOG_BEGUN], entry[LOG_GROUP] = now(clock), ctl[GROUP]
        _unlock(ctl[MUTEX])
        if ctl[DELAY] > 0:  # a slow, uneven disk: not two reads take equally long
            pause[1] = ctl[DELAY] * (1 + read * 2654435761 % 7) // 4
            pause[0], pause[1] = pause[1] // 1_000_000_000, pause[1] % 1_000_000_000
            _nanosleep(pause.ctypes.data, 0)
        failed, got = _read(ctl, read, scratch)
        if line >= 0:
            words(ctl[LOG] + 8 * LOG_WORDS * line, LOG_WORDS)[LOG_DONE] = now(clock)
        _lock(ctl[MUTEX])
        ctl[IN_FLIGHT] -= 1
        if failed != 0:
            if ctl[FAILED] == 0:
                ctl[FAILED], ctl[FAILED_READ], ctl[FAILED_GOT] = failed, read, got
        else:
            left[cell] -= 1
            if left[cell] == 0:
                state[cell] = PRESENT
        if ctl[WAITING]:
            _broadcast(ctl[DONE])
    _unlock(ctl[MUTEX])


@kernel
def release(ctl, layer, expert):  # type: ignore[no-untyped-def]
    """Give an expert's pages back, or its frames to others, except pages in which another expert's bytes are wanted."""
    page, experts = ctl[PAGE], ctl[EXPERTS]
    pool = words(ctl[FRAMES], frames.WORDS)
    state = table(ctl, STATE)
    state[layer * experts + expert] = ABSENT
    for tensor in range(ctl[TENSORS]):
        at = place(ctl, layer, tensor)
        if at[LENGTH] == 0:
            continue
        start, end = cover(ctl, at, expert)
        if _shared(ctl, at, layer, start):
            start += page
        if end > start and _shared(ctl, at, layer, end - page):
            end -= page
        slice_ = (layer * experts + expert) * ctl[TENSORS] + tensor
        frame = (at[OFFSET] + expert * at[LENGTH] + page - 1) // page * page
        after = frames.frame_end(pool, slice_, frame)
        _give_back(at, start, min(frame, end) if after > frame else end)
        if after > frame:
            _give_back(at, after, end)
            frames.leave(pool, slice_)


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
def unlock_and_wake(ctl):  # type: ignore[no-untyped-def]
    """After queueing: readers look again."""
    _broadcast(ctl[WORK])
    _unlock(ctl[MUTEX])


@kernel
def wait_for(ctl, layer, needed):  # type: ignore[no-untyped-def]
    """Until every needed expert of a layer (uint8 [E]) is PRESENT; False after a failed read, or when told to stop."""
    state, experts = table(ctl, STATE), ctl[EXPERTS]
    fine = True
    _lock(ctl[MUTEX])
    ctl[WAITING] = 1
    for expert in range(experts):
        while fine and needed[expert] and state[layer * experts + expert] != PRESENT:
            if ctl[FAILED] != 0 or ctl[ABORT] != 0 or ctl[STOP] != 0:
                fine = False
            else:
                _wait(ctl[DONE], ctl[MUTEX])
    ctl[WAITING] = 0
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
    ctl[WAITING] = 1
    while ctl[IN_FLIGHT] > 0:
        _wait(ctl[DONE], ctl[MUTEX])
    ctl[WAITING] = 0
    ctl[FAILED] = ctl[ABORT] = 0
    _unlock(ctl[MUTEX])
    for cell in range(ctl[LAYERS] * ctl[EXPERTS]):
        if state[cell] != PRESENT:
            ticket[cell] += 1
            if state[cell] != ABSENT:
                release(ctl, cell // ctl[EXPERTS], cell % ctl[EXPERTS])


@kernel
def stop(ctl, word):  # type: ignore[no-untyped-def]
    """Set STOP (readers end) or ABORT (the callback does not wait any longer)."""
    _lock(ctl[MUTEX])
    ctl[word] = 1
    _broadcast(ctl[WORK])
    _broadcast(ctl[DONE])
    _unlock(ctl[MUTEX])
