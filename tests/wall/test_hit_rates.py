"""Hit rates: replay at what a budget buys, texts as a range, the default band, traces of other models refused."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from wall_fixtures import EXPERT_BYTES, EXPERTS, LAYERS, small_geometry, small_trace

from edgemoe.errors import UserError
from edgemoe.tracing import save_trace
from edgemoe.tracing.simulate import simulate
from edgemoe.wall.hits import (
    LRU_BAND,
    STATIC_BAND,
    BandHits,
    GivenHits,
    TraceHits,
    capacity_for,
    check_trace,
    load_hits,
    slots_for,
)

G = small_geometry()


@given(st.integers(0, 70_000))
def test_a_budget_buys_as_many_even_slots_as_it_can(budget: int) -> None:
    slots = slots_for(G, budget)
    spent = sum(count * size for count, size in zip(slots, EXPERT_BYTES, strict=True))
    assert spent <= budget and max(slots) <= EXPERTS and max(slots) - min(slots) <= 1
    even = min(budget // sum(EXPERT_BYTES), EXPERTS)
    for count, size in zip(slots, EXPERT_BYTES, strict=True):
        assert count in (even, even + 1)
        assert count == even + 1 or count == EXPERTS or size > budget - spent


@pytest.mark.parametrize("policy", ["lru", "static-prefix", "belady"])
def test_a_text_is_replayed_as_edgemoe_simulate_does(policy: str) -> None:
    text = small_trace()
    hit = TraceHits(G, [text], (policy,)).at([5] * LAYERS)
    row = simulate(text, [5], [policy], expert_bytes=EXPERT_BYTES).iloc[0]
    assert hit.low == hit.high == pytest.approx(row["hit_rate"])
    assert hit.copied == pytest.approx((row["bytes_per_token"],) * 2)


def test_layers_may_have_different_slots_and_texts_make_the_range() -> None:
    texts = [small_trace(seed=seed, name=f"t{seed}") for seed in (1, 2)]
    hit = TraceHits(G, texts).at([5, 4, 4])
    each = [TraceHits(G, [text]).at([5, 4, 4]) for text in texts]
    assert (hit.low, hit.high) == (min(e.low for e in each), max(e.high for e in each))
    one = TraceHits(G, texts[:1])
    more, less = one.at([5, 4, 4]), one.at([4, 4, 4])
    assert more.low > less.low and more.copied[0] < less.copied[0]


def test_nothing_resident_misses_everything_and_everything_resident_nothing() -> None:
    hits = TraceHits(G, [small_trace()])
    assert hits.at([0] * LAYERS).copied == (2 * 3500.0,) * 2
    assert hits.at([EXPERTS] * LAYERS).copied == (0.0, 0.0)


def test_the_default_band_is_labelled_rises_and_ends_at_one() -> None:
    for band in (LRU_BAND, STATIC_BAND):
        lows, highs = (np.array([pair[i] for pair in band.values()]) for i in (0, 1))
        assert np.all(np.diff(lows) > 0) and np.all(np.diff(highs) >= 0) and np.all(lows <= highs)
        assert band[1.0] == (1.0, 1.0)
    hit = BandHits(EXPERTS, (7000.0, 7000.0)).at([4, 4, 4])
    assert (hit.low, hit.high) == LRU_BAND[0.25] and "default band" in hit.why
    assert hit.copied == pytest.approx((7000 * (1 - hit.high), 7000 * (1 - hit.low)))


def test_several_streams_may_leave_a_cache_with_its_share() -> None:
    one, many = (BandHits(EXPERTS, (7000.0, 7000.0), streams=streams).at([8] * 3) for streams in (1, 8))
    assert many.low == 0.5 < one.low and many.high == one.high


def test_a_given_rate_holds_at_any_capacity_but_none_and_all() -> None:
    hits = GivenHits(EXPERTS, (7000.0, 7000.0), 0.659)
    assert hits.at([4] * 3).copied == pytest.approx((2387.0, 2387.0))
    assert hits.at([EXPERTS] * 3).low == 1.0 and hits.at([0] * 3).high == 0.0


@pytest.mark.parametrize("rate", [0.3, 0.6, 0.9])
def test_the_capacity_for_a_rate_is_the_least_that_reaches_it(rate: float) -> None:
    hits = TraceHits(G, [small_trace()])
    slots = capacity_for(hits, G, rate)
    assert slots is not None
    assert hits.at([slots] * LAYERS).high >= rate > hits.at([slots - 1] * LAYERS).high


def test_only_all_experts_reach_a_perfect_rate() -> None:
    assert capacity_for(TraceHits(G, [small_trace(tokens=60)]), G, 1.0) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_experts": 32}, "has 32 experts, the model 16"),
        ({"layers": np.arange(3, dtype=np.int32)}, "3 MoE layers, the model 3, but others"),
        (
            {"layers": np.arange(1, 3, dtype=np.int32), "experts": small_trace().experts[:2]},
            "2 MoE layers, the model 3",
        ),
        ({"experts": small_trace().experts[:, :, :1]}, "top-k is 1, the model's 2"),
    ],
)
def test_traces_of_other_models_are_refused(change: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_trace(G, (), replace(small_trace(), **change), "t.npz")


def test_a_trace_is_read_checked_and_split(tmp_path: Path) -> None:
    save_trace(replace(small_trace(), windows=np.array([0, 200]), domains=("a", "b")), tmp_path / "t.npz")
    found = load_hits(G, (), [tmp_path / "t.npz"], "score")
    assert [text.domains[0] for text in found.texts] == ["a", "b"] and "score" in found.dynamic.label


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], "mru"), "no policy 'mru'"),
        (([], "score"), "--policy score needs a --trace"),
        ((["t.npz"], "lru", 0.5), "give one"),
        ((["none.npz"], "lru"), "no such trace file"),
    ],
)
def test_mistakes_are_one_line(arguments: tuple, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_hits(G, (), *arguments)
