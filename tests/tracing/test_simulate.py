"""`simulate` on traces small enough to count by hand, and against the policy that the tiers call."""

import numpy as np
import pytest

from edgemoe.errors import UserError
from edgemoe.policy import PRESETS, LogicalCache, Policy, preset
from edgemoe.tracing import Trace
from edgemoe.tracing.simulate import Calibration, n_replays, simulate


def make_trace(**fields):
    rng = np.random.default_rng(3)
    n_layers, n_tokens, n_experts, k = 3, 60, 16, 4
    scores = rng.normal(size=(n_layers, n_tokens, n_experts)).astype(np.float32)
    scores += 2 * rng.normal(size=(n_layers, 1, n_experts)).astype(np.float32)
    ranked = np.argsort(-scores, axis=2).astype(np.int16)
    values = {
        "experts": ranked[:, :, :k],
        "n_experts": n_experts,
        "layers": np.array([1, 2, 4], dtype=np.int32),
        "windows": np.array([0, 25], dtype=np.int64),
        "domains": ("prose", "code"),
        "name": "small",
        "scores": scores,
        "pregate": scores + rng.normal(scale=0.3, size=scores.shape).astype(np.float32),
        "delta": np.full(n_layers, 6, dtype=np.float32),
        "warm": np.argsort(-scores.sum(axis=1), axis=1).astype(np.int16),
    }
    return Trace(**{**values, **fields})


def loads(rows, n_experts):
    """A trace of one layer that only holds loads."""
    return make_trace(
        experts=np.array([rows], dtype=np.int16),
        n_experts=n_experts,
        layers=np.array([0], dtype=np.int32),
        windows=np.array([0]),
        domains=("t",),
        scores=None,
        pregate=None,
        delta=None,
        warm=None,
    )


def test_counts_done_by_hand():
    """Capacity 2, loads 0 1 | 0 2 | 0 1: LRU evicts 1 for 2, then 2 for 1; so does the optimum."""
    rows = simulate(loads([[0, 1], [0, 2], [0, 1]], 4), [2], ["lru", "belady", "static-oracle"])
    assert rows["misses_per_token"].tolist() == pytest.approx([4 / 3, 4 / 3, 1 / 3])
    assert rows["hit_rate"].tolist() == pytest.approx([2 / 6, 2 / 6, 5 / 6])
    assert rows["share"].tolist() == [0.5] * 3


def test_every_rule_misses_each_expert_once_with_room_for_all():
    rows = simulate(loads([[0, 1], [2, 3], [3, 0], [1, 2]], 4), [4], ["lru", "lfu", "score", "belady"])
    assert (rows["misses_per_token"] * 4).tolist() == [4] * 4


@pytest.mark.parametrize("name", PRESETS)
def test_replay_makes_the_decisions_of_the_logical_cache(name):
    trace = make_trace()
    policy = preset(name)
    policy = preset(name, window=5) if policy.window else policy
    cache = LogicalCache(policy, n_layers=3, n_experts=16, top_k=4, capacity=6, delta=trace.delta, warm=trace.warm)
    demand = prefetched = unused = replaced = 0
    for t in range(trace.n_tokens):
        if t in trace.windows:
            cache.reset()
        cache.begin_token()
        for i in range(3):
            copies = cache.prefetch(i, trace.pregate[i, t]) if trace.has_pregate[i] else []
            experts, demanded = cache.select(i, trace.scores[i, t])
            demand += len(demanded)
            prefetched += len(copies)
            unused += len({copy.expert for copy in copies} - set(experts))
            replaced += len(set(experts) - set(trace.experts[i, t].tolist()))
    row = simulate(trace, [6], {name: policy}).iloc[0]
    counted = row[["demand_per_token", "prefetch_per_token", "unused_per_token", "replaced_per_token"]] * 60
    assert counted.tolist() == pytest.approx([demand, prefetched, unused, replaced])
    assert trace.has_pregate.tolist() == [False, True, False]  # layer 4 follows a dense layer


def test_all_layers_are_the_sum_of_each():
    trace = make_trace()
    policies = ["lru", "belady", "exact-score"]
    whole = simulate(trace, [5], policies, expert_bytes=[10, 20, 30])
    parts = [simulate(trace, [5], policies, layer=layer, expert_bytes=[10, 20, 30]) for layer in (1, 2, 4)]
    for column in ("misses_per_token", "bytes_per_token"):
        assert np.allclose(whole[column], sum(part[column] for part in parts))
    assert np.allclose(whole["hit_rate"], np.mean([part["hit_rate"] for part in parts], axis=0))
    assert np.allclose(parts[2]["bytes_per_token"], 30 * parts[2]["misses_per_token"])
    assert whole["layer"].tolist() == ["all"] * 3


