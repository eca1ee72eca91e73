"""Find the operating point of a model on its user's own text: the fewest copies within a divergence budget.

The first part of each text calibrates, windows of the rest are measured, so that no measured token entered a warm set,
a bonus scale or a token prior (PSR paper §6.1, "Configuration selection"). A coarse grid of λ, n, w and gates is run in
one pass that shares exact routing; then λ is refined where the KL of the best families crosses the budget.

Every copy moves one expert, over the link or from the disk, so copies and bytes rank policies alike. Divergence and
perplexity are gates, and exact routing, which passes them always, is a candidate: output that has degenerated cannot
win by routing to what is resident.
"""

import hashlib
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgemoe.calibration import load_calibration
from edgemoe.errors import UserError
from edgemoe.evaluation.divergence import Estimate, Extent, Watch
from edgemoe.evaluation.identity import model_id
from edgemoe.evaluation.results import ModelId
from edgemoe.evaluation.subject import Subject
from edgemoe.evaluation.subjects import Runs, check_model, default_engine, subject
from edgemoe.evaluation.windows import text_windows
from edgemoe.gpu_offload.vocabulary import open_vocabulary
from edgemoe.model import Model, read_model
from edgemoe.policy import Policy, preset
from edgemoe.policy.policy_file import PolicyFile
from edgemoe.stats import mean_over_tasks, paired_difference
from edgemoe.tracing.texts import Source, read_sources
from edgemoe.units import Residency

REFINED_FAMILIES = 3
STEPS = 3  # parts that the bracket of a refined family is cut into
CALIBRATING = 0.5  # share of each text


@dataclass(frozen=True)
class Grid:
    """The coarse grid. A budget of 0 is Cache-Prior without prefetch; budgets above a window are left out."""

    lams: tuple[float, ...] = (0.05, 0.1, 0.2, 0.3)
    budgets: tuple[int | str, ...] = (0, 1)
    windows: tuple[int, ...] = (8,)
    gates: tuple[str, ...] = ("none", "predicted")
    eviction: str = "score"

    def policies(self) -> list[Policy]:
        """Exact routing first; each policy once."""
        found = [Policy(), Policy(eviction="score")]
        for lam in self.lams:
            for budget in self.budgets:
                if budget == 0:
                    found.append(preset("cache-prior", lam=lam, eviction=self.eviction))
                    continue
                for window in self.windows:
                    if isinstance(budget, int) and budget > window:
                        continue
                    changes: dict[str, Any] = {"lam": lam, "budget": budget, "window": window}
                    found += [preset("psr", gate=gate, eviction=self.eviction, **changes) for gate in self.gates]
        return list(dict.fromkeys(found))


@dataclass(frozen=True)
class Limits:
    """What the operating point may cost on the measured text."""

    max_kl: float = 0.02  # nats: mean KL(exact ‖ steered)
    max_excess: float = 0.05  # of perplexity, as a share of the exact one

    def __post_init__(self) -> None:
        if not (math.isfinite(self.max_kl) and self.max_kl >= 0):
            raise UserError(f"--max-kl {self.max_kl:g}: expected nats from 0, like 0.02")
        if not (math.isfinite(self.max_excess) and self.max_excess >= 0):
            raise UserError(f"--max-ppl {self.max_excess:g}: expected a share of the exact perplexity, like 5%")


@dataclass(frozen=True)
class Point:
    """One policy, measured; per predicted token, counts over all layers, texts counting alike."""

    policy: Policy
    perplexity: float
    perplexity_exact: float
    excess_nll: Estimate
    kl: Estimate
    demand: float
    prefetch: float
    unused: float
    replaced: float

    @property
    def copies(self) -> float:
        return self.demand + self.prefetch

    @property
    def excess(self) -> float:
        """Of perplexity, as a share of the exact one."""
        return self.perplexity / self.perplexity_exact - 1

    def within(self, limits: Limits) -> bool:
        """Whether both gates let it through; a number that is none never does."""
        return self.kl.mean <= limits.max_kl and self.excess <= limits.max_excess

    def measured(self, expert_bytes: float) -> dict[str, float]:
        """For the policy file and --json."""
        return {
            "kl": self.kl.mean,
            "kl_half_width": self.kl.half_width,
            "perplexity": self.perplexity,
            "perplexity_exact": self.perplexity_exact,
            "excess_perplexity": self.excess,
            "copies": self.copies,
            "demand": self.demand,
            "prefetch": self.prefetch,
            "unused": self.unused,
            "replaced": self.replaced,
            "bytes_per_token": self.copies * expert_bytes,
        }


