"""Latency beside divergence (PSR paper, Figure 1): KL from result files of `edgemoe eval divergence`, by configuration.

A KL belongs to a row with the same policy and slots. It was measured by the quality harness on text, so it says
something of a row only where both ran the same model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from edgemoe.bench.gpu.limits import RESIDENT
from edgemoe.bench.gpu.rows import Row
from edgemoe.errors import UserError
from edgemoe.policy import Policy
from edgemoe.stats import Ratio, log_ratio, mean_over_tasks, paired_difference


@dataclass(frozen=True)
class Quality:
    """What result files say of policies, each by its hash and slots, and of which model."""

    kl: dict[tuple[str, int], float]
    """Mean over windows, texts counting alike."""
    models: tuple[str, ...]
    windows: dict[tuple[str, int], dict[str, np.ndarray]] = field(default_factory=dict)
    """text → KL of each of its windows, [W]; all of one order."""


def read_quality(paths: Sequence[Path]) -> Quality:
    """KL of the windows of each file, or of each JSON file in a folder.

    Raises `UserError` for a file that is no divergence result, and for results of other windows than the first one's.
    """
    from edgemoe.evaluation.results import load_results

    found, models = Quality({}, (), {}), []
    first: tuple[Path, dict[str, str]] | None = None
    for path in [file for given in paths for file in _files(given)]:
        results = load_results(path)
        header = results.header
        if header.kind != "divergence" or "policy" not in header.config or "slots" not in header.config:
            raise UserError(f"{path}: not a result of edgemoe eval divergence: run that for the policies of these rows")
        counted = {name: task.questions for name, task in header.tasks.items() if task.in_mean}
        first = first or (path, counted)
        if counted != first[1]:
            raise UserError(f"{path}: measured on other windows than {first[0]}: KL is compared on the same ones")
        key = Policy(**header.config["policy"]).hash, int(header.config["slots"])
        found.windows[key] = {
            name: np.array([item.metrics["kl"] for item in results.of(name)], np.float64) for name in sorted(counted)
        }
        found.kl[key] = float(np.mean([values.mean() for values in found.windows[key].values()]))
        models.append(header.model.name)
    return replace(found, models=tuple(dict.fromkeys(models)))


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(path.glob("*.json"))
    if not found:
        raise UserError(f"{path}: no result of edgemoe eval divergence in this folder")
    return found


@dataclass(frozen=True)
class AtEqualKl:
    """A steered row against the fastest baseline of the same KL, whose latency lies between two measured ones."""

    row: str
    share: str
    slots: int
    kl: float
    family: str
    """The baseline that is the fastest there."""
    between: tuple[str, str]
    """Its rows on both sides of this KL."""
    between_kl: tuple[float, float]
    families: dict[str, float]
    """Mean seconds per token of every family that reaches this KL, at this KL."""
    ratio: Ratio
    """Its time over the row's: above 1 where the row is faster. The interval is over rounds: that of the clock."""
    with_kl: tuple[float, float] | None
    """The interval that also holds what KL is uncertain by, over its windows; None where their KLs are not known."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class _There:
    """A family at a KL, between two of its rows: what copies cost is a power of KL there."""

    name: str
    rows: tuple[Row, Row]
    weight: float
    """Of the second row."""
    floor: np.ndarray  # [R] seconds, of everything resident

    @property
    def _logs(self) -> tuple[np.ndarray, ...]:  # [R] of each row: of its seconds beyond the floor
        return tuple(np.log(np.array(row.rounds) - self.floor) for row in self.rows)

    @property
    def above(self) -> np.ndarray:  # [R] seconds beyond the floor
        low, high = self._logs
        return np.exp((1 - self.weight) * low + self.weight * high)

    @property
    def times(self) -> np.ndarray:  # [R] seconds
        return self.floor + self.above

    @property
    def slope(self) -> float:
        """d log time / d log KL."""
        low, high = self._logs
        apart = np.log((self.rows[1].kl or 1.0) / (self.rows[0].kl or 1.0))
        return float(((high - low) / apart * self.above / self.times).mean())


def at_equal_kl(rows: Sequence[Row], quality: Quality | None = None) -> list[AtEqualKl]:
    """Each psr-gated row with a KL against Cache-Prior rows of the same slots and executor.

    A family is a variant of Cache-Prior (eviction, J, scale) at several λ. In each round, its latency at the row's KL
    is interpolated between its two nearest rows: the logarithm of the time beyond everything resident, which follows
    the copies, over log KL. Where a family's KLs do not enclose the row's, it says nothing. The family with the lowest
    mean is the one to compare with. quality: the windows' KLs.
    """
    found = []
    for row in rows:
        if not row.kl or not _is_steered(row) or len(row.rounds) < 2:
            continue
        families, floor = _families(rows, row), _floor(rows, row)
        there = [at for name, members in families.items() if (at := _between(name, members, row.kl, floor))]
        if not there:
            continue
        best = min(there, key=lambda at: float(at.times.mean()))
        times = {at.name: float(at.times.mean()) for at in there}
        low, high = best.rows
        found.append(
            AtEqualKl(
                row.label, row.share, row.slots, row.kl, best.name, (low.label, high.label),
                (float(low.kl or 0.0), float(high.kl or 0.0)), dict(sorted(times.items(), key=lambda one: one[1])),
                log_ratio(best.times, row.rounds), None if quality is None else _with_kl(row, best, quality),
            )
        )  # fmt: skip
    return found


def _with_kl(row: Row, best: _There, quality: Quality) -> tuple[float, float] | None:
    """The 95% interval of the ratio from two independent sources: the rounds, and the KLs that are interpolated.

    A KL that is off by a share δ moves the log ratio by slope · δ, the row's and the two baselines' each by its weight.
    They were measured on the same windows, so each window's shares are taken together, and windows are the unit.
    """
    known = [quality.windows.get((one.policy_hash, one.slots)) for one in (row, *best.rows)]
    if any(one is None for one in known):
        return None
    parts = []
    for text in known[0] or {}:
        shares = ((one or {})[text] / (of.kl or 1.0) for one, of in zip(known, (row, *best.rows), strict=True))
        own, low, high = shares
        parts.append(paired_difference(own, (1 - best.weight) * low + best.weight * high))
    clock, divergence = paired_difference(np.log(best.times), np.log(row.rounds)), mean_over_tasks(parts)
    moved = replace(clock, mean=0.0, se=abs(best.slope) * divergence.se, df=divergence.df)
    half = mean_over_tasks([clock, moved])  # of independent parts: their sum is twice that
    return float(np.exp(2 * half.low)), float(np.exp(2 * half.high))


def _is_steered(row: Row) -> bool:
    return row.policy["routing"] == "cache-prior" and row.policy["gate"] == "predicted"


def _families(rows: Sequence[Row], beside: Row) -> Mapping[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        plain = row.policy["routing"] == "cache-prior" and row.policy["prefetch"] == "none"
        same = (row.slots, row.executor, len(row.rounds)) == (beside.slots, beside.executor, len(beside.rounds))
        if plain and same and row.kl is not None:
            found.setdefault(family_of(row.policy), []).append(row)
    return found


def family_of(policy: Mapping[str, Any]) -> str:
    """What a row varies λ of."""
    if policy["routing"] == "exact":
        return "exact" if policy["prefetch"] == "none" else "exact, prefetch"
    if policy["routing"] == "speculative":
        return "speculative"
    if policy["prefetch"] == "none":
        return f"cache-prior {policy['eviction']} J={policy['top_j']}" + (
            ", running" if policy["scale"] == "running" else ""
        )
    steered = "psr-gated" if policy["gate"] == "predicted" else "psr"
    steered += "" if policy["eviction"] == "score" else f" {policy['eviction']}"
    steered += f" J={policy['top_j']}" if policy["top_j"] else ""
    return f"{steered} n={policy['budget']} w={policy['window']}"


def _floor(rows: Sequence[Row], beside: Row) -> np.ndarray:  # [R] seconds
    """Everything resident on the same executor; nothing where that was not run."""
    for row in rows:
        if row.name == RESIDENT and (row.executor, len(row.rounds)) == (beside.executor, len(beside.rounds)):
            return np.array(row.rounds)
    return np.zeros(len(beside.rounds))


def _between(name: str, members: Sequence[Row], kl: float, floor: np.ndarray) -> _There | None:
    """None where the members' KLs do not enclose this one."""
    members = sorted(members, key=lambda row: row.kl or 0.0)
    for low, high in pairwise(members):
        bottom, top = low.kl or 0.0, high.kl or 0.0
        if 0 < bottom <= kl <= top and bottom < top:
            above = all((np.array(row.rounds) > floor).all() for row in (low, high))  # a CPU's clock may say otherwise
            weight = float(np.log(kl / bottom) / np.log(top / bottom))
            return _There(name, (low, high), weight, floor if above else np.zeros_like(floor))
    return None
