"""Latency beside divergence (PSR paper, Figure 1): KL from result files of `edgemoe eval divergence`, by configuration.

A KL belongs to a row with the same policy and slots. It was measured by the quality harness on text, so it says
something of a row only where both ran the same model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgemoe.bench.gpu.rows import Row
from edgemoe.errors import UserError
from edgemoe.policy import Policy
from edgemoe.stats import Ratio, log_ratio

STEERED, BASELINE = "psr-gated", "cache-prior"


@dataclass(frozen=True)
class Quality:
    """What result files say: KL by policy hash and slots, and of which model."""

    kl: dict[tuple[str, int], float]
    models: tuple[str, ...]


def read_quality(paths: Sequence[Path]) -> Quality:
    """Mean KL over the windows of each file. Raises `UserError` for a file that is no divergence result."""
    from edgemoe.evaluation.divergence import ALL, summarise
    from edgemoe.evaluation.results import load_results

    kl: dict[tuple[str, int], float] = {}
    models = []
    for path in paths:
        results = load_results(path)
        header = results.header
        if header.kind != "divergence" or "policy" not in header.config or "slots" not in header.config:
            raise UserError(f"{path}: not a result of edgemoe eval divergence: run that for the policies of these rows")
        lines = summarise(results)
        line = next((one for one in lines if one.domain == ALL), lines[0])
        kl[Policy(**header.config["policy"]).hash, int(header.config["slots"])] = line.kl.mean
        models.append(header.model.name)
    return Quality(kl, tuple(dict.fromkeys(models)))


@dataclass(frozen=True)
class AtEqualKl:
    """A steered row against the fastest baseline of the same KL, whose latency lies between two measured ones."""

    row: str
    share: str
    slots: int
    kl: float
    family: str
    """The baseline that is the fastest there."""
    ratio: Ratio
    """Its time over the row's: above 1 where the row is faster."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def at_equal_kl(rows: Sequence[Row]) -> list[AtEqualKl]:
    """Each psr-gated row with a KL against Cache-Prior rows of the same slots and executor.

    A family is a variant of Cache-Prior (eviction, J, scale) at several λ. In each round, its latency at the row's KL
    is interpolated, log latency over KL; where a family's KLs do not enclose the row's, it says nothing. The family
    with the lowest mean is the one to compare with.
    """
    found = []
    for row in rows:
        if row.kl is None or not _is_steered(row) or len(row.rounds) < 2:
            continue
        best: tuple[float, str, np.ndarray] | None = None
        for name, members in _families(rows, row).items():
            there = _interpolated(members, row.kl)
            if there is not None and (best is None or float(there.mean()) < best[0]):
                best = float(there.mean()), name, there
        if best is not None:
            ratio = log_ratio(best[2], row.rounds)
            found.append(AtEqualKl(row.name, row.share, row.slots, row.kl, best[1], ratio))
    return found


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
    gate = "psr-gated" if policy["gate"] == "predicted" else "psr"
    return f"{gate} n={policy['budget']} w={policy['window']}"


def _interpolated(members: Sequence[Row], kl: float) -> np.ndarray | None:  # [R] seconds
    members = sorted(members, key=lambda row: row.kl or 0.0)
    divergences = np.array([row.kl for row in members], np.float64)
    if len(members) < 2 or not divergences[0] <= kl <= divergences[-1]:
        return None
    logs = np.log(np.array([row.rounds for row in members]))  # [members, R]
    return np.exp(np.array([np.interp(kl, divergences, column) for column in logs.T]))
