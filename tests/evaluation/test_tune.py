"""Choosing an operating point: gates, the frontier, the knee, and the policy file."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from edgemoe.errors import UserError
from edgemoe.evaluation.divergence import Estimate
from edgemoe.evaluation.tune import Grid, Limits, Point, frontier, knee, refined
from edgemoe.policy import Policy, preset
from edgemoe.policy.config import presets
from edgemoe.policy.policy_file import PolicyFile, calibration_beside, load_policy_file


def point(policy: Policy, kl: float, copies: float, perplexity: float = 10.0) -> Point:
    zero = Estimate(0.0, 0.0)
    return Point(policy, perplexity, 10.0, zero, Estimate(kl, 0.0), copies, 0.0, 0.0, 0.0, copies)


EXACT = point(Policy(), 0.0, 20.0)
CAREFUL = point(preset("cache-prior", lam=0.1), 0.01, 9.0)
BOLD = point(preset("cache-prior", lam=0.3), 0.08, 3.0)


def test_the_fewest_copies_within_the_limits_win() -> None:
    assert knee([EXACT, BOLD, CAREFUL], Limits(0.02)) is CAREFUL
    assert knee([EXACT, BOLD, CAREFUL], Limits(0.1)) is BOLD
    assert knee([EXACT, BOLD, CAREFUL], Limits(0.001)) is EXACT


@pytest.mark.parametrize(("kl", "perplexity"), [(0.0, 11.0), (math.nan, 10.0), (0.001, math.nan), (math.inf, 10.0)])
def test_degenerate_output_never_wins(kl: float, perplexity: float) -> None:
    degenerate = point(preset("psr", lam=0.3), kl, 0.0, perplexity)
    assert knee([degenerate, EXACT, CAREFUL], Limits(0.02, 0.05)) is CAREFUL
    with pytest.raises(UserError, match="no policy is within"):
        knee([degenerate], Limits(0.02, 0.05))


def test_the_frontier_holds_what_nothing_beats_in_both() -> None:
    worse = point(preset("psr", lam=0.2), 0.05, 9.5)
    assert frontier([BOLD, worse, EXACT, CAREFUL]) == [EXACT, CAREFUL, BOLD]


def test_lambda_is_refined_where_the_budget_is_crossed() -> None:
    more = refined([EXACT, CAREFUL, BOLD], Limits(0.02))
    assert [policy.lam for policy in more] == [0.1667, 0.2333]
    assert {replace(policy, lam=0.1) for policy in more} == {CAREFUL.policy}
    assert refined([EXACT, CAREFUL, BOLD], Limits(0.1)) == []


def test_the_grid_starts_exact_and_leaves_out_what_means_nothing() -> None:
    grid = Grid((0.1, 0.2), (0, 1, "unbounded"), (1, 8), ("none",)).policies(slots=8)
    assert grid[0] == Policy() and len(grid) == len(set(grid))
    # Exact twice; per λ: no prefetch, n = 1 at two windows, unbounded at w = 8 (at w = 1 it is n = 1).
    assert len(grid) == 2 + 2 * (1 + 2 + 1)
    assert all(policy.insertions <= policy.window for policy in grid)


def written(path: Path) -> PolicyFile:
    file = PolicyFile(
        preset("psr", lam=0.15), "25%", 16, {"name": "m", "weights": "ab"}, ("12",), "p.calib", {"kl": 0.01}
    )
    file.save(path)
    return file


def test_a_policy_file_is_read_back_and_taken_as_a_preset(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    file = written(path)
    assert load_policy_file(path).policy == file.policy and load_policy_file(path).slots == 16
    assert preset(str(path)) == file.policy and preset(str(path), lam=0.3).lam == 0.3
    assert presets([str(path), "psr"], lam=0.1)[str(path)].lam == 0.1
    assert [name.name for name in tmp_path.iterdir()] == ["p.json"]
    with pytest.raises(UserError, match=r"its calibration .* is not there"):
        calibration_beside(str(path))
    (tmp_path / "p.calib").write_bytes(b"")
    assert calibration_beside(str(path)) == tmp_path / "p.calib" and calibration_beside("psr") is None
    file.check_model(path, "ab")
    with pytest.raises(UserError, match="tuned for m"):
        file.check_model(path, "cd")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, "version 2"),
        ({"format": "x"}, "expected"),
        ({"policy_hash": "0"}, "edited"),
        ({"model": {}}, "no name"),
        ({"policy": {"routing": "psychic"}}, "psychic"),
    ],
)
def test_a_damaged_policy_file_is_refused_in_one_line(tmp_path: Path, change: dict, words: str) -> None:
    path = tmp_path / "p.json"
    written(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(UserError, match=words) as refused:
        preset(str(path))
    assert "\n" not in str(refused.value)
