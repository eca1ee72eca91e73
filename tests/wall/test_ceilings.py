"""The way back: the paper's worked example, and that what is said to be needed is just enough."""

from dataclasses import replace

import pytest
from wall_fixtures import machine, small_trace, wall_of

from edgemoe.model.memory import memory_needs
from edgemoe.wall.ceiling import bandwidth_for, ceiling, hit_rate_for, tokens_per_s
from edgemoe.wall.hits import slots_for
from edgemoe.wall.paths import paths
from edgemoe.wall.presets import preset_geometry
from edgemoe.wall.tiers import Path, Wall

RATES = {"ssd": 500.0, "ram": 10_000.0, "cpu": 10_000.0}


def streamed(extra: int, texts: list | None = None, **rates: float) -> tuple[Wall, Path]:
    """SSD → RAM with `extra` bytes beyond the least that it needs."""
    wall = wall_of(machine(10**9, **(RATES | rates)), [small_trace()] if texts is None else texts)
    least = next(need.ram for need in memory_needs(wall.geometry, 10) if need.way == "ssd-to-ram")
    wall = replace(wall, machine=machine(least + extra, **(RATES | rates)))
    return wall, next(path for path in paths(wall) if path.name == "slots in RAM")


def test_the_papers_example_where_it_follows_from_its_inputs() -> None:
    assert tokens_per_s(12e9, 2.4e9) == pytest.approx(0.20)
    assert bandwidth_for(12e9, 10) == 120e9 and bandwidth_for(12e9, 10) / 2.4e9 == pytest.approx(50)
    routed = 94 * 8 * 10.6e6
    assert routed * (1 - 0.659) / 1e9 == pytest.approx(2.7, abs=0.05)
    assert tokens_per_s(routed * (1 - 0.659), 2.4e9) == pytest.approx(0.9, abs=0.05)


def test_the_papers_example_where_it_does_not() -> None:
    routed = 94 * 8 * 10.6e6
    assert tokens_per_s(0.05 * routed, 2.4e9) == pytest.approx(6.0, abs=0.05)
    assert hit_rate_for(routed, 2.4e9, 10) == pytest.approx(0.97, abs=0.001)


def test_eighteen_gigabytes_of_the_real_model_are_18_slots() -> None:
    g = preset_geometry("qwen3-235b-a22b:Q4_K")
    assert set(slots_for(g, 18_000_000_000)) == {18, 19} and sum(slots_for(g, 18_000_000_000)) * 10_616_832 <= 18e9


def test_time_that_is_spent_elsewhere_leaves_less_for_misses() -> None:
    assert hit_rate_for(1000, 100, 1.0) == pytest.approx(0.9)
    assert hit_rate_for(1000, 100, 1.0, other_seconds=0.5) == pytest.approx(0.95)
    assert hit_rate_for(1000, 100, 1.0, other_seconds=1.5) is None
    assert hit_rate_for(1000, 10_000, 1.0) == 0.0


def test_the_link_rate_and_the_capacity_that_are_named_reach_the_target() -> None:
    wall, path = streamed(2 * 3500)
    low, high = path.tokens_per_s
    target = 1.3 * high
    found = ceiling(wall, path, target)
    assert found.reached == "no" and found.link == "ssd"
    at_worst, at_best = found.link_rate
    assert at_best is not None and streamed(2 * 3500, ssd=at_best)[1].tokens_per_s[1] == pytest.approx(target)
    slots = found.capacity[1]
    assert slots is not None
    held = {more: streamed((slots - 2 + more) * 3500)[1].tokens_per_s[1] for more in (0, -1)}
    assert held[-1] < target <= held[0]
    modest = 1.2 * low
    at_worst = ceiling(wall, path, modest).link_rate[0]
    assert at_worst is not None and streamed(2 * 3500, ssd=at_worst)[1].tokens_per_s[0] == pytest.approx(modest)


def test_advice_in_words() -> None:
    wall, path = streamed(2 * 3500)
    low, high = path.tokens_per_s
    assert ceiling(wall, path, 0.9 * low).advice[0].endswith("nothing to buy")
    between = ceiling(wall, path, (low + high) / 2)
    assert between.reached == "perhaps"
    words = "\n".join(between.advice)
    assert "hit rate needed" in words and "more RAM if nothing overlaps" in words and "faster SSD" in words
    beyond = ceiling(wall, path, 5.0)
    assert beyond.hit_rate == (None, None) and "RAM and CPU bound it whatever is cached" in beyond.advice[0]
    assert "buy bandwidth: RAM and CPU" in beyond.advice[1]


def test_a_way_without_a_link_says_which_tier_bounds_it() -> None:
    wall = wall_of(machine(10**9, ram=10_000.0, cpu=(5000.0, 10_000.0)))
    path = next(path for path in paths(wall) if path.name == "all in RAM")
    low, high = path.tokens_per_s
    assert ceiling(wall, path, 2 * high).advice[1] == "buy bandwidth: RAM and CPU 2.0× as fast"
    assert "to be sure of it" in ceiling(wall, path, (low + high) / 2).advice[1]
