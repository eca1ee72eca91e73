"""Where experts live while they are in RAM, and the readers that bring them there from the model's files.

Every expert tensor has a reserve of address space of its full size, and a slice has its natural place in it: the one
that llama.cpp computes from the tensor's `data`. Places lie in their page as the bytes lie in the file, so that whole
pages are read straight into them with O_DIRECT; only the ends of a slice are copied.
"""

import ctypes
import mmap
import os
import threading
import weakref
from pathlib import Path

import numpy as np

from edgemoe.errors import UserError
from edgemoe.llamacpp.reserve import Reserve
from edgemoe.machine.alignment import open_direct
from edgemoe.machine.disk import disk_of
from edgemoe.model import Model, Tensor
from edgemoe.streaming import reader, reads
from edgemoe.streaming.frames import Frames
from edgemoe.streaming.skeleton import is_streamed

PIECE = 1 << 20  # a longer slice is several reads
DEFAULT_READERS = 8
MAX_READERS = 128
_PTHREAD_BYTES = 64  # a mutex is 40 bytes, a condition 48, up to 8 more elsewhere


class ExpertStore:
    """The experts of `model`'s MoE layers, all absent at first.

    `readers` threads read without the interpreter's lock. `verify` holds each slice against a second, buffered read.
    `delay` (seconds) is slept before each read, unevenly: what a slow disk would do, for tests. Raises `UserError`
    where a file cannot be opened or the address space does not suffice.
    """

    def __init__(self, model: Model, *, readers: int = DEFAULT_READERS, verify: bool = False, delay: float = 0) -> None:
        if not 1 <= readers <= MAX_READERS:
            raise UserError(f"{readers} readers: expected 1 to {MAX_READERS}")
        self.model = model
        self.layers = model.geometry.moe_layers
        self.tensors = [[t for t in model.expert_tensors(layer) if is_streamed(t)] for layer in self.layers]
        self._threads: list[threading.Thread] = []
        self._files: list[tuple[int, int, bool]] = []
        self.frames: Frames | None = None
        self._reserve = Reserve(sum(self._room(tensor) for layer in self.tensors for tensor in layer))
        try:
            for path in model.files:
                self._files.append(open_file(path))
            self._seen = [_identity(plain) for _, plain, _ in self._files]
            self._lay_out(verify, delay)
            self._start(readers)
        except BaseException:
            self.close()
            raise

    @property
    def direct(self) -> bool:
        """Whether reads pass the page cache by. Where a file system cannot, pages are dropped after each read."""
        return all(direct for _, _, direct in self._files)

    @property
    def address_space(self) -> int:
        """Bytes of the reserve."""
        return self._reserve.size

    def _room(self, tensor: Tensor) -> int:
        return -(-(tensor.offset % mmap.PAGESIZE + tensor.nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE

    def _lay_out(self, verify: bool, delay: float) -> None:
        n_layers, n_experts = len(self.layers), self.model.geometry.n_experts
        n_tensors = max(len(layer) for layer in self.tensors)
        self._places = np.zeros((n_layers, n_tensors, reads.PLACE_WORDS), np.int64)
        self.addresses: dict[str, int] = {}
        at = self._reserve.address
        for row, layer in enumerate(self.tensors):
            for i, tensor in enumerate(layer):
                self.addresses[tensor.name] = address = at + tensor.offset % mmap.PAGESIZE
                fd, plain, direct = self._files[tensor.file]
                length = tensor.nbytes // n_experts
                self._places[row, i] = fd, plain, tensor.offset, length, address, not direct, 0
                at += self._room(tensor)
        room = 2 * n_experts * int((self._places[:, :, reads.LENGTH] // PIECE + 3).sum(axis=1).max())
        self._tables = np.zeros((5, n_layers * n_experts), np.int64)
        self._leaving = np.zeros(1 + 4 * n_experts, np.int64)
        self._rings = np.zeros((2, reads.RING_WORDS + 2 * room), np.int64)
        self._locks = np.zeros(3 * _PTHREAD_BYTES, np.uint8)
        self.ctl = ctl = np.zeros(reads.CTL_WORDS, np.int64)
        ctl[[reads.LAYERS, reads.EXPERTS, reads.TENSORS]] = n_layers, n_experts, n_tensors
        ctl[[reads.PAGE, reads.PIECE, reads.RING]] = mmap.PAGESIZE, PIECE, room
        ctl[reads.PLACES], ctl[reads.RINGS] = self._places.ctypes.data, self._rings.ctypes.data
        ctl[reads.LEAVING], ctl[reads.LEAVING_ROOM] = self._leaving.ctypes.data, 4 * n_experts
        for i, word in enumerate((reads.STATE, reads.LEFT, reads.LEFT_FIRST, reads.TICKET, reads.QUEUED_AT)):
            ctl[word] = self._tables[i].ctypes.data
        libc = ctypes.CDLL(None)
        for i, word in enumerate((reads.MUTEX, reads.WORK, reads.DONE)):
            ctl[word] = self._locks.ctypes.data + i * _PTHREAD_BYTES
            initialise = libc.pthread_mutex_init if word == reads.MUTEX else libc.pthread_cond_init
            initialise(ctypes.c_void_p(int(ctl[word])), None)
        starts = np.where(self._places[:, :, reads.LENGTH] > 0, self._places[:, :, reads.ADDRESS], 0)
        self.frames = Frames(starts, self._places[:, :, reads.LENGTH], n_experts)
        ctl[reads.FRAMES] = self.frames.control.ctypes.data
        ctl[reads.VERIFY], ctl[reads.DELAY] = verify, int(delay * 1e9)

    def _start(self, readers: int) -> None:
        self._end = weakref.finalize(
            self, _end, self.ctl, self._threads, (self._tables, self._rings, self._locks, self.frames)
        )
        for _ in range(readers):
            scratch = np.frombuffer(
                mmap.mmap(-1, 3 * mmap.PAGESIZE + (PIECE if self.ctl[reads.VERIFY] else 0)), np.uint8
            )
            # A daemon: an engine that nobody closed must not keep the process from ending.
            thread = threading.Thread(target=reader.serve, args=(self.ctl, scratch), daemon=True, name="edgemoe-read")
            try:
                thread.start()
            except RuntimeError:  # what Python calls a refused thread
                started = len(self._threads)
                raise UserError(
                    f"only {started} of {readers} readers could be started: give fewer, or raise the limit of threads "
                    "or address space (ulimit -u, ulimit -v)"
                ) from None
            self._threads.append(thread)

    def allow(self, nbytes: int) -> None:
        """Let the memory of experts that left wait for those that come, up to so many bytes of experts in all. Until
        then it is given back at once."""
        if self.frames is not None:
            self.frames.allow(nbytes)

    def bytes_of(self, row: int) -> int:
        """What one expert of a layer (by row) takes in RAM at most: its slices in whole pages."""
        lengths = self._places[row, :, reads.LENGTH]
        return int(sum(-(-length // mmap.PAGESIZE) + 1 for length in lengths if length)) * mmap.PAGESIZE

    def read_last(self, row: int, tensor: str) -> None:
        """Read a layer's slices of this tensor after all its others: what the layer multiplies by last."""
        names = [other.name for other in self.tensors[row]]
        self._places[row, names.index(tensor), reads.LAST] = 1

    def states(self) -> np.ndarray:
        """ABSENT, QUEUED, READING or PRESENT of every expert, [L, E] (a copy)."""
        return self._tables[0].reshape(len(self.layers), -1).copy()

    def log(self, room: int) -> np.ndarray:
        """Note every read from now on, up to `room` of them: int64 [room, LOG_WORDS], of which `reads.LOG_COUNT` are
        filled. `edgemoe.streaming.replay_reads` makes sense of it."""
        self.ctl[reads.LOG] = 0
        self._log = np.zeros((room, reads.LOG_WORDS), np.int64)
        self.ctl[[reads.LOG_ROOM, reads.LOG_COUNT]] = room, 0
        self.ctl[reads.LOG] = self._log.ctypes.data
        return self._log

    def check_files(self) -> None:
        """Raise `UserError` if a file was written to since the store was made: bytes of two models must not mix."""
        for path, (_, plain, _), seen in zip(self.model.files, self._files, self._seen, strict=True):
            if _identity(plain) != seen:
                raise UserError(f"{path}: changed while it was in use: start again")

    def settle(self) -> UserError | None:
        """After a decode that failed or was interrupted: drop every read, and say which one failed, if one did."""
        failed, read, got = (int(self.ctl[word]) for word in (reads.FAILED, reads.FAILED_READ, reads.FAILED_GOT))
        reads.settle(self.ctl)
        if not failed:
            return None
        row, expert = divmod(read // 65536, int(self.ctl[reads.EXPERTS]))
        where = f"expert {expert} of layer {self.layers[row]}"
        files = {self.model.files[tensor.file] for tensor in self.tensors[row]}
        names = ", ".join(str(path) for path in sorted(files))
        if failed == reads.READ_DIFFERS:
            return UserError(f"{names}: {where} reads differently the second time: the disk or its memory is faulty")
        why = "the disk reports an error" if got < 0 else "the file ends there"
        return UserError(f"{names}: {where} cannot be read ({why}): check the file and the disk, then start again")

    def close(self) -> None:
        """End the readers and give all memory back; llama.cpp must not run."""
        if self._threads:
            self._end()
            self._threads = []
        for fd, plain, _ in self._files:
            for descriptor in {fd, plain}:
                os.close(descriptor)
        self._files = []
        self._reserve.close()
        if self.frames is not None:
            self.frames.close()


def _end(ctl: np.ndarray, threads: list[threading.Thread], _alive: tuple[object, ...]) -> None:
    reads.stop(ctl, reads.STOP)
    for thread in threads:
        thread.join()


def readers_for(model: Model) -> int:
    """How many reads this model's disk wants in flight: the fewest that `edgemoe probe` found to be (within 2%) as fast
    as any, for reads of a slice; `DEFAULT_READERS` where this disk was not probed."""
    from edgemoe.machine.profile import load_profile

    try:
        ssd = load_profile(model=model.path).ssd
    except UserError:
        return DEFAULT_READERS
    if ssd is None:
        return DEFAULT_READERS
    layer = model.geometry.moe_layers[0]
    nbytes = min(PIECE, max(piece.length for piece in model.expert_slices(layer, 0)))
    rates = {p.depth: ssd.random_expert(nbytes, p.depth) for p in ssd.points if p.pattern == "random"}
    enough = 0.98 * max(rates.values())
    return min(MAX_READERS, min(depth for depth, rate in rates.items() if rate >= enough))


def open_file(path: Path) -> tuple[int, int, bool]:
    """A descriptor to read by, a buffered one, and whether the first passes the page cache by."""
    try:
        plain = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    found = open_direct(plain, disk_of(path).logical_block)
    if found is None or found[1] > mmap.PAGESIZE:
        if found:
            os.close(found[0])
        os.posix_fadvise(plain, 0, 0, os.POSIX_FADV_RANDOM)  # what is read ahead nobody would drop
        return plain, plain, False
    return found[0], plain, True


def _identity(descriptor: int) -> tuple[int, ...]:
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns, status.st_dev, status.st_ino