def test_bytes_count_prefetch_copies_too():
    row = simulate(make_trace(), [8], ["psr"], layer=2, expert_bytes=[1, 7, 1]).iloc[0]
    assert row["prefetch_per_token"] > 0
    assert row["bytes_per_token"] == pytest.approx(7 * (row["demand_per_token"] + row["prefetch_per_token"]))


def test_rules_carry_their_state_through_windows_and_algorithm_1_does_not():
    whole = make_trace(windows=np.array([0]), domains=("t",))
    split = make_trace(windows=np.arange(0, 60, 3), domains=("t",) * 20)
    assert simulate(whole, [5], ["lru"]).equals(simulate(split, [5], ["lru"]))
    misses = [simulate(trace, [5], ["exact-lru"])["misses_per_token"].item() for trace in (whole, split)]
    assert misses[1] < misses[0]  # the warm set comes from this very text


def test_elided_experts_are_no_loads():
    """The hit rate is over what ran, not over what was recorded."""
    trace = make_trace(windows=np.array([0]), domains=("t",))
    policy = Policy(elide=0.45)
    cache = LogicalCache(policy, n_layers=3, n_experts=16, top_k=4, capacity=6, warm=trace.warm)
    executed = missed = 0
    for t in range(trace.n_tokens):
        cache.begin_token()
        for i in range(3):
            experts, copies = cache.select(i, trace.scores[i, t])
            executed += len(experts)
            missed += len(copies)
    assert executed < trace.experts.size / 2
    assert simulate(trace, [6], {"elided": policy})["hit_rate"].item() == pytest.approx(1 - missed / executed)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -1.0])
def test_a_calibration_that_is_no_range_of_scores_is_refused(wrong):
    with pytest.raises(UserError, match="held: a mean range of scores of"):
        Calibration(np.array([1.0, wrong], dtype=np.float32), source="held")


def test_scores_without_a_range_are_no_calibration():
    text = make_trace()
    for wrong in (np.nan, np.inf):
        scores = text.scores.copy()
        scores[1, 7, 3] = wrong
        spoilt = make_trace()
        object.__setattr__(spoilt, "scores", scores)
        with pytest.raises(UserError, match="small: a mean range of scores of"):
            Calibration.measured(spoilt, text)
    masked = text.scores.copy()
    masked[1, 7, 3] = masked[2, 9] = -np.inf
    assert np.isfinite(Calibration.measured(make_trace(scores=masked), text).delta).all()


def test_a_running_scale_reaches_the_gate_under_exact_routing():
    """λ has nothing to steer there but the prefetches, which a gate without its bonus scale would not change."""

    def prefetched(lam):
        policy = preset("psr-gated", routing="exact", scale="running", window=5, lam=lam)
        cache = LogicalCache(policy, n_layers=3, n_experts=16, top_k=4, capacity=6, warm=trace.warm)
        copies = 0
        for t in range(trace.n_tokens):
            if t in trace.windows:
                cache.reset()
            cache.begin_token()
            copies += len(cache.prefetch(1, trace.pregate[1, t]))
            cache.select(1, trace.scores[1, t])
        row = simulate(trace, [6], {"gated": policy}, layer=2).iloc[0]
        assert row["prefetch_per_token"] * trace.n_tokens == pytest.approx(copies)
        assert row["replaced_per_token"] == 0
        return copies

    trace = make_trace()
    assert prefetched(1.0) < prefetched(0.0)
    unscored = make_trace(scores=None)
    with pytest.raises(UserError, match="needs the router's scores"):
        simulate(unscored, [6], {"gated": preset("psr-gated", routing="exact", scale="running", window=5)})


def test_exact_routing_executes_what_was_recorded():
    """The router's ranking of near-ties is its own: here it recorded the four worst experts."""
    trace = make_trace()
    worst = np.argsort(trace.scores, axis=2)[:, :, :4].astype(np.int16)
    recorded, without = make_trace(experts=worst), make_trace(experts=worst, scores=None)
    assert simulate(recorded, [6], ["exact-lru"]).equals(simulate(without, [6], ["exact-lru"]))
    assert not simulate(recorded, [6], ["exact-lru"]).equals(simulate(trace, [6], ["exact-lru"]))


