"""The calibration file: what goes in comes out bit for bit, and what is not one is refused in one line."""

import io
import json
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgemoe.calibration import Calibration, TokenPrior, is_calibration, load_calibration, mean_range, score_ranges
from edgemoe.errors import UserError
from edgemoe.llamacpp.header import header_fingerprint
from edgemoe.model.synthetic import write_synthetic
from edgemoe.policy import Policy, preset
from edgemoe.policy.logical_cache import LogicalCache
from edgemoe.tracing import Trace
from edgemoe.tracing.calibrate import calibration_of

VOCABULARY = 40


def make_trace(seed: int = 0, n_tokens: int = 300, n_layers: int = 3, n_experts: int = 8, k: int = 2) -> Trace:
    rng = np.random.default_rng(seed)
    scores = (rng.normal(size=(n_layers, n_tokens, n_experts)) + rng.normal(size=(n_layers, 1, n_experts))).astype("f4")
    return Trace(
        experts=np.argsort(-scores, axis=2)[:, :, :k].astype(np.int16),
        n_experts=n_experts,
        layers=np.arange(1, n_layers + 1, dtype=np.int32),
        windows=np.array([0]),
        domains=("text",),
        name="t",
        tokens=np.minimum(rng.geometric(0.1, n_tokens) * 3, VOCABULARY - 1).astype(np.int32),
        scores=scores,
        meta={"header_sha256": ["aa"], "model": "M", "texts": [{"domain": "text", "sha256": "bb"}]},
    )


def dense(trace: Trace) -> np.ndarray:  # [L, V, E]
    """The token prior by its definition, in plain Python."""
    assert trace.tokens is not None
    prior = np.zeros((trace.n_layers, VOCABULARY, trace.n_experts), np.float32)
    for token in set(trace.tokens.tolist()):
        at = np.flatnonzero(trace.tokens == token)
        for layer in range(trace.n_layers):
            for expert in range(trace.n_experts):
                chosen = sum(expert in trace.experts[layer, t] for t in at)
                prior[layer, token, expert] = np.float32(chosen) / np.float32(len(at))
    return prior


@pytest.fixture
def found() -> Calibration:
    return calibration_of(make_trace())


def test_the_prior_is_its_definition(found: Calibration) -> None:
    expected = dense(make_trace())
    for token in range(VOCABULARY):
        row = found.prior_row(token)
        assert row.dtype == np.float32 and np.array_equal(row, expected[:, token])
    assert (found.prior_row(3).sum(axis=1) == pytest.approx(2)) and not found.prior_row(1).any()
    for unseen in (-1, VOCABULARY, 10**6):
        assert not found.prior_row(unseen).any()


def test_rows_of_a_layer_are_those_of_the_tokens(found: Calibration) -> None:
    tokens = np.array([3, 1, 6, 3, -5, 10**6, 9, 39], np.int32)
    for layer in range(3):
        expected = np.stack([found.prior_row(int(token))[layer] for token in tokens])
        assert np.array_equal(found.prior.rows(layer, tokens), expected)


