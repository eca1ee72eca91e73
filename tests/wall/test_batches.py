"""Several streams: unions from traces, against a plain reading of the definition and against independence."""

from dataclasses import replace

import numpy as np
import pytest
from wall_fixtures import EXPERTS, LAYERS, TOP_K, machine, small_geometry, small_trace, wall_of

from edgemoe.errors import UserError
from edgemoe.model.memory import memory_needs
from edgemoe.wall.batch import batch, independent_union, interleave, many, parse_batches, union
from edgemoe.wall.paths import paths
from edgemoe.wall.sharing import replayed

LEAST = next(need.ram for need in memory_needs(small_geometry(), 10) if need.way == "ssd-to-ram")
KV = small_geometry().kv.at(10)
RATES = {"ssd": 1000.0, "ram": 10_000.0, "cpu": 8000.0, "pcie": 2000.0, "vram": 100_000.0}


@pytest.mark.parametrize("streams", [1, 2, 7, 20])
def test_a_union_is_the_distinct_experts_of_windows_at_equal_distances(streams: int) -> None:
    trace = small_trace(tokens=401)
    steps = 401 // streams
    for layer in range(LAYERS):
        sizes = [
            len({int(e) for s in range(streams) for e in trace.experts[layer, s * steps + t]}) for t in range(steps)
        ]
        assert union(trace, streams)[layer] == pytest.approx(np.mean(sizes))


def test_steps_keep_every_expert_once_by_index() -> None:
    trace = small_trace(tokens=90)
    steps = interleave(trace, 3)
    for t in (0, 11, 29):
        wanted = sorted({int(e) for s in range(3) for e in trace.experts[1, 30 * s + t]})
        row = steps.experts[1, t]
        assert row[row >= 0].tolist() == wanted and np.all(row[len(wanted) :] == -1)


def test_padding_is_no_expert() -> None:
    trace = small_trace(tokens=64)
    padded = np.concatenate([trace.experts, np.full((LAYERS, 64, 1), -1, dtype=np.int16)], axis=2)
    assert union(replace(trace, experts=padded), 2).tolist() == union(trace, 2).tolist()


def test_independent_streams_meet_the_formula_and_alike_ones_do_not() -> None:
    rng = np.random.default_rng(3)
    even = np.argsort(rng.random((LAYERS, 8000, EXPERTS)), axis=2)[:, :, :TOP_K].astype(np.int16)
    drawn = replace(small_trace(tokens=16), experts=even)
    assert union(drawn, 8).mean() == pytest.approx(independent_union(EXPERTS, TOP_K, 8), rel=0.01)
    assert independent_union(EXPERTS, TOP_K, 8) == pytest.approx(16 * (1 - (7 / 8) ** 8))
    assert union(small_trace(), 8).mean() < independent_union(EXPERTS, TOP_K, 8)
    alike = replace(drawn, experts=np.tile(even[:, :100], (1, 8, 1)))
    assert union(alike, 8).tolist() == [TOP_K] * LAYERS


def test_one_stream_is_the_path_itself() -> None:
    wall = wall_of(machine(10**9, **RATES), [small_trace()])
    row = batch(wall, 1)
    assert row.union == (TOP_K, TOP_K) and row.path is not None
    assert row.step_bytes == pytest.approx((wall.token.total,) * 2)


def test_streams_share_weights_and_not_caches() -> None:
    wall = wall_of(machine(10**9, **RATES), [small_trace()])
    row = batch(wall, 8)
    sizes = union(small_trace(), 8) @ np.array([1000, 1000, 1500])
    assert row.step_bytes == pytest.approx((wall.token.always + 8 * wall.token.kv + sizes,) * 2)
    assert row.path is not None and row.path.name == "all in RAM"
    assert row.path.tokens_per_s[1] == pytest.approx(8 / ((wall.token.always + 8 * 80) / 1e4 + sizes / 8000))


def test_a_cache_smaller_than_the_union_catches_next_to_nothing_at_worst() -> None:
    """The paper's collapse: streams evict each other's experts from one cache. Belady is the other end."""
    hit = {}
    least = next(need.vram for need in memory_needs(small_geometry(), 10) if need.way == "ram-to-vram")
    for streams in (1, 8):
        wall = wall_of(machine(10**9, least + (streams - 1) * KV + 2 * 3500, **RATES), [small_trace()])  # C = 4
        path = next(path for path in paths(many(wall, streams)) if path.name == "slots in VRAM")
        assert path.slots == (4, 4, 4) and path.hit is not None
        hit[streams] = path.hit
    assert union(small_trace(), 8).min() > 4
    assert hit[8].low < 0.5 * hit[1].low
    assert hit[8].high > hit[8].low and "belady" in hit[8].why


def test_the_ssd_tier_shares_one_store_and_its_two_figures_are_its_legs() -> None:
    texts = [small_trace(), small_trace(seed=5, name="other")]
    wall = wall_of(machine(LEAST + 7 * KV + 2 * 3500, ssd=(500.0, 1000.0), ram=1e4, cpu=8e3), texts)
    path = batch(wall, 8).path
    assert path is not None and path.name == "slots in RAM" and path.slots == (4, 4, 4) and path.hit is not None
    each = [replayed(text, 8, (4, 4, 4), 0, 50) for text in texts]
    sizes = [float(missed @ [1000, 1000, 1500]) / 50 for missed, _ in each]
    assert path.hit.copied == pytest.approx((min(sizes), max(sizes)))
    assert path.hit.low == pytest.approx(min(1 - missed.sum() / ran.sum() for missed, ran in each))
    reads, computing = path.copies[0].slow, path.slow - path.copies[0].slow
    assert reads == pytest.approx(max(sizes) / 500)
    assert path.in_turn[0] == pytest.approx(8 / (reads + computing))
    assert path.overlapped[0] == pytest.approx(8 / max(reads, computing))
    assert path.in_turn[0] < path.overlapped[0] and path.in_turn[1] < path.overlapped[1]
    said = [reason for reason in path.reasons if " tok/s = " in reason]
    assert "reads + computing" in said[0] and "max(reads, computing)" in said[1]


def test_other_evictions_and_given_rates_share_no_store() -> None:
    few = machine(LEAST + 7 * KV + 2 * 3500, ssd=1000.0, ram=1e4, cpu=8e3)
    assert many(wall_of(few, [small_trace()]), 8).caching.store is not None
    assert many(wall_of(few, [small_trace()]), 1).caching.store is None
    assert many(wall_of(few, rate=0.5), 8).caching.store is None
    lfu = wall_of(few, [small_trace()])
    lfu = replace(lfu, caching=replace(lfu.caching, policy="lfu"))
    assert many(lfu, 8).caching.store is None


def test_without_a_trace_the_union_spans_agreement_to_independence() -> None:
    row = batch(wall_of(machine(10**9, **RATES)), 8)
    assert row.union == pytest.approx((TOP_K, independent_union(EXPERTS, TOP_K, 8))) and "no trace" in row.source


def test_streams_that_do_not_fit_have_no_path() -> None:
    wall = wall_of(machine(LEAST + 3 * KV, ram=1e4, cpu=8e3, ssd=1e3))
    assert batch(wall, 4).path is not None and batch(wall, 5).path is None


def test_mistakes_are_one_line() -> None:
    with pytest.raises(UserError, match="90 tokens are too few for 8 streams"):
        union(small_trace(tokens=90), 8)
    assert parse_batches("1, 8,32,8") == [1, 8, 32]
    for wrong in ("0", "-1", "1.5", "many", "", "1,,2", "5000"):
        with pytest.raises(UserError, match="expected numbers of streams"):
            parse_batches(wrong)
