"""What this machine could do, measured in the same run, and what `edgemoe wall` makes of it.

The disk is probed by reading the model's own file, in requests as large as its experts' matrices; ggml's products in
the model's own types, as the file has them. A profile may stand in for RAM and products, never for the disk.
"""

import mmap
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from statistics import median

import numpy as np

from edgemoe.machine import ggml_probe, ram_probe, ssd_probe
from edgemoe.machine.identity import this_host
from edgemoe.machine.profile import Profile, Ssd
from edgemoe.machine.rounds import Effort
from edgemoe.machine.ssd_probe import KIB, MIB, SsdGrid
from edgemoe.model import Model
from edgemoe.model.memory import memory_needs
from edgemoe.progress import Advance
from edgemoe.streaming.replay_reads import ReadLog, replay
from edgemoe.streaming.skeleton import is_streamed
from edgemoe.tracing import Trace
from edgemoe.wall.batch import batch, independent_union
from edgemoe.wall.cpu_costs import costs_of
from edgemoe.wall.cpu_decode import predict_cpu_decode
from edgemoe.wall.hits import caching
from edgemoe.wall.rates import Machine, measured
from edgemoe.wall.rates import Speed as WallSpeed
from edgemoe.wall.tiers import Path as WallPath
from edgemoe.wall.tiers import Wall

Watch = Callable[[str, int, str], AbstractContextManager[Advance]]
_SIZES = (64 * KIB, 256 * KIB, MIB)
_DISK, _QUICK_DISK = Effort(5, 9, 12), Effort(3, 3, 3)
_PRODUCTS, _QUICK_PRODUCTS = Effort(3, 7, 12), Effort(1, 3, 1)
_QUICK_WORKING_SET = 1 << 26
SPREAD = 512 << 20  # bytes of memory that replayed reads go into
_BURST_BYTES = 1 << 30


@dataclass(frozen=True)
class Limits:
    """Bytes per second that the disk gives this model's reads, and the machine as the wall knows it."""

    profile: Profile
    machine: Machine
    disk: float
    piece: int  # bytes of one read
    readers: int
    threads: int

    @property
    def ssd(self) -> Ssd:
        assert self.profile.ssd is not None
        return self.profile.ssd


