"""`edgemoe stats` as a person runs it."""

import json
import sys
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pandas as pd
import pytest

from edgemoe.cli import main
from edgemoe.tracing import Trace, load_trace, save_trace


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def edgemoe(monkeypatch, capsys):
    def run(*arguments, expected=0):
        monkeypatch.setattr(sys, "argv", ["edgemoe", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            main()
        captured = capsys.readouterr()
        assert stopped.value.code == expected, captured.err
        return Done(stopped.value.code, captured.out, captured.err)

    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A trace of two domains with a pre-gate, and one of another model."""
    folder = tmp_path_factory.mktemp("traces")
    rng = np.random.default_rng(7)
    scores = rng.normal(size=(2, 90, 8)).astype(np.float32)
    trace = Trace(
        experts=np.argsort(-scores, axis=2)[:, :, :2].astype(np.int16),
        n_experts=8,
        layers=np.array([1, 2], dtype=np.int32),
        windows=np.array([0, 30, 60]),
        domains=("prose", "prose", "code"),
        name="m",
        scores=scores,
        pregate=scores,
    )
    save_trace(trace, folder / "m.npz")
    other = Trace(trace.experts, 9, trace.layers, np.array([0]), ("poems",), "other")
    save_trace(other, folder / "other.npz")
    return folder


def test_json_is_one_object_and_nothing_else(edgemoe, folder):
    done = edgemoe("stats", folder / "m.npz", "--json")
    found = json.loads(done.stdout)
    assert done.stderr == ""
    assert set(found["reuse"][0]) == {"trace", "layer", "lag", "reuse", "chance", "jaccard"}
    assert set(found["working_set"][0]) == {"trace", "layer", "coverage", "experts", "share"}
    assert {row["layer"] for row in found["reuse"]} == {"all", 1, 2}
    assert {row["trace"] for row in found["reuse"]} == {"m:prose", "m:code"}
    assert {row["coverage"] for row in found["working_set"]} == {0.90, 0.95, 0.99}
    assert found["similarity"]["names"] == ["m:prose", "m:code"]
    assert found["similarity"]["matrix"][0][0] == 1.0 and len(found["similarity"]["matrix"]) == 2
    # The pre-gate here is the router itself.
    assert all(row["recall"] == 1.0 and row["layer"] in ("all", 2) for row in found["pregate"])


def test_what_is_not_defined_is_null(edgemoe, folder):
    found = json.loads(edgemoe("stats", folder / "m.npz", "--json", "--lags", "1,50", "--layer", "all").stdout)
    assert [row["reuse"] is None for row in found["reuse"]] == [False, True, False, True]
    assert {row["layer"] for row in found["reuse"]} == {"all"}


def test_one_layer_and_one_domain(edgemoe, folder):
    found = json.loads(edgemoe("stats", folder / "m.npz", "--layer", 2, "--domain", "code", "--json").stdout)
    for part in ("reuse", "working_set", "load", "drift", "pregate"):
        assert {(row["trace"], row["layer"]) for row in found[part]} == {("m:code", 2)}


def test_tables_are_plain_when_piped(edgemoe, folder):
    done = edgemoe("stats", folder / "m.npz", "--plots", folder / "pictures", "--csv", folder / "tables")
    assert "\x1b" not in done.stdout
    for words in ("Reuse", "Working set", "Load", "Drift", "Pre-gate", "Similarity", "× chance", "prose", "code"):
        assert words in done.stdout
    assert max(map(len, done.stdout.splitlines())) < 400
    assert f"wrote {folder / 'pictures' / 'reuse-by-lag.png'}" in done.stdout
    reuse = pd.read_csv(folder / "tables" / "reuse.csv")
    assert list(reuse.columns) == ["trace", "layer", "lag", "reuse", "chance", "jaccard"]
    assert pd.read_csv(folder / "tables" / "similarity-cosine.csv", index_col=0).shape == (2, 2)


def test_one_csv_holds_every_figure(edgemoe, folder):
    found = json.loads(edgemoe("stats", folder / "m.npz", "--csv", folder / "all.csv", "--json").stdout)
    table = pd.read_csv(folder / "all.csv")
    assert list(table.columns) == ["statistic", "trace", "layer", "at", "value"]
    for row in found["reuse"][:3]:
        here = (
            (table["statistic"] == "reuse.reuse") & (table["trace"] == row["trace"]) & (table["at"] == str(row["lag"]))
        )
        assert float(table[here & (table["layer"] == str(row["layer"]))]["value"].iloc[0]) == row["reuse"]
    assert (table["statistic"] == "similarity.jaccard").sum() == 4


def test_traces_of_two_models_are_shown_but_not_compared(edgemoe, folder):
    done = edgemoe("stats", folder / "m.npz", folder / "other.npz")
    assert "only texts of one model are compared" in done.stdout
    found = json.loads(edgemoe("stats", folder / "m.npz", folder / "other.npz", "--json").stdout)
    assert found["similarity"]["matrix"][0][2] is None and found["similarity"]["matrix"][0][1] > 0
    assert "of 8 experts" in found["notes"][0] and "of 9 experts" in found["notes"][0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["absent.npz"], "no such trace file"),
        (["m.npz", "--layer", "0"], "m:prose: no MoE layer 0; its 2 MoE layers are 1 to 2"),
        (["m.npz", "--layer", "first"], "--layer first: expected a layer number or all"),
        (["m.npz", "--lags", "1,,2"], "--lags 1,,2: expected distances in tokens"),
        (["m.npz", "--lags", "9" * 20], "expected distances in tokens"),
        (["m.npz", "--lags", "1," + "9" * 5000], "expected distances in tokens"),
        (["m.npz", "--layer", "9" * 5000], "expected a layer number"),
        (["m.npz", "--lags", "0"], "--lags 0: expected distances in tokens"),
        (["m.npz", "--domain", "math"], "no trace has a domain 'math'; the domains are prose, code"),
        (["m.npz", "--csv", "m.npz"], "--csv m.npz: cannot be written into"),
        (["m.npz", "--plots", "m.npz"], "--plots m.npz: cannot be written into"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(edgemoe, folder, monkeypatch, arguments, words):
    monkeypatch.chdir(folder)
    done = edgemoe("stats", *arguments, expected=2)
    assert done.stdout == ""
    [line] = done.stderr.splitlines()  # and no statistics before it
    assert words in line and len(line) < 200


def test_names_are_never_markup(edgemoe, folder, tmp_path):
    trace = load_trace(folder / "m.npz")
    odd = tmp_path / "[b]m[ x].npz"
    save_trace(replace(trace, domains=("[/x]", "[/x]", ":smile:"), meta={"partial": True}), odd)
    out = edgemoe("stats", odd, "--plots", tmp_path / "[/a]").stdout
    assert "[/x]: 60 tokens" in out and out.count("[/x]") >= 10 and out.count(":smile:") >= 10
    assert "note [b]m[ x]:[/x]: this trace is partial" in out and f"wrote {tmp_path / '[/a]'}" in out


@pytest.mark.parametrize("width", [80, 120])
def test_every_table_fits_the_terminal(edgemoe, folder, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    out = edgemoe("stats", folder / "m.npz", "--lags", "1,2,4,8,16,20,32,64,128,512").stdout
    tables = [line.rstrip() for line in out.splitlines()]
    assert max(map(len, tables)) <= width
    assert "…" not in out
    at = next(i for i, line in enumerate(tables) if line.startswith("text  ") and "lag 1" in line)
    assert tables[at].split() == ["text", "lag", *["1", "2", "4", "8", "32", "128", "512"], "chance", "×", "chance"]
    prose = tables[at + 2].split()
    assert prose[0] == "prose" and float(prose[-1]) > 0  # a plain number under "× chance"


def test_what_cannot_be_written_is_found_before_the_work(edgemoe, folder, tmp_path):
    in_the_way = folder / "m.npz"
    for option in ("--csv", "--plots"):
        for place in (in_the_way / "x", in_the_way / "x.csv"):
            done = edgemoe("stats", in_the_way, option, place, expected=2)
            assert done.stderr.startswith(f"edgemoe: {option} {place}: cannot be written") and done.stdout == ""
            assert done.stderr.count("\n") == 1
    edgemoe("stats", in_the_way, "--csv", tmp_path / "new" / "one.csv", "--plots", tmp_path / "pictures")
    assert (tmp_path / "new" / "one.csv").exists()


def test_a_trace_that_is_partial_or_failed_its_check_says_so(edgemoe, folder, tmp_path):
    trace = replace(load_trace(folder / "other.npz"), meta={"partial": True, "self_check": ["reuse below chance"]})
    save_trace(trace, tmp_path / "cut.npz")
    notes = json.loads(edgemoe("stats", tmp_path / "cut.npz", "--json").stdout)["notes"]
    assert len(notes) == 2
    assert "cut: this trace is partial" in notes[0] and "failed its self-check (reuse below chance)" in notes[1]
