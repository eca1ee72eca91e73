"""The pictures: what their titles claim, and that hostile traces still draw."""

import numpy as np
import pandas as pd
import pytest

from edgemoe.errors import UserError
from edgemoe.tracing import Trace, pictures, stats
from edgemoe.tracing.summary import short_names, summarise


def a_trace(name, seed=0, n_layers=3, n_tokens=60, k=2, n_experts=8):
    ranked = np.random.default_rng(seed).random((n_layers, n_tokens, n_experts)).argsort(axis=2)
    layers = np.arange(n_layers, dtype=np.int32)
    return Trace(ranked[:, :, :k].astype(np.int16), n_experts, layers, np.zeros(1, np.int64), (name,), name)


def is_png(path):
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5_000


def test_every_picture_is_written(tmp_path):
    summary = summarise([a_trace("m.prose"), a_trace("m.code", 1)])
    written = pictures.write_all(summary, tmp_path / "new" / "folder")
    assert [path.name for path in written] == [
        "load-prose.png",
        "load-code.png",
        "reuse-by-lag.png",
        "working-set.png",
        "similarity.png",
    ]
    assert all(is_png(path) for path in written)


@pytest.mark.parametrize(
    "trace",
    [
        a_trace("one token", n_tokens=1),
        a_trace("one layer, one expert", n_layers=1, n_experts=1, k=1),
        a_trace("wide", n_layers=2, n_experts=512, k=8),
        a_trace("deep", n_layers=95),
        a_trace("a/b: c?"),
    ],
    ids=lambda trace: trace.name,
)
def test_traces_of_any_shape_are_drawn(tmp_path, trace):
    written = pictures.write_all(summarise([trace]), tmp_path)
    assert written and all(is_png(path) and path.parent == tmp_path for path in written)


def test_many_texts_and_one_layer_are_drawn(tmp_path):
    summary = summarise([a_trace(f"text-{i}", i) for i in range(9)], lags=[3], layer=1)
    for name, figure in {
        "reuse": pictures.reuse_by_lag(summary.reuse),
        "similarity": pictures.similarity_matrix(summary.cosine, summary.jaccard),
    }.items():
        assert is_png(pictures.save(figure, tmp_path / f"{name}.png"))
    assert "3 tokens later" in pictures.reuse_by_lag(summary.reuse).axes[0].get_title(loc="left")


def test_texts_that_cannot_be_compared_are_drawn():
    pair = [a_trace("a"), a_trace("b", n_experts=9)]
    figure = pictures.similarity_matrix(stats.similarity(pair), stats.similarity(pair, "jaccard"))
    assert "No two of these texts" in figure.get_suptitle()


def test_titles_state_what_was_found():
    always = Trace(
        np.tile(np.array([3, 5], dtype=np.int16), (1, 50, 1)),
        8,
        np.zeros(1, np.int32),
        np.zeros(1, np.int64),
        ("d",),
        "still",
    )
    title = pictures.load_heat_map(always).axes[0].get_title(loc="left")
    assert title == "still: 25% of the experts serve 95% of the loads"
    title = pictures.reuse_by_lag(stats.reuse(always)).axes[0].get_title(loc="left")
    assert title == "100% of the experts are used again by the next token, 1.0× chance"


def test_hit_rates_are_drawn_and_the_best_rule_that_can_be_built_is_named(tmp_path):
    rows = pd.DataFrame(
        [
            {"trace": "t", "layer": 24, "policy": policy, "capacity": capacity, "share": capacity / 8, "hit_rate": rate}
            for policy, rates in {
                "lru": (0.3, 0.6),
                "belady": (0.5, 0.8),
                "static-oracle": (0.4, 0.75),
                "static-prefix": (0.2, 0.7),
            }.items()
            for capacity, rate in zip((2, 4), rates, strict=True)
        ]
    )
    figure = pictures.hit_rate_by_capacity(rows)
    assert figure.axes[0].get_title(loc="left") == "With 25% of the experts resident, LRU serves 30% of the loads"
    figure = pictures.hit_rate_by_capacity(rows, at=0.5)
    assert "pinned, from the first 20% serves 70%" in figure.axes[0].get_title(loc="left")
    assert is_png(pictures.save(figure, tmp_path / "hits.png"))


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="cannot write"):
        pictures.save(pictures.working_set_curve([a_trace("t")]), tmp_path / "file" / "x.png")


def test_short_names_drop_what_all_share():
    assert short_names(["qwen.code", "qwen.math"]) == ["code", "math"]
    assert short_names(["s-a.code", "s-b.code"]) == ["a.code", "b.code"]
    assert short_names(["demo:prose", "demo:code", "other"]) == ["demo:prose", "demo:code", "other"]
    assert short_names(["x.code"]) == ["x.code"]
    assert short_names(["x.", "x.y"]) == ["x.", "y"]