def test_a_file_gives_back_every_bit(found: Calibration, tmp_path: Path) -> None:
    path = tmp_path / "m.calib"  # the name stays as it is: no .npz is added
    found.save(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.calib"] and is_calibration(path)
    again = load_calibration(path)
    for name in ("layers", "delta", "warm"):
        ours, theirs = getattr(found, name), getattr(again, name)
        assert ours.dtype == theirs.dtype and np.array_equal(ours, theirs)
    for name in ("tokens", "totals", "starts", "cells", "counts"):
        ours, theirs = getattr(found.prior, name), getattr(again.prior, name)
        assert ours.dtype == theirs.dtype and np.array_equal(ours, theirs)
    assert (again.model, again.header_sha256, again.texts) == ("M", ("aa",), ({"domain": "text", "sha256": "bb"},))
    assert (again.n_tokens, again.dropped, again.settings) == (300, (0, 0), found.settings)


@pytest.mark.parametrize(
    "policy",
    [
        preset("exact-score"),
        Policy(routing="cache-prior", lam=0.2, eviction="score"),
        Policy(routing="exact", eviction="score", prefetch="token-prior", window=3, budget=2),
    ],
)
def test_dense_and_sparse_priors_decide_alike(found: Calibration, policy: Policy) -> None:
    """Other text, other decisions without a prior, the same with either of its two forms."""
    text, shape = make_trace(seed=1), {"n_layers": 3, "n_experts": 8, "top_k": 2, "capacity": 4}

    def decisions(prior: Any) -> list[Any]:
        cache = LogicalCache(policy, delta=found.delta, warm=found.warm, prior=prior, **shape)
        said: list[Any] = []
        assert text.tokens is not None and text.scores is not None
        for t, token in enumerate(text.tokens.tolist()):
            cache.begin_token(token)
            for layer in range(3):
                said += [cache.prefetch(layer), cache.select(layer, text.scores[layer, t])]
        return said

    assert decisions(found) == decisions(dense(make_trace())) != decisions(None)


def test_a_prior_of_another_shape_is_an_error(found: Calibration) -> None:
    cache = LogicalCache(preset("exact-score"), n_layers=1, n_experts=8, top_k=2, capacity=4, prior=found)
    with pytest.raises(ValueError, match=r"of \(3, 8\) layers and experts, not \(1, 8\)"):
        cache.begin_token(3)


def test_masked_experts_are_not_in_the_range() -> None:
    low = -np.inf
    scores = np.array([[1, 5, low, 2], [low, low, 3, 3], [low, low, low, low], [-2, 0, 1, 0]], np.float32)
    assert score_ranges(scores).tolist() == [4, 0, 3]
    assert mean_range(score_ranges(scores)) == np.float32(7 / 3)
    assert np.isnan(mean_range(score_ranges(scores[2:3])))
    assert np.isnan(mean_range(score_ranges(np.array([[1, np.nan], [1, 2]], np.float32))))


def changed(path: Path, **members: Any) -> Path:
    """The file with members replaced (`None`: removed; a dict: keys of the meta replaced)."""
    with np.load(path) as archive:
        arrays = {name: archive[name] for name in archive.files}
    for name, value in members.items():
        if isinstance(value, dict):
            arrays[name] = np.array(json.dumps({**json.loads(str(arrays[name])), **value}))
        elif value is None:
            del arrays[name]
        else:
            arrays[name] = value
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    path.write_bytes(buffer.getvalue())
    return path


def rank(*first: int) -> np.ndarray:
    return np.tile(np.array([*first, *range(len(first), 8)], np.int16), (3, 1))


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"meta": {"version": 3}}, "of version 3, this edgemoe reads 1 to 2"),
        ({"meta": {"format": "x"}}, "another format's"),
        ({"meta": None}, "no member meta"),
        ({"meta": np.array("[]")}, "another format's"),
        ({"meta": np.array("{")}, "not a sound calibration"),
        ({"meta": {"dropped": 3}}, "not a sound calibration"),
        ({"totals": None}, "totals"),
        ({"delta": np.array([1, np.nan, 1], np.float32)}, "bonus scale is not one finite number per layer"),
        ({"delta": np.array([1, np.inf, 1], np.float32)}, "bonus scale is not"),
        ({"delta": np.array([1, -1, 1], np.float32)}, "bonus scale is not"),
        ({"delta": np.ones(2, np.float32)}, "bonus scale is not"),
        ({"delta": np.ones(3)}, "delta holds float64, expected float32"),
        ({"warm": rank(0, 0)}, "each of the 8 experts once"),
        ({"warm": rank(8)}, "each of the 8 experts once"),
        ({"warm": rank()[:2]}, "each of the 8 experts once"),
        ({"layers": np.array([3, 2, 1], np.int32)}, "not ascending"),
        ({"tokens": np.array([1], np.int32)}, "do not fit together"),
        ({"starts": np.array([0], np.int64)}, "do not fit together"),
        ({"counts": np.ones(5, np.float32)}, "counts holds float32"),
        ({"cells": np.zeros((2, 2), np.uint16)}, "cells has shape"),
    ],
)
def test_damage_is_one_line(found: Calibration, tmp_path: Path, members: dict[str, Any], message: str) -> None:
    found.save(tmp_path / "c")
    with pytest.raises(UserError, match=message) as refused:
        load_calibration(changed(tmp_path / "c", **members))
    assert "\n" not in str(refused.value) and str(refused.value).startswith(str(tmp_path / "c"))


