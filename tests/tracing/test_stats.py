"""Statistics against cases worked out by hand, and properties that no trace may break."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgemoe.errors import UserError
from edgemoe.tracing import Trace, stats


def a_trace(experts, n_experts=4, windows=(0,), domains=None, name="t", **more):
    """A trace of the given ids; [T, k] stands for one layer."""
    experts = np.asarray(experts, dtype=np.int16)
    experts = experts[None] if experts.ndim == 2 else experts
    windows = np.asarray(windows, dtype=np.int64)
    layers = more.pop("layers", np.arange(len(experts), dtype=np.int32))
    return Trace(experts, n_experts, layers, windows, tuple(domains or ["d"] * len(windows)), name, **more)


def random_trace(seed, n_layers=2, n_tokens=200, k=2, n_experts=8, **more):
    rng = np.random.default_rng(seed)
    ranked = rng.random((n_layers, n_tokens, n_experts)).argsort(axis=2)
    return a_trace(ranked[:, :, :k], n_experts, **more)


def row(frame, layer="all", **keys):
    found = frame[frame["layer"] == layer]
    for column, value in keys.items():
        found = found[found[column] == value]
    assert len(found) == 1
    return found.iloc[0]


def test_reuse_by_hand():
    # Tokens {0,1}, {1,2}, {1,2}, {3,0}: at lag 1, 1 + 2 + 0 of 6 loads come again; at lag 2, 1 + 0 of 4.
    frame = stats.reuse(a_trace([[0, 1], [1, 2], [2, 1], [3, 0]]), lags=[1, 2, 3])
    assert row(frame, lag=1)["reuse"] == pytest.approx(3 / 6)
    assert row(frame, lag=2)["reuse"] == pytest.approx(1 / 4)
    assert row(frame, lag=3)["reuse"] == pytest.approx(1 / 2)  # {0,1} and {3,0}
    # p = (2, 3, 2, 1) / 4: Σp² = 18/16, Σp = 2.
    assert np.allclose(frame["chance"], 18 / 16 / 2)
    assert row(frame, lag=1)["jaccard"] == pytest.approx((1 / 3 + 1 + 0) / 3)


def test_reuse_never_spans_two_windows():
    experts = [[0], [0], [1], [1], [1]]
    assert row(stats.reuse(a_trace(experts, windows=[0, 2]), [1]), lag=1)["reuse"] == 1.0
    assert row(stats.reuse(a_trace(experts), [1]), lag=1)["reuse"] == pytest.approx(3 / 4)


def test_all_layers_pool_the_loads_of_layers_with_unequal_k():
    # Layer 0 executes two experts per token and repeats both; layer 1 executes one (−1 pads) and repeats none.
    trace = a_trace([[[0, 1], [1, 0]], [[2, -1], [3, -1]]], layers=np.array([3, 5], dtype=np.int32))
    frame = stats.reuse(trace, [1])
    assert [frame["reuse"].iloc[i] for i in range(3)] == [pytest.approx(2 / 3), 1.0, 0.0]
    assert list(frame["layer"]) == ["all", 3, 5]
    assert list(stats.load(trace)["loads"]) == [6, 4, 2]


def test_default_lags_stop_at_the_longest_window():
    assert set(stats.reuse(random_trace(0, n_tokens=40, windows=[0, 20]))["lag"]) == {1, 2, 4, 8, 16}


def test_working_set_by_hand():
    # 20 loads: 15, 3, 1, 1.
    trace = a_trace([[0]] * 15 + [[1]] * 3 + [[2], [3]])
    frame = stats.working_set(trace, [0.75, 0.9, 0.95, 1.0])
    assert list(frame[frame["layer"] == 0]["experts"]) == [1, 2, 3, 4]  # exactly 75%, 90% and 95%: not one more
    assert list(frame[frame["layer"] == "all"]["share"]) == [0.25, 0.5, 0.75, 1.0]


def test_load_by_hand():
    values = row(stats.load(a_trace([[0], [0], [1], [1]])))
    assert values["entropy"] == pytest.approx(1.0)  # two experts, evenly: one bit
    assert values["effective"] == pytest.approx(2.0)
    assert values["imbalance"] == pytest.approx(2.0)
    assert values["never"] == 2


def test_drift_by_hand():
    # The first fifth uses expert 0 alone, the rest expert 0 once in four.
    trace = a_trace([[0], [0]] + [[0], [1], [1], [1]] * 2)
    values = row(stats.drift(trace, prefix=0.2, share=0.25))
    assert (values["tokens"], values["capacity"]) == (2, 1)
    assert values["variation"] == pytest.approx(3 / 4)
    assert values["pinned"] == pytest.approx(1 / 4)
    assert values["oracle"] == pytest.approx(3 / 4)
    assert values["lost"] == pytest.approx(1 / 2)


def test_drift_of_a_text_that_does_not_drift_is_what_sampling_gives():
    values = row(stats.drift(random_trace(3, n_tokens=20_000)))
    assert values["variation"] < 0.02
    assert values["variation"] == pytest.approx(values["sampled"], abs=0.01)


def test_pregate_recall_by_hand():
    pregate = np.zeros((2, 2, 4), dtype=np.float32)
    pregate[1] = [[9, 5, 1, 0], [3, 3, 3, 3]]  # equal scores rank by index
    trace = a_trace([[[0, 1], [0, 1]], [[0, 2], [1, 3]]], pregate=pregate)
    frame = stats.pregate_recall(trace, [1, 2, 3, 4])
    assert list(frame[frame["layer"] == 1]["recall"]) == [1 / 4, 2 / 4, 3 / 4, 1.0]
    assert set(frame["layer"]) == {"all", 1}  # the first MoE layer has no pre-gate


def test_pregate_recall_is_empty_without_scores_and_after_dense_layers():
    assert stats.pregate_recall(random_trace(0)).empty
    pregate = np.zeros((2, 200, 8), dtype=np.float32)
    assert stats.pregate_recall(random_trace(0, pregate=pregate, layers=np.array([1, 3], dtype=np.int32))).empty


def test_similarity_by_hand():
    a, b = a_trace([[0]] * 3 + [[1]] * 4, name="a"), a_trace([[1]] * 5, name="b")
    cosine = stats.similarity([a, b])
    assert cosine.loc["a", "b"] == pytest.approx(4 / 5)
    assert list(np.diag(cosine)) == [1.0, 1.0]
    assert stats.similarity([a, b], "jaccard").loc["a", "b"] == pytest.approx(1 / 2)


def test_texts_of_different_models_are_not_compared():
    others = [
        random_trace(1, n_experts=8, name="a"),
        random_trace(1, n_experts=9, name="b"),
        random_trace(1, n_layers=3, name="c"),
        random_trace(1, layers=np.array([1, 2], dtype=np.int32), name="d"),
    ]
    for measure in ("cosine", "jaccard"):
        values = stats.similarity(others, measure).to_numpy()
        assert np.array_equal(np.isnan(values), ~np.eye(4, dtype=bool))


def test_split_takes_domains_apart_and_keeps_names_unique():
    both = random_trace(0, windows=[0, 50, 120], domains=["prose", "code", "prose"], name="f")
    parts = stats.split([both, random_trace(1, name="f:code")])
    assert [(part.name, part.n_tokens) for part in parts] == [("f:prose", 130), ("f:code#1", 70), ("f:code#2", 200)]
    assert [part.name for part in stats.split([both], ["code"])] == ["f:code"]
    with pytest.raises(UserError, match="no trace has a domain 'math'; the domains are prose, code"):
        stats.split([both], ["math"])


def test_one_token_is_a_trace():
    trace = a_trace([[0, 1]])
    assert np.isnan(row(stats.reuse(trace))["reuse"])
    assert np.isnan(row(stats.drift(trace))["lost"])
    assert row(stats.load(trace))["entropy"] == 1.0
    assert row(stats.working_set(trace, [0.95]))["experts"] == 2


@settings(max_examples=25)
@given(seed=st.integers(0, 10_000), k=st.integers(1, 6), lag=st.integers(1, 9))
def test_a_constant_trace_is_reused_whole(seed, k, lag):
    experts = np.random.default_rng(seed).permutation(8)[:k]
    frame = stats.reuse(a_trace(np.tile(experts, (10, 1)), 8), [lag])
    assert (frame["reuse"] == 1).all() and (frame["jaccard"] == 1).all() and np.allclose(frame["chance"], 1)


@settings(max_examples=10)
@given(seed=st.integers(0, 10_000), k=st.integers(1, 7))
def test_a_trace_without_memory_is_reused_as_chance_says(seed, k):
    values = row(stats.reuse(random_trace(seed, n_tokens=4000, k=k), [1]))
    assert values["chance"] == pytest.approx(k / 8, rel=0.02)
    assert values["reuse"] == pytest.approx(values["chance"], abs=0.04)


@settings(max_examples=15)
@given(seed=st.integers(0, 10_000))
def test_naming_the_experts_differently_changes_nothing(seed):
    trace = random_trace(seed, n_tokens=60, windows=[0, 25])
    other = random_trace(seed + 1, n_tokens=80)
    names = np.random.default_rng(seed).permutation(8).astype(np.int16)
    renamed, other_renamed = (a_trace(names[t.experts], 8, t.windows) for t in (trace, other))
    for compute in (stats.reuse, stats.working_set, stats.load):
        before, after = compute(trace), compute(renamed)
        assert np.allclose(before.select_dtypes("number"), after.select_dtypes("number"))
    before, after = (stats.similarity(pair).to_numpy() for pair in ([trace, other], [renamed, other_renamed]))
    assert np.allclose(before, after)


@settings(max_examples=25)
@given(
    seed=st.integers(0, 10_000),
    lag=st.integers(1, 12),
    cuts=st.sets(st.integers(1, 39), max_size=4),
    pad=st.integers(0, 2),
)
def test_reuse_is_what_sets_say(seed, lag, cuts, pad):
    """The compiled loop against the definition, read literally."""
    windows = [0, *sorted(cuts)]
    trace = random_trace(seed, n_layers=1, n_tokens=40, k=3, windows=windows)
    trace.experts[:, :, 3 - pad :] = -1
    sets = [set(ids) - {-1} for ids in trace.experts[0].tolist()]
    ends = [*windows[1:], 40]
    pairs = [
        (sets[t], sets[t + lag]) for start, end in zip(windows, ends, strict=True) for t in range(start, end - lag)
    ]
    values = row(stats.reuse(trace, [lag]))
    loads = sum(len(a) for a, _ in pairs)
    if not loads:
        assert np.isnan(values["reuse"])
    else:
        assert values["reuse"] == pytest.approx(sum(len(a & b) for a, b in pairs) / loads)
        assert values["jaccard"] == pytest.approx(np.mean([len(a & b) / len(a | b) for a, b in pairs]))