def test_layers_of_smaller_k_are_padded():
    experts = make_trace().experts.copy()
    experts[1, :, 2:] = -1
    trace = make_trace(experts=experts)
    rows = simulate(trace, [4], ["lru", "exact-lru"], layer=2)
    assert rows["misses_per_token"].le(2).all()
    assert rows["hit_rate"].tolist() == pytest.approx((1 - rows["misses_per_token"] / 2).tolist())


def test_calibration_is_measured_on_the_other_text():
    text = make_trace(delta=None, warm=None)
    measured = Calibration.measured(text, make_trace())
    ranges = text.scores.max(axis=2) - text.scores.min(axis=2)
    assert np.allclose(measured.delta, ranges.mean(axis=1))
    counts = [np.bincount(layer.ravel(), minlength=16) for layer in text.experts]
    for warm, count in zip(measured.warm, counts, strict=True):
        assert (np.diff(count[warm]) <= 0).all()
    unscored = make_trace(scores=None, pregate=None)
    assert Calibration.measured(unscored, text).delta is None


def test_without_calibration_the_scale_runs_and_the_warm_set_is_the_first_experts():
    trace = make_trace()
    bare = make_trace(delta=None, warm=None)
    running = {"cache-prior": preset("cache-prior", scale="running")}
    first = Calibration(None, np.arange(16)[None].repeat(3, axis=0))
    assert simulate(bare, [6], ["cache-prior"]).equals(simulate(trace, [6], running, calibration=first))


@pytest.mark.parametrize(
    ("fields", "arguments", "says"),
    [
        ({}, ([6], ["fifo"]), "no policy 'fifo'"),
        ({}, ([6], ["lru"], 3), "no MoE layer 3"),
        ({}, ([0], ["lru"]), "0 slots"),
        ({}, ([17], ["lru"]), "17 slots"),
        ({}, ([3], ["exact-lru"]), "cannot hold the 4 experts"),
        ({}, ([6], ["psr"]), "window of 8"),
        ({"scores": None}, ([8], ["cache-prior"]), "trace it with --scores"),
        ({"pregate": None}, ([8], ["exact-prefetch"]), "trace it with --pregate"),
        ({"scores": np.full((3, 60, 16), np.nan, np.float32)}, ([8], ["cache-prior"]), "not numbers"),
        ({"experts": np.full((3, 60, 4), 16, np.int16)}, ([6], ["lru"]), "expert id 16"),
        ({"experts": np.full((3, 60, 4), -2, np.int16)}, ([6], ["lru"]), "expert id -2"),
        ({"experts": np.zeros((3, 0, 4), np.int16)}, ([6], ["lru"]), "no tokens"),
        ({"windows": np.array([0, 99])}, ([6], ["lru"]), "do not ascend"),
        ({"warm": np.full((3, 16), 99)}, ([6], ["lru"]), "`warm`"),
        ({"delta": np.zeros(2)}, ([6], ["lru"]), "`delta`"),
    ],
)
def test_refuses_in_one_line(fields, arguments, says):
    with pytest.raises(UserError, match=says) as refusal:
        simulate(make_trace(**fields), *arguments)
    assert "\n" not in str(refusal.value)


def test_a_gap_in_the_recorded_experts_is_refused_by_exact_routing():
    experts = make_trace().experts.copy()
    experts[1, 7, 3] = -1
    with pytest.raises(UserError, match="fewer experts"):
        simulate(make_trace(experts=experts), [6], ["exact-lru"])


def test_calibration_of_another_model_is_refused():
    with pytest.raises(UserError, match="32 experts"):
        Calibration.measured(make_trace(n_experts=32, scores=None, pregate=None), make_trace())
    with pytest.raises(UserError, match="layer 4"):
        Calibration.measured(make_trace(layers=np.array([1, 2, 3])), make_trace())


def test_progress_is_told_of_every_layer():
    told = []
    trace, policies = make_trace(), ["lru", "exact-lru"]
    simulate(trace, [5, 6], policies, advance=told.append)
    assert sum(told) == n_replays(trace, [5, 6], policies) == 12


def test_a_policy_of_ones_own_is_replayed_under_its_name():
    mine = Policy(routing="tau", tau=0.5)
    rows = simulate(make_trace(), [6], {"mine": mine, "lru": None, "exact": Policy()})
    assert rows["policy"].tolist() == ["mine", "lru", "exact"]
    assert rows.loc[0, "demand_per_token"] < rows.loc[2, "demand_per_token"]
    assert rows.loc[0, "replaced_per_token"] > 0
