"""Calibration: known counts, the bound on the prior, and the demo model end to end."""

from contextlib import nullcontext
from importlib.resources import as_file, files
from pathlib import Path

import numpy as np
import pytest

from edgemoe.calibration import load_calibration
from edgemoe.errors import UserError
from edgemoe.model.synthetic import write_synthetic
from edgemoe.progress import no_progress
from edgemoe.tracing import Trace, calibrate, load_trace, members
from edgemoe.tracing.calibrate import calibration_of
from edgemoe.tracing.capture import Settings, capture
from edgemoe.tracing.simulate import Calibration, simulate
from edgemoe.tracing.texts import Source


def watch(*_: object):
    return nullcontext(no_progress)


def hand_made(**changes) -> Trace:
    """Two layers of four experts, top-2; the second layer executes one expert only (−1 pads)."""
    experts = [[[2, 0], [2, 1], [3, 2], [2, 0]], [[1, -1], [1, -1], [3, -1], [0, -1]]]
    scores = np.array([[[0, 1, 4, 2], [1, 2, 3, 0], [0, 0, 1, 2], [-np.inf, 1, 3, 0]], [[0, 8, 0, 4]] * 4], np.float32)
    fields = {
        "experts": np.array(experts, np.int16),
        "n_experts": 4,
        "layers": np.array([0, 1], np.int32),
        "windows": np.array([0]),
        "domains": ("x",),
        "name": "hand",
        "tokens": np.array([7, 5, 7, 7], np.int32),
        "scores": scores,
        "meta": {"header_sha256": ["aa"]},
    }
    return Trace(**{**fields, **changes})


def test_known_counts():
    found = calibration_of(hand_made())
    assert found.warm.tolist() == [[2, 0, 1, 3], [1, 0, 3, 2]]
    assert found.delta.tolist() == [3.0, 8.0]  # ranges 4, 3, 2, 3
    third = np.float32(1) / np.float32(3)
    assert found.prior_row(7).tolist() == [[2 * third, 0, 1, third], [third, third, 0, third]]
    assert found.prior_row(5).tolist() == [[0, 1, 1, 0], [0, 1, 0, 0]]
    assert found.prior.tokens.tolist() == [5, 7] and found.prior.totals.tolist() == [1, 3]
    assert found.n_tokens == 4 and found.dropped == (0, 0)


def test_the_rarest_tokens_go_first():
    """Seen 3, 2, 1, 1 times: at worst min(2N, 4) entries in each of two layers: 8, 8, 4, 4."""
    experts = np.tile(np.array([0, 1], np.int16), (2, 7, 1))
    trace = hand_made(experts=experts, scores=np.zeros((2, 7, 4), "f4"), tokens=np.array([9, 9, 9, 4, 4, 6, 2], "i4"))
    for room, kept, dropped in (
        (24, [2, 4, 6, 9], (0, 0)),
        (20, [2, 4, 9], (1, 1)),
        (15, [9], (3, 4)),
        (7, [], (4, 7)),
    ):
        found = calibration_of(trace, max_entries=room)
        assert found.prior.tokens.tolist() == kept and found.dropped == dropped
        assert len(found.prior.cells) <= room and found.prior_row(6).any() == (6 in kept)
        found.prior.check()


def test_a_text_of_152k_distinct_tokens_stays_within_its_bound(tmp_path: Path):
    """The vocabulary of a Qwen3, 128 experts; one layer and a smaller bound stand for 48 and 2^24."""
    rng = np.random.default_rng(0)
    n = 152_000
    experts = np.argsort(rng.random((1, n, 32)), axis=2)[:, :, :8].astype(np.int16) * 4
    fields = {"experts": experts, "n_experts": 128, "scores": np.broadcast_to(np.float32(0), (1, n, 128))}
    fields["layers"] = np.array([0], np.int32)
    trace = hand_made(**fields, tokens=np.append(np.arange(n - 1000, dtype=np.int32), np.zeros(1000, np.int32)))
    found = calibration_of(trace, max_entries=1 << 20)
    assert len(found.prior.cells) <= 1 << 20 and found.prior.nbytes < 6 << 20
    assert 0 in found.prior.tokens, "the most frequent is kept"
    assert found.dropped[0] == n - 1000 - len(found.prior.tokens) > 0
    found.save(tmp_path / "c")
    assert np.array_equal(load_calibration(tmp_path / "c").prior_row(0), found.prior_row(0))


