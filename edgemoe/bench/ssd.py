"""`edgemoe bench ssd`: the SSD tier beside mmap, beside the disk, beside the wall's prediction; all in one run.

Cases run one after the other; within a case, both sides take turns. Everything is a median over rounds.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from edgemoe.bench import case, quality, resident
from edgemoe.bench.case import Case, Outcome, Setting
from edgemoe.bench.limits import Limits, Missed, Prediction, Watch, measure_limits, predict, probe_disk, refine
from edgemoe.bench.loads import Shape, check_room, fit_trace, forced_ids, shape_of, written
from edgemoe.bench.memory_group import Hierarchy, find_hierarchy
from edgemoe.bench.needs import check_memory
from edgemoe.data import DOMAINS
from edgemoe.demo import demo_file, demo_model
from edgemoe.errors import UserError
from edgemoe.llamacpp.session import MAX_SEQUENCES, default_threads
from edgemoe.machine.disk import disk_of
from edgemoe.machine.memory import ram
from edgemoe.machine.page_cache import read_ahead
from edgemoe.machine.profile import Profile
from edgemoe.model import Model, read_model
from edgemoe.policy import Policy, preset
from edgemoe.tracing import Trace, load_trace
from edgemoe.units import format_bytes
from edgemoe.wall.batch import MIN_STEPS
from edgemoe.wall.sharing import replayed_misses

RATIO = 2.5  # the model over the memory that both sides have
RANDOM, RECORDED = "random", "recorded"
STREAMS = (1, 8, 32)
# Both issue reads a layer early. Speculative routing executes what was prefetched; exact prefetching may be in vain.
EARLY: dict[str, Policy] = {"speculative": preset("speculative"), "exact-prefetch": preset("exact-prefetch")}
_DEMO_TOKENS = 2048  # of each of the demo model's four texts
_SPARE = 1 << 31


@dataclass(frozen=True)
class Settings:
    """What a person asks for. `ram`: bytes for each side, `model / 2.5` unless given. `trace`: recorded routing, the
    demo model's unless given."""

    directory: Path
    size: int = 4_000_000_000
    ram: int | None = None
    trace: Path | None = None
    profile: Profile | None = None
    keep: bool = False
    quick: bool = False
    streams: tuple[int, ...] = STREAMS
    threads: int = field(default_factory=default_threads)
    readers: int = 8

    @property
    def effort(self) -> case.Effort:
        return case.QUICK if self.quick else case.Effort()


@dataclass(frozen=True)
class Result:
    """A case with what the wall says of it."""

    outcome: Outcome
    prediction: Prediction | None


@dataclass(frozen=True)
class Report:
    """All of a run. `no_mmap` says why nothing stands beside, where nothing does. `disk_after` is the disk's rate when
    all was over, to be held against the first probe; `read_ahead`: bytes that the kernel reads around a page fault."""

    shape: Shape
    model_bytes: int
    n_layers: int
    limit: int
    limits: Limits
    trace: Trace
    threads: int
    readers: int
    quick: bool
    results: Sequence[Result]
    quality: Sequence[quality.Point]
    no_mmap: str
    disk_after: float
    read_ahead: int | None


def bench_ssd(settings: Settings, watch: Watch) -> Report:
    """Measure everything. `watch(what, total, unit)` gives the progress callback of a part.

    An interrupt leaves nothing behind: no model (unless kept), no process, no control group. Raises `UserError` for a
    directory, size, budget or trace that does not do.
    """
    if max(settings.streams) > MAX_SEQUENCES:
        raise UserError(f"{max(settings.streams)} streams: expected at most {MAX_SEQUENCES}, as llama.cpp has them")
    given = load_trace(settings.trace) if settings.trace else None
    router = given or read_model(demo_model()).geometry
    shape = shape_of(settings.size, router.n_experts, router.top_k)
    limit = settings.ram or round(shape.nbytes / RATIO)
    cases = list(_cases(settings.streams))
    _check_place(settings, shape, limit)
    if given:
        _check_length(given, settings.streams)
    check_memory(shape, cases, limit)
    trace = given or _demo_trace(settings, watch)
    _check_length(trace, settings.streams)
    hierarchy = find_hierarchy()
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="edgemoe-bench-")))
        with watch("writing the model", shape.nbytes, "bytes") as advance:
            model = held.enter_context(written(shape, settings.directory, settings.keep, advance))
        fitted = fit_trace(trace, model.geometry.n_layers)
        limits = measure_limits(model, settings.readers, settings.threads, settings.quick, watch, settings.profile)
        place = None if isinstance(hierarchy, str) else hierarchy
        setting = Setting(model.files[0], limit, settings.threads, settings.readers, place, settings.effort)
        cases = [_recorded(one, fitted, folder) for one in cases]
        alone = _resident(cases, model, setting, watch)
        results = [_run(one, setting, model, limits, fitted, alone, watch) for one in cases]
        points = quality.measure_quality(quality.QUICK if settings.quick else quality.Extent(), settings.threads, watch)
        after = probe_disk(model.files[0], settings.readers, True, watch)
        return Report(
            shape=shape,
            model_bytes=model.geometry.file_bytes,
            n_layers=model.geometry.n_layers,
            limit=limit,
            limits=limits,
            trace=fitted,
            threads=settings.threads,
            readers=settings.readers,
            quick=settings.quick,
            results=results,
            quality=points,
            no_mmap=_why_not(hierarchy),
            disk_after=after.random_expert(limits.piece, settings.readers),
            read_ahead=read_ahead(model.files[0]),
        )


