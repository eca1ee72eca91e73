"""Do two implementations of one policy choose the same experts, and if not, why (PSR paper §6.4)?

From the same scores they must decide alike, bit for bit: what each recorded is replayed through Algorithm 1. Their
scores differ in the last bits, so a near-tie may go the other way; then the caches differ, and later sets with them.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from edgemoe.policy import LogicalCache

NEAR = 0.01
"""A near-tie: candidates whose ranks differ lie closer than this share of the layer's bonus scale."""


@dataclass(frozen=True, eq=False)
class Recorded:
    """One window under one policy, from an empty cache: T tokens through L layers."""

    tokens: np.ndarray  # [T]
    executed: np.ndarray  # [L, T, k]
    scores: np.ndarray  # [L, T, E] float32
    pregate: np.ndarray | None = None  # [L, T, E] float32; of layer 0 it is not read


@dataclass(frozen=True)
class Agreement:
    """Sets of executed experts, one per token and layer. `same` + `ties` + `inherited` + `other` is `sets`."""

    sets: int
    same: int
    ties: int
    """Sets that differ by near-ties, the resident experts in question being the same."""
    inherited: int
    """Sets that differ where an expert in question is resident in one cache only: an earlier near-tie decided that."""
    other: int
    replayed: int
    """Sets of either implementation that Algorithm 1 does not give from the scores that it recorded: 0."""
    gap: float
    """The 95th percentile of the gaps of sets in `ties` and `other`, as a share of the bonus scale."""

    @property
    def share(self) -> float:
        return self.same / self.sets

    @property
    def explained(self) -> float:
        """Of the sets that differ, the share that near-ties account for, at once or by what they left in the cache."""
        return (self.ties + self.inherited) / max(self.sets - self.same, 1)


def agreement(pairs: Iterable[tuple[Recorded, Recorded]], cache: LogicalCache, delta: np.ndarray) -> Agreement:
    """Compare what two implementations recorded of the same windows. cache: of their policy, geometry and calibration.

    delta: Δ̄ [L], which gaps are measured in; a bonus must be fixed. For exact routing and routing by bonus.
    """
    delta = delta.astype(np.float64)
    bonus = (cache.policy.lam if cache.policy.routing == "cache-prior" else 0.0) * delta
    counts = dict.fromkeys(("sets", "same", "ties", "inherited", "other", "replayed"), 0)
    gaps: list[float] = []
    for ours, theirs in pairs:
        (a, resident_a), (b, resident_b) = _replay(ours, cache), _replay(theirs, cache)
        for side, found in ((ours, a), (theirs, b)):
            counts["replayed"] += int((_chosen(side) != found).any(axis=2).sum())
        counts["sets"] += a.shape[0] * a.shape[1]
        differ = (a != b).any(axis=2)
        counts["same"] += int((~differ).sum())
        for layer, t in zip(*np.nonzero(differ), strict=True):
            swapped = a[layer, t] != b[layer, t]
            if bonus[layer] and (resident_a[layer, t] != resident_b[layer, t])[swapped].any():
                counts["inherited"] += 1
                continue
            ranked = ours.scores[layer, t] + bonus[layer] * resident_a[layer, t]
            gap = float(np.ptp(ranked[swapped])) / delta[layer]
            gaps.append(gap)
            counts["ties" if gap < NEAR else "other"] += 1
    return Agreement(**counts, gap=float(np.quantile(gaps, 0.95)) if gaps else 0.0)


def _chosen(side: Recorded) -> np.ndarray:  # [L, T, E] bool
    found = np.zeros(side.scores.shape, np.bool_)
    np.put_along_axis(found, side.executed.astype(np.int64), True, axis=2)
    return found


def _replay(side: Recorded, cache: LogicalCache) -> tuple[np.ndarray, np.ndarray]:
    """[L, T, E] bool: what Algorithm 1 executes from these scores, and which experts are resident as it chooses."""
    executed, resident = np.zeros((2, *side.scores.shape), np.bool_)
    cache.reset()
    for t, token in enumerate(side.tokens.tolist()):
        cache.begin_token(token)
        for layer in range(len(side.scores)):
            if layer and side.pregate is not None and cache.policy.needs_pregate:
                cache.prefetch(layer, side.pregate[layer, t])
            resident[layer, t] = cache.state.slot_of[layer] >= 0
            executed[layer, t, cache.select(layer, side.scores[layer, t]).experts] = True
    return executed, resident