@dataclass(frozen=True)
class Tuned:
    """All points in the order in which they were measured, the one that was chosen, and its file."""

    points: tuple[Point, ...]
    chosen: Point
    file: PolicyFile
    expert_bytes: float  # mean over the MoE layers: what one copy moves
    calibrating: Mapping[str, int]  # text → its first bytes, which calibrated; empty for a calibration that was given
    windows: int


def knee(points: Sequence[Point], limits: Limits) -> Point:
    """The fewest copies within the limits; of equals the smaller KL, then the fewer demand copies.

    Raises `UserError` if nothing is within them, which cannot be where an exact policy was measured.
    """
    inside = [point for point in points if point.within(limits)]
    if not inside:
        raise UserError(f"no policy is within a KL of {limits.max_kl:g}: allow more, or measure an exact policy too")
    return min(inside, key=lambda point: (point.copies, point.kl.mean, point.demand))


def frontier(points: Sequence[Point]) -> list[Point]:
    """Points that no other beats in both KL and copies, by rising KL."""
    found: list[Point] = []
    for point in sorted(points, key=lambda p: (p.kl.mean, p.copies)):
        if math.isfinite(point.kl.mean) and (not found or point.copies < found[-1].copies):
            found.append(point)
    return found


def refined(points: Sequence[Point], limits: Limits) -> list[Policy]:
    """More λ for the families (all but λ alike) whose KL crosses the limit and that copy least within it."""
    families: dict[Policy, list[Point]] = {}
    for point in points:
        if point.policy.uses_bonus:
            families.setdefault(_with_lambda(point.policy, 0.0), []).append(point)
    brackets = []
    for family, members in families.items():
        members.sort(key=lambda point: point.policy.lam)
        inside = [point for point in members if point.within(limits)]
        low = max((point.policy.lam for point in inside), default=0.0)
        high = min((point.policy.lam for point in members if point.policy.lam > low), default=None)
        if high is not None:
            brackets.append((min((point.copies for point in inside), default=math.inf), family, low, high))
    brackets.sort(key=lambda bracket: bracket[0])
    return [
        _with_lambda(family, round(low + (high - low) * step / STEPS, 4))
        for _, family, low, high in brackets[:REFINED_FAMILIES]
        for step in range(1, STEPS)
    ]


def _with_lambda(policy: Policy, lam: float) -> Policy:
    from dataclasses import replace

    return replace(policy, lam=lam)


def tune(
    path: str | Path,
    sources: Sequence[Source],
    out: Path,
    *,
    watch: Watch,
    residency: Residency,
    limits: Limits | None = None,
    grid: Grid | None = None,
    calibration: Path | None = None,
    engine: str | None = None,
    extent: Extent | None = None,
    runs: Runs | None = None,
) -> Tuned:
    """Tune a policy for a model at a residency, and write the policy file `out`, with its calibration beside it.

    calibration: a file of `edgemoe calibrate`, made from other text than `sources`; without one, the first half of each
    text calibrates and `out` with the ending `.calib` is written too. An interrupt leaves neither. Raises `UserError`,
    one line, for what cannot be read, steered or written, and for texts that are too short.
    """
    limits, grid, extent = limits or Limits(), grid or Grid(), extent or Extent()
    runs = runs or Runs(extent.length)
    contents = read_sources(sources)
    model = read_model(path)
    check_model(model, extent.length)
    name = engine or default_engine(model.path)
    cuts = [0 if calibration else _cut(data) for data in contents]
    who, texts = _windows(model, sources, [data[cut:] for data, cut in zip(contents, cuts, strict=True)], extent)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as folder:
        known = calibration or Path(folder) / "tuned.calib"
        if calibration is None:
            heads = [data[:cut] for data, cut in zip(contents, cuts, strict=True)]
            _calibrate(model, sources, heads, known, extent.length, runs, watch)
        ran = subject(name, model, residency, known, runs)
        coarse = [ran.completed(policy) for policy in grid.policies()]
        ran.check(coarse)
        points = _measure(ran, texts, coarse, "coarse grid", watch)
        seen = {point.policy for point in points}
        more = [policy for policy in map(ran.completed, refined(points, limits)) if policy not in seen]
        if more:
            points += _measure(ran, texts, more, "refining", watch)
        chosen = knee(points, limits)
        kept = out.with_suffix(".calib")
        expert_bytes = float(np.mean(model.geometry.expert_bytes))
        described = [
            {"domain": s.domain, "file": s.path.name, "sha256": hashlib.sha256(data).hexdigest(), "calibrating": cut}
            for s, data, cut in zip(sources, contents, cuts, strict=True)
        ]
        file = PolicyFile(
            chosen.policy,
            residency.text,
            ran.slots,
            {"name": who.name, "weights": who.fingerprint},
            str(calibration.resolve()) if calibration else kept.name,
            chosen.measured(expert_bytes),
            tuple(described),
            {**ran.configuration(chosen.policy), "max_kl": limits.max_kl, "max_excess": limits.max_excess},
        )
        if calibration is None:
            load_calibration(known).save(kept)
        file.save(out)
    halves = {} if calibration else {str(s.path): cut for s, cut in zip(sources, cuts, strict=True)}
    return Tuned(tuple(points), chosen, file, expert_bytes, halves, sum(map(len, texts.values())))


