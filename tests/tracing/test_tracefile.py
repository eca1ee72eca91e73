"""Trace files as they come: whatever is in them is read right, or refused in one line before anything computes."""

import json
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgemoe.errors import UserError
from edgemoe.tracing import Trace, load_trace
from edgemoe.tracing.spool import Spool
from edgemoe.tracing.tracefile import save_trace

L, T, K, E = 3, 20, 2, 8
SCORES = np.random.default_rng(0).normal(size=(L, T, E)).astype(np.float32)
EXPERTS = np.argsort(-SCORES, axis=2)[:, :, :K].astype(np.int16)


def fields(**changed: Any) -> dict[str, Any]:
    return {
        "experts": EXPERTS,
        "n_experts": E,
        "layers": np.arange(L, dtype=np.int32),
        "windows": np.array([0, 9], dtype=np.int64),
        "domains": ("a", "b"),
        "name": "t",
        **changed,
    }


def write(path: Path, meta: Any = None, **members: Any) -> Path:
    members = {"experts": EXPERTS, **members}
    meta = meta if isinstance(meta, np.ndarray) else np.array(json.dumps({"num_experts": E} if meta is None else meta))
    np.savez(path, meta=meta, **members)
    return path


def refused(path: Path) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserError) as caught:
            load_trace(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("n_tokens", [L, T])
def test_members_are_token_major_only_where_the_file_says_so(tmp_path: Path, n_tokens: int) -> None:
    """With as many tokens as layers the shape says nothing."""
    scores, experts = SCORES[:, :n_tokens], EXPERTS[:, :n_tokens]
    said = {"num_experts": E, "scores": "[token, layer, expert] router logits"}
    ours = load_trace(write(tmp_path / "ours.npz", experts=experts, scores=scores, pregate=2 * scores))
    turned = {"scores": scores.transpose(1, 0, 2), "pregate": 2 * scores.transpose(1, 0, 2)}
    theirs = load_trace(write(tmp_path / "theirs.npz", said, experts=experts, **turned))
    for trace in (ours, theirs):
        assert trace.scores is not None and np.array_equal(trace.scores, scores)
        assert trace.pregate is not None and np.array_equal(trace.pregate, 2 * scores)
    save_trace(theirs, tmp_path / "again.npz")
    again = load_trace(tmp_path / "again.npz")
    assert again.scores is not None and np.array_equal(again.scores, scores), "saved, it says what it is now"


def test_token_major_members_that_do_not_say_so_are_refused(tmp_path: Path) -> None:
    assert "`scores` has shape (20, 3, 8)" in refused(write(tmp_path / "t.npz", scores=SCORES.transpose(1, 0, 2)))


def test_arrays_are_brought_to_their_types() -> None:
    trace = Trace(
        **fields(
            experts=EXPERTS.astype(np.uint64),
            layers=np.arange(L),
            windows=np.array([0, 9], np.uint8),
            domains=["a", "b"],
            tokens=np.arange(T, dtype=np.uint16),
            scores=SCORES.astype(np.float16),
            weights=np.ones((L, T, K)),
            delta=np.ones(L),
            warm=np.tile(np.arange(E), (L, 1)),
        )
    )
    kinds = {"experts": "i2", "layers": "i4", "windows": "i8", "tokens": "i4", "scores": "f4", "delta": "f4"}
    for name, kind in {**kinds, "weights": "f4", "warm": "i2"}.items():
        assert getattr(trace, name).dtype == np.dtype(kind), name
    assert trace.domains == ("a", "b") and [len(part.windows) for _, part in trace.by_domain()] == [1, 1]


def spoilt(array: np.ndarray, at: Any, value: Any) -> np.ndarray:
    array = array.copy()
    array[at] = value
    return array


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"experts": EXPERTS[:, :0]}, "holds no tokens"),
        ({"experts": EXPERTS[:0]}, "holds no tokens"),
        ({"experts": EXPERTS.astype(float)}, "`experts` holds float64, expected integers"),
        ({"experts": EXPERTS.astype(str)}, "`experts` holds <U6, expected integers"),
        ({"experts": EXPERTS[0]}, "`experts` has shape"),
        ({"experts": EXPERTS.tolist()}, "`experts` is a list, expected an array"),
        ({"experts": spoilt(EXPERTS, (0, 0, 0), E)}, "expert id 8, but the model has experts 0 to 7"),
        ({"experts": spoilt(EXPERTS, (0, 0, 0), -2)}, "expert id -2"),
        # as int16, this would be expert 3
        ({"experts": spoilt(EXPERTS.astype(np.int64), (0, 0, 0), 65539)}, "expert id 65539"),
        ({"experts": spoilt(EXPERTS, 1, -1)}, "row 1 of `experts` holds no expert at all"),
        ({"experts": EXPERTS % 1, "n_experts": 1}, "2 experts per token, but the model has 1"),
        ({"n_experts": "many"}, "'many' experts per layer, expected a number from 1 to 32768"),
        ({"n_experts": 10**12}, "1000000000000 experts"),
        ({"n_experts": 8.0}, "8.0 experts"),
        ({"n_experts": 0}, "0 experts"),
        ({"layers": np.arange(2)}, "`layers` has shape"),
        ({"layers": np.array([0, 1, 1])}, "`layers` are not ids that ascend"),
        ({"layers": np.array([2, 1, 3])}, "`layers` are not ids that ascend"),
        ({"layers": np.array([-1, 1, 3])}, "`layers` are not ids that ascend"),
        ({"layers": np.array([0, 1, 1 << 40])}, "`layers` holds 1099511627776, which no int32"),
        ({"layers": np.array(["0", "1", "2"])}, "`layers` holds <U1"),
        ({"windows": np.array([0, T])}, "windows do not ascend from 0 to the 20 tokens"),
        ({"windows": np.array([1, 9])}, "windows do not ascend"),
        ({"windows": np.array([9, 0])}, "windows do not ascend"),
        ({"windows": np.array([0, 0])}, "windows do not ascend"),
        ({"windows": np.array([[0, 9]])}, "`windows` has shape"),
        ({"windows": np.array([0.0, 9.0])}, "`windows` holds float64"),
        ({"domains": ("a",)}, "2 windows but 1 domains"),
        ({"domains": ("a", 3)}, "domains are not a list of names"),
        ({"domains": "ab"}, "domains are not a list of names"),
        ({"tokens": np.arange(T - 1)}, "`tokens` has shape"),
        ({"tokens": np.full(T, 1 << 40)}, "`tokens` holds 1099511627776"),
        ({"scores": SCORES[:, :, :4]}, "`scores` has shape"),
        ({"scores": SCORES.astype(int)}, "`scores` holds int64, expected floating-point"),
        ({"scores": spoilt(SCORES, (1, 2, 3), np.nan)}, "`scores` holds values that are not numbers"),
        ({"scores": spoilt(SCORES, (1, 2, 3), np.inf)}, "`scores` holds values that are not numbers"),
        ({"pregate": spoilt(SCORES, (1, 2, 3), np.nan)}, "`pregate` holds values that are not numbers"),
        ({"weights": np.ones((L, T, K + 1))}, "`weights` has shape"),
        ({"weights": np.full((L, T, K), np.nan)}, "`weights` holds values that are not"),
        ({"delta": np.zeros(2)}, "`delta` has shape"),
        ({"delta": np.full(L, np.nan)}, "`delta` holds values that are no range"),
        ({"delta": np.full(L, -1.0)}, "`delta` holds values that are no range"),
        ({"warm": np.full((L, E), E)}, "`warm` is not a list of different experts"),
        ({"warm": np.zeros((L, E), int)}, "`warm` is not a list of different experts"),
        ({"warm": np.zeros(L, int)}, "`warm` has shape"),
    ],
)
def test_a_trace_that_contradicts_itself_cannot_be_made(tmp_path: Path, changed: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError) as caught:
        Trace(**fields(**changed))
    assert says in str(caught.value) and str(caught.value).startswith("t: ") and "\n" not in str(caught.value)
    members = {name: value for name, value in changed.items() if name not in ("n_experts", "domains")}
    if any(not isinstance(value, np.ndarray) for value in members.values()):
        return
    meta = {"num_experts": changed.get("n_experts", E), "domains": changed.get("domains", ["a", "b"])}
    members.setdefault("windows", np.array([0, 9]))
    refused(write(tmp_path / "t.npz", meta, **members))


