"""McNemar, Holm and sign flips: against statsmodels and scipy, and by enumeration."""

import itertools
from fractions import Fraction
from math import comb

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats
from statsmodels.stats.contingency_tables import mcnemar as theirs_mcnemar
from statsmodels.stats.multitest import multipletests

from edgemoe.stats import difference_of_differences, holm, mcnemar, paired_difference, sign_flip
from edgemoe.stats.mcnemar import balance_p


def outcomes(won: int, lost: int, both: int = 3, neither: int = 2) -> tuple[list[int], list[int]]:
    ours = [1] * won + [0] * lost + [1] * both + [0] * neither
    return ours, [0] * won + [1] * lost + [1] * both + [0] * neither


@pytest.mark.parametrize(("won", "lost"), [(0, 0), (1, 0), (6, 0), (3, 3), (15, 5), (61, 103), (700, 800)])
def test_mcnemar_is_that_of_statsmodels(won: int, lost: int) -> None:
    found = mcnemar(*outcomes(won, lost))
    assert (found.won, found.lost, found.n, found.discordant) == (won, lost, won + lost + 5, won + lost)
    table = theirs_mcnemar([[3, lost], [won, 2]], exact=True)
    assert found.p == pytest.approx(min(1.0, table.pvalue), rel=1e-9)


@given(st.integers(0, 30), st.integers(0, 30))
def test_mcnemar_counts_coin_flips(won: int, lost: int) -> None:
    flips, few = won + lost, min(won, lost)
    exact = min(Fraction(1), Fraction(2 * sum(comb(flips, k) for k in range(few + 1)), 2**flips))
    assert balance_p(won, lost) == pytest.approx(float(exact), rel=1e-12)


def test_mcnemar_takes_right_and_wrong_only() -> None:
    assert mcnemar([True, False], np.array([0, 1])).discordant == 2
    with pytest.raises(ValueError, match="0 and 1"):
        mcnemar([0.5, 1], [0, 1])
    with pytest.raises(ValueError, match="expected pairs"):
        mcnemar([0, 1], [0, 1, 1])


@pytest.mark.parametrize("alpha", [0.01, 0.05, 0.2])
@pytest.mark.parametrize("family", [1, 2, 9, 90])
def test_holm_is_that_of_statsmodels(family: int, alpha: float) -> None:
    p_values = np.random.default_rng(family).random(family) ** 4
    p_values[family // 2 :: 7] = p_values[0]  # ties, too
    found = holm(p_values, alpha)
    rejected, adjusted, *_ = multipletests(p_values, alpha, method="holm")
    assert found.adjusted == pytest.approx(tuple(adjusted)) and found.family == family
    assert found.rejected == tuple(rejected)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12), st.randoms())
@settings(max_examples=40)
def test_holm_does_not_depend_on_the_order(p_values: list[float], random) -> None:
    order = random.sample(range(len(p_values)), len(p_values))
    mixed = holm([p_values[at] for at in order]).adjusted
    assert mixed == tuple(holm(p_values).adjusted[at] for at in order)
    assert all(adjusted >= p for adjusted, p in zip(holm(p_values).adjusted, p_values, strict=True))


@pytest.mark.parametrize("p_values", [[], [1.2], [-0.1, 0.5], [float("nan")]])
def test_holm_takes_probabilities_only(p_values: list[float]) -> None:
    with pytest.raises(ValueError, match="expected"):
        holm(p_values)


def enumerated(sums: list[int]) -> float:
    """Every flip of every unit, in exact arithmetic."""
    flips = [
        sum(s * x for s, x in zip(signs, sums, strict=True)) for signs in itertools.product((1, -1), repeat=len(sums))
    ]
    return sum(abs(flip) >= abs(sum(sums)) for flip in flips) / len(flips)


@given(st.lists(st.integers(-4, 4), min_size=1, max_size=9))
def test_sign_flips_are_all_counted(values: list[int]) -> None:
    found = sign_flip(values, [0] * len(values))
    assert found.exact and found.p == enumerated(values)
    assert found.nonzero == sum(value != 0 for value in values) and found.units == len(values)


@given(st.lists(st.tuples(st.integers(-3, 3), st.sampled_from("abcdef")), min_size=1, max_size=14))
def test_whole_groups_flip(items: list[tuple[int, str]]) -> None:
    values, groups = zip(*items, strict=True)
    sums = [sum(value for value, group in items if group == name) for name in sorted(set(groups))]
    found = sign_flip(values, [0] * len(values), groups)
    assert found.p == enumerated(sums) and found.units == len(sums)


