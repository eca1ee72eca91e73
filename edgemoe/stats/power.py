"""The smallest effect that a sample could have detected: what "not significant" leaves open (PSR paper §6.1, §6.4).

The paper states the half-width of its intervals as the resolution of a check (±3.2–4.8 points). These say the same of
a test: the true effect that it would have found with 80% probability.
"""

from collections.abc import Callable

import numpy as np

from edgemoe.stats.distributions import functions

POWER = 0.8
_HALVINGS = 60
_NODES = 400
_NEGLIGIBLE = 1e-10  # probability of the discordant counts that are left out


def smallest_difference(se: float, df: float, alpha: float = 0.05, power: float = POWER) -> float | None:
    """The true mean difference that a two-sided paired t-test at α finds with probability `power`.

    se: standard error of the mean difference, df: its degrees of freedom, both of a `Difference` (clustered or not).
    By the noncentral t distribution; 2.80·se for large samples at 5%. Assumes that the true standard error is the
    observed one. None where nothing varied (se = 0): such a sample says nothing of its own resolution.
    """
    special = functions()
    _check(alpha, power)
    if df <= 0 or se < 0:
        raise ValueError(f"a standard error of {se} with {df} degrees of freedom")
    if se == 0:
        return None
    critical = float(special.stdtrit(df, 1 - alpha / 2))
    # The noncentral t, by Gauss–Legendre over the spread that a sample may show; nctdtr is wrong at few degrees.
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    reach = critical * np.sqrt(special.chdtri(df, (1 - nodes) / 2) / df)

    def found(shift: float) -> float:
        return float(weights @ (special.ndtr(shift - reach) + special.ndtr(-shift - reach))) / 2

    top = critical + 10.0
    while found(top) < power:
        top *= 2
    return se * _where(found, power, top)


def smallest_discordance(n: int, discordant: int, alpha: float = 0.05, power: float = POWER) -> float | None:
    """The true difference in accuracy that an exact McNemar test at α on n questions finds with probability `power`.

    Of the questions a share discordant / n is taken to be answered differently, as observed; an effect larger than that
    share needs more, all of them one way. So 0 of 40 discordant still says how large a loss could have hidden. The
    number of discordant questions is Binomial(n, share), and the test is the exact one at each. Assumes independent
    questions. None where n is too small for any effect.
    """
    _check(alpha, power)
    if not 0 <= discordant <= n or n < 1:
        raise ValueError(f"{discordant} discordant questions of {n}")
    share = discordant / n

    def found(effect: float) -> float:
        return _mcnemar_power(n, max(share, effect), effect, alpha)

    return _where(found, power, 1.0) if found(1.0) >= power else None


def _mcnemar_power(n: int, share: float, effect: float, alpha: float) -> float:
    """P(the exact test rejects), over the discordant count and then over how many of them are won."""
    special = functions()
    spread = 8 * (n * share * (1 - share)) ** 0.5 + 10
    counts = np.arange(max(0, int(n * share - spread)), min(n, int(n * share + spread)) + 1)
    chance = _binomial(n, counts, share)
    counts, chance = counts[chance > _NEGLIGIBLE], chance[chance > _NEGLIGIBLE]
    few = _critical(counts, alpha)
    some = few >= 0
    counts, chance, few = counts[some], chance[some], few[some]
    won = min(1.0, (1 + effect / share) / 2) if share else 0.5
    rejected = special.bdtr(few, counts, won) + special.bdtr(few, counts, 1 - won)
    return float((chance * rejected).sum())


def _critical(counts: np.ndarray, alpha: float) -> np.ndarray:
    """The most wins (or losses) of so many discordant at which the two-sided test still rejects; −1 where none is."""
    special = functions()
    # The normal quantile is within two of it; the exact tail decides.
    guess = np.floor(counts / 2 + special.ndtri(alpha / 2) * np.sqrt(counts) / 2).astype(np.int64)
    best = np.full(len(counts), -1)
    for step in range(-3, 4):
        few = np.clip(guess + step, 0, counts)
        best = np.where(special.bdtr(few, counts, 0.5) <= alpha / 2, np.maximum(best, few), best)
    return best


def _binomial(n: int, counts: np.ndarray, share: float) -> np.ndarray:
    special = functions()
    ways = special.gammaln(n + 1) - special.gammaln(counts + 1) - special.gammaln(n - counts + 1)
    return np.exp(ways + special.xlogy(counts, share) + special.xlog1py(n - counts, -share))


def _where(found: Callable[[float], float], power: float, top: float) -> float:
    """Where a growing function reaches `power`, between 0 and `top`, by bisection."""
    low, high = 0.0, top
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if found(middle) >= power else (middle, high)
    return high


def _check(alpha: float, power: float) -> None:
    if not 0 < alpha < power < 1:
        raise ValueError(f"expected 0 < α < power < 1, found α {alpha} and power {power}")
