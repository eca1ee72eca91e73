"""Paired differences: mean, standard error and t-based interval, with items alone or in groups (PSR paper §6.1)."""

from dataclasses import dataclass

import numpy as np

from edgemoe.stats.distributions import functions
from edgemoe.stats.vectors import Groups, Numbers, differences, sums_by_group


@dataclass(frozen=True)
class Difference:
    """A mean of paired differences (values − reference) with what it is uncertain by."""

    mean: float
    se: float
    """Standard error of the mean."""
    df: float
    """Degrees of freedom of the t distribution behind `low`, `high` and `p`."""
    low: float
    high: float
    """The interval at the level asked for: mean ± t·se."""
    p: float
    """Two-sided p-value of no difference in the mean."""
    n: int
    """Pairs."""
    units: int
    """Independent units: pairs, or groups of them."""

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2


def paired_difference(values: Numbers, reference: Numbers, level: float = 0.95) -> Difference:
    """The mean of values − reference over n pairs [n], its standard error s/√n, and the t interval with n − 1 df.

    PSR paper §6.1: "the mean paired difference, its standard error". Assumes independent pairs, and either many of them
    or differences near a normal distribution. Where all differences are one number other than 0, t is not defined: `p`
    is then the sign-flip test's 2^(1−n). Raises ValueError for fewer than 2 pairs.
    """
    found = differences(values, reference)
    return estimate(float(found.mean()), float(found.std(ddof=1)) / len(found) ** 0.5, len(found), len(found), level)


def clustered_difference(values: Numbers, reference: Numbers, groups: Groups, level: float = 0.95) -> Difference:
    """The mean over all n pairs with a cluster-robust standard error (CR1), and the t interval with G − 1 df.

    PSR paper §6.1 and Appendix A: IFEval's instructions come several to a prompt, so the prompt is the unit. CR1 is
    √(G/(G−1) · Σ_g u_g²) / n with u_g the sum of a group's deviations from the mean. Assumes independent groups, and
    many of them; within a group anything may depend on anything. Groups of one pair each give `paired_difference`.
    Raises ValueError for fewer than 2 groups.
    """
    found = differences(values, reference)
    mean = float(found.mean())
    spread = sums_by_group(found - mean, groups)
    units = len(spread)
    if units < 2:
        raise ValueError("expected at least 2 groups")
    se = 0.0 if np.ptp(found) == 0 else float(np.sqrt(units / (units - 1) * np.square(spread).sum()) / len(found))
    return estimate(mean, se, len(found), units, level)


def estimate(mean: float, se: float, n: int, units: int, level: float) -> Difference:
    """The t interval and p-value of a mean with `units` − 1 degrees of freedom."""
    special = functions()
    if not 0 < level < 1:
        raise ValueError(f"a level of {level}: expected one between 0 and 1")
    df = units - 1
    margin = float(special.stdtrit(df, (1 + level) / 2)) * se
    if se > 0:
        p = float(2 * special.stdtr(df, -abs(mean) / se))
    else:
        p = 1.0 if mean == 0 else 2.0 ** (1 - units)
    return Difference(mean, se, df, mean - margin, mean + margin, p, n, units)
