"""The smallest detectable effect: against statsmodels, by simulation, and by counting."""

import numpy as np
import pytest
from scipy import integrate
from scipy import stats as scipy_stats
from statsmodels.stats.power import TTestPower

from edgemoe.errors import UserError
from edgemoe.stats import holm, paired_difference, smallest_difference, smallest_discordance
from edgemoe.stats.mcnemar import balance_p


@pytest.mark.parametrize("df", [5, 30, 100])
@pytest.mark.parametrize(("alpha", "power"), [(0.05, 0.8), (0.01, 0.9)])
def test_means_are_those_of_statsmodels(df: int, alpha: float, power: float) -> None:
    effect = smallest_difference(1.0, df, alpha, power)
    assert effect is not None
    assert TTestPower().power(effect / (df + 1) ** 0.5, df + 1, alpha) == pytest.approx(power, abs=1e-4)


@pytest.mark.parametrize("df", [1, 2, 7, 5000])
def test_means_are_those_of_the_integral(df: int) -> None:
    """Where the noncentral t of scipy, and so of statsmodels, is wrong in the third digit: over the observed spread."""
    effect, critical = smallest_difference(2.0, df), scipy_stats.t.ppf(0.975, df)

    def found(quantile: float) -> float:
        reach = critical * (scipy_stats.chi2.ppf(quantile, df) / df) ** 0.5
        return scipy_stats.norm.sf(reach - effect / 2) + scipy_stats.norm.cdf(-reach - effect / 2)

    assert integrate.quad(found, 0, 1, limit=200)[0] == pytest.approx(0.8, abs=1e-5)


def test_large_samples_are_the_normal_rule() -> None:
    assert smallest_difference(0.5, 1e6) == pytest.approx(0.5 * (scipy_stats.norm.ppf([0.975, 0.8]).sum()), rel=1e-4)
    assert smallest_difference(0.0, 50) is None


def test_a_t_test_finds_it_four_times_in_five() -> None:
    rng = np.random.default_rng(4)
    n, trials = 12, 2000
    effect = smallest_difference(1 / n**0.5, n - 1)
    found = sum(paired_difference(rng.normal(effect, 1, n), np.zeros(n)).p <= 0.05 for _ in range(trials))
    assert found / trials == pytest.approx(0.8, abs=0.03)


@pytest.mark.parametrize(("n", "discordant"), [(164, 30), (60, 40), (500, 25)])
def test_mcnemar_finds_it_four_times_in_five(n: int, discordant: int) -> None:
    rng = np.random.default_rng(n)
    effect, share = smallest_discordance(n, discordant), discordant / n
    assert effect is not None
    share = max(share, effect)
    found, trials = 0, 2000
    for _ in range(trials):
        won, lost, _ = rng.multinomial(n, [(share + effect) / 2, (share - effect) / 2, 1 - share])
        found += 2 * scipy_stats.binom.cdf(min(won, lost), won + lost, 0.5) <= 0.05
    assert found / trials == pytest.approx(0.8, abs=0.03)


@pytest.mark.parametrize("discordant", [0, 9, 20])
def test_its_power_is_the_sum_over_all_tables(discordant: int) -> None:
    """Every (won, lost) of 25 questions with its probability, tested by the test itself."""
    n, alpha = 25, 0.05
    effect = smallest_discordance(n, discordant, alpha)
    assert effect is not None
    share = max(discordant / n, effect)  # without enough discordance it takes more, all one way
    chances = [(share + effect) / 2, (share - effect) / 2, 1 - share]
    power = sum(
        scipy_stats.multinomial.pmf([won, lost, n - won - lost], n, chances)
        for won in range(n + 1)
        for lost in range(n + 1 - won)
        if balance_p(won, lost) <= alpha
    )
    assert power == pytest.approx(0.8, abs=1e-6)


def test_no_difference_seen_still_leaves_one_possible() -> None:
    # 0 of 40 discordant: 6 of one kind would have been needed, and P(Binomial(40, effect) ≥ 6) = 80%
    effect = smallest_discordance(40, 0)
    assert scipy_stats.binom.sf(5, 40, effect) == pytest.approx(0.8, abs=1e-6)
    assert smallest_discordance(5, 0) is None and smallest_discordance(5, 5) is None


def test_more_questions_find_less_and_a_stricter_level_finds_more() -> None:
    sizes = [smallest_discordance(n, n // 10) for n in (50, 200, 1000, 14_042)]
    assert sizes == sorted(sizes, reverse=True)
    # for many questions, the normal rule: 2.80 · √(share / n), less the effect's own share of the variance
    assert sizes[-1] == pytest.approx(2.8016 * (0.1 / 14_042) ** 0.5, rel=0.02)
    assert smallest_discordance(200, 20, 0.05 / 8) > smallest_discordance(200, 20)
    assert smallest_difference(1, 30, 0.05 / 8) > smallest_difference(1, 30)


@pytest.mark.parametrize(("n", "discordant"), [(0, 0), (5, 6), (5, -1)])
def test_counts_that_cannot_be_are_refused(n: int, discordant: int) -> None:
    with pytest.raises(ValueError, match="discordant"):
        smallest_discordance(n, discordant)


def test_levels_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="α"):
        smallest_difference(1, 5, alpha=0.9)
    with pytest.raises(ValueError, match="degrees"):
        smallest_difference(1, 0)


def test_without_scipy_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "scipy", None)
    with pytest.raises(UserError, match=r"pip install 'edgemoe\[eval\]'"):
        paired_difference([1, 2, 3], [3, 2, 2])
    assert holm([0.01, 0.04]).adjusted == (0.02, 0.04)  # needs none of it