def _why_not(hierarchy: Hierarchy | str) -> str:
    return hierarchy if isinstance(hierarchy, str) else ""


def _demo_trace(settings: Settings, watch: Watch) -> Trace:
    """The routing of the demo model on its four texts."""
    from edgemoe.tracing.capture import Settings as Capture
    from edgemoe.tracing.capture import capture
    from edgemoe.tracing.texts import Source

    with tempfile.TemporaryDirectory(prefix="edgemoe-bench-") as folder:
        out = Path(folder) / "demo.npz"
        sources = [Source(domain, demo_file(f"{domain}.txt")) for domain in DOMAINS]
        tokens = _DEMO_TOKENS // (4 if settings.quick else 1)
        report = capture(
            demo_model(),
            sources,
            out,
            Capture(max_tokens=tokens, n_threads=settings.threads),
            watch=lambda total: watch("tracing the demo model", total, "tokens"),
        )
        if report.partial:
            raise KeyboardInterrupt
        return load_trace(out)


def _check_length(trace: Trace, streams: Sequence[int]) -> None:
    need = MIN_STEPS * max(streams)
    if trace.n_tokens < need:
        raise UserError(
            f"{trace.name}: {trace.n_tokens:,} tokens, and {max(streams)} streams need {need:,}: trace more"
        )


def _check_place(settings: Settings, shape: Shape, limit: int) -> None:
    """Refuse, before any work, a directory or a machine that does not do."""
    directory = settings.directory
    if not directory.is_dir():
        raise UserError(f"--dir {directory}: no such directory")
    if caches := disk_of(directory).caches:
        raise UserError(f"--dir {directory}: {caches}, so there is no disk to measure: give one on a disk")
    if not (directory / shape.name).exists():
        check_room(shape, directory)
    free = ram().available
    if 2 * limit + _SPARE > free:
        raise UserError(
            f"both sides of {format_bytes(limit)} and 2 GiB to spare do not fit into the {format_bytes(free)} that are "
            "free: lower --ram or --size"
        )


def _cases(streams: Sequence[int]) -> Iterator[Case]:
    exact = preset("exact-lru")
    yield Case(RANDOM, 1, "exact-lru", exact)
    for count in streams:
        yield Case(RECORDED, count, "exact-lru", exact)
    for name, policy in EARLY.items():
        yield Case(RANDOM, 1, name, policy, beside_mmap=False)


def _recorded(one: Case, trace: Trace, folder: Path) -> Case:
    """A case with the file of its routing, where that is recorded."""
    if one.load != RECORDED:
        return one
    ids = folder / f"{one.streams}.npy"
    np.save(ids, forced_ids(trace, one.streams))
    return replace(one, forced=str(ids))


def _resident(cases: Sequence[Case], model: Model, setting: Setting, watch: Watch) -> dict[int, float]:
    """Seconds per step of each number of streams with all of the model in RAM; none where RAM does not hold it."""
    if model.geometry.file_bytes + _SPARE > ram().available:
        return {}
    forced = [one for one in cases if one.forced]
    found = {}
    with watch("computing alone", resident.STEPS * len(forced), "steps") as advance:
        resident.read_into_cache(setting.model)
        for one in forced:
            assert one.forced is not None
            found[one.streams] = resident.resident_step(
                setting.model, one.streams, one.n_ctx, setting.threads, one.forced, advance
            )
    case.drop_pages(setting.model)
    return found


def _run(
    one: Case,
    setting: Setting,
    model: Model,
    limits: Limits,
    trace: Trace,
    alone: dict[int, float],
    watch: Watch,
) -> Result:
    with watch(one.name, case.n_steps(setting.effort), "rounds") as advance:
        outcome = case.run(one, setting, advance)
    slots = outcome.streamed.described.get("slots")
    if slots is None or one.policy != preset("exact-lru"):
        return Result(outcome, None)
    said = predict(model, limits, one.streams, slots, one.n_ctx, trace if one.forced else None)
    side = outcome.streamed
    steps = sum(len(found.seconds) for found in side.rounds)
    if said is None or not one.forced or not steps:
        return Result(outcome, said)
    missed = Missed(*replayed_misses(trace, one.streams, slots, side.warmed, steps))
    return Result(outcome, refine(said, model, limits, one.streams, missed, alone.get(one.streams, said.compute_s)))
