"""The sign-flip permutation test, on items or on whole groups of them (PSR paper §6.1, §6.4)."""

from dataclasses import dataclass

import numpy as np

from edgemoe.stats.vectors import Groups, Numbers, differences, sums_by_group

EXACT_UNITS = 20  # up to so many units that differ, all 2^units flips are counted
RESAMPLES = 20_000
_CHUNK = 1 << 22  # signs drawn at once


@dataclass(frozen=True)
class SignFlip:
    """How often flipping signs at random gives a sum at least as far from 0."""

    units: int
    """Items or groups."""
    nonzero: int
    """Units whose sum is not 0; the others change nothing."""
    p: float
    """Two-sided."""
    exact: bool
    """Whether every flip was counted, not a sample of them."""


def sign_flip(
    values: Numbers,
    reference: Numbers,
    groups: Groups | None = None,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> SignFlip:
    """The test that values − reference [n] is symmetric about 0, by the sum of the differences.

    PSR paper §6.1: "a sign-flip permutation test on per-prompt sums"; §6.4 uses it on differences of differences. Whole
    groups flip; without `groups` every pair is its own. Assumes that units are independent and that, without an effect,
    values and reference could be exchanged. Exact for up to 20 units that differ; above, `resamples` seeded flips of
    which the observed one counts as one more: p = (1 + as extreme) / (1 + resamples).
    """
    found = differences(values, reference, at_least=1)
    sums = found if groups is None else sums_by_group(found, groups)
    weights = sums[sums != 0]
    # Equal sums that were added up in another order are still equal.
    far = abs(float(weights.sum())) - 1e-9 * float(np.abs(weights).sum())
    exact = len(weights) <= EXACT_UNITS
    p = _counted(weights, far) if exact else _sampled(weights, far, seed, resamples)
    return SignFlip(len(sums), len(weights), p, exact)


def _counted(weights: np.ndarray, far: float) -> float:
    """The share of all flips. The first unit keeps its sign: each flip and its mirror image are as extreme."""
    if not len(weights):
        return 1.0
    reached = weights[:1]
    for weight in weights[1:]:
        reached = np.concatenate((reached + weight, reached - weight))
    return float((np.abs(reached) >= far).mean())


def _sampled(weights: np.ndarray, far: float, seed: int, resamples: int) -> float:
    rng = np.random.default_rng(seed)
    total, extreme, left = float(weights.sum()), 0, resamples
    while left:
        rows = min(left, max(1, _CHUNK // len(weights)))
        bits = np.unpackbits(rng.integers(0, 256, (rows, (len(weights) + 7) // 8), dtype=np.uint8), axis=1)
        flipped = total - 2 * (bits[:, : len(weights)] @ weights)
        extreme += int((np.abs(flipped) >= far).sum())
        left -= rows
    return (1 + extreme) / (1 + resamples)
