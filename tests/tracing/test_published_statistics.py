"""The figures of arXiv 2608.18261 (Tables 3, 4, 5) that follow from its traces without a cache."""

from pathlib import Path

import numpy as np
import pytest

from edgemoe.tracing import load_trace, stats

ROUTING = Path(__file__).parents[3] / "shared" / "data" / "routing"
DOMAINS = ("code", "general", "math", "medical")

pytestmark = pytest.mark.skipif(not ROUTING.is_dir(), reason="the published traces (../shared/data/routing) are absent")


@pytest.fixture(scope="module")
def qwen():
    return stats.split([load_trace(ROUTING / f"qwen3-30b-a3b.{domain}.npz") for domain in DOMAINS])


def over_all(frames, **keys):
    """The "all" rows of several traces."""
    rows = []
    for frame in frames:
        for column, value in keys.items():
            frame = frame[frame[column] == value]
        rows.append(frame[frame["layer"] == "all"].iloc[0])
    return rows


def test_table_3_reuse_and_chance(qwen):
    rows = over_all([stats.reuse(trace, [1]) for trace in qwen])
    reuse, chance = np.mean([row["reuse"] for row in rows]), np.mean([row["chance"] for row in rows])
    assert reuse == pytest.approx(0.4439, abs=5e-5)
    assert chance == pytest.approx(0.2227, abs=5e-5)
    assert round(reuse / chance, 1) == 2.0


def test_table_3_working_set(qwen):
    rows = over_all([stats.working_set(trace, [0.95]) for trace in qwen])
    assert np.mean([row["share"] for row in rows]) == pytest.approx(0.5247, abs=5e-5)


def test_table_4_is_the_cosine_of_the_load_vectors(qwen):
    cosine = stats.similarity(qwen).to_numpy()
    assert cosine[0, 1] == pytest.approx(0.1614, abs=5e-5)
    assert cosine[1, 3] == pytest.approx(0.4151, abs=5e-5)
    published = [[1.00, 0.16, 0.14, 0.11], [0.16, 1.00, 0.33, 0.42], [0.14, 0.33, 1.00, 0.35], [0.11, 0.42, 0.35, 1.00]]
    assert np.array_equal(np.round(cosine, 2), published)


def test_table_4_is_not_a_jaccard_index(qwen):
    """The study says "Jaccard-style"; the sets that carry 95% overlap more than twice as much."""
    jaccard = stats.similarity(qwen, "jaccard").to_numpy()
    assert jaccard[0, 1] == pytest.approx(0.4003, abs=5e-5)
    assert jaccard[0, 1:].min() > 0.33


@pytest.mark.parametrize(("run", "published"), [("a", 0.336), ("b", 0.634), ("c", 0.470)])
def test_table_5_reuse(run, published):
    traces = [load_trace(ROUTING / f"sticky-{run}-main-s1.{domain}.npz") for domain in ("prose", "code", "math")]
    rows = over_all([stats.reuse(trace, [1]) for trace in traces])
    assert round(float(np.mean([row["reuse"] for row in rows])), 3) == published


def test_pregate_of_a_real_router_names_most_of_the_next_layers_experts():
    parts = stats.split([load_trace(ROUTING / "olmoe-shaped-16x64.scores.npz")])
    assert [part.domains[0] for part in parts] == ["prose", "code", "math", "manual"]
    for recall in over_all([stats.pregate_recall(part) for part in parts], width=8):
        assert 0.80 < recall["recall"] < 0.83 and recall["recall"] > 2 * recall["frequent"]
