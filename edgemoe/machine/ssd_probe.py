"""What the disk gives: reads past the page cache, over request size and requests in flight, in order and at random.

An expert that is not in RAM is a few such reads, so these rates bound every token that misses (bandwidth-wall paper §5,
whose first figure, 5.3 GB/s, was the page cache's: the disk gave 2.4). They go into huge pages, as the SSD tier's do:
into others, some disks give half.
"""

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from edgemoe.errors import UserError
from edgemoe.machine import page_cache, probe_file
from edgemoe.machine.alignment import open_direct
from edgemoe.machine.direct_reader import DirectReader, at_random, sequential
from edgemoe.machine.disk import Disk, disk_of
from edgemoe.machine.memory import ram
from edgemoe.machine.profile import Rate, Ssd, SsdPoint
from edgemoe.machine.rounds import Effort, settle
from edgemoe.progress import Advance, no_progress
from edgemoe.units import format_bytes

KIB, MIB = 1 << 10, 1 << 20
LEAST_FILE = 16 * MIB
_WARM_BYTES, _WARM_SECONDS = 64 * MIB, 10
_STILL_COLD = 0.01
_CACHED = "this would measure the page cache, not the disk"


@dataclass(frozen=True)
class SsdGrid:
    """Which reads to measure, how long one round of each lasts, and the size of a temporary file."""

    sizes: tuple[int, ...]
    depths: tuple[int, ...]
    round_seconds: float
    file_bytes: int
    effort: Effort


FULL = SsdGrid(tuple(4 * KIB * 4**step for step in range(7)), (1, 2, 4, 8, 16, 32), 0.08, 1024 * MIB, Effort(5, 25, 75))
QUICK = SsdGrid((4 * KIB, 64 * KIB, MIB, 16 * MIB), (1, 8, 32), 0.03, 512 * MIB, Effort(3, 5, 4))

Cell = tuple[str, int, int]  # pattern, request bytes, depth


def probe_ssd(directory: Path, model: Path | None = None, grid: SsdGrid = FULL, advance: Advance = no_progress) -> Ssd:
    """Measure the disk under `directory`, or under a model's file by reading that.

    `advance` is told `n_rounds(grid, model)` in all. Raises `UserError` for a place without a disk, one that cannot be
    written or has no room, a file with holes, and wherever the rate turns out to be the page cache's.
    """
    place = model or directory
    disk = disk_of(place)
    if disk.caches:
        raise UserError(f"{place}: {disk.caches}, so there is no disk to measure; give --dir a directory on a disk")
    source = probe_file.model_file(model) if model else probe_file.temporary_file(directory, grid.file_bytes, advance)
    with source as plain, _opened(plain, disk) as (descriptor, method, alignment):
        size = os.fstat(plain).st_size
        if size < LEAST_FILE:
            raise UserError(f"{place} has {format_bytes(size)}: at least {format_bytes(LEAST_FILE)} are needed to read")
        rates, evidence = _Probe(place, disk, plain, descriptor, grid).run(advance)
    points = tuple(SsdPoint(pattern, length, depth, rate) for (pattern, length, depth), rate in rates.items())
    return Ssd(
        dir=str(directory.resolve()) if not model else str(model.resolve().parent),
        device=disk.device,
        filesystem=disk.filesystem,
        kind=disk.kind,
        method=method,
        source=model.name if model else "temporary file",
        source_bytes=size,
        alignment=alignment,
        points=points,
        cached=False,
        label=disk.label,
        evidence=evidence.lines,
    )


def n_rounds(grid: SsdGrid, model: Path | None = None) -> int:
    """What `advance` is told in all: rounds, and pieces of a temporary file."""
    pieces = 0 if model else probe_file.n_pieces(grid.file_bytes)
    return n_cells(grid) * grid.effort.most + pieces


def n_cells(grid: SsdGrid) -> int:
    return 2 * len(grid.sizes) * len(grid.depths)


@contextmanager
def _opened(plain: int, disk: Disk) -> Iterator[tuple[int, str, int]]:
    """(descriptor to read, method, alignment): with O_DIRECT, or else buffered, of pages dropped before each round."""
    direct = open_direct(plain, disk.logical_block)
    if direct is None:
        yield plain, "cold buffered", 1
        return
    try:
        yield direct[0], "O_DIRECT", direct[1]
    finally:
        os.close(direct[0])


