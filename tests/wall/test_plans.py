"""Placement plans: the hottest experts in the fastest memory, read back whole or refused."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wall_fixtures import EXPERT_BYTES, EXPERTS, LAYERS, small_geometry, small_trace

from edgemoe.errors import UserError
from edgemoe.wall.plan import compare, heat_map, load_plan, make_plan, place, save_plan

G = small_geometry()


def test_heat_is_each_layers_share_of_loads_with_texts_weighted_alike() -> None:
    long, short = small_trace(tokens=400, seed=1), small_trace(tokens=40, seed=2)
    heat = heat_map([long, short])
    assert heat.sum(axis=1) == pytest.approx([1, 1, 1])
    counts = [np.bincount(text.experts[2].ravel(), minlength=EXPERTS) / text.experts[2].size for text in (long, short)]
    assert heat[2] == pytest.approx((counts[0] + counts[1]) / 2)


@settings(max_examples=60)
@given(st.integers(0, 60_000), st.integers(0, 60_000), st.integers(0, 99))
def test_tiers_keep_their_budgets_and_hotter_experts_are_never_in_a_slower_one(a: int, b: int, seed: int) -> None:
    heat = np.random.default_rng(seed).dirichlet(np.full(EXPERTS, 0.4), LAYERS)
    tiers = place(heat, EXPERT_BYTES, (a, b))
    sizes = np.repeat(EXPERT_BYTES, EXPERTS).reshape(LAYERS, EXPERTS)
    assert sizes[tiers == 0].sum() <= a and sizes[tiers == 1].sum() <= b
    for tier in (0, 1):
        if (tiers == tier).any() and (tiers > tier).any():
            assert heat[tiers == tier].min() >= heat[tiers > tier].max()
    left = a - sizes[tiers == 0].sum()
    assert not (tiers > 0).any() or left < max(EXPERT_BYTES)


def test_a_plan_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    plan = make_plan(G, (), [small_trace()], 9000, 12_000)
    assert load_plan(save_plan(plan, tmp_path / "p.json"), G) == plan
    assert [layer.layer for layer in plan.layers] == [1, 2, 3]
    tiers = plan.tier_of()
    assert tiers.shape == (LAYERS, EXPERTS) and set(tiers.ravel()) == {0, 1, 2}
    heat = heat_map([small_trace()])
    assert plan.loads["vram"] == pytest.approx(heat[tiers == 0].sum() / LAYERS)
    assert sum(plan.loads.values()) == pytest.approx(1)
    first = heat[0, list(plan.layers[0].ssd)]
    assert list(first) == sorted(first, reverse=True), "hottest first"
    assert not (tmp_path / "p.json.tmp").exists()


def test_plans_that_are_damaged_or_of_another_model_are_refused(tmp_path: Path) -> None:
    path = save_plan(make_plan(G, (), [small_trace()], 9000, 12_000), tmp_path / "p.json")
    good = json.loads(path.read_text())

    def refused(change: dict) -> str:
        path.write_text(json.dumps(good | change))
        with pytest.raises(UserError) as error:
            load_plan(path, G)
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "plan version 2" in refused({"version": 2})
    assert "not a placement plan" in refused({"kind": "recipe"})
    twice = [{**good["layers"][0], "ssd": [*good["layers"][0]["ssd"], 0]}, *good["layers"][1:]]
    assert "does not place each of 16 experts once" in refused({"layers": twice})
    assert "damaged" in refused({"layers": [{"layer": 1}]}) and "damaged" in refused({"vram_bytes": None})
    assert "2 MoE layers of 16 experts" in refused({"layers": good["layers"][:2]})
    path.write_text("not json")
    with pytest.raises(UserError, match="not JSON"):
        load_plan(path)
    with pytest.raises(UserError, match="no such placement plan"):
        load_plan(tmp_path / "none.json")
    with pytest.raises(UserError, match="cannot be written"):
        save_plan(make_plan(G, (), [small_trace()], 1, 1), tmp_path / "no" / "p.json")


def test_residencies_are_judged_on_text_that_they_did_not_see() -> None:
    texts = [small_trace(tokens=600, seed=seed, name=f"t{seed}") for seed in (1, 2)]
    rows = {row.name: row.hit_rate for row in compare(G, texts, 4 * sum(EXPERT_BYTES))}
    assert list(rows) == ["placed", "placed, other texts", "placed, hindsight", "lru", "score"]
    assert rows["placed, hindsight"][0] >= rows["placed"][0] > rows["placed, other texts"][0]
    assert "placed, other texts" not in {row.name for row in compare(G, texts[:1], 14_000)}


def test_eviction_is_scored_on_the_second_half_after_the_first() -> None:
    """Two texts in one: what the first half left in the cache is worth nothing to the second."""
    half = np.tile(np.array([[0, 1]], dtype=np.int16), (50, 1))
    whole = np.concatenate([half, half + 2])
    text = replace(small_trace(tokens=100), experts=np.stack([whole] * LAYERS))
    rows = {row.name: row.hit_rate[0] for row in compare(G, [text], 2 * sum(EXPERT_BYTES))}
    assert rows["lru"] == pytest.approx(1 - 2 / 100)  # two misses, then hits
    assert rows["placed"] == 0.0 and rows["placed, hindsight"] == 1.0
