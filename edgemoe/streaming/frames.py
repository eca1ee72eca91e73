"""Memory that experts hand on: the pages of one that leaves become those of one that comes, without a fault between.

A page that is given back and faulted in again is cleared by the kernel, and lies wherever the kernel finds room: a read
into such pages costs ten times the processor time and a third of the disk's rate (docs/streaming.md, Reading). So the
whole pages of a slice are a *frame*: they come, once, from an arena of huge pages, where they lie side by side, and
from then on mremap(2) moves them to where they are read next. What they hold when they arrive is another expert's: the
store calls an expert present only when all of it has been read.

A slice's frame is as many whole pages as every slice of its tensor has, or a few less: tensors of one shape begin
anywhere in a page, and one has a whole page more than the other. Frames of one size are of one class and stand in for
each other; layers that could not would have to clear memory in turns. What is left at a slice's ends is ordinary
memory. Where the kernel cannot move pages (before 5.7, or too many mappings), all of it is.
"""

import ctypes
import mmap
from pathlib import Path

import numpy as np
from numba import carray, types

from edgemoe.llamacpp.native import _pointer
from edgemoe.llamacpp.reserve import Reserve
from edgemoe.streaming.jit import kernel

LEAST_PAGES = 16  # below 64 KiB moving costs what it saves
ARENA = 64 << 20
_HUGE = 2 << 20

# the control block, int64
(PAGE, SLICES, MUTEX, LIMIT, HELD, BROKEN, TIDY, MOVES) = range(8)
(SIZES, HEADS, CLASSES, ARENA_AT, ARENA_SIZE, CURSOR) = range(8, 14)
(CLASS_OF, WHERE, USE, NEXT, PREVIOUS) = range(14, 19)
WORDS = 20
NONE, USED, FREE = 0, 1, 2

_lock = types.ExternalFunction("pthread_mutex_lock", types.int32(types.intp))
_unlock = types.ExternalFunction("pthread_mutex_unlock", types.int32(types.intp))
_madvise = types.ExternalFunction("madvise", types.int32(types.intp, types.uintp, types.int32))
_mremap = types.ExternalFunction("mremap", types.intp(types.intp, types.uintp, types.uintp, types.int32, types.intp))
_mmap = types.ExternalFunction(
    "mmap", types.intp(types.intp, types.uintp, types.int32, types.int32, types.int32, types.int64)
)
_DONTNEED, _HUGE_PAGES, _NO_HUGE_PAGES = 4, 14, 15
_MAY_MOVE_FIXED_DONT_UNMAP = 1 | 2 | 4
_READ_WRITE = 3
_PRIVATE_FIXED_ANONYMOUS_NORESERVE = 0x02 | 0x10 | 0x20 | 0x4000


@kernel
def _array(address, count):  # type: ignore[no-untyped-def]
    return carray(_pointer(address), (count,), np.int64)


@kernel
def _link(f, slice_):  # type: ignore[no-untyped-def]
    """Put a slice's frame first among the free ones of its class."""
    heads, following, previous = (
        _array(f[HEADS], f[CLASSES]),
        _array(f[NEXT], f[SLICES]),
        _array(f[PREVIOUS], f[SLICES]),
    )
    kind = _array(f[CLASS_OF], f[SLICES])[slice_]
    first = heads[kind]
    following[slice_], previous[slice_] = first, -1
    if first >= 0:
        previous[first] = slice_
    heads[kind] = slice_
    _array(f[USE], f[SLICES])[slice_] = FREE


@kernel
def _unlink(f, slice_, use):  # type: ignore[no-untyped-def]
    heads, following, previous = (
        _array(f[HEADS], f[CLASSES]),
        _array(f[NEXT], f[SLICES]),
        _array(f[PREVIOUS], f[SLICES]),
    )
    before, after = previous[slice_], following[slice_]
    if before >= 0:
        following[before] = after
    else:
        heads[_array(f[CLASS_OF], f[SLICES])[slice_]] = after
    if after >= 0:
        previous[after] = before
    _array(f[USE], f[SLICES])[slice_] = use


