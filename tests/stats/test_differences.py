"""Paired and clustered differences, against scipy and statsmodels, and by simulation."""

import numpy as np
import pytest
import statsmodels.api as sm
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from edgemoe.stats import clustered_difference, log_ratio, mean_over_tasks, paired_difference

RNG = np.random.default_rng(11)
A, B = RNG.normal(size=50), RNG.normal(0.3, 2, size=50)
GROUPS = [f"prompt {i}" for i in RNG.integers(0, 17, size=50)]
PAIRS = st.lists(
    st.tuples(st.floats(-1e3, 1e3, allow_subnormal=False), st.floats(-1e3, 1e3, allow_subnormal=False)),
    min_size=3,
    max_size=30,
)


def test_it_is_the_paired_t_test_of_scipy() -> None:
    found, theirs = paired_difference(A, B), scipy_stats.ttest_rel(A, B)
    interval = theirs.confidence_interval(0.95)
    assert found.p == pytest.approx(theirs.pvalue, rel=1e-10)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high), rel=1e-10)
    assert found.se == pytest.approx(scipy_stats.sem(A - B)) and found.mean == pytest.approx((A - B).mean())
    assert (found.n, found.units, found.df) == (50, 50, 49)


def test_the_level_is_that_of_the_interval() -> None:
    wide, narrow = paired_difference(A, B, 0.99), paired_difference(A, B, 0.8)
    theirs = scipy_stats.ttest_rel(A, B).confidence_interval(0.99)
    assert (wide.low, wide.high) == pytest.approx((theirs.low, theirs.high))
    assert wide.half_width > narrow.half_width and wide.p == narrow.p


def test_clusters_are_those_of_statsmodels() -> None:
    found = clustered_difference(A, B, GROUPS)
    codes = np.unique(GROUPS, return_inverse=True)[1]
    fit = sm.OLS(A - B, np.ones(50)).fit(cov_type="cluster", cov_kwds={"groups": codes}, use_t=True)
    assert found.mean == pytest.approx(fit.params[0]) and found.se == pytest.approx(fit.bse[0], rel=1e-10)
    assert found.p == pytest.approx(fit.pvalues[0], rel=1e-8)
    assert (found.low, found.high) == pytest.approx(tuple(fit.conf_int()[0]), rel=1e-8)
    assert (found.n, found.units) == (50, len(set(GROUPS)))


@given(PAIRS)
@settings(max_examples=60)
def test_groups_of_one_are_no_groups(pairs: list[tuple[float, float]]) -> None:
    ours, theirs = zip(*pairs, strict=True)
    alone, grouped = paired_difference(ours, theirs), clustered_difference(ours, theirs, range(len(pairs)))
    assert grouped.se == pytest.approx(alone.se, rel=1e-9, abs=1e-12) and grouped.mean == alone.mean


@given(PAIRS)
@settings(max_examples=60)
def test_turning_it_round_turns_the_sign(pairs: list[tuple[float, float]]) -> None:
    ours, theirs = zip(*pairs, strict=True)
    one, other = paired_difference(ours, theirs), paired_difference(theirs, ours)
    assert (one.mean, one.low, one.high) == (-other.mean, -other.high, -other.low) and one.p == other.p


def test_copies_of_a_question_add_nothing_once_grouped() -> None:
    once = paired_difference(A, B)
    thrice = clustered_difference(np.repeat(A, 3), np.repeat(B, 3), np.repeat(np.arange(50), 3))
    assert (thrice.mean, thrice.se, thrice.p) == pytest.approx((once.mean, once.se, once.p), rel=1e-9)
    assert paired_difference(np.repeat(A, 3), np.repeat(B, 3)).se < 0.6 * once.se


@pytest.mark.parametrize("grouped", [False, True])
def test_the_interval_covers_what_it_says(grouped: bool) -> None:
    rng = np.random.default_rng(3)
    covered, naive, trials = 0, 0, 1500
    for _ in range(trials):
        shared = np.repeat(rng.normal(size=25), 4) if grouped else 0
        values = 0.4 + rng.normal(size=100) + shared
        groups = np.arange(100) // 4
        found = clustered_difference(values, np.zeros(100), groups)
        alone = paired_difference(values, np.zeros(100))
        covered += found.low <= 0.4 <= found.high
        naive += alone.low <= 0.4 <= alone.high
    # three standard errors of a share near 95% from so many trials
    assert abs(covered / trials - 0.95) < 3 * (0.95 * 0.05 / trials) ** 0.5 + 0.01
    assert naive / trials < 0.85 if grouped else abs(naive / trials - 0.95) < 0.02


