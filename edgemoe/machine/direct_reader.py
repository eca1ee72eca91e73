"""Reads with many in flight, in native code without the interpreter's lock: what the disk gives, not what Python does.

One thread per request in flight, each with an aligned buffer of its own, in a loop around pread(2) compiled by numba.
At 4 KiB the kernel's cost of a call counts too, as it does for any program that reads so.
"""

import mmap
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

import numba
import numpy as np
from numba import types

# Symbols of the C library that is in the process anyway: resolved by name, so the machine code can be kept on disk.
_pread = types.ExternalFunction("pread", types.int64(types.int32, types.intp, types.uintp, types.int64))
_clock_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.intp))
_MONOTONIC = 1
_UNLIMITED = 1 << 62
_HUGE = 2 << 20


@numba.njit(nogil=True, cache=True)
def _now(clock: np.ndarray) -> int:
    _clock_gettime(_MONOTONIC, clock.ctypes.data)
    return clock[0] * 1_000_000_000 + clock[1]


@numba.njit(nogil=True, cache=True)
def _read_loop(  # type: ignore[no-untyped-def]
    descriptor, address, length, offsets, least, most, nanoseconds, result
):
    """Read `length` bytes at each offset, round and round, until the time is up; `least` to `most` requests.

    result: int64 [start, end, requests, failed offset or −1, what pread gave there].
    """
    clock = np.empty(2, np.int64)
    start = _now(clock)
    end, done, failed, got = start, 0, -1, 0
    while done < most and (done < least or end - start < nanoseconds):
        offset = offsets[done % len(offsets)]
        got = _pread(descriptor, address, length, offset)
        if got != length:
            failed = offset
            break
        done += 1
        end = _now(clock)
    result[0], result[1], result[2], result[3], result[4] = start, end, done, failed, got


@dataclass(frozen=True)
class Reads:
    """What one round read: bytes, and seconds from the first thread's start to the last one's end."""

    bytes: int
    seconds: float

    @property
    def rate(self) -> float:
        return self.bytes / self.seconds


class DirectReader:
    """Reads of a file with up to `depth` in flight; a context manager.

    Every round reads into memory of its own, touched before anything is timed: how contiguous pages happen to lie
    changes what a request costs the device (on one machine by 40% at 64 KiB, on another twofold at 1 MiB), so that one
    allocation is one sample. `huge_pages` settle it, and are what the SSD tier reads experts into; without them it is
    what most programs do.
    """

    def __init__(self, depth: int, huge_pages: bool = False) -> None:
        self.huge_pages = huge_pages
        self._pool = ThreadPoolExecutor(depth, "edgemoe-read")

    def __enter__(self) -> "DirectReader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown()

    def read(
        self, descriptor: int, length: int, offsets: Sequence[np.ndarray], seconds: float, once: bool = False
    ) -> Reads:
        """One thread per array of offsets (int64 [n]), each cycling through its own until the time is up.

        Each reads once at least; with `once`, no offset twice. Offsets and lengths are the caller's to align if the
        file is open with O_DIRECT; buffers start at pages. Raises `OSError` for a read that fails, `EOFError` for one
        that is short.
        """
        stride = -(-length // mmap.PAGESIZE) * mmap.PAGESIZE
        buffer = self._memory(len(offsets) * stride)
        results = self._run(descriptor, length, offsets, seconds, once, buffer.ctypes.data, stride)
        for _, _, _, failed, got, *_ in results.tolist():
            if failed >= 0:
                _explain(descriptor, length, failed, got)
        nanoseconds = int(results[:, 1].max() - results[:, 0].min())
        return Reads(int(results[:, 2].sum()) * length, nanoseconds / 1e9)

    def _memory(self, nbytes: int) -> np.ndarray:
        """So many bytes, in memory, from a page's start."""
        room = mmap.mmap(-1, nbytes + _HUGE * self.huge_pages, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if self.huge_pages and hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without them
                room.madvise(mmap.MADV_HUGEPAGE)
        # Given back with its last reference: closing it would be refused, with an error that hides Ctrl-C, for as
        # long as a traceback holds the array.
        buffer = np.frombuffer(room, np.uint8)
        start = -buffer.ctypes.data % _HUGE if self.huge_pages else 0
        buffer = buffer[start : start + nbytes]
        buffer[:: mmap.PAGESIZE] = 1
        return buffer

    def _run(
        self,
        descriptor: int,
        length: int,
        offsets: Sequence[np.ndarray],
        seconds: float,
        once: bool,
        address: int,
        stride: int,
    ) -> np.ndarray:
        """What `_read_loop` says of each thread, int64 [threads, 8]. Returns, or raises, when none of them reads."""
        results = np.zeros((len(offsets), 8), np.int64)  # a cache line each
        ready = threading.Barrier(len(offsets))

        def work(at: int) -> None:
            most = len(offsets[at]) if once else _UNLIMITED
            ready.wait()
            place = address + at * stride
            _read_loop(descriptor, place, length, offsets[at], 1, most, int(seconds * 1e9), results[at])

        futures: list[Future[None]] = []
        try:
            for at in range(len(offsets)):
                futures.append(self._pool.submit(work, at))
            for future in futures:
                future.result()
        except BaseException:
            ready.abort()  # some may wait for others that will not come
            wait(futures)  # and some read into the buffers
            raise
        return results


def _explain(descriptor: int, length: int, offset: int, got: int) -> None:
    """Native code does not see errno: ask Python for the same bytes."""
    room = -(-length // mmap.PAGESIZE) * mmap.PAGESIZE
    os.preadv(descriptor, [memoryview(mmap.mmap(-1, room))[:length]], offset)
    raise EOFError(f"a read of {length} bytes at {offset} gave {got}")


def sequential(size: int, length: int, depth: int, start: int = 0) -> list[np.ndarray]:
    """Offsets of a stream read by `depth` threads in turn: thread i takes requests i, i + depth, … of the file, around.

    `start` (in requests) is where the stream begins.
    """
    count = size // length
    lanes = [(np.arange(at, max(count, at + 1), depth, dtype=np.int64) + start) % count for at in range(depth)]
    return [lane * length for lane in lanes]


def at_random(size: int, length: int, depth: int, generator: np.random.Generator) -> list[np.ndarray]:
    """Offsets of requests anywhere in the file, at multiples of their length, no place twice before the others."""
    count = size // length
    order = generator.permutation(count)[: 4096 * depth].astype(np.int64)
    lanes = [np.arange(at, max(len(order), at + 1), depth) % len(order) for at in range(depth)]
    return [order[lane] * length for lane in lanes]