def test_what_cannot_be_calibrated():
    for changes, message in (
        ({"tokens": None}, "needs token ids"),
        ({"scores": None}, "needs scores"),
        ({"meta": {}}, "of which model file"),
        ({"scores": np.full((2, 4, 4), -np.inf, "f4")}, "layer 0 has scores that are not numbers"),
    ):
        with pytest.raises(UserError, match=message):
            calibration_of(hand_made(**changes))


def test_a_run_reads_its_spool_like_a_trace_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A model with masked experts and a dense layer, in blocks of five tokens; nothing but the file is left."""
    [model] = write_synthetic(tmp_path / "m.gguf", "deepseek2", n_layers=4, leading_dense=1)
    (tmp_path / "text.txt").write_text(Path(__file__).read_text()[:3000])
    sources, settings = [Source("code", tmp_path / "text.txt")], Settings(n_ctx=64, max_tokens=200, n_threads=1)
    monkeypatch.setattr(members, "BLOCK_BYTES", 5 * 16 * 4)
    found = calibrate.calibrate(model, sources, tmp_path / "c", settings, watch=watch)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "m.gguf", "text.txt"]
    capture(model, sources, tmp_path / "t.npz", Settings(**{**vars(settings), "scores": True}), watch=watch)
    expected = calibration_of(load_trace(tmp_path / "t.npz"))
    loaded = load_calibration(tmp_path / "c", model)
    assert loaded.layers.tolist() == [1, 2, 3] and loaded.texts[0]["sha256"] == expected.texts[0]["sha256"]
    for one in (found, loaded):
        assert np.array_equal(one.delta, expected.delta) and np.array_equal(one.warm, expected.warm)
        for token in loaded.prior.tokens:
            assert np.array_equal(one.prior_row(token), expected.prior_row(token))


def test_interrupts_and_failures_leave_what_was_there(tmp_path: Path):
    [model] = write_synthetic(tmp_path / "m.gguf")
    (tmp_path / "text.txt").write_text(Path(__file__).read_text())
    (tmp_path / "c").write_text("precious")
    sources, settings = [Source("code", tmp_path / "text.txt")], Settings(n_ctx=64, max_tokens=300, n_threads=1)

    def stop(at: str):
        def advance(_: int) -> None:
            raise KeyboardInterrupt

        return lambda what, total, unit: nullcontext(advance if what == at else no_progress)

    for at in ("calibrating", "counting"):
        with pytest.raises(KeyboardInterrupt):
            calibrate.calibrate(model, sources, tmp_path / "c", settings, overwrite=True, watch=stop(at))
        assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "m.gguf", "text.txt"]
        assert (tmp_path / "c").read_text() == "precious"
    with pytest.raises(UserError, match="exists already"):
        calibrate.calibrate(model, sources, tmp_path / "c", settings, watch=watch)


def test_a_disk_without_room_is_refused_before_the_first_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    [model] = write_synthetic(tmp_path / "m.gguf")
    (tmp_path / "text.txt").write_text(Path(__file__).read_text())
    free = type("Usage", (), {"free": 10_000})
    monkeypatch.setattr(calibrate.shutil, "disk_usage", lambda _: free)
    with pytest.raises(UserError, match=r"100 tokens need .* for a while, 10\.0 kB are free"):
        sources = [Source("code", tmp_path / "text.txt")]
        calibrate.calibrate(model, sources, tmp_path / "c", Settings(max_tokens=100, n_threads=1), watch=watch)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.gguf", "text.txt"]


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory):
    """The demo model calibrated on the first half of each sample text, and a trace of the beginning of the second."""
    folder = tmp_path_factory.mktemp("halves")
    first, second = [], []
    for name in ("code", "manuals", "math", "prose"):
        text = files("edgemoe.data").joinpath(f"{name}.txt").read_bytes()
        middle = text.index(b"\n", len(text) // 2) + 1
        (folder / f"{name}.1.txt").write_bytes(text[:middle])
        (folder / f"{name}.2.txt").write_bytes(text[middle:])
        first.append(Source(name, folder / f"{name}.1.txt"))
        second.append(Source(name, folder / f"{name}.2.txt"))
    with as_file(files("edgemoe.data").joinpath("demo-moe-32m-q8_0.gguf")) as model:
        settings = Settings(max_tokens=400, n_threads=2)
        found = calibrate.calibrate(model, first, folder / "demo.calib", settings, watch=watch)
        scored = Settings(max_tokens=192, n_threads=2, scores=True, pregate=True)
        capture(model, second, folder / "t.npz", scored, watch=watch)
        assert load_calibration(folder / "demo.calib", model).n_tokens == found.n_tokens
    return found, load_trace(folder / "t.npz")


def test_calibrating_the_demo_model_saves_copies(halves):
    found, trace = halves
    known = Calibration.loaded(found, trace, "demo.calib")
    for share in (4, 2):
        copies = []
        for calibration in (known, Calibration()):
            row = simulate(trace, [trace.n_experts // share], ["psr"], calibration=calibration).iloc[0]
            copies.append(row["demand_per_token"] + row["prefetch_per_token"])
        assert copies[0] < copies[1], f"1/{share} resident: {copies[0]} copies with, {copies[1]} without"


def test_the_replay_decides_like_a_cache_with_the_file(halves):
    """The simulator's own reading of the prior, row by row and layer by layer, against `LogicalCache`."""
    from edgemoe.policy import preset
    from edgemoe.policy.logical_cache import LogicalCache

    found, whole = halves
    trace = whole.only("code")
    policy, capacity = preset("psr"), trace.n_experts // 4
    shape = {"n_layers": trace.n_layers, "n_experts": trace.n_experts, "top_k": trace.top_k, "capacity": capacity}
    cache = LogicalCache(policy, delta=found.delta, warm=found.warm, prior=found, **shape)
    demand = prefetched = 0
    for t in range(trace.n_tokens):
        if t in trace.windows:
            cache.reset()
        cache.begin_token(int(trace.tokens[t]))
        for layer in range(trace.n_layers):
            if trace.has_pregate[layer]:
                prefetched += len(cache.prefetch(layer, trace.pregate[layer, t]))
            demand += len(cache.select(layer, trace.scores[layer, t]).copies)
    row = simulate(trace, [capacity], {"psr": policy}, calibration=Calibration.loaded(found, trace, "c")).iloc[0]
    assert row["demand_per_token"] * trace.n_tokens == pytest.approx(demand)
    assert row["prefetch_per_token"] * trace.n_tokens == pytest.approx(prefetched)


def test_another_models_trace_and_a_trace_without_tokens(halves):
    found, trace = halves
    fields = {name: getattr(trace, name) for name in trace.__dataclass_fields__}
    bare = Trace(**{**fields, "tokens": None})
    assert Calibration.loaded(found, bare, "c").prior is None and Calibration.loaded(found, trace, "c").prior
    other = Trace(**{**fields, "meta": {**trace.meta, "header_sha256": ["00"]}})
    with pytest.raises(UserError, match=r"c: a calibration of .*, not of this .*header fingerprints differ"):
        Calibration.loaded(found, other, "c")
    with pytest.raises(UserError, match=r"c cannot calibrate hand .*64 experts per layer"):
        Calibration.loaded(found, hand_made(), "c")
