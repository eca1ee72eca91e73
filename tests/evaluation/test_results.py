"""The result file: the same bytes for the same content, everything back, and damage told in one line."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evaluations import MODEL, header, items, write
from hypothesis import given, settings
from hypothesis import strategies as st

from edgemoe.errors import UserError
from edgemoe.evaluation.results import Header, Item, Results, Task, fingerprint, load_results

HEAD = header({"arc": 3, "gsm8k": 2}, seeds={"a": 1, "b": 2})
ITEMS = [*items("arc", [1, 0, 1]), *items("gsm8k", [0.5, 0.25])]
NUMBERS = st.one_of(st.floats(allow_nan=False, allow_infinity=False), st.integers(-(2**53), 2**53))


def test_everything_comes_back(tmp_path: Path) -> None:
    written = write(tmp_path / "a.json", HEAD, ITEMS)
    found = load_results(tmp_path / "a.json")
    assert found == written and found.header == HEAD and list(found.items) == ITEMS
    assert found.mean("arc", "acc") == pytest.approx(2 / 3) and found.metrics("gsm8k") == ("acc",)
    assert [item.id for item in found.of("gsm8k")] == ["0", "1"]
    assert found.header.edgemoe and len(found.header.config_hash) == 12


def test_the_same_content_is_the_same_bytes(tmp_path: Path) -> None:
    write(tmp_path / "a.json", HEAD, ITEMS)
    turned = replace(
        HEAD,
        config=dict(reversed(HEAD.config.items())),
        tasks=dict(reversed(HEAD.tasks.items())),
        seeds=dict(reversed(HEAD.seeds.items())),
    )
    write(tmp_path / "b.json", turned, ITEMS[::-1])
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert load_results(tmp_path / "a.json").as_bytes() == (tmp_path / "a.json").read_bytes()
    assert list(tmp_path.iterdir()).__len__() == 2  # nothing else is left


def test_a_line_per_item_under_a_header_that_can_be_read(tmp_path: Path) -> None:
    write(tmp_path / "a.json", HEAD, ITEMS)
    lines = (tmp_path / "a.json").read_text().splitlines()
    assert '  "format": "edgemoe results",' in lines and '    "name": "demo-moe",' in lines
    assert [line.strip().rstrip(",") for line in lines[-7:-2]] == [json.dumps(item.as_json()) for item in ITEMS]


@given(
    st.lists(st.dictionaries(st.text(min_size=1), NUMBERS, min_size=1, max_size=1), min_size=1, max_size=5), st.text()
)
@settings(max_examples=60)
def test_any_number_and_any_text_comes_back(tmp_path_factory: Any, metrics: list[dict[str, float]], text: str) -> None:
    names = [next(iter(one)) for one in metrics]
    records = [
        Item("t", f"{text}{at}", {names[0]: next(iter(one.values()))}, group=text, output=text)
        for at, one in enumerate(metrics)
    ]
    path = tmp_path_factory.mktemp("any") / "a.json"
    written = write(path, header({"t": len(records)}, names[0]), records)
    assert load_results(path) == written


def test_numbers_become_plain_ones() -> None:
    item = Item("t", "1", {"z": np.float32(0.5), "acc": np.bool_(True), "n": np.int64(7), "hit": False})
    assert item.as_json()["metrics"] == {"acc": 1, "hit": 0, "n": 7, "z": 0.5}
    assert [type(value) for value in item.metrics.values()] == [int, int, int, float]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "0.5", None, 2**70, [1]])
def test_what_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="acc of item 1"):
        Item("t", "1", {"acc": value})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"kind": "speed"}, "kind"),
        ({"tasks": {}}, "at least one task"),
        ({"config": {"lam": float("nan")}}, "JSON"),
        ({"seeds": {"a": 0.5}}, "whole numbers"),
    ],
)
def test_a_header_that_cannot_be_is_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        replace(HEAD, **change)


def test_the_hash_names_the_model_the_tokenizer_and_the_config_only() -> None:
    same = replace(HEAD, seeds={}, kind="divergence", edgemoe="9", tasks={"x": Task("kl", "y", 1)})
    assert same.config_hash == HEAD.config_hash
    others = [
        replace(HEAD, config={**HEAD.config, "chunk": 2}),
        replace(HEAD, config={**HEAD.config, "policy": {"lam": 0.1}}),
        replace(HEAD, model=replace(MODEL, tokenizer="t")),
        replace(HEAD, model=replace(MODEL, fingerprint="f")),
    ]
    assert len({HEAD.config_hash, *(other.config_hash for other in others)}) == 5
    assert replace(HEAD, model=replace(MODEL, name="same file, renamed")).config_hash == HEAD.config_hash
    assert Header("tasks", MODEL, {"ids": (1, 2)}, HEAD.tasks) == Header("tasks", MODEL, {"ids": [1, 2]}, HEAD.tasks)


def test_a_fingerprint_keeps_pieces_apart() -> None:
    assert fingerprint(["ab", "c"]) != fingerprint(["a", "bc"]) != fingerprint(["abc"])
    assert fingerprint(["ä"]) == fingerprint(["ä".encode()]) and fingerprint(["\udc80"])


def test_ids_are_in_the_order_of_their_numbers() -> None:
    shuffled = [Item("t", id, {"acc": 1}) for id in ("10", "9", "b", "a/2", "100")]
    assert [item.id for item in Results(header({"t": 5}), tuple(shuffled)).items] == ["9", "10", "100", "a/2", "b"]


@pytest.mark.parametrize(
    ("records", "says"),
    [
        (ITEMS[:-1], "1 items of gsm8k, its header says 2"),
        ([*ITEMS, ITEMS[0]], "there twice"),
        ([*ITEMS[:-1], Item("gsm8k", "1", {"acc": 1, "other": 2})], "different metrics"),
        ([*ITEMS[:-1], Item("gsm8k", "1", {"acc": 1}, group="g")], "only one has a group"),
        ([*ITEMS, Item("mmlu", "1", {"acc": 1})], "mmlu, which the header does not name"),
        ([*ITEMS[:3], *items("gsm8k", [1, 0], "exact_match")], "has no acc"),
    ],
)
def test_items_that_do_not_fit_the_header_are_refused(records: list[Item], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Results(HEAD, tuple(records))


def edit(**change: Any) -> Any:
    """A change of the JSON object at its top level."""
    return lambda said: {**said, **change}


def lam(said: dict[str, Any]) -> dict[str, Any]:
    return {**said, "config": {**said["config"], "policy": {"lam": 0.3}}}


def first_item(**change: Any) -> Any:
    return lambda said: {**said, "items": [{**said["items"][0], **change}, *said["items"][1:]]}


def without(name: str) -> Any:
    return lambda said: {key: value for key, value in said.items() if key != name}


HOSTILE = [
    (edit(format="edgemoe plan"), 'expected "format": "edgemoe results"'),
    (edit(version=2), "of version 2, this edgemoe reads 1"),
    (edit(version=[[1]] * 50), "of version"),
    (lam, "config_hash is"),
    (edit(items=[]), "0 items of arc, its header says 3"),
    (edit(items=7), "not a sound result file"),
    (edit(items=[None]), "not a sound result file"),
    (edit(items=[{"task": "arc"}]), "not a sound result file"),
    (edit(model="demo"), "not a sound result file"),
    (edit(tasks={"arc": {"metric": "acc", "questions": "q", "items": -3}}), "-3 items"),
    (edit(tasks=["arc"]), "not a sound result file"),
    (edit(seeds={"a": "1"}), "seeds are whole numbers"),
    (edit(kind="speed"), "kind 'speed' is not one of"),
    (without("seeds"), "no seeds"),
    (first_item(metrics={"acc": True}), "is not a number"),
    (first_item(metrics={"acc": "1"}), "not a number"),
    (first_item(metrics={}), "no metrics"),
    (first_item(id=5), "not a text"),
    (first_item(extra=5), "extra"),
    (first_item(id="1"), "there twice"),
]


@pytest.mark.parametrize(("change", "says"), HOSTILE)
def test_an_edited_file_is_one_line(tmp_path: Path, change: Any, says: str) -> None:
    write(tmp_path / "a.json", HEAD, ITEMS)
    said = json.loads((tmp_path / "a.json").read_text())
    (tmp_path / "a.json").write_text(json.dumps(change(said)))
    with pytest.raises(UserError) as refused:
        load_results(tmp_path / "a.json")
    assert says in str(refused.value) and "\n" not in str(refused.value) and len(str(refused.value)) < 400


@pytest.mark.parametrize(
    "raw", [b"", b"\x00\xff\xfe", b"{", b"[]", b"null", b"5", b'{"format": NaN}', b"[" * 100_000, b'"' + b"9" * 9000]
)
def test_bytes_that_are_no_result_file_are_one_line(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "a.json").write_bytes(raw)
    with pytest.raises(UserError, match="not a result file") as refused:
        load_results(tmp_path / "a.json")
    assert "\n" not in str(refused.value)


def test_a_file_cut_short_or_with_infinity_in_it_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.json", HEAD, ITEMS)
    whole = (tmp_path / "a.json").read_text()
    for raw in (whole[: len(whole) // 2], whole.replace("0.25", "Infinity"), whole.replace("0.25", "1e999")):
        (tmp_path / "b.json").write_text(raw)
        with pytest.raises(UserError, match="result file"):
            load_results(tmp_path / "b.json")


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such result file"):
        load_results(tmp_path / "none.json")
    with pytest.raises(UserError, match="a folder"):
        load_results(tmp_path)
