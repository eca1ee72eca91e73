"""When is a median stable? Settled, drifting, noisy, and out of time."""

import math
import time

import numpy as np
import pytest

from edgemoe.machine.rounds import TOLERANCE, Effort, is_stable, rate, settle


def test_a_steady_figure_settles_at_the_least_number_of_rounds() -> None:
    told: list[int] = []
    found = settle({"a": lambda: 5.0, "b": lambda: 7.0}, Effort(4, 10, 60), told.append)
    assert {key: (value.median, value.spread, value.rounds, value.stable) for key, value in found.items()} == {
        "a": (5.0, 0.0, 4, True),
        "b": (7.0, 0.0, 4, True),
    }
    assert sum(told) == 20


def test_a_figure_that_drifts_is_never_stable() -> None:
    falling = iter(100 * 0.98**step for step in range(100))
    found = settle({"hot": lambda: next(falling)}, Effort(3, 12, 60))["hot"]
    assert found.rounds == 12 and not found.stable


def test_cells_take_turns_and_the_noisy_one_goes_on_alone() -> None:
    order: list[str] = []
    noise = iter([1.0, 2.0] * 10)

    def steady() -> float:
        order.append("s")
        return 1.0

    def noisy() -> float:
        order.append("n")
        return next(noise)

    found = settle({"s": steady, "n": noisy}, Effort(3, 6, 60))
    assert "".join(order) == "snsnsn" + "nnn"
    assert found["s"].stable and not found["n"].stable


def test_when_time_is_up_every_cell_has_a_round() -> None:
    told: list[int] = []

    def slow() -> float:
        time.sleep(0.02)
        return 1.0

    found = settle({"a": slow, "b": slow}, Effort(3, 5, 0.0), told.append)
    assert [value.rounds for value in found.values()] == [1, 1]
    assert not any(value.stable for value in found.values()) and sum(told) == 10


def test_the_interval_of_the_median_holds_it_as_often_as_it_says() -> None:
    """Of draws called stable, the median is off by more than the tolerance in at most 5%."""
    generator = np.random.default_rng(0)
    wrong = called = 0
    for _ in range(3000):
        draws = list(generator.normal(1.0, 0.035, 15))
        if is_stable(draws):
            called += 1
            wrong += abs(rate(draws).median - 1) > TOLERANCE
    assert called > 300 and wrong / called < 0.05


@pytest.mark.parametrize(
    ("rounds", "stable"),
    [([1.0], False), ([1.0, 1.0], False), ([1.0, 1.0, 1.0], True), ([1.0, 1.0, 1.2], False), ([1.0] * 9 + [5.0], True)],
)
def test_few_rounds_say_little_and_one_outlier_of_ten_is_forgiven(rounds: list[float], stable: bool) -> None:
    assert is_stable(rounds) is stable


def test_spread_is_half_the_interquartile_range() -> None:
    found = rate([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (found.median, found.rounds) == (3.0, 5) and math.isclose(found.spread, 1 / 3)


def test_an_impossible_effort_is_an_error() -> None:
    with pytest.raises(ValueError, match="5 to 3 rounds"):
        Effort(5, 3, 1)
