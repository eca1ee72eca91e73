"""`edgemoe bench gpu`: the PSR paper's latency protocol (§6.1), every row beside its physical limits, all in one run.

from edgemoe.bench.gpu.run import Settings, bench_gpu
report = bench_gpu(Settings(geometry="olmoe-1b-7b", trace=Path("scores.npz"), seconds=120))
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf
from pathlib import Path
from typing import Any

import torch

from edgemoe.bench.gpu.against import Split
from edgemoe.bench.gpu.choices import DEFAULT, parse_policies
from edgemoe.bench.gpu.clocks import CPU, DEVICE, EXECUTORS, Arm
from edgemoe.bench.gpu.determinism import Run, determinism
from edgemoe.bench.gpu.frontier import AtEqualKl, Quality, at_equal_kl, read_quality
from edgemoe.bench.gpu.generation import Generated, generate
from edgemoe.bench.gpu.limits import RESIDENT, Far, Rates, measure_far, measure_rates, resident_arm
from edgemoe.bench.gpu.measure import Ended, Timed, prepare, rounds
from edgemoe.bench.gpu.pool import Pool
from edgemoe.bench.gpu.prompts import LONGEST, Prompted, arms_prompted, prompted
from edgemoe.bench.gpu.rows import Beside, Row, beside, executors_beside, rows_of
from edgemoe.bench.gpu.subject import Subject, check_device, model_subject, replayed_subject
from edgemoe.errors import UserError
from edgemoe.gpu_offload.shape import Shape
from edgemoe.gpu_offload.weights import DTYPES
from edgemoe.policy import Policy
from edgemoe.progress import Advance, no_progress
from edgemoe.units import Residency

Watch = Callable[[str, int, str], AbstractContextManager[Advance]]
DEFAULT_GEOMETRY = "olmoe-1b-7b"
_RESERVE = 0.2  # of the time that was given: for what follows the rounds


@dataclass(frozen=True)
class Settings:
    """What is measured. `model` is a GGUF file, a safetensors folder or a Hugging Face name, run on `texts`; without
    one, random weights of `geometry` are run by the recorded routing of `trace` (default: the demo model's)."""

    model: Path | None = None
    geometry: str = DEFAULT_GEOMETRY
    trace: Path | None = None
    texts: tuple[Path, ...] = ()
    calibration: Path | None = None
    device: str = "cuda"
    dtype: str = "bfloat16"
    policies: dict[str, Policy] = field(default_factory=lambda: parse_policies(DEFAULT))
    residencies: tuple[str, ...] = ("50%", "25%")
    executors: tuple[str, ...] = ()
    """Default: that of the device."""
    rounds: int = 3
    windows: int = 4
    tokens: int = 256
    generate: int = 64
    """Tokens of free generation behind each prompt; 0 leaves it out."""
    prompt: int | None = None
    """Tokens of the prompts that are timed, at most 512; 0 leaves them out. Default: 512, on the CPU 64."""
    determinism: int = 48
    """Tokens decoded in every way of moving bytes; 0 leaves it out."""
    quality: tuple[Path, ...] = ()
    seconds: float | None = None
    """Rounds stop, and what follows them is left out, where this would be passed."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("rounds", "windows", "tokens"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name} {getattr(self, name)}: expected at least 1")
        if self.tokens < 4:
            raise UserError(f"--tokens {self.tokens}: expected at least 4")
        if self.prompt is not None and self.prompt and not 2 <= self.prompt <= LONGEST:
            raise UserError(f"--prompt {self.prompt}: expected 2 to {LONGEST}, or 0")
        unknown = [name for name in self.executors if name not in EXECUTORS]
        if unknown:
            raise UserError(f"--executors {unknown[0]}: expected {', '.join(EXECUTORS)}")
        if self.dtype not in DTYPES:
            raise UserError(f"--dtype {self.dtype}: expected {' or '.join(DTYPES)}")
        if self.seconds is not None and not 0 < self.seconds < inf:
            raise UserError(f"--seconds {self.seconds:g}: expected a number above 0")
        if not self.policies or not self.residencies:
            raise UserError("nothing to measure: give at least one policy and one residency")
        for text in self.residencies:
            Residency.parse(text)

    def slots(self, shape: Shape) -> dict[str, int]:
        """Slots per layer by residency. Raises `UserError` for more than the shape has experts, and for none."""
        layer = shape.n_layers * shape.expert_values * DTYPES[self.dtype].itemsize
        return {text: Residency.parse(text).slots(shape.n_experts, layer) for text in self.residencies}


@dataclass
class Report:
    """All of a run, as far as it came."""

    subject: str
    fingerprint: str
    notes: tuple[str, ...]
    device: str
    card: str
    versions: dict[str, str]
    domains: tuple[str, ...]
    window_tokens: int
    expert_bytes: int
    n_experts: int
    rates: Rates | None = None
    rows: list[Row] = field(default_factory=list)
    beside: list[Beside] = field(default_factory=list)
    equal_kl: list[AtEqualKl] = field(default_factory=list)
    far: Far | None = None
    load_s: float | None = None
    prompts: list[Prompted] = field(default_factory=list)
    generated: list[Generated] = field(default_factory=list)
    determinism: list[Run] = field(default_factory=list)
    quality_models: tuple[str, ...] = ()
    ended: Ended = field(default_factory=lambda: Ended(0))
    against: list[Split] = field(default_factory=list)
    interrupted: bool = False


def bench_gpu(
    settings: Settings,
    watch: Watch | None = None,
    saved: Callable[[Report], None] | None = None,
) -> Report:
    """Measure. `watch(what, total, unit)` gives the progress callback of a part; `saved` is told of the report after
    every round and part.

    An interrupt after the first measurement ends the run and keeps what was measured (`Report.interrupted`). Raises
    `UserError`, one line, for what cannot be run at all; a row that cannot be run says so in its `problem`.
    """
    watch, saved = watch or _unwatched, saved or _unsaved
    check_device(settings.device)
    quality = read_quality(settings.quality) if settings.quality else Quality({}, ())
    until = None if settings.seconds is None else time.monotonic() + settings.seconds
    subject = _subject(settings, watch)
    pool = Pool(subject)
    try:
        report = _report(subject, quality)
        try:
            _measure(settings, subject, pool, quality, report, until, watch, saved)
        except RuntimeError as error:
            _failed(report, error)
        return report
    finally:
        with suppress(RuntimeError):  # a GPU that has failed frees nothing
            pool.close()
        subject.close()


def _failed(report: Report, error: RuntimeError) -> None:
    """The GPU gave up (an illegal access, say): what was measured before stays. Raises whatever else it is."""
    if "CUDA" not in str(error):
        raise error
    why = f"the GPU failed: {str(error).splitlines()[0]}"
    if not any(row.rounds for row in report.rows):
        raise UserError(f"{why}: start again, with fewer rows or --device cpu") from error
    report.ended = Ended(report.ended.rounds, why)


def _measure(
    settings: Settings,
    subject: Subject,
    pool: Pool,
    quality: Quality,
    report: Report,
    until: float | None,
    watch: Watch,
    saved: Callable[[Report], None],
) -> None:
    arms = arms_of(settings, subject)
    report.rates = measure_rates(subject.weights, subject.device)
    _far(subject, report)
    with watch("preparing the rows", len(arms), "rows") as advance:
        timed = prepare(subject, pool, arms, advance)
    problems = [one.problem for one in timed if one.arm.name != RESIDENT]
    if all(problems):
        raise UserError(f"no row can run: {problems[0]}")

    def note(done: int) -> None:
        report.ended = Ended(done)
        _fill(report, subject, timed, quality)
        saved(report)

    total = settings.rounds * len(arms) * sum(len(window) for window in subject.windows)
    with watch("decoding", total, "tokens") as advance:
        further = settings.generate or settings.determinism or settings.prompt != 0
        stop = until - _RESERVE * (settings.seconds or 0) if until is not None and further else until
        ended = rounds(subject, pool, timed, settings.rounds, stop, note, advance)
    note(ended.rounds)
    report.ended, report.interrupted = ended, ended.why == "interrupted"
    if not report.interrupted:
        try:
            _further(settings, subject, pool, timed, quality, report, until, watch, saved)
        except KeyboardInterrupt:
            report.interrupted = True


def _further(
    settings: Settings,
    subject: Subject,
    pool: Pool,
    timed: Sequence[Timed],
    quality: Quality,
    report: Report,
    until: float | None,
    watch: Watch,
    saved: Callable[[Report], None],
) -> None:
    """What follows the rounds, as long as there is time."""

    def there_is_time() -> bool:
        return until is None or time.monotonic() < until

    going = [one.arm for one in timed if not one.problem]
    if settings.generate and there_is_time():
        with watch("free generation", len(going), "rows") as advance:
            report.generated = generate(subject, pool, going, settings.generate, advance, until)
        saved(report)
    pool.close()  # the rest makes executors of its own
    assert report.rates is not None
    # Once more, a second's work whatever the time: a GPU that was idle for long is slower at first.
    report.rates = report.rates.or_faster(measure_rates(subject.weights, subject.device))
    if there_is_time():
        _far(subject, report)
    _fill(report, subject, timed, quality)
    saved(report)
    length = settings.prompt if settings.prompt is not None else LONGEST if subject.device == "cuda" else 64
    if length and there_is_time():
        arms = arms_prompted(going, subject)
        with watch("prompts", len(arms), "rows") as advance:
            report.prompts = prompted(subject, arms, length, report.rates.link, advance, until)
        saved(report)
    if settings.determinism and there_is_time():
        slots = settings.slots(subject.weights.shape)[settings.residencies[-1]]
        with watch("determinism", 20, "runs") as advance:
            report.determinism = determinism(subject, slots, report.rates.link, settings.determinism, advance, until)
        saved(report)


def _far(subject: Subject, report: Report) -> None:
    if subject.device != "cuda":
        return
    assert report.rates is not None
    try:
        report.far = measure_far(subject, report.rates, 128)
    except (UserError, torch.cuda.OutOfMemoryError) as error:
        if report.far is None:
            why = str(error).splitlines()[0]
            report.notes += (f"everything resident at a context of 1024 was not measured: {why}",)
    torch.cuda.empty_cache()


def arms_of(settings: Settings, subject: Subject) -> list[Arm]:
    """Every policy at every residency on every executor, behind everything resident on each."""
    executors = settings.executors or (CPU if subject.device == "cpu" else DEVICE,)
    slots = settings.slots(subject.weights.shape)
    arms = [replace(resident_arm(subject), executor=executor) for executor in executors]
    for share, executor, (name, policy) in product(settings.residencies, executors, settings.policies.items()):
        arms.append(Arm(name, policy.completed(subject.estimated), slots[share], executor, share))
    return arms


def _fill(report: Report, subject: Subject, timed: Sequence[Timed], quality: Quality) -> None:
    assert report.rates is not None
    report.rows = rows = rows_of(subject, timed, report.rates, quality.kl)
    report.beside = beside(rows) + executors_beside(rows)
    report.equal_kl = at_equal_kl(rows, quality)


def _subject(settings: Settings, watch: Watch) -> Subject:
    common: dict[str, Any] = {
        "device": settings.device,
        "dtype": settings.dtype,
        "windows": settings.windows,
        "tokens": settings.tokens,
        "watch": watch,
        "accept": settings.slots,
    }
    if settings.model is not None:
        return model_subject(settings.model, texts=settings.texts, calibration=settings.calibration, **common)
    return replayed_subject(settings.geometry, trace=settings.trace, seed=settings.seed, **common)


def _report(subject: Subject, quality: Quality) -> Report:
    return Report(
        subject=subject.name,
        fingerprint=subject.fingerprint,
        notes=subject.notes,
        device=subject.device,
        card=_card(subject.device),
        versions=_versions(subject.device),
        domains=subject.domains,
        window_tokens=subject.longest,
        expert_bytes=subject.weights.arena.expert_bytes,
        n_experts=subject.weights.shape.n_experts,
        load_s=subject.load_s,
        quality_models=quality.models,
    )


def _card(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    import platform

    return f"CPU ({platform.machine()}, {torch.get_num_threads()} threads)"


def _versions(device: str) -> dict[str, str]:
    from edgemoe import __version__

    found = {"edgemoe": __version__, "torch": torch.__version__}
    if device == "cuda":
        import triton

        found |= {"triton": triton.__version__, "cuda": str(torch.version.cuda)}
    return found


def _unwatched(_what: str, _total: int, _unit: str) -> AbstractContextManager[Advance]:
    return nullcontext(no_progress)


def _unsaved(_report: Report) -> None:
    pass
