"""docs/results-format.md is true: its tables name what a real file holds, and its examples are files and programs."""

import json
import re
from pathlib import Path

import pytest

from edgemoe.evaluation.results import VERSION, Header, Item, ModelId, Results, Task, load_results
from edgemoe.evaluation.writer import partial_path

PAGE = (Path(__file__).parents[2] / "docs" / "results-format.md").read_text()
HEADER = Header("tasks", ModelId("m", "weights", "pieces"), {"slots": 1}, {"arc": Task("acc", "questions", 1)})


def keys(heading: str) -> set[str]:
    """The names in the first column of the table that follows `heading`."""
    table = next(part for part in PAGE.split(heading, 1)[1].split("\n\n") if part.startswith("|"))
    return {name for line in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", line.split("|")[1])}


def test_the_tables_name_every_key() -> None:
    item = Item("arc", "0", {"acc": 1}, group="g", output="text")
    said = json.loads(Results(HEADER, (item,)).as_bytes())
    assert keys("}\n```\n\n") == set(said) and said["version"] == VERSION
    assert keys("Of each task:") == set(said["tasks"]["arc"])
    assert keys("Of each item:") == set(said["items"][0])


def test_the_example_is_a_result_file_but_for_its_hash(tmp_path: Path) -> None:
    [example] = re.findall(r"```json\n(.*?)```", PAGE, flags=re.DOTALL)
    said = json.loads(example)
    head = Header.from_json({**said, "config_hash": _hash(said)})
    assert set(said) == {*head.as_json(), "items"}
    Results(head, tuple(Item.from_json(item) for item in said["items"]))


def _hash(said: dict) -> str:
    return Header("tasks", ModelId(**said["model"]), said["config"], HEADER.tasks).config_hash


def test_the_program_writes_a_result_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    [program] = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    exec(compile(program, "results-format.md", "exec"), {})
    found = load_results("sums.json")
    assert capsys.readouterr().out == f"{found.header.config_hash} 0.5\n"
    assert not partial_path(Path("sums.json")).exists()
