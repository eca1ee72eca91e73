"""The threads that read: each takes a read from the queue of `reads`, brings its bytes to their place, and says so.

O_DIRECT reads whole pages, and the first and last page of a slice hold bytes of its neighbours too. Those two are read
into the reader's own memory, and only the slice's bytes are copied out of them: encrypted disks decrypt in place, so
that a page being read may hold anything meanwhile, and a neighbour may be computed with.
"""

import numpy as np
from numba import types

from edgemoe.streaming import frames, reads
from edgemoe.streaming.jit import kernel
from edgemoe.streaming.reads import _broadcast, _lock, _unlock, _wait

_pread = types.ExternalFunction("pread", types.int64(types.int32, types.intp, types.uintp, types.int64))
_preadv = types.ExternalFunction("preadv", types.int64(types.int32, types.intp, types.int32, types.int64))
_memcpy = types.ExternalFunction("memcpy", types.intp(types.intp, types.intp, types.uintp))
_memcmp = types.ExternalFunction("memcmp", types.int32(types.intp, types.intp, types.uintp))
_fadvise = types.ExternalFunction("posix_fadvise", types.int32(types.int32, types.int64, types.int64, types.int32))
_nanosleep = types.ExternalFunction("nanosleep", types.int32(types.intp, types.intp))
_FADV_DONTNEED = 4


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
    page = ctl[reads.PAGE]
    vectors = reads.words(scratch.ctypes.data, 6)
    head, tail = scratch.ctypes.data + page, scratch.ctypes.data + 2 * page
    place_of = at[reads.ADDRESS] - at[reads.OFFSET]
    start, inner, outer = first // page * page, (first + page - 1) // page * page, last // page * page
    if outer < inner:  # all in one page
        got = _whole(at[reads.FD], head, start, last - start, page)
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
    got = _preadv(at[reads.FD], scratch.ctypes.data, count, start)
    if 0 <= got < need:  # the kernel may give less than was asked for: vector by vector, then
        got = 0
        for i in range(count):
            part = min(vectors[2 * i + 1], need - got)
            did = _whole(at[reads.FD], vectors[2 * i], start + got, part, vectors[2 * i + 1])
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
def _read(ctl, read, scratch):  # type: ignore[no-untyped-def]
    """Do one read, a piece of a slice. Returns 0, or what FAILED becomes, and what pread gave."""
    cell, tensor, first, last = reads.part(ctl, read)
    at = reads.place(ctl, cell // ctl[reads.EXPERTS], tensor)
    frames.hold(reads.words(ctl[reads.FRAMES], frames.WORDS), cell * ctl[reads.TENSORS] + tensor)
    got = _gather(ctl, at, first, last, scratch)
    if got != last - first:
        return reads.READ_FAILED, got
    if ctl[reads.VERIFY]:
        buffer = scratch.ctypes.data + 3 * ctl[reads.PAGE]
        got = _whole(at[reads.FD_BUFFERED], buffer, first, last - first, last - first)
        if got != last - first or _memcmp(buffer, at[reads.ADDRESS] + first - at[reads.OFFSET], last - first) != 0:
            return reads.READ_DIFFERS, got
    if at[reads.FORGET] or ctl[reads.VERIFY]:
        start = first // ctl[reads.PAGE] * ctl[reads.PAGE]
        _fadvise(at[reads.FD_BUFFERED], start, last - start + ctl[reads.PAGE], _FADV_DONTNEED)
    return 0, got


@kernel
def serve(ctl, scratch):  # type: ignore[no-untyped-def]
    """A reader: takes reads until STOP. `scratch` is aligned: 3 pages, and a piece where reads are verified."""
    pause, clock = np.zeros(2, np.int64), np.empty(2, np.int64)
    state = reads.table(ctl, reads.STATE)
    _lock(ctl[reads.MUTEX])
    while ctl[reads.STOP] == 0:
        read = reads.take(ctl)
        if read < 0:
            _wait(ctl[reads.WORK], ctl[reads.MUTEX])
            continue
        cell = read // 65536
        state[cell] = reads.READING
        ctl[reads.IN_FLIGHT] += 1
        line = -1
        if ctl[reads.LOG] != 0 and ctl[reads.LOG_COUNT] < ctl[reads.LOG_ROOM]:
            line = ctl[reads.LOG_COUNT]
            ctl[reads.LOG_COUNT] += 1
            entry = reads.words(ctl[reads.LOG] + 8 * reads.LOG_WORDS * line, reads.LOG_WORDS)
            entry[reads.LOG_READ], entry[reads.LOG_QUEUED] = read, reads.table(ctl, reads.QUEUED_AT)[cell]
            entry[reads.LOG_BEGUN], entry[reads.LOG_GROUP] = reads.now(clock), ctl[reads.GROUP]
        _unlock(ctl[reads.MUTEX])
        if ctl[reads.DELAY] > 0:  # a slow, uneven disk: not two reads take equally long
            pause[1] = ctl[reads.DELAY] * (1 + read * 2654435761 % 7) // 4
            pause[0], pause[1] = pause[1] // 1_000_000_000, pause[1] % 1_000_000_000
            _nanosleep(pause.ctypes.data, 0)
        failed, got = _read(ctl, read, scratch)
        if line >= 0:
            reads.words(ctl[reads.LOG] + 8 * reads.LOG_WORDS * line, reads.LOG_WORDS)[reads.LOG_DONE] = reads.now(clock)
        _lock(ctl[reads.MUTEX])
        ctl[reads.IN_FLIGHT] -= 1
        if failed != 0:
            if ctl[reads.FAILED] == 0:
                ctl[reads.FAILED], ctl[reads.FAILED_READ], ctl[reads.FAILED_GOT] = failed, read, got
        else:
            reads.note(ctl, read)
        if failed != 0 or reads.is_awaited(ctl, cell):
            _broadcast(ctl[reads.DONE])
    _unlock(ctl[reads.MUTEX])
