"""The machine profile: what every tier of this machine was measured to give, saved as versioned JSON.

All sizes are bytes, all rates bytes per second, decimal. A profile belongs to one host, its GPUs and one disk;
that of another is refused, because a prediction from it would be wrong without looking wrong.
"""

import itertools
import math
import os
import shlex
import tempfile
from dataclasses import dataclass
from pathlib import Path

from edgemoe.errors import UserError
from edgemoe.files import read_json, write_json
from edgemoe.machine.disk import check_same_disk
from edgemoe.machine.identity import Host, gpu_uuids, profile_key, this_host
from edgemoe.machine.record import RecordError, from_json, to_json

VERSION = 1
_AGAIN = "run `edgemoe probe`"


@dataclass(frozen=True)
class Rate:
    """A measured rate in bytes per second.

    `median` of `rounds` rounds; `spread` is half their interquartile range over the median (0.02: ± 2%); `stable` says
    whether the median had settled (edgemoe.machine.rounds) when measuring ended.
    """

    median: float
    spread: float
    rounds: int
    stable: bool

    def __post_init__(self) -> None:
        if not self.median > 0 or not math.isfinite(self.median) or self.spread < 0 or self.rounds < 1:
            raise ValueError(f"{self.median} bytes/s ± {self.spread} in {self.rounds} rounds is not a rate")

    def __float__(self) -> float:
        return self.median


@dataclass(frozen=True)
class SsdPoint:
    """Reads of `request_bytes`, `depth` of them in flight; `pattern` is sequential or random."""

    pattern: str
    request_bytes: int
    depth: int
    bytes_per_s: Rate

    def __post_init__(self) -> None:
        if self.pattern not in ("sequential", "random") or self.request_bytes < 1 or self.depth < 1:
            raise ValueError(f"{self.depth} × {self.request_bytes} bytes, {self.pattern}: not a kind of read")


@dataclass(frozen=True)
class Ssd:
    """The disk under `dir`.

    `device` identifies it (a profile of another disk is refused), `kind` is what may be called it: "SSD", "hard disk",
    "virtual disk", "network", ...; `method` how it was read: "O_DIRECT", or "cold buffered" where that is refused.
    `cached` is false in every profile: a rate of the page cache is refused when it is measured. `evidence` says what
    was seen.
    """

    dir: str
    device: str
    filesystem: str
    kind: str
    method: str
    source: str
    source_bytes: int
    alignment: int
    points: tuple[SsdPoint, ...]
    cached: bool
    label: str
    evidence: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.cached:
            raise ValueError("the disk's rates are the page cache's")
        for pattern in ("sequential", "random"):
            if not any(point.pattern == pattern for point in self.points):
                raise ValueError(f"no {pattern} reads in ssd.points")

    @property
    def sequential(self) -> Rate:
        """The best sequential rate over request sizes and depths."""
        return max((p.bytes_per_s for p in self.points if p.pattern == "sequential"), key=float)

    def random_expert(self, request_bytes: int, depth: int | None = None) -> float:
        """Bytes per second of random reads of `request_bytes`, `depth` in flight (by default: of the best depth).

        Interpolated between measured sizes, log-log; outside them the nearest size holds.
        """
        return self.rate("random", request_bytes, depth)

    def rate(self, pattern: str, request_bytes: int, depth: int | None = None) -> float:
        """Like `random_expert`, for either pattern. A depth that was not measured takes the nearest below it."""
        if request_bytes < 1 or (depth is not None and depth < 1):
            raise ValueError(f"{request_bytes} bytes, {depth} in flight: not a read")
        best: dict[int, float] = {}
        for size in sorted({p.request_bytes for p in self.points if p.pattern == pattern}):
            points = [p for p in self.points if p.pattern == pattern and p.request_bytes == size]
            if depth is not None:
                nearest = max((p.depth for p in points if p.depth <= depth), default=min(p.depth for p in points))
                points = [p for p in points if p.depth == nearest]
            best[size] = max(float(p.bytes_per_s) for p in points)
        return _interpolate(best, request_bytes)


@dataclass(frozen=True)
class ThreadsRate:
    """A rate with so many threads."""

    threads: int
    bytes_per_s: Rate


