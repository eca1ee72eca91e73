"""Pictures of the wall: written, with a title that states what they show."""

from pathlib import Path

import pytest
from wall_fixtures import machine, small_geometry, small_trace, wall_of

from edgemoe.model.memory import memory_needs
from edgemoe.wall.batch import batch
from edgemoe.wall.paths import paths
from edgemoe.wall.pictures import by_batch, by_budget, ladder, write_all
from edgemoe.wall.tiers import Path as Way
from edgemoe.wall.tiers import Wall

RATES = {"ssd": (500.0, 900.0), "ram": 10_000.0, "cpu": 8000.0}
LEAST = next(need.ram for need in memory_needs(small_geometry(), 10) if need.way == "ssd-to-ram")


@pytest.fixture
def streamed() -> tuple[Wall, Way]:
    wall = wall_of(machine(LEAST + 3 * 3500, **RATES), [small_trace()])
    return wall, next(path for path in paths(wall) if path.name == "slots in RAM")


def test_the_ladder_compares_the_slowest_tier_with_the_need(streamed: tuple[Wall, Way]) -> None:
    wall, _ = streamed
    assert wall.token.total == 10_260
    axes = ladder(wall, 10.0).axes[0]
    assert axes.get_title(loc="left").endswith("the SSD is 205× short")
    assert [label.get_text() for label in axes.get_yticklabels()] == ["SSD", "experts on the CPU", "RAM loads"]
    assert ladder(wall, 0.001).axes[0].get_title(loc="left").startswith("Every tier gives")


def test_the_budget_curve_rises_from_the_least_need_to_every_expert(streamed: tuple[Wall, Way]) -> None:
    axes = by_budget(*streamed).axes[0]
    best, worst = (line.get_xydata() for line in axes.lines[:2])
    assert worst[0, 0] == pytest.approx(LEAST / 1e9) and len(worst) > 10
    assert all(a <= b + 1e-9 for a, b in zip(worst[:, 1], worst[1:, 1], strict=False))
    assert (best[:, 1] >= worst[:, 1] - 1e-12).all()


def test_the_batch_curve_has_every_possible_batch(streamed: tuple[Wall, Way]) -> None:
    wall, _ = streamed
    table = [batch(wall, streams) for streams in (1, 2, 4)]
    axes = by_batch(table).axes[0]
    assert list(axes.lines[1].get_xdata()) == [1, 2, 4]
    assert "4 streams together give" in axes.get_title(loc="left")


def test_what_there_is_to_draw_is_written(streamed: tuple[Wall, Way], tmp_path: Path) -> None:
    wall, path = streamed
    written = write_all(wall, path, [batch(wall, 1), batch(wall, 2)], 10.0, tmp_path / "p")
    assert [file.name for file in written] == ["wall-ladder.png", "wall-batch.png", "wall-budget.png"]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in written)
    assert [file.name for file in write_all(wall, None, [], 10.0, tmp_path / "q")] == ["wall-ladder.png"]