def test_it_is_scipys_permutation_test() -> None:
    rng = np.random.default_rng(2)
    ours, theirs = rng.normal(0.5, 1, 12), rng.normal(0, 1, 12)
    reference = scipy_stats.permutation_test(
        (ours, theirs), lambda x, y: np.mean(x - y), permutation_type="samples", n_resamples=np.inf
    )
    assert sign_flip(ours, theirs).p == pytest.approx(reference.pvalue, rel=1e-12)


def test_on_right_and_wrong_answers_it_is_mcnemar() -> None:
    for won, lost in ((12, 5), (2, 9), (20, 0)):
        ours, theirs = outcomes(won, lost)
        assert sign_flip(ours, theirs).p == pytest.approx(mcnemar(ours, theirs).p, rel=1e-12)


def test_sampled_flips_are_near_the_truth_seeded_and_never_zero() -> None:
    ours, theirs = outcomes(70, 45)
    found = sign_flip(ours, theirs, seed=1)
    assert not found.exact and found.nonzero == 115
    truth = mcnemar(ours, theirs).p
    assert abs(found.p - truth) < 4 * (truth * (1 - truth) / 20_000) ** 0.5
    assert found == sign_flip(ours, theirs, seed=1) != sign_flip(ours, theirs, seed=2)
    assert sign_flip(*outcomes(60, 0), resamples=999).p == 1 / 1000


def test_false_alarms_are_as_rare_as_promised_in_groups() -> None:
    rng = np.random.default_rng(5)
    groups = np.repeat(np.arange(14), 6)
    clustered, naive, trials = 0, 0, 400
    for _ in range(trials):
        values = np.repeat(rng.normal(size=14), 6) + rng.normal(size=84)
        clustered += sign_flip(values, np.zeros(84), groups).p <= 0.05
        naive += paired_difference(values, np.zeros(84)).p <= 0.05
    assert clustered / trials < 0.05 + 3 * (0.05 * 0.95 / trials) ** 0.5
    assert naive / trials > 0.2


def test_equal_sums_in_another_order_are_equal() -> None:
    """0.1 + 0.2 + 0.3 is not 0.3 + 0.2 + 0.1 in floating point; all of one sign still has p = 2 / 2^n."""
    values = [0.1, 0.2, 0.3, 0.7, 1.1, 1e-3]
    assert sign_flip(values, [0] * 6).p == 2 / 2**6
    assert sign_flip(values, [0] * 6, range(6)).p == 2 / 2**6
    assert sign_flip([1.0], [1.0]).p == 1


def test_a_difference_of_differences() -> None:
    rng = np.random.default_rng(9)
    base = rng.integers(0, 2, 40).astype(float)
    psr, prompts = rng.integers(0, 2, 40).astype(float), np.arange(40) // 3
    same = difference_of_differences((psr, base), (psr, base), prompts)
    assert (same.difference.mean, same.p) == (0, 1)
    engine = rng.integers(0, 2, 40).astype(float)
    found = difference_of_differences((engine, base), (psr, base))
    assert found.difference == paired_difference(engine - base, psr - base)
    assert found.p == sign_flip(engine - base, psr - base).p
    grouped = difference_of_differences((engine, base), (psr, base), prompts)
    assert grouped.difference.units == 14 and grouped.p == sign_flip(engine - base, psr - base, prompts).p
    swapped = difference_of_differences((psr, base), (engine, base), prompts)
    assert swapped.difference.mean == -grouped.difference.mean and swapped.p == grouped.p


def test_the_papers_humaneval_can_only_be_twelve_to_three() -> None:
    """§6.3: +5.5 points on 164 problems, p = 0.035: nine more solved, and one split of them gives that p."""
    fitting = [lost for lost in range(70) if round(mcnemar(*outcomes(lost + 9, lost)).p, 3) == 0.035]
    assert fitting == [3]
    ours, theirs = outcomes(12, 3, both=100, neither=49)
    assert (len(ours), round(100 * paired_difference(ours, theirs).mean, 1)) == (164, 5.5)
    assert 2.2 < 100 * paired_difference(ours, theirs).se < 3.0  # "1.8–3.0 on HumanEval" (§6.1)