def measure_limits(
    model: Model, readers: int, threads: int, quick: bool, watch: Watch, known: Profile | None = None
) -> Limits:
    """Probe the disk under the model's file, RAM and ggml's products; with a profile, the disk alone."""
    ssd = probe_disk(model.files[0], readers, quick, watch)
    profile = replace(known, ssd=ssd) if known else _probe_rest(model, ssd, threads, quick, watch)
    g = model.geometry
    piece = max(max(g.expert_bytes) // (2 if g.merged_gate_up else 3), 1)
    rate = ssd.random_expert(piece, readers)
    said = f"this run: random reads of this file, {readers} in flight"
    machine = replace(measured(g, profile), ssd=WallSpeed(rate, rate, said), vram_bytes=0)
    return Limits(profile, machine, rate, piece, readers, threads)


def probe_disk(file: Path, readers: int, quick: bool, watch: Watch) -> Ssd:
    """The rates of reads of a model's file, past the page cache."""
    effort = _QUICK_DISK if quick else _DISK
    grid = SsdGrid(_SIZES, tuple(sorted({1, readers})), 0.03 if quick else 0.15, 0, effort)
    with watch("reading the disk", ssd_probe.n_rounds(grid, file), "rounds") as advance:
        return ssd_probe.probe_ssd(file.parent, file, grid, advance)


def _probe_rest(model: Model, ssd: Ssd, threads: int, quick: bool, watch: Watch) -> Profile:
    counts = ram_probe.quick_thread_counts()
    effort = ram_probe.QUICK
    with watch("reading RAM", ram_probe.n_rounds(effort, counts), "rounds") as advance:
        ram = ram_probe.probe_ram(effort, counts, advance)
    kinds = tuple(dict.fromkeys((*model.geometry.expert_types, *model.geometry.type_bytes)))
    kinds = tuple(kind for kind in kinds if kind in ggml_probe.ALL_TYPES) or ("Q8_0",)
    plan = ggml_probe.ProductPlan(kinds, both_states=True, threads=(threads,), effort=_PRODUCTS)
    if quick:
        plan = replace(plan, effort=_QUICK_PRODUCTS, working_set=_QUICK_WORKING_SET)
    with watch("multiplying by experts", ggml_probe.n_rounds(plan), "rounds") as advance:
        found = ggml_probe.probe_products(plan, advance)
    plain = tuple(rate for rate in found.experts if not rate.repacked)
    return Profile(
        host=this_host(),
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        ram=ram,
        ssd=ssd,
        cpu_experts=plain,
        cpu_dense=tuple(rate for rate in found.dense if not rate.repacked),
        cpu_nodes=found.nodes,
        quick=quick,
    )


@dataclass(frozen=True)
class Missed:
    """Per layer and step: experts that are not in RAM, of the distinct ones that are executed."""

    experts: float
    union: float


@dataclass(frozen=True)
class Prediction:
    """Of one number of streams, in tok/s of all together and seconds per step.

    `wall`: reading what a step needs, or computing it, whichever is slower; `serial`: one after the other, as it is
    where nothing is read before it is known to be needed. `least` … `most` is what `edgemoe wall --batch` says of the
    two without having seen the run: over the whole trace, at the disk's rate for reads that never stop.
    """

    wall: float
    serial: float
    least: float
    most: float
    read_bytes: float
    read_s: float
    compute_s: float
    hit_rate: float
    union: float  # distinct experts per layer

    def error(self, tokens_per_s: float) -> float:
        """Measured / `wall` − 1."""
        return tokens_per_s / self.wall - 1

    def serial_error(self, tokens_per_s: float) -> float:
        """Measured / `serial` − 1."""
        return tokens_per_s / self.serial - 1


def predict(
    model: Model, limits: Limits, streams: int, slots: int, n_ctx: int, trace: Trace | None
) -> Prediction | None:
    """`edgemoe wall --batch` for a budget that buys `slots` per layer: of a trace, or of independent random streams.

    None where the wall takes another path, because the budget holds all of the model.
    """
    g = model.geometry
    machine = _with_slots(model, limits.machine, streams, slots, n_ctx)
    active = (g.active_expert_bytes,) * 2
    if trace is not None:
        wall = Wall.of_one(g, machine, caching(g, [trace], "lru", None, active), n_ctx)
    else:
        # Random routing: a cache catches what it holds of the experts, whatever it evicts.
        wall = Wall.of_one(g, machine, caching(g, [], "lru", min(slots / g.n_experts, 1.0), active), n_ctx)
    wall = replace(wall, cpu_extra=_beside_bytes(model, limits, wall))
    row = batch(wall, streams)
    path = row.path
    if path is None or not path.copies or path.hit is None:
        return None
    union = row.union[1] if trace is not None else independent_union(g.n_experts, g.top_k, streams)
    return _prediction(path, union)


def _prediction(path: WallPath, union: float) -> Prediction:
    assert path.hit is not None
    read_s = path.copies[0].slow
    compute_s = path.slow - read_s
    return Prediction(
        wall=path.streams / max(read_s, compute_s),
        serial=path.streams / (read_s + compute_s),
        least=path.tokens_per_s[0],
        most=path.tokens_per_s[1],
        read_bytes=path.copies[0].bytes[1],
        read_s=read_s,
        compute_s=compute_s,
        hit_rate=path.hit.low,
        union=union,
    )


def refine(
    said: Prediction, model: Model, limits: Limits, streams: int, missed: Missed, compute_s: float
) -> Prediction:
    """The same with what this run knows better: what the tier's caches miss in the very steps that were run, the disk's
    rate for reads that come a layer at a time, and what computing takes with everything in RAM."""
    g = model.geometry
    read_bytes = missed.experts * g.slot_bytes
    read_s = read_bytes / burst_rate(model, limits, missed.experts) if read_bytes else 0.0
    return replace(
        said,
        wall=streams / max(read_s, compute_s),
        serial=streams / (read_s + compute_s),
        read_bytes=read_bytes,
        read_s=read_s,
        compute_s=compute_s,
        hit_rate=1 - missed.experts / missed.union,
        union=missed.union,
    )


def burst_rate(model: Model, limits: Limits, experts: float) -> float:
    """Bytes per second of random experts, so many at a time: the next ones are asked for when the last are there. A
    layer's reads come so, and few at a time do not keep a disk busy. Into memory as experts' is."""
    rng = np.random.default_rng(0)
    g, page = model.geometry, mmap.PAGESIZE
    layers = [[t for t in model.expert_tensors(layer) if is_streamed(t)] for layer in g.moe_layers]
    lines: list[tuple[int, int, int, int]] = []
    # As many experts in each group as the mean, and one more as often as its fraction says.
    groups = max(round(_BURST_BYTES / (max(experts, 1.0) * max(g.expert_bytes))), 8)
    for group in range(groups):
        count = max(int(experts) + int(rng.random() < experts % 1), 1)
        tensors = layers[int(rng.integers(len(layers)))]
        for expert in rng.choice(g.n_experts, min(count, g.n_experts), replace=False).tolist():
            for tensor in tensors:
                length = tensor.nbytes // g.n_experts
                start = (tensor.offset + expert * length) // page * page
                lines.append(
                    (tensor.file, start, -(-(tensor.offset + (expert + 1) * length) // page) * page - start, group)
                )
    number, offset, length_, group_ = (np.array(column, np.int64) for column in zip(*lines, strict=True))
    none = np.zeros(len(number), np.int64)
    log = ReadLog(tuple(model.files), number, offset, length_, none, none, none, group_)
    seconds = [replay(log, readers=limits.readers, spread=SPREAD) for _ in range(3)]
    return log.nbytes / median(seconds)


def _with_slots(model: Model, machine: Machine, streams: int, slots: int, n_ctx: int) -> Machine:
    """The machine whose RAM buys exactly so many slots: what the wall counts as needed, and the slots beyond."""
    g = model.geometry
    need = next(need.ram for need in memory_needs(g, n_ctx) if need.way == "ssd-to-ram")
    beyond = slots * g.slot_bytes - g.active_expert_bytes
    return replace(machine, ram_bytes=need + (streams - 1) * g.kv.at(n_ctx) + beyond, ram_source="the group's limit")


def _beside_bytes(model: Model, limits: Limits, wall: Wall) -> float:
    """Seconds per step that the CPU pays besides bytes, by the cost of every product, as the wall counts."""
    weights, cpu = wall.machine.weights, wall.machine.cpu
    assert weights is not None and cpu is not None
    predicted = predict_cpu_decode(model, costs_of(limits.profile, limits.threads), wall.n_ctx, repack=False)
    return max(predicted.seconds - (wall.fixed / weights.low + wall.routed[1] / cpu.low), 0.0)