def prior(**changes: Any) -> TokenPrior:
    fields = {"tokens": [3, 9], "totals": [2, 4], "starts": [0, 2, 3], "cells": [0, 3, 1], "counts": [1, 2, 4]}
    kinds = {"tokens": "i4", "totals": "u4", "starts": "i8", "cells": "u2", "counts": "u2"}
    return TokenPrior((2, 2), **{name: np.array(v, kinds[name]) for name, v in {**fields, **changes}.items()})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": [9, 3]}, "do not ascend"),
        ({"tokens": [-1, 3]}, "do not ascend"),
        ({"starts": [0, 3, 2]}, "do not cover"),
        ({"starts": [1, 2, 3]}, "do not cover"),
        ({"starts": [0, 2, 4]}, "do not cover"),
        ({"cells": [0, 4, 1]}, "one of 4"),
        ({"cells": [3, 0, 1]}, "in order"),
        ({"cells": [3, 3, 1]}, "in order"),
        ({"counts": [1, 3, 4]}, "between 1 and"),
        ({"counts": [0, 2, 4]}, "between 1 and"),
    ],
)
def test_a_prior_that_cannot_be_read_is_refused(changes: dict[str, Any], message: str) -> None:
    prior().check()
    prior(starts=[0, 0, 3], cells=[0, 1, 3], counts=[1, 1, 1]).check()  # a token without entries
    with pytest.raises(ValueError, match=message):
        prior(**changes).check()


def test_a_file_of_another_kind_is_called_that(tmp_path: Path) -> None:
    (tmp_path / "prose.txt").write_text("The calibration of instruments")
    with pytest.raises(UserError, match=r"prose\.txt: not a sound calibration file \(it is no npz archive\)"):
        load_calibration(tmp_path / "prose.txt")


def test_every_cut_and_every_flipped_byte_is_refused_or_harmless(found: Calibration, tmp_path: Path) -> None:
    path = tmp_path / "c"
    found.save(path)
    whole = path.read_bytes()
    for at in range(0, len(whole), max(1, len(whole) // 60)):
        path.write_bytes(whole[:at])
        with pytest.raises(UserError, match=r"not a sound calibration file|no such"):
            load_calibration(path)
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        try:
            again = load_calibration(path)
        except UserError as refused:
            assert "\n" not in str(refused)
        else:
            assert np.array_equal(again.delta, found.delta) and np.array_equal(again.prior_row(3), found.prior_row(3))


def test_what_is_no_calibration(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("not a zip")
    with zipfile.ZipFile(tmp_path / "zip", "w") as archive:
        archive.writestr("x", "y")
    for name, message in (("empty", "not a sound"), ("text", "not a sound"), ("zip", "no member"), ("gone", "no such")):
        assert not is_calibration(tmp_path / name)
        with pytest.raises(UserError, match=message):
            load_calibration(tmp_path / name)
    with pytest.raises(UserError, match="a folder"):
        load_calibration(tmp_path)


def test_another_models_file_is_refused(found: Calibration, tmp_path: Path) -> None:
    [model] = write_synthetic(tmp_path / "m.gguf")
    found.save(tmp_path / "c")
    with pytest.raises(UserError, match=r"a calibration of M, not of this .*header fingerprints differ"):
        load_calibration(tmp_path / "c", model)
    changed(tmp_path / "c", meta={"header_sha256": [header_fingerprint(model)]})
    assert load_calibration(tmp_path / "c", model).model == "M"


def test_saving_where_nothing_can_be_written(found: Calibration, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "no" / "c", tmp_path / "file" / "c"):
        with pytest.raises(UserError, match="cannot be written"):
            found.save(path)


def test_the_digest_names_what_decides(found: Calibration) -> None:
    other = replace(found, delta=found.delta * np.float32(2))
    seen = replace(found.prior, totals=found.prior.totals + np.uint32(1))
    assert found.digest == replace(found, settings={"ctx": 7}).digest
    assert len({found.digest, other.digest, replace(found, prior=seen).digest}) == 3
