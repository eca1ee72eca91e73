"""Latency ratios: a paired t-test on logarithms over repetitions (PSR paper §6.1)."""

from dataclasses import dataclass

import numpy as np

from edgemoe.stats.difference import paired_difference
from edgemoe.stats.vectors import Numbers, numbers


@dataclass(frozen=True)
class Ratio:
    """values over reference, as a geometric mean over paired repetitions."""

    ratio: float
    low: float
    high: float
    p: float
    """Two-sided, of a ratio of 1."""
    n: int
    """Repetitions."""


def log_ratio(values: Numbers, reference: Numbers, level: float = 0.95) -> Ratio:
    """The ratio values / reference [n] with its t interval and p-value, n − 1 degrees of freedom, on a log scale.

    PSR paper §6.1: "a paired t-test on log latency over repetitions, which treats the repetition, not the token, as the
    unit". Pair repetition r of both, timed in the same round; one number (a mean per token, say) for each. Assumes that
    rounds are independent and log ratios near normal. Raises ValueError for fewer than 2, or for a number not above 0.
    """
    ours, theirs = numbers(values, 2), numbers(reference, 2)
    if (ours <= 0).any() or (theirs <= 0).any():
        raise ValueError("a ratio needs numbers above 0")
    found = paired_difference(np.log(ours), np.log(theirs), level)
    ratio, low, high = (float(np.exp(bound)) for bound in (found.mean, found.low, found.high))
    return Ratio(ratio, low, high, found.p, found.n)
