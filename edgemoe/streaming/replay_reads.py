"""What did a run read, and how long does the disk take for just that? Record a run's reads; do them again, bare.

    log = ReadLog.begin(engine.store)         # before the tokens that are to be measured
    ...                                       # decode
    log = log.end()
    seconds = replay(log, readers=8)          # the same reads, without inference, policy or expert memory
    share = seconds / wait                    # 1: the tier adds nothing to the disk

A run queues the reads of a layer, waits for them, computes, and goes on; so does the replay: it begins a group when
the one before has been read, and leaves out what lies between. What is not waited for in a run (prefetch) counts to the
group in which a reader took it. Reads are bare: one pread each, in the order in which readers began them, of the same
whole pages, with as many in flight. They go into memory that was touched before and is used again and again, as
a bandwidth probe's do, or, with `spread`, into so many bytes of it.
"""

import ctypes
import mmap
import os
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edgemoe.errors import UserError
from edgemoe.llamacpp.reserve import Reserve
from edgemoe.streaming import reads
from edgemoe.streaming.jit import kernel
from edgemoe.streaming.reader import _pread
from edgemoe.streaming.reads import _broadcast, _lock, _unlock, _wait
from edgemoe.streaming.store import MAX_READERS, open_file

if TYPE_CHECKING:
    from edgemoe.streaming.store import ExpertStore

ROOM = 1 << 20  # reads
_HUGE = 2 << 20
# the control block of a replay
(NEXT, READY, DONE, STOP, FAILED, MUTEX, WORK, REST, READS, COUNT, BUFFER, STRIDE, SPREAD) = range(13)
_WORDS = 16
_FD, _OFFSET, _LENGTH = range(3)


@dataclass(frozen=True)
class ReadLog:
    """Reads in the order in which they began. Arrays of [N] int64: which of the model's files, where in it, how many
    bytes (both of whole pages, as O_DIRECT reads them), when it was queued, begun and done (nanoseconds, monotonic
    clock), and its group: how many waits had ended before it began."""

    paths: tuple[Path, ...]
    number: np.ndarray
    offset: np.ndarray
    length: np.ndarray
    queued_ns: np.ndarray
    begun_ns: np.ndarray
    done_ns: np.ndarray
    group: np.ndarray

    @property
    def nbytes(self) -> int:
        return int(self.length.sum())

    @staticmethod
    def begin(store: "ExpertStore", room: int = ROOM) -> "Recorder":
        """Note the reads of a store from now on, up to `room` of them (40 bytes each)."""
        return Recorder(store, store.log(room))

    @property
    def busy_s(self) -> float:
        """Seconds in which a read was queued or under way. A run waits for less where it computes meanwhile, so that
        this, not the wait, is what the bare reads are to be held against."""
        if not len(self.queued_ns):
            return 0.0
        order = np.argsort(self.queued_ns)
        queued, done = self.queued_ns[order], np.maximum.accumulate(self.done_ns[order])
        idle = np.maximum(queued[1:] - done[:-1], 0).sum()
        return float(done[-1] - queued[0] - idle) / 1e9

    def save(self, path: Path) -> None:
        """As .npz; `ReadLog.load` reads it."""
        arrays = {name: value for name, value in vars(self).items() if name != "paths"}
        np.savez_compressed(path, paths=np.array([str(path) for path in self.paths]), **arrays)

    @classmethod
    def load(cls, path: Path) -> "ReadLog":
        with np.load(path) as data:
            arrays: dict[str, Any] = {name: data[name] for name in data.files if name != "paths"}
            return cls(paths=tuple(Path(str(name)) for name in data["paths"]), **arrays)

    def first(self, count: int) -> "ReadLog":
        """The first so many reads."""
        cut = {name: value[:count] for name, value in vars(self).items() if name != "paths"}
        return replace(self, **cut)


