"""The predicted hit rates of a calibration: a replay of its text, kept in its file, and shown beside a run's own."""

import json
import signal
import zipfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgemoe.calibration import Calibration, HitRates, load_calibration
from edgemoe.cli import commands
from edgemoe.policy import PRESETS, LogicalCache, preset
from edgemoe.progress import no_progress
from edgemoe.tracing import Trace, load_trace
from edgemoe.tracing.calibrate import calibration_of
from edgemoe.tracing.capture import Settings, capture
from edgemoe.tracing.predict import _others, predict
from edgemoe.tracing.texts import Source

DATA = Path(__file__).parents[2] / "edgemoe" / "data"
DEMO = DATA / "demo-moe-32m-q8_0.gguf"


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("predict") / "t.npz"
    settings = Settings(n_ctx=100, max_tokens=300, scores=True, pregate=None, n_threads=1)
    capture(DEMO, [Source("prose", DATA / "prose.txt")], out, settings, watch=lambda _: nullcontext(no_progress))
    return out


@pytest.fixture(scope="module")
def known(traced: Path) -> Calibration:
    found = calibration_of(load_trace(traced))
    with zipfile.ZipFile(traced) as archive:
        return replace(found, hits=predict(archive, found))


def by_hand(trace: Trace, known: Calibration, name: str, capacity: int) -> float:
    """The same with the cache that Python drives."""
    policy, prior = PRESETS[name], [_others(known, row, trace.tokens, trace.experts[row]) for row in range(8)]
    cache = LogicalCache(
        policy, n_layers=8, n_experts=64, top_k=8, capacity=capacity, delta=known.delta, warm=known.warm
    )
    cache.prior = np.zeros((8, 1, 64), np.float32)
    misses = 0
    for t in range(trace.n_tokens):
        if t in trace.windows:
            cache.reset()
        cache.prior[:, 0] = [rows[t] for rows in prior]
        cache.begin_token(0)
        for layer in range(8):
            if policy.needs_pregate and layer:
                cache.prefetch(layer, trace.pregate[layer, t])  # type: ignore[index]
            if policy.needs_scores:
                misses += len(cache.select(layer, trace.scores[layer, t]).copies)  # type: ignore[index]
            else:
                misses += len(cache.observe(layer, trace.experts[layer, t].tolist()))
    return 1 - misses / (trace.n_tokens * 64)


@pytest.mark.parametrize("name", ["exact-score", "psr"])
def test_a_rate_is_a_replay_of_the_text(traced: Path, known: Calibration, name: str) -> None:
    assert known.hits and known.hits.policies[name] == preset(name).hash and known.hits.n_tokens == 304
    predicted = known.hits.at(preset(name).hash, 16)
    assert predicted == pytest.approx(by_hand(load_trace(traced), known, name, 16), abs=1e-6)
    assert 0.3 < predicted < 1


def test_more_slots_hit_more_and_all_of_them_always(known: Calibration) -> None:
    hits = known.hits
    assert hits and set(hits.policies) == set(PRESETS) and hits.capacities[-1] == 64
    assert np.isnan(hits.rates[:, hits.capacities < 8]).all() and (hits.rates[:, -1] == 1).all()
    lru = hits.rates[list(hits.policies).index("exact-lru"), hits.capacities >= 8]
    assert (np.diff(lru) > 0).all()


def test_a_token_does_not_foretell_itself(known: Calibration) -> None:
    """Seen once: no prior. Seen n times: the mean of the other n − 1."""
    trace_experts = np.array([[3, 5], [3, 6], [1, 2]])
    prior = calibration_of(
        Trace(
            experts=trace_experts[None].astype(np.int16),
            n_experts=8,
            layers=np.array([0]),
            windows=np.array([0]),
            domains=("t",),
            name="t",
            tokens=np.array([7, 7, 9]),
            scores=np.zeros((1, 3, 8), np.float32),
            meta={"header_sha256": ["a"]},
        )
    )
    rows = _others(prior, 0, np.array([7, 7, 9]), trace_experts)
    assert [np.flatnonzero(row).tolist() for row in rows] == [[3, 6], [3, 5], []]
    assert rows.max() == 1


def test_the_file_keeps_them_and_one_without_still_loads(known: Calibration, tmp_path: Path) -> None:
    known.save(tmp_path / "new")
    read = load_calibration(tmp_path / "new", DEMO)
    assert read.hits and known.hits and read.hits.policies == known.hits.policies
    assert np.array_equal(read.hits.rates, known.hits.rates, equal_nan=True) and read.digest == known.digest
    replace(known, hits=None, version=1).save(tmp_path / "old")
    old = load_calibration(tmp_path / "old", DEMO)
    assert old.hits is None and old.version == 1 and old.digest == known.digest


def test_between_sizes_is_on_the_line_and_beyond_them_is_nothing() -> None:
    hits = HitRates({"a": "x"}, np.array([4, 8, 16], np.int32), np.array([[np.nan, 0.5, 0.9]], np.float32), 10)
    assert hits.at("x", 12) == pytest.approx(0.7)
    assert hits.at("x", 4) is None and hits.at("x", 17) is None and hits.at("y", 8) is None
    for capacities, rates in (([8, 4], [[0.1, 0.2]]), ([4, 8], [[0.1]]), ([4, 8], [[0.1, 1.5]])):
        with pytest.raises(ValueError):
            HitRates({"a": "x"}, np.array(capacities), np.array(rates), 1)


@pytest.mark.parametrize("tier", [[], ["--device", "cpu"]], ids=["disk", "device"])
def test_a_run_shows_what_was_predicted_or_why_nothing_was(
    tier: list[str], known: Calibration, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if tier:
        pytest.importorskip("torch", reason="the GPU tier needs torch (pip install edgemoe[gpu])")
    before = signal.getsignal(signal.SIGTERM)
    known.save(tmp_path / "c.calib")
    replace(known, hits=None, version=1).save(tmp_path / "old.calib")
    calibrated = ["--calibration", str(tmp_path / "c.calib"), "--policy", "psr"]
    said = []
    for more in (
        calibrated,
        [*calibrated, "--lambda", "0.3"],
        ["--policy", "psr"],
        ["--calibration", str(tmp_path / "old.calib")],
    ):
        run = ["run", str(DEMO), "--threads", "1", "-p", "In the", "-n", "4", "--residency", "16", *tier, *more]
        assert commands.run([*run, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        said.append((found["predicted_hit_rate"], found["unpredicted"]))
    assert known.hits and said[0] == (pytest.approx(known.hits.at(preset("psr").hash, 16)), "")
    assert [rate for rate, _ in said[1:]] == [None] * 3
    assert [why.split()[:3] for _, why in said[1:]] == [
        ["the", "calibration", "covers"],
        ["no", "calibration"],
        ["the", "calibration", "is"],
    ]
    assert commands.run([*run[: -len(more)], *calibrated]) == 0
    assert f"(predicted {said[0][0]:.1%} on the calibration's text)" in capsys.readouterr().err
    signal.signal(signal.SIGTERM, before)