class _Probe:
    """One file, open twice (plain, and as it is read), and the cells of the grid that fit it and the free memory."""

    def __init__(self, place: Path, disk: Disk, plain: int, descriptor: int, grid: SsdGrid) -> None:
        self.place, self.disk, self.plain, self.descriptor, self.grid = place, disk, plain, descriptor, grid
        self.direct = descriptor != plain
        self.size = os.fstat(plain).st_size
        most = min(self.size, ram().available // 4)
        self.cells: list[Cell] = [
            (pattern, length, depth)
            for pattern in ("sequential", "random")
            for length in grid.sizes
            for depth in grid.depths
            if length * max(depth, 4) <= most
        ]
        self.usual = max(length for _, length, depth in self.cells if length <= MIB and depth == 1)
        self.generator = np.random.default_rng()
        self.read_bytes = 0
        self.position = 0

    def run(self, advance: Advance) -> tuple[dict[Cell, Rate], page_cache.Evidence]:
        with DirectReader(max(depth for _, _, depth in self.cells), huge_pages=True) as self.reader:
            if self.direct:
                self._check_content()
            warm = self._warm_rate()
            # A little first, so that a cache is refused at once and not after a minute of measuring it.
            self._measure([("sequential", self.usual, 1)], Effort(3, 3, 1), warm, no_progress)
            left_out = n_cells(self.grid) - len(self.cells)
            advance(left_out * self.grid.effort.most)
            return self._measure(self.cells, self.grid.effort, warm, advance)

    def _measure(
        self, cells: list[Cell], effort: Effort, warm: float, advance: Advance
    ) -> tuple[dict[Cell, Rate], page_cache.Evidence]:
        """The rates of some cells, with witnesses; raises `UserError` if it is the page cache that they heard."""
        page_cache.drop_pages(self.plain)
        before, fetched, read = page_cache.resident_share(self.plain), page_cache.fetched_bytes(), self.read_bytes
        rates = settle({cell: partial(self._round, cell) for cell in cells}, effort, advance)
        now = page_cache.fetched_bytes()
        evidence = page_cache.Evidence(
            read_bytes=self.read_bytes - read,
            fetched_bytes=None if fetched is None or now is None else now - fetched,
            block_device=self.disk.block_device,
            resident_before=before if self.direct else None,
            resident_after=page_cache.resident_share(self.plain) if self.direct else None,
            bytes_per_s=float(rates["sequential", self.usual, 1]),
            warm_bytes_per_s=warm,
        )
        why = evidence.why_cached()
        if why:
            raise UserError(f"{self.place} ({self.disk.label}): {why}, so {_CACHED}; give --dir a directory on a disk")
        return rates, evidence

    def _round(self, cell: Cell) -> float:
        """Bytes per second of one round. Streams go on where the last one stopped: no round reads what is fresh."""
        pattern, length, depth = cell
        if pattern == "random":
            offsets = at_random(self.size, length, depth, self.generator)
        else:
            offsets = sequential(self.size, length, depth, self.position // length)
        if not self.direct:
            self._make_cold(pattern)
        done = self.reader.read(self.descriptor, length, offsets, self.grid.round_seconds, once=not self.direct)
        self.read_bytes += done.bytes
        self.position = (self.position + done.bytes) % self.size
        return done.rate

    def _make_cold(self, pattern: str) -> None:
        left = page_cache.make_cold(self.plain, _STILL_COLD)
        if left is None or left > _STILL_COLD:
            what = "whether its pages are cached cannot be told" if left is None else f"{left:.0%} of it stays cached"
            raise UserError(f"{self.place} refuses O_DIRECT, and {what}, so {_CACHED}; give --dir another disk")
        advice = os.POSIX_FADV_RANDOM if pattern == "random" else os.POSIX_FADV_SEQUENTIAL
        os.posix_fadvise(self.plain, 0, 0, advice)

    def _warm_rate(self) -> float:
        """Bytes per second of the same reads out of the page cache: what this probe must not report."""
        length = min(self.size, _WARM_BYTES) // self.usual * self.usual
        offsets = sequential(length, self.usual, 1)
        self.reader.read(self.plain, self.usual, offsets, _WARM_SECONDS, once=True)
        warm = max(self.reader.read(self.plain, self.usual, offsets, 0.02).rate for _ in range(5))
        page_cache.drop_pages(self.plain)
        return warm

    def _check_content(self) -> None:
        """O_DIRECT must give the file's bytes: a file system that gives others is not measured but reported."""
        for offset in self.generator.integers(0, self.size // (64 * KIB), 4) * (64 * KIB):
            with mmap.mmap(-1, 64 * KIB) as pages:
                os.preadv(self.descriptor, [pages], int(offset))
                if pages[:] != os.pread(self.plain, 64 * KIB, int(offset)):
                    raise UserError(f"{self.place}: O_DIRECT reads other bytes than the file has: a fault of that disk")