class Recorder:
    """A log that is being written."""

    def __init__(self, store: "ExpertStore", log: np.ndarray) -> None:
        self._store, self._log = store, log

    def end(self) -> ReadLog:
        """What was read since. Raises `UserError` if that was more than there was room for."""
        store, ctl = self._store, self._store.ctl
        count = int(ctl[reads.LOG_COUNT])
        ctl[reads.LOG] = 0
        if count >= len(self._log):
            raise UserError(f"{count:,} reads filled the log: record fewer tokens, or give more room")
        lines = self._log[:count]
        lines = lines[lines[:, reads.LOG_DONE] > 0]
        table = np.zeros((len(lines), 3), np.int64)
        page = mmap.PAGESIZE
        for row, read in zip(table, lines[:, reads.LOG_READ].tolist(), strict=True):
            cell, tensor, first, last = reads.part(ctl, read)
            layer = cell // int(ctl[reads.EXPERTS])
            start = first // page * page
            row[:] = store.tensors[layer][tensor].file, start, -(-last // page) * page - start
        times = (lines[:, word].copy() for word in (reads.LOG_QUEUED, reads.LOG_BEGUN, reads.LOG_DONE, reads.LOG_GROUP))
        return ReadLog(tuple(store.model.files), *table.T.copy(), *times)


@kernel
def _reader(r, number):  # type: ignore[no-untyped-def]
    table = reads.words(r[READS], 3 * r[COUNT])
    _lock(r[MUTEX])
    while r[STOP] == 0:
        if r[NEXT] >= r[READY]:
            _wait(r[WORK], r[MUTEX])
            continue
        at = r[NEXT]
        r[NEXT] += 1
        _unlock(r[MUTEX])
        place = r[BUFFER] + r[STRIDE] * (at % r[SPREAD] if r[SPREAD] else number)
        got = _pread(table[3 * at + _FD], place, table[3 * at + _LENGTH], table[3 * at + _OFFSET])
        _lock(r[MUTEX])
        r[DONE] += 1
        if got <= 0:
            r[FAILED] = 1
        if r[DONE] == r[READY]:
            _broadcast(r[REST])
    _unlock(r[MUTEX])


@kernel
def _drive(r, ends):  # type: ignore[no-untyped-def]
    """Let each group begin when the one before has been read; then stop the readers. Returns nanoseconds."""
    clock = np.empty(2, np.int64)
    _lock(r[MUTEX])
    start = reads.now(clock)
    for end in ends:
        r[READY] = end
        _broadcast(r[WORK])
        while r[DONE] < end:
            _wait(r[REST], r[MUTEX])
    taken = reads.now(clock) - start
    r[STOP] = 1
    _broadcast(r[WORK])
    _unlock(r[MUTEX])
    return taken


def replay(log: ReadLog, *, readers: int, spread: int = 0, grouped: bool = True) -> float:
    """Seconds that the reads take, bare, with at most `readers` in flight.

    spread: read into that many bytes in turn (huge pages) instead of one buffer per reader, whose memory then is in the
    processor's cache, as no expert's is. grouped=False: do not wait between groups. Raises `UserError` where a file
    cannot be read.
    """
    count = len(log.number)
    if not count:
        return 0.0
    if not 1 <= readers <= MAX_READERS:
        raise UserError(f"{readers} readers: expected 1 to {MAX_READERS}")
    stride = -(-int(log.length.max()) // mmap.PAGESIZE) * mmap.PAGESIZE
    spread = max(spread // stride, readers) if spread else 0
    files = [open_file(path) for path in log.paths]
    memory = Reserve((spread or readers) * stride + _HUGE, huge_pages=True)
    try:
        r, table, locks = np.zeros(_WORDS, np.int64), np.zeros((count, 3), np.int64), np.zeros((3, 64), np.uint8)
        table[:, _FD] = np.array([fd for fd, _, _ in files])[log.number]
        table[:, _OFFSET], table[:, _LENGTH] = log.offset, log.length
        r[[COUNT, STRIDE, SPREAD]] = count, stride, spread
        r[READS], r[BUFFER] = table.ctypes.data, -(-memory.address // _HUGE) * _HUGE
        ctypes.memset(int(r[BUFFER]), 1, (spread or readers) * stride)
        libc = ctypes.CDLL(None)
        for word, place in zip((MUTEX, WORK, REST), locks, strict=True):
            r[word] = place.ctypes.data
            make = libc.pthread_mutex_init if word == MUTEX else libc.pthread_cond_init
            make(ctypes.c_void_p(int(r[word])), None)
        ends = np.flatnonzero(np.diff(log.group, append=log.group[-1] + 1)) + 1
        threads = [threading.Thread(target=_reader, args=(r, number), daemon=True) for number in range(readers)]
        for thread in threads:
            thread.start()
        taken = _drive(r, ends if grouped else np.array([count]))
        for thread in threads:
            thread.join()
    finally:
        memory.close()
        for descriptor in {descriptor for pair in files for descriptor in pair[:2]}:
            os.close(descriptor)
    if r[FAILED]:
        raise UserError(f"{', '.join(map(str, log.paths))}: a read failed: is this the file that was read before?")
    return int(taken) / 1e9