@kernel
def _drop(f, slice_):  # type: ignore[no-untyped-def]
    """Give the memory of a slice's frame back to the kernel."""
    size = _array(f[SIZES], f[CLASSES])[_array(f[CLASS_OF], f[SLICES])[slice_]]
    _madvise(_array(f[WHERE], f[SLICES])[slice_], size, _DONTNEED)
    f[HELD] -= size


@kernel
def _fresh(f, size):  # type: ignore[no-untyped-def]
    """The address of `size` bytes of the arena, in memory: huge pages where the kernel has some. −1 if it has none."""
    if f[CURSOR] < 0 or f[CURSOR] + size > f[ARENA_SIZE]:
        # All before the cursor has been moved out. Mapped anew, the arena can have huge pages again.
        flags = _PRIVATE_FIXED_ANONYMOUS_NORESERVE
        if _mmap(f[ARENA_AT], f[ARENA_SIZE], _READ_WRITE, flags, -1, 0) != f[ARENA_AT]:
            return -1
        _madvise(f[ARENA_AT], f[ARENA_SIZE], _HUGE_PAGES)
        f[CURSOR] = 0
    at = f[ARENA_AT] + f[CURSOR]
    touched = carray(_pointer(at), (size,), np.int8)
    for first in range(0, size, f[PAGE]):
        touched[first] = 0
    f[CURSOR] += size
    return at


@kernel
def _make_room(f, size):  # type: ignore[no-untyped-def]
    """Drop free frames, of whatever class, while `size` more bytes would be more than LIMIT."""
    heads = _array(f[HEADS], f[CLASSES])
    for kind in range(f[CLASSES]):
        while f[HELD] + size > f[LIMIT] and heads[kind] >= 0:
            gone = heads[kind]
            _unlink(f, gone, NONE)
            _drop(f, gone)


@kernel
def _move(f, source, size, target):  # type: ignore[no-untyped-def]
    """Let the memory at `source` be at `target`, where nothing is; the source keeps its addresses, without memory."""
    if f[BROKEN] == 0 and _mremap(source, size, size, _MAY_MOVE_FIXED_DONT_UNMAP, target) != target:
        f[BROKEN] = 1
    if f[BROKEN]:
        return False
    f[MOVES] += 1
    return True


@kernel
def hold(f, slice_):  # type: ignore[no-untyped-def]
    """Before a read of any part of a slice: its frame is there. Several readers may ask for the same."""
    kind = _array(f[CLASS_OF], f[SLICES])[slice_]
    if kind < 0:
        return
    use, where = _array(f[USE], f[SLICES]), _array(f[WHERE], f[SLICES])
    size = _array(f[SIZES], f[CLASSES])[kind]
    _lock(f[MUTEX])
    if use[slice_] == FREE:
        _unlink(f, slice_, USED)
    elif use[slice_] == NONE:
        use[slice_] = USED
        donor = _array(f[HEADS], f[CLASSES])[kind]
        if donor >= 0:
            _unlink(f, donor, NONE)
            if not _move(f, where[donor], size, where[slice_]):
                _drop(f, donor)
                f[HELD] += size  # what faults will bring
            elif f[TIDY]:  # an untouched mapping becomes one with its neighbours, a moved one never does
                flags = _PRIVATE_FIXED_ANONYMOUS_NORESERVE
                _mmap(where[donor], size, _READ_WRITE, flags, -1, 0)
                _madvise(where[donor], size, _NO_HUGE_PAGES)
        else:
            _make_room(f, size)
            f[HELD] += size
            if f[BROKEN] == 0:
                source = _fresh(f, size)
                if source > 0 and not _move(f, source, size, where[slice_]):
                    _madvise(f[ARENA_AT], f[ARENA_SIZE], _DONTNEED)
    _unlock(f[MUTEX])


@kernel
def leave(f, slice_):  # type: ignore[no-untyped-def]
    """A slice is not wanted any more: its frame waits for another, as long as all frames are within LIMIT."""
    if _array(f[CLASS_OF], f[SLICES])[slice_] < 0:
        return
    _lock(f[MUTEX])
    if _array(f[USE], f[SLICES])[slice_] == USED:
        if f[BROKEN] or f[HELD] > f[LIMIT]:
            _drop(f, slice_)
            _array(f[USE], f[SLICES])[slice_] = NONE
        else:
            _link(f, slice_)
    _unlock(f[MUTEX])