def _cut(data: bytes) -> int:
    """Where the measured part of a text begins: behind a line's end, so never inside a character."""
    at = data.find(b"\n", int(len(data) * CALIBRATING)) + 1
    if not 0 < at < len(data):
        raise UserError("a text of one line cannot be split into a part that calibrates and one that is measured")
    return at


def _windows(
    model: Model, sources: Sequence[Source], contents: Sequence[bytes], extent: Extent
) -> tuple[ModelId, dict[str, list[np.ndarray]]]:
    words = open_vocabulary(model)
    try:
        return model_id(model, words), text_windows(sources, contents, words, extent.windows, extent.length)
    finally:
        words.close()


def _calibrate(
    model: Model,
    sources: Sequence[Source],
    heads: Sequence[bytes],
    out: Path,
    length: int,
    runs: Runs,
    watch: Watch,
) -> None:
    """Calibrate on the first parts of the texts: with llama.cpp for a GGUF file, under transformers for a folder."""
    if model.format == "GGUF":
        from edgemoe.tracing.calibrate import calibrate
        from edgemoe.tracing.capture import Settings

        parts = []
        for at, (source, head) in enumerate(zip(sources, heads, strict=True)):
            part = out.with_name(f"{at}-{source.path.name}")
            part.write_bytes(head)
            parts.append(Source(source.domain, part))
        calibrate(model.path, parts, out, Settings(n_ctx=length, n_threads=runs.threads), watch=watch)
        return
    from edgemoe.gpu_offload.harness.calibrate import calibrate_model
    from edgemoe.gpu_offload.harness.loading import load
    from edgemoe.gpu_offload.harness.windows import text_windows as cut_text

    loaded, tokenizer = load(model.path, dtype=runs.dtype or "bfloat16", device=runs.device or "cpu")
    windows = [window for head in heads for window in cut_text(tokenizer, head.decode(), length)]
    with watch("calibrating", sum(map(len, windows)), "tokens") as advance:
        calibrate_model(loaded, windows, advance=advance).save(out)


def _measure(
    ran: Subject,
    texts: Mapping[str, Sequence[np.ndarray]],
    policies: Sequence[Policy],
    what: str,
    watch: Watch,
) -> list[Point]:
    windows = [window for found in texts.values() for window in found]
    domains = [domain for domain, found in texts.items() for _ in found]
    cells: dict[tuple[int, str], list[dict[str, float]]] = {}

    def skip(at: int, which: int) -> bool:  # noqa: ARG001
        return False

    title = f"{what}, {len(policies)} policies"
    with watch(title, ran.work(windows, policies, skip), "tokens") as advance:
        for at, which, metrics in ran.divergences(windows, policies, skip, advance):
            cells.setdefault((which, domains[at]), []).append(metrics.means())
    return [
        point_of(policy, {domain: cells[which, domain] for domain in texts}) for which, policy in enumerate(policies)
    ]


def point_of(policy: Policy, means: Mapping[str, Sequence[Mapping[str, float]]]) -> Point:
    """A policy's point from the means of its windows, by text, as `WindowMetrics.means` gives them."""

    def estimate(metric: str, minus: str | None = None) -> Estimate:
        parts = []
        for windows in means.values():
            values = np.array([window[metric] for window in windows])
            reference = np.array([window[minus] for window in windows]) if minus else np.zeros(len(values))
            parts.append(paired_difference(values, reference))
        whole = mean_over_tasks(parts)
        return Estimate(whole.mean, whole.half_width)

    return Point(
        policy,
        float(np.exp(estimate("nll").mean)),
        float(np.exp(estimate("nll_exact").mean)),
        estimate("nll", "nll_exact"),
        estimate("kl"),
        *(estimate(name).mean for name in ("demand", "prefetch", "unused", "replaced")),
    )