@dataclass(frozen=True)
class RamRates:
    """Reading and copying RAM with 1…n threads, over arrays of `array_bytes` (`cache_bytes`: last-level cache in all).

    `load` counts bytes read. `copy` counts bytes read plus bytes written, as STREAM does; stores that first fetch the
    line that they overwrite move up to 1.5 × as much.
    """

    array_bytes: int
    cache_bytes: int
    load: tuple[ThreadsRate, ...]
    copy: tuple[ThreadsRate, ...]

    def __post_init__(self) -> None:
        if not self.load or not self.copy:
            raise ValueError("no rates of RAM")

    @property
    def best_load(self) -> Rate:
        return max((point.bytes_per_s for point in self.load), key=float)


@dataclass(frozen=True)
class ProductCost:
    """Seconds of one product on the CPU at batch 1: `per_node + per_row · rows + per_byte · bytes`.

    A node of the graph costs its dispatch and the threads' meeting, a row of the weight the call of its dot product,
    the bytes their way from RAM. Fitted over products of several shapes; `residual` is the largest relative error.
    """

    per_node: float
    per_row: float
    per_byte: float
    residual: float

    def __post_init__(self) -> None:
        if min(self.per_node, self.per_row, self.residual) < 0 or not self.per_byte > 0:
            raise ValueError(f"{self.per_node} + {self.per_row} per row + {self.per_byte} per byte is no cost")

    def seconds(self, nbytes: float, rows: float) -> float:
        return self.per_node + self.per_row * rows + self.per_byte * nbytes


@dataclass(frozen=True)
class ExpertRate:
    """Weights of one quantisation type (`Q8_0`) that ggml's own product reads per second, on large matrices.

    `repacked` says that they lie as llama.cpp rearranges them by default where this CPU has a kernel for it. `cost`
    foretells the smaller ones.
    """

    type: str
    repacked: bool
    threads: int
    bytes_per_s: Rate
    cost: ProductCost | None = None


@dataclass(frozen=True)
class NodeCost:
    """Seconds of what decoding computes besides products with weights.

    `per_node` of the graph (its dispatch, the threads' meeting), `per_value` that such a node produces, and
    `per_attention`: of each multiplication of a query, or of attention's weights, with a cached value.
    """

    threads: int
    per_node: float
    per_value: float
    per_attention: float

    def __post_init__(self) -> None:
        if not self.per_node > 0 or min(self.per_value, self.per_attention) < 0:
            raise ValueError(f"{self.per_node} s per node, {self.per_value} per value: no cost")


@dataclass(frozen=True)
class Transfer:
    """A rate for pieces of so many bytes."""

    bytes: int
    bytes_per_s: Rate


@dataclass(frozen=True)
class ZeroCopy:
    """Pinned host memory read by `ctas` thread blocks of a kernel, in pieces of so many bytes."""

    bytes: int
    ctas: int
    bytes_per_s: Rate


@dataclass(frozen=True)
class Overlap:
    """RAM loads with `threads` threads and pinned host→device copies, both running: what each still gets."""

    threads: int
    ram: Rate
    h2d: Rate


@dataclass(frozen=True)
class GpuRates:
    """One GPU and its link. `zero_copy` is empty where Triton is missing, `ram_while_h2d` none where not measured."""

    uuid: str
    name: str
    vram_bytes: int
    h2d_pinned: tuple[Transfer, ...]
    h2d_pageable: tuple[Transfer, ...]
    zero_copy: tuple[ZeroCopy, ...]
    d2h: tuple[Transfer, ...]
    vram_read: Rate
    ram_while_h2d: Overlap | None = None

    def __post_init__(self) -> None:
        if not self.h2d_pinned:
            raise ValueError("no host-to-device rates")

    def h2d(self, size: int) -> float:
        """Bytes per second of pinned host→device copies of `size` bytes each, interpolated log-log."""
        return _interpolate({point.bytes: float(point.bytes_per_s) for point in self.h2d_pinned}, size)