def test_masks_are_minus_infinity_and_that_is_allowed() -> None:
    Trace(**fields(scores=spoilt(SCORES, (1, 2, 3), -np.inf)))


@pytest.mark.parametrize(
    ("meta", "says"),
    [
        (["a", "list"], "its `meta` is not a JSON object"),
        (3, "its `meta` is not a JSON object"),
        (np.array("{"), "its `meta` is not a JSON object"),
        (np.array("[" * 100_000), "its `meta` is not a JSON object"),
        (np.array(5), "its `meta` is not a JSON object"),
        (np.array(["{}", "{}"]), "its `meta` is not a JSON object"),
        ({"window": 0}, "`window` in its meta is 0"),
        ({"window": -4}, "`window` in its meta is -4"),
        ({"window": "long"}, "`window` in its meta is 'long'"),
        ({"num_experts": "many"}, "'many' experts per layer"),
        ({"num_experts": 10**12}, "1000000000000 experts per layer"),
        ({"num_experts": None}, "None experts per layer"),
        ({"domains": 7}, "domains are not a list of names"),
        ({"domain": 7}, "domains are not a list of names"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_meta_that_makes_no_sense_is_one_line(tmp_path: Path, meta: Any, says: str) -> None:
    assert says in refused(write(tmp_path / "t.npz", meta))


def test_files_that_are_something_else(tmp_path: Path) -> None:
    np.save(tmp_path / "one.npy", EXPERTS)
    (tmp_path / "one.npz").write_bytes((tmp_path / "one.npy").read_bytes())
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + bytes(100))
    (tmp_path / "t.moetrace").write_bytes(b"MOETRACE" + bytes(100))
    (tmp_path / "p.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100))
    (tmp_path / "empty").write_bytes(b"")
    for name, says in {
        "one.npy": "one NumPy array",
        "one.npz": "one NumPy array",
        "m.gguf": "a GGUF model: trace it first",
        "t.moetrace": "convert it first",
        "p.png": "no archive",
        "empty": "no archive",
    }.items():
        said = refused(tmp_path / name)
        assert says in said and "unsafe" not in said and "pickle" not in said


def test_archives_that_are_damaged_or_something_else(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "office.npz", "w") as archive:
        archive.writestr("document.xml", "x")
    assert "it has no member 'experts'" in refused(tmp_path / "office.npz")
    np.savez(tmp_path / "objects.npz", experts=np.array([None]), meta=np.array("{}"))
    assert "`experts` is damaged, or no plain array" in refused(tmp_path / "objects.npz")
    with zipfile.ZipFile(tmp_path / "text.npz", "w") as archive:
        archive.writestr("experts", "x")
        archive.writestr("meta", "{}")
    assert "`experts` is no array" in refused(tmp_path / "text.npz")


def test_damage_anywhere_is_one_line_or_harmless(tmp_path: Path) -> None:
    """Deflated members: a flipped byte is a checksum, a zlib error, another header, or the name of something else."""
    np.savez_compressed(tmp_path / "t.npz", experts=EXPERTS, meta=np.array(json.dumps({"num_experts": E})))
    whole = (tmp_path / "t.npz").read_bytes()
    caught = 0
    for at in range(0, len(whole), 3):
        (tmp_path / "d.npz").write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        (tmp_path / "c.npz").write_bytes(whole[:at])
        assert refused(tmp_path / "c.npz")
        try:
            assert np.array_equal(load_trace(tmp_path / "d.npz").experts, EXPERTS)
        except UserError as error:
            caught += 1
            assert "\n" not in str(error)
    assert caught > len(whole) / 9


def test_members_of_others_are_left_alone(tmp_path: Path) -> None:
    assert load_trace(write(tmp_path / "t.npz", notes=np.array(["x"]), more=np.array([None]))).n_tokens == T


@pytest.mark.parametrize("text", ["[]", "{", '"x"', '{"layers": [0], "widths": {"experts": "x"}, "meta": {}}', "null"])
def test_a_spool_whose_meta_is_damaged_is_one_line(tmp_path: Path, text: str) -> None:
    with Spool.create(tmp_path / "t.npz.partial", [0], {"experts": K}, {}) as spool:
        (spool.path / "meta.json").write_text(text)
    assert "meta.json in it is damaged" in refused(spool.path)


def test_a_folder_is_not_called_a_trace_to_remove(tmp_path: Path) -> None:
    said = refused(tmp_path)
    assert "a folder, expected a trace file" in said and "remove" not in said
