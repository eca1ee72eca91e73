"""`edgemoe eval compare` as a person runs it."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgemoe.cli import main
from edgemoe.cli.commands import verbs
from edgemoe.evaluation.results import Header, Item, ModelId, Results, Task

RNG = np.random.default_rng(0)
BASE = {"arc_challenge": RNG.integers(0, 2, 300), "hellaswag": RNG.integers(0, 2, 900)}


@pytest.fixture
def edgemoe(monkeypatch, capsys):
    def run(*arguments: Any, expected: int = 0, columns: int | None = None):
        if columns:
            monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(sys, "argv", ["edgemoe", "eval", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            main()
        captured = capsys.readouterr()
        assert stopped.value.code == expected, captured.err
        return captured

    return run


def write(path: Path, scores: dict[str, Any], lam: float, **other: Any) -> Path:
    tasks = {task: Task("acc", task, len(values)) for task, values in scores.items()}
    model = other.get("model", ModelId("demo-moe", "weights", "vocabulary"))
    records = [
        Item(task, str(at), {"acc": value, "half": value / 2})
        for task, values in scores.items()
        for at, value in enumerate(values)
    ]
    path.write_bytes(Results(Header("tasks", model, {"lam": lam}, tasks), tuple(records)).as_bytes())
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("results")
    rng = np.random.default_rng(1)
    worse = {task: np.where(rng.random(len(values)) < 0.12, 0, values) for task, values in BASE.items()}
    other = {
        task: np.where(rng.random(len(values)) < 0.05, rng.integers(0, 2, len(values)), values)
        for task, values in BASE.items()
    }
    return [
        write(folder / name, scores, lam)
        for lam, (name, scores) in enumerate((("exact.json", BASE), ("worse.json", worse), ("other.json", other)))
    ]


def test_the_table_says_what_is_resolved(edgemoe, files) -> None:
    said = edgemoe("compare", *files, columns=112).out
    lines = said.splitlines()
    assert all(len(line) <= 112 for line in said.split("\nDifference:")[0].splitlines() if " against " not in line)
    assert f"{files[1]} against {files[0]}, the reference: acc" in lines
    heads = [line for line in lines if line.startswith("task")]
    assert len(heads) == 2 and heads[0].split()[-2:] == ["detectable", "verdict"]
    assert sum("significant" in line for line in lines if line.startswith(("arc", "hella"))) == 2
    assert sum("unresolved" in line for line in lines if line.startswith(("arc", "hella"))) == 2
    assert sum(line.startswith("mean over tasks ") for line in lines) == 2
    assert "all 4 tests of this table (2 tasks × 2 runs)" in said and "does not show that the two are equal" in said


def test_a_narrow_terminal_gets_two_tables(edgemoe, files) -> None:
    said = edgemoe("compare", *files[:2], columns=80).out
    tables = said.split("\nDifference:")[0].splitlines()
    heads = [line.split() for line in tables if line.startswith("task")]
    assert [head[-1] for head in heads] == ["verdict", "detectable"] and "test" in heads[1]
    assert all(len(line) <= 80 for line in tables if line != tables[0])
    assert any(line.startswith("hellaswag") and "exact McNemar" in line for line in tables)


def test_json_holds_every_figure_and_nothing_else_is_printed(edgemoe, files) -> None:
    captured = edgemoe("compare", *files, "--json")
    found = json.loads(captured.out)
    assert captured.err == "" and captured.out.count("\n") == 1
    assert [(row["run"], row["task"]) for row in found["rows"]] == [
        (str(file), task) for file in files[1:] for task in ("arc_challenge", "hellaswag")
    ]
    row = found["rows"][0]
    assert row["n"] == 300 and row["lost"] > 0 and row["won"] == 0 and row["difference"]["mean"] < 0
    assert row["verdict"] == "significant" and row["p"] <= row["p_holm"] < 0.001
    assert found["overall"][0]["difference"]["tasks"] == 2 and found["alpha"] == 0.05


def test_another_metric_level_and_reference(edgemoe, files) -> None:
    halves = json.loads(edgemoe("compare", *files, "--metric", "half", "--alpha", "0.01", "--json").out)
    assert {(row["metric"], row["test"]) for row in halves["rows"]} == {("half", "t")} and halves["alpha"] == 0.01
    turned = json.loads(edgemoe("compare", *files, "--reference", files[1], "--json").out)
    assert turned["reference"] == str(files[1]) and turned["runs"] == [str(files[0]), str(files[2])]
    assert turned["rows"][0]["difference"]["mean"] > 0
    outside = json.loads(edgemoe("compare", files[0], "--reference", files[1], "--json").out)
    assert (outside["reference"], outside["runs"]) == (str(files[1]), [str(files[0])])


def test_markup_in_a_name_stays_as_it_is(edgemoe, tmp_path) -> None:
    scores = {"[bold]task:smile:": [0, 1] * 10}
    for name in ("[a].json", "b.json"):
        write(tmp_path / name, scores, 0)
    said = edgemoe("compare", tmp_path / "[a].json", tmp_path / "b.json").out
    assert "[bold]task:smile:" in said and "[a].json" in said and "same configuration" in said


def hostile(folder: Path, exact: Path) -> list[tuple[list[Any], str]]:
    """Command lines that cannot work, and what each is told."""
    text = exact.read_text()
    (folder / "empty.json").write_bytes(b"")
    (folder / "cut.json").write_text(text[: len(text) // 2])
    (folder / "binary.json").write_bytes(bytes(range(256)))
    (folder / "edited.json").write_text(text.replace('"lam": 0', '"lam": 7'))
    (folder / "newer.json").write_text(text.replace('"version": 1', '"version": 99'))
    (folder / "nan.json").write_text(text.replace('"half": 0.5', '"half": NaN', 1))
    (folder / "begun.json.partial").write_text("{}\n")
    foreign = write(folder / "foreign.json", BASE, 1, model=ModelId("other", "w", "other vocabulary"))
    model = write(folder / "model.json", BASE, 1, model=ModelId("q4", "w", "vocabulary"))
    fewer = write(folder / "fewer.json", {task: values[:-5] for task, values in BASE.items()}, 1)
    task = write(folder / "task.json", {"arc_challenge": BASE["arc_challenge"]}, 1)
    tiny = [write(folder / f"tiny{at}.json", {"arc": [1, 0, 1]}, at) for at in range(2)]
    return [
        ([exact], "1 result file, expected at least two"),
        ([exact, folder / "none.json"], "no such result file"),
        ([exact, folder], "a folder, expected a result file"),
        ([exact, folder / "empty.json"], "not a result file"),
        ([exact, folder / "cut.json"], "not a result file"),
        ([exact, folder / "binary.json"], "not a result file"),
        ([exact, folder / "edited.json"], "config_hash is"),
        ([exact, folder / "newer.json"], "of version 99, this edgemoe reads 1"),
        ([exact, folder / "nan.json"], "NaN is not a number"),
        ([exact, folder / "begun.json.partial"], "interrupted: run the same command again"),
        ([exact, foreign], "another tokenizer"),
        ([exact, foreign, "--any-model"], "another tokenizer"),
        ([exact, model], "another model file (q4)"),
        ([exact, fewer], "arc_challenge: 5 questions are not in both files"),
        ([exact, task], "has the task hellaswag"),
        (tiny, "arc: 3 pairs, expected at least 6"),
        ([exact, exact], "given twice"),
        ([exact, model, "--any-model", "--metric", "f1"], "has no metric f1, only acc, half: choose with --metric"),
        ([exact, model, "--any-model", "--alpha", "0"], "--alpha 0: expected a probability"),
        ([exact, model, "--any-model", "--alpha", "nan"], "--alpha nan: expected a probability"),
        ([exact, model, "--any-model", "--alpha", "x"], "Invalid value for '--alpha'"),
    ]


def test_hostile_inputs_are_one_line_each(edgemoe, files, tmp_path) -> None:
    for arguments, says in hostile(tmp_path, files[0]):
        for more in ([], ["--json"]):
            captured = edgemoe("compare", *arguments, *more, expected=2)
            assert captured.out == "" and captured.err.count("\n") == 1, arguments
            assert captured.err.startswith("edgemoe: ") and says in captured.err


def test_another_model_file_is_compared_when_asked_for(edgemoe, files, tmp_path) -> None:
    model = write(tmp_path / "model.json", BASE, 1, model=ModelId("q4", "w", "vocabulary"))
    assert "unresolved" in edgemoe("compare", files[0], model, "--any-model").out


def test_the_group_has_help_and_refuses_other_verbs(edgemoe) -> None:
    assert "compare" in edgemoe("-h").out and "--reference" in edgemoe("compare", "--help").out
    assert edgemoe("nope", expected=2).err == "edgemoe: No such command 'nope' (see edgemoe eval --help)\n"
    assert "see edgemoe eval compare --help" in edgemoe("compare", "--nope", expected=2).err
    assert edgemoe(expected=2).err.count("\n") == 1


def test_the_documentation_knows_verbs_in_groups() -> None:
    assert {("eval",), ("eval", "compare"), ("info",)} <= set(verbs())