@dataclass(frozen=True)
class Profile:
    """Everything measured on one machine. `created` is ISO 8601, UTC; `quick` marks a profile of fewer rounds."""

    host: Host
    created: str
    ram: RamRates
    ssd: Ssd | None = None
    cpu_experts: tuple[ExpertRate, ...] = ()  # MUL_MAT_ID
    cpu_dense: tuple[ExpertRate, ...] = ()  # MUL_MAT
    cpu_nodes: tuple[NodeCost, ...] = ()
    gpus: tuple[GpuRates, ...] = ()
    present_gpus: tuple[str, ...] = ()  # UUIDs, of those too that were not measured
    quick: bool = False
    notes: tuple[str, ...] = ()
    version: int = VERSION

    @property
    def unstable(self) -> bool:
        """Is there a figure whose median had not settled?"""
        return _has_unstable(to_json(self))


def profile_path(host: Host | None = None, uuids: tuple[str, ...] | None = None) -> Path:
    """Where the profile of this host with these GPUs is kept: the user's configuration directory."""
    home = os.environ.get("XDG_CONFIG_HOME") or ""
    base = Path(home) if Path(home).is_absolute() else Path.home() / ".config"
    key = profile_key(host or this_host(), gpu_uuids() if uuids is None else uuids)
    return base / "edgemoe" / f"profile-{key}.json"


def save_profile(profile: Profile, path: Path | None = None) -> Path:
    """Write the profile, atomically, and return where. Raises `UserError` where it cannot be written."""
    path = path or profile_path(profile.host, profile.present_gpus)
    check_writable(path)
    write_json(path, to_json(profile), indent=1)
    return path


def check_writable(path: Path) -> None:
    """Raise `UserError` unless a file can be written there: before minutes of measuring, not after."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
        if path.is_dir():
            raise IsADirectoryError(21, "it is a directory")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None


def load_profile(path: Path | None = None, model: Path | None = None) -> Profile:
    """This machine's profile, by default from where `edgemoe probe` saves it.

    Raises `UserError`, one line, for no profile, a damaged one, one of another version, one of another host or of other
    GPUs, and where the disk is not the one that was measured: under the directory that was, and under `model`.
    """
    found = path or profile_path()
    profile = read_profile(found)
    _check_machine(profile, found)
    if profile.ssd:
        if Path(profile.ssd.dir).exists():
            check_same_disk(profile.ssd.device, Path(profile.ssd.dir), f"{_AGAIN} again")
        if model:
            check_same_disk(profile.ssd.device, model, f"run `edgemoe probe --dir {shlex.quote(str(model.parent))}`")
    return profile


def read_profile(path: Path) -> Profile:
    """Whatever machine's profile is in this file; `UserError` if it is none of this version."""
    data = read_json(path, "machine profile", f"{_AGAIN} on this machine")
    version = data.get("version") if isinstance(data, dict) else None
    if version != VERSION:
        raise UserError(f"{path} has profile version {version!r}, this edgemoe reads {VERSION}: {_AGAIN} again")
    try:
        return from_json(Profile, data)
    except RecordError as error:
        raise UserError(f"{path} is not a machine profile ({error}): {_AGAIN} again") from None


def _check_machine(profile: Profile, path: Path) -> None:
    here = this_host()
    if profile.host.id != here.id:
        which = f"another machine ({profile.host.label}; this is {here.label})"
        raise UserError(f"{path} is a profile of {which}: {_AGAIN} here")
    gone = set(profile.present_gpus) ^ set(gpu_uuids())
    if gone:
        raise UserError(f"{path} is of other GPUs ({len(gone)} came or went since it was measured): {_AGAIN} again")


def _interpolate(rates: dict[int, float], size: int) -> float:
    """Log-log between the sizes around `size`; the nearest beyond them."""
    sizes = sorted(rates)
    if size <= sizes[0]:
        return rates[sizes[0]]
    for low, high in itertools.pairwise(sizes):
        if size <= high:
            share = math.log(size / low) / math.log(high / low)
            return math.exp((1 - share) * math.log(rates[low]) + share * math.log(rates[high]))
    return rates[sizes[-1]]


def _has_unstable(data: object) -> bool:
    if isinstance(data, dict):
        return data.get("stable") is False or any(_has_unstable(value) for value in data.values())
    return isinstance(data, list) and any(_has_unstable(value) for value in data)
