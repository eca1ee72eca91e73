"""Recorded routing: which windows are taken, how a geometry with more layers is filled, and the demo model's."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from gpu_subjects import recording, trace_file

from edgemoe.bench.gpu.replay import decide
from edgemoe.bench.gpu.routing import demo_recording, filled, recording_of
from edgemoe.errors import UserError
from edgemoe.policy import LogicalCache, preset
from edgemoe.progress import no_progress
from edgemoe.tracing import load_trace


def test_windows_are_taken_from_every_domain_in_turn(tmp_path: Path) -> None:
    trace = load_trace(trace_file(tmp_path / "t.npz"))
    found = recording_of(trace, 3, 6)
    assert found.domains == ("a", "b", "a")
    assert [tokens[0] for tokens in found.tokens] == [0, 20, 10] and [len(t) for t in found.tokens] == [6, 6, 6]
    assert np.array_equal(found.windows[1].scores, trace.scores[:, 20:26])
    assert np.array_equal(found.delta, trace.delta) and found.notes == ()
    with pytest.raises(UserError, match="no pregate in it"):
        recording_of(replace(trace, pregate=None), 3, 6)


def test_the_tail_of_a_text_is_no_window_where_others_have_the_tokens(tmp_path: Path) -> None:
    whole = load_trace(trace_file(tmp_path / "t.npz"))
    trace = replace(whole, windows=np.array([0, 7, 10, 20, 30]), domains=("a", "a", "b", "b", "b"))
    for asked, firsts, length in ((6, [0, 10, 20, 30], 6), (3, [0, 10, 7, 20, 30], 3), (99, [10, 20, 30], 10)):
        found = recording_of(trace, 9, asked)
        assert [tokens[0] for tokens in found.tokens] == firsts
        assert {len(tokens) for tokens in found.tokens} == {length}


def test_a_trace_without_bonus_scale_and_warm_set_gives_half_of_its_windows_to_estimate_them(tmp_path: Path) -> None:
    trace = replace(load_trace(trace_file(tmp_path / "t.npz")), delta=None, warm=None)
    found = recording_of(trace, 9, 6)
    assert [tokens[0] for tokens in found.tokens] == [10, 30] and "first half" in found.notes[0]
    early = np.r_[0:10, 20:30]
    ranges = np.ptp(trace.scores[:, early], axis=-1)
    assert found.delta == pytest.approx(ranges.mean(1), rel=1e-5)
    most = np.bincount(trace.experts[1, early].ravel(), minlength=64).argmax()
    assert found.warm[1, 0] == most
    with pytest.raises(UserError, match="trace more tokens"):
        recording_of(replace(trace, windows=trace.windows[:1], domains=("a",)), 9, 6)


def test_executors_get_a_layer_s_scores_and_the_next_one_s_pregate() -> None:
    window = recording().windows[0]
    packed = window.packed()
    assert packed.shape == (12, 3, 2, 8)
    assert np.array_equal(packed[5, 1, 0], window.scores[1, 5])
    assert np.array_equal(packed[5, 1, 1], window.pregate[2, 5])
    assert not packed[:, 2, 1].any()


def test_more_layers_are_filled_from_other_windows_and_never_by_the_first_layer() -> None:
    found = recording(windows=3)
    more = filled(found, 6)
    assert len(more.delta) == len(more.warm) == 6
    for number in range(3):
        scores = more.windows[number].scores
        assert np.array_equal(scores[:3], found.windows[number].scores)
        assert np.array_equal(scores[3:5], found.windows[(number + 1) % 3].scores[1:])
        assert np.array_equal(scores[5], found.windows[(number + 2) % 3].scores[1])
        assert more.windows[number].pregate[1:].any(axis=(1, 2)).all()
    assert "layers 1 to 2 again to fill 6" in more.notes[-1]
    assert filled(found, 3) is found and len(filled(found, 2).windows[0].scores) == 2


def test_decisions_are_counted(tmp_path: Path) -> None:
    window = recording().windows[0]
    cache = LogicalCache(preset("exact-lru"), n_layers=3, n_experts=8, top_k=2, capacity=3)
    found = decide(cache, window, np.arange(12))
    own = np.argsort(-window.scores, axis=-1)[..., :2]
    assert found.replaced == 0 and found.prefetch == 0 and np.array_equal(found.executed, own)
    assert found.demand == found.counts[..., 1].sum() > 0 and (found.resident.sum(1) == 3).all()
    steered = decide(
        LogicalCache(
            preset("psr", window=3, lam=0.5), n_layers=3, n_experts=8, top_k=2, capacity=3, delta=np.ones(3, np.float32)
        ),
        window,
        np.arange(12),
    )
    other = (np.sort(steered.executed) != np.sort(own)).any()
    assert other and steered.replaced > 0 and 0 < steered.demand < found.demand and steered.prefetch > 0


def test_the_demo_model_s_routing_is_replayed_from_behind_what_estimates() -> None:
    pytest.importorskip("llama_cpp")
    found = demo_recording(4, 20, lambda *_: nullcontext(no_progress), per_text=1024)
    assert len(set(found.domains)) == 4 and found.windows[0].scores.shape == (8, 20, 64)
    assert found.delta.shape == (8,) and (found.delta > 0).all()
    assert (np.sort(found.warm, 1) == np.arange(64)).all()