@kernel
def frame_end(f, slice_, at):  # type: ignore[no-untyped-def]
    """Where a slice's frame ends that begins at `at`; `at` itself for one without."""
    kind = _array(f[CLASS_OF], f[SLICES])[slice_]
    return at + (_array(f[SIZES], f[CLASSES])[kind] if kind >= 0 else 0)


class Frames:
    """The frames of slices; `control` is what the kernels above work on.

    starts: [L, J], where a tensor's first slice begins in memory; lengths: [L, J] bytes of a slice, 0 for no tensor.
    Slice (layer, expert, tensor) has the number (layer · E + expert) · J + tensor. `limit`: bytes that all frames may
    hold, used and free (`allow`); until it is given, no frame waits for another use. Raises `UserError` where there is
    no address space for the arena.
    """

    def __init__(self, starts: np.ndarray, lengths: np.ndarray, n_experts: int) -> None:
        page = mmap.PAGESIZE
        first = starts[:, None, :] + np.arange(n_experts)[None, :, None] * lengths[:, None, :]
        begin = -(-first // page) * page
        whole = np.where(lengths[:, None, :] > 0, (first + lengths[:, None, :]) // page - begin // page, 0)
        pages = whole.min(axis=1)  # [L, J]
        sizes = _classes(pages[pages >= LEAST_PAGES])
        kind = np.where(pages >= LEAST_PAGES, np.searchsorted(sizes, pages, "right") - 1, -1)
        self._sizes = (sizes * page).astype(np.int64)
        self._heads = np.full(max(len(sizes), 1), -1, np.int64)
        self._tables = np.zeros((5, first.size), np.int64)
        self._tables[0] = np.broadcast_to(kind[:, None, :], first.shape).ravel()
        self._tables[1] = begin.ravel()
        self._mutex = np.zeros(64, np.uint8)
        largest = int(self._sizes.max(initial=0))
        self._arena = Reserve(max(ARENA, -(-largest // _HUGE) * _HUGE) + _HUGE) if largest else None
        self.control = f = np.zeros(WORDS, np.int64)
        f[[PAGE, SLICES, CLASSES, CURSOR]] = page, first.size, len(sizes), -1
        f[SIZES], f[HEADS], f[MUTEX] = self._sizes.ctypes.data, self._heads.ctypes.data, self._mutex.ctypes.data
        for i, word in enumerate((CLASS_OF, WHERE, USE, NEXT, PREVIOUS)):
            f[word] = self._tables[i].ctypes.data
        if self._arena:
            f[ARENA_AT] = -(-self._arena.address // _HUGE) * _HUGE
            f[ARENA_SIZE] = self._arena.size - _HUGE
        ctypes.CDLL(None).pthread_mutex_init(ctypes.c_void_p(int(f[MUTEX])), None)
        # A frame divides the reserve's mapping in three. Models of very many slices tidy up behind them.
        f[TIDY] = 2 * int((self._tables[0] >= 0).sum()) > _most_mappings() // 2

    @property
    def moves(self) -> int:
        """How many frames were moved to where they were read next."""
        return int(self.control[MOVES])

    @property
    def held(self) -> int:
        """Bytes of all frames, used and free."""
        return int(self.control[HELD])

    def allow(self, limit: int) -> None:
        self.control[LIMIT] = limit

    def close(self) -> None:
        if self._arena:
            self._arena.close()


def _classes(pages: np.ndarray) -> np.ndarray:
    """The sizes of frames for slices of so many pages, ascending: sizes that differ little are one, the smallest."""
    sizes: list[int] = []
    for size in np.unique(pages).tolist():
        if not sizes or size - sizes[-1] > max(1, sizes[-1] // 64):
            sizes.append(size)
    return np.array(sizes, np.int64)


def _most_mappings() -> int:
    try:
        return int(Path("/proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        return 65530