def test_what_does_not_vary_is_not_divided_by() -> None:
    same = paired_difference([0.1, 0.7, 0.2], [0.1, 0.7, 0.2])
    assert (same.mean, same.se, same.low, same.high, same.p) == (0, 0, 0, 0, 1)
    # 0.3 − 0.1 and 0.8 − 0.6 differ by rounding alone; so many of one sign have p = 2^(1−n)
    shifted = paired_difference([0.3, 0.8, 0.4], [0.1, 0.6, 0.2])
    assert (shifted.se, shifted.p) == (0, 0.25) and shifted.mean == pytest.approx(0.2)
    assert clustered_difference([1, 1, 1, 1], [0, 0, 0, 0], "aabb").p == 0.5


@pytest.mark.parametrize(
    ("values", "reference"),
    [([1.0], [2.0]), ([1.0, 2.0], [1.0]), ([1.0, float("nan")], [1.0, 2.0]), ([[1.0, 2.0]], [[1.0, 2.0]]), ([], [])],
)
def test_what_is_no_pairs_is_refused(values: list, reference: list) -> None:
    with pytest.raises(ValueError, match="expected"):
        paired_difference(values, reference)


def test_one_group_has_no_error() -> None:
    with pytest.raises(ValueError, match="2 groups"):
        clustered_difference(A, B, ["x"] * 50)
    with pytest.raises(ValueError, match="a group for each"):
        clustered_difference(A, B, ["x"] * 49)


def test_a_ratio_is_the_t_test_on_logs() -> None:
    ours, theirs = [24.7, 24.1, 25.3], [10.7, 10.9, 10.5]
    found, test = log_ratio(ours, theirs), scipy_stats.ttest_rel(np.log(ours), np.log(theirs))
    interval = test.confidence_interval(0.95)
    assert found.p == pytest.approx(test.pvalue) and found.n == 3
    assert (found.low, found.high) == pytest.approx((np.exp(interval.low), np.exp(interval.high)))
    assert found.ratio == pytest.approx(scipy_stats.gmean(ours) / scipy_stats.gmean(theirs))
    inverse = log_ratio(theirs, ours)
    assert (1 / inverse.ratio, 1 / inverse.high) == pytest.approx((found.ratio, found.low))
    with pytest.raises(ValueError, match="above 0"):
        log_ratio([1.0, 0.0], [1.0, 1.0])


def test_the_mean_over_tasks_counts_each_task_once() -> None:
    rng = np.random.default_rng(8)
    tasks = [paired_difference(rng.normal(m, 1, size=n), np.zeros(n)) for m, n in ((1, 400), (0, 900), (-0.4, 2500))]
    found = mean_over_tasks(tasks)
    assert found.mean == pytest.approx(np.mean([task.mean for task in tasks])) and found.tasks == 3
    assert found.se == pytest.approx(np.sqrt(sum(task.se**2 for task in tasks)) / 3)
    # with hundreds of questions it is the paper's normal interval
    assert found.half_width == pytest.approx(1.96 * found.se, rel=0.005)


def test_two_tasks_in_the_mean_are_welchs_interval() -> None:
    """Half the sum of two means is Welch's difference of two samples, one with its sign turned."""
    ours, theirs = A[:8], B[:5]
    found = mean_over_tasks([paired_difference(ours, np.zeros(8)), paired_difference(theirs, np.zeros(5))])
    welch = scipy_stats.ttest_ind(ours, -theirs, equal_var=False)
    interval = welch.confidence_interval(0.95)
    assert found.df == pytest.approx(welch.df)
    assert (2 * found.low, 2 * found.high) == pytest.approx((interval.low, interval.high))


def test_one_task_is_its_own_mean_and_none_is_refused() -> None:
    task = paired_difference(A, B)
    found = mean_over_tasks([task])
    assert (found.low, found.high, found.df) == pytest.approx((task.low, task.high, task.df))
    still = paired_difference([1.0, 0.0, 1.0], [1.0, 0.0, 1.0])
    assert mean_over_tasks([still, still]).half_width == 0
    with pytest.raises(ValueError, match="at least one"):
        mean_over_tasks([])
