"""What an operating point is: the fewest copies within a divergence budget, of a grid of λ, n, w and gates.

Copies are counted as the engine makes them; each moves one expert, over the link or from the disk. Divergence and
perplexity are gates, and exact routing, which passes them always, is a candidate: output that has degenerated cannot
win by routing to what is resident. `edgemoe.evaluation.tuning` measures the points.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from edgemoe.errors import UserError
from edgemoe.evaluation.divergence import Estimate
from edgemoe.policy import Policy, preset
from edgemoe.stats import mean_over_tasks, paired_difference

REFINED_FAMILIES = 3
STEPS = 3  # parts that the bracket of a refined family is cut into


@dataclass(frozen=True)
class Grid:
    """The coarse grid. A budget of 0 is Cache-Prior without prefetch; budgets above a window are left out, and windows
    above the slots of a layer."""

    lams: tuple[float, ...] = (0.05, 0.1, 0.2, 0.3)
    budgets: tuple[int | str, ...] = (0, 1)
    windows: tuple[int, ...] = (4, 8)
    gates: tuple[str, ...] = ("none", "predicted")
    eviction: str = "score"

    def policies(self, slots: int) -> list[Policy]:
        """Exact routing first; each policy once. Raises `UserError` where nothing that steers is left."""
        exact = [Policy(), Policy(eviction="score")]
        found = []
        for lam in self.lams:
            for budget in self.budgets:
                if budget == 0:
                    found.append(preset("cache-prior", lam=lam, eviction=self.eviction))
                    continue
                for window in self.windows:
                    if window > slots or (isinstance(budget, int) and budget > window):
                        continue
                    changes: dict[str, Any] = {"lam": lam, "budget": budget, "window": window}
                    found += [preset("psr", gate=gate, eviction=self.eviction, **changes) for gate in self.gates]
        if not found:
            raise UserError(
                f"--budget and --window: no budget of {', '.join(map(str, self.budgets))} fits a window of "
                f"{', '.join(map(str, self.windows))} and {slots} slots per layer: give smaller ones"
            )
        return list(dict.fromkeys([*exact, *found]))


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
    copied_bytes: float
    """Of all copies of a token: each moves an expert of its layer."""

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

    def measured(self) -> dict[str, float]:
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
            "bytes_per_token": self.copied_bytes,
        }


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
    return replace(policy, lam=lam)


def point_of(policy: Policy, means: Mapping[str, Sequence[Mapping[str, float]]]) -> Point:
    """A policy's point from the means of its windows, by text, as `WindowMetrics.means` gives them, and the
    `copied_bytes` of a token."""

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
        *(estimate(name).mean for name in ("demand", "prefetch", "unused", "replaced", "copied_bytes")),
    )
