"""`edgemoe simulate` as a person runs it."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from edgemoe.cli import main
from edgemoe.model import read_model
from edgemoe.model.synthetic import write_synthetic
from edgemoe.tracing import Trace, load_trace, save_trace
from edgemoe.tracing.simulate import Calibration, simulate
from edgemoe.wall.plan import LayerPlan, Plan, save_plan

FIELDS = ["trace", "layer", "policy", "capacity", "hit_rate", "misses_per_token"]
ALGORITHM_1 = ["demand_per_token", "prefetch_per_token", "unused_per_token", "replaced_per_token"]


@pytest.fixture
def edgemoe(monkeypatch, capsys):
    def run(*arguments, expected=0):
        monkeypatch.setattr(sys, "argv", ["edgemoe", "simulate", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            main()
        captured = capsys.readouterr()
        assert stopped.value.code == expected, captured.err
        return captured.out if expected == 0 else captured.err

    return run


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    """m.npz with scores, pre-gate and two domains; loads.npz with loads only; other.npz of another model."""
    folder = tmp_path_factory.mktemp("traces")
    rng = np.random.default_rng(11)
    scores = (rng.normal(size=(2, 90, 16)) + 2 * rng.normal(size=(2, 1, 16))).astype(np.float32)
    trace = Trace(
        experts=np.argsort(-scores, axis=2)[:, :, :4].astype(np.int16),
        n_experts=16,
        layers=np.array([1, 2], dtype=np.int32),
        windows=np.array([0, 30, 60]),
        domains=("prose", "prose", "code"),
        name="m",
        scores=scores,
        pregate=scores + rng.normal(scale=0.3, size=scores.shape).astype(np.float32),
    )
    save_trace(trace, folder / "m.npz")
    bare = {"layers": trace.layers, "windows": trace.windows, "domains": trace.domains, "name": "loads"}
    save_trace(Trace(experts=trace.experts, n_experts=16, **bare), folder / "loads.npz")
    save_trace(Trace(experts=trace.experts, n_experts=32, **bare), folder / "other.npz")
    for name, layers in (("plan.json", (1, 2)), ("less.json", (1,))):
        placed = tuple(LayerPlan(layer, (3,), (7, layer), tuple({*range(16)} - {3, 7, layer})) for layer in layers)
        save_plan(Plan("planned", "test", 16, (), 0, 0, (), {}, placed), folder / name)
    return folder


def test_a_plan_pins_experts_besides_the_slots(edgemoe, traces):
    rules = "lru,static-oracle,exact-lru,psr"
    arguments = (traces / "m.npz", "--policy", rules, "--capacity", "8", "--json")
    planned = json.loads(edgemoe(*arguments, "--plan", traces / "plan.json"))
    trace = load_trace(traces / "m.npz")
    pinned = [(3, 7, 1), (3, 7, 2)]
    expected = simulate(trace, [8], rules.split(","), pinned=pinned)
    assert [row["hit_rate"] for row in planned["rows"]] == pytest.approx(expected["hit_rate"].tolist())
    assert all(
        row["hit_rate"] > plain["hit_rate"]
        for row, plain in zip(planned["rows"], json.loads(edgemoe(*arguments))["rows"], strict=True)
    )
    oracle = planned["rows"][1]["misses_per_token"] * 90
    counts = [np.bincount(layer.ravel(), minlength=16) for layer in trace.experts]
    left = [np.sort(np.delete(row, pins))[:-8].sum() for row, pins in zip(counts, pinned, strict=True)]
    assert oracle == pytest.approx(sum(left))
    assert any("pins 3 experts per layer" in note for note in planned["notes"])


def test_json_is_one_object_with_the_agreed_fields(edgemoe, traces):
    answer = json.loads(
        edgemoe(traces / "m.npz", "--capacity", "25%,8", "--policy", "lru,psr", "--window", "4", "--json")
    )
    assert [(row["policy"], row["capacity"]) for row in answer["rows"]] == [
        (policy, capacity) for capacity in (4, 8) for policy in ("lru", "psr")
    ]
    lru, psr = answer["rows"][:2]
    assert set(FIELDS) <= lru.keys() and not set(ALGORITHM_1) & lru.keys()
    assert set(FIELDS + ALGORITHM_1) <= psr.keys()
    assert lru["layer"] == "all" and lru["trace"] == "m"
    assert psr["misses_per_token"] == psr["demand_per_token"]
    assert answer["notes"][-1].startswith("bonus scale: running mean of the range; warm set: experts 0 to C - 1")


def test_rows_are_those_of_the_library(edgemoe, traces):
    answer = json.loads(edgemoe(traces / "m.npz", "--capacity", "8", "--layer", "2", "--domain", "code", "--json"))
    rules = ["lru", "lfu", "static-prefix", "static-oracle", "score", "belady"]
    expected = simulate(load_trace(traces / "m.npz").only("code"), [8], rules, layer=2)
    assert answer["rows"] == expected.to_dict("records")
    assert answer["rows"][0]["trace"] == "m:code" and answer["rows"][0]["layer"] == 2


def test_the_table_says_the_count_that_a_share_became(edgemoe, traces):
    out = edgemoe(traces / "m.npz", "--capacity", "30%,1kB", "--policy", "lru", "--expert-bytes", "50B")
    assert "30% = 5" in out
    assert "1kB = 10" in out  # two layers of 50 bytes an expert
    assert "per token" in out and "bytes" in out and "\x1b" not in out


@pytest.mark.parametrize("width", [80, 120])
def test_the_widest_table_fits_the_terminal_and_cuts_nothing_short(edgemoe, traces, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    policies = "lru,static-oracle,exact-prefetch,cache-prior,psr-gated"
    out = edgemoe(traces / "m.npz", "--policy", policies, "--capacity", "62.5%,100%", "--expert-bytes", "10.6MB")
    table = out[: out.index("note ")].splitlines()
    assert max(len(line.rstrip()) for line in table) <= width
    assert "…" not in out
    headings = ["slots", "policy", "hits", "misses", "prefetch", "unused", "replaced", "bytes"]
    assert any(re.split(r" {2,}", line.strip()) == headings for line in table)
    assert "62.5% = 10" in out and "exact-prefetch " in out


def test_the_model_gives_the_bytes(edgemoe, traces, tmp_path):
    write_synthetic(tmp_path / "model.gguf", n_layers=3, n_experts=16, top_k=4)
    sizes = read_model(tmp_path / "model.gguf").geometry.expert_bytes
    command = [traces / "m.npz", "--capacity", "8", "--policy", "lru", "--model", tmp_path / "model.gguf"]
    row = json.loads(edgemoe(*command, "--json"))["rows"][0]
    assert len(set(sizes)) == 1
    assert row["bytes_per_token"] == pytest.approx(sizes[0] * row["misses_per_token"])
    whole = f"{4 * sum(sizes)}B"  # four slots in each of the model's three layers, of which the trace has two
    assert json.loads(edgemoe(*command, "--capacity", whole, "--json"))["rows"][0]["capacity"] == 4
    assert "is not the model of other (32 experts)" in edgemoe(traces / "other.npz", *command[1:], expected=2)
    write_synthetic(tmp_path / "model.gguf", n_layers=2, n_experts=16, top_k=4)
    assert "its layer 2 has no experts" in edgemoe(*command, expected=2)


def test_overrides_reach_the_presets_they_mean_something_to(edgemoe, traces):
    def replaced(*arguments):
        answer = json.loads(edgemoe(traces / "m.npz", "--capacity", "8", *arguments, "--json"))
        return [row["replaced_per_token"] for row in answer["rows"]]

    both = ["--policy", "exact-lru,cache-prior"]
    assert replaced(*both, "--lambda", "0") == [0, 0]
    assert replaced(*both, "--lambda", "0.5")[1] > replaced(*both, "--lambda", "0.1")[1] > 0
    assert replaced("--policy", "psr", "--routing", "exact") == [0]
    assert replaced("--policy", "exact-lru", "--routing", "tau", "--tau", "0.9")[0] > 0


def test_budget_and_gate(edgemoe, traces):
    def row(*arguments):
        command = (traces / "m.npz", "--capacity", "8", "--policy", "psr", *arguments, "--json")
        return json.loads(edgemoe(*command))["rows"][0]

    one, all_of_them, none = row(), row("--budget", "unbounded"), row("--prefetch", "none")
    assert 0 == none["prefetch_per_token"] < one["prefetch_per_token"] <= 1 < 2
    assert all_of_them["prefetch_per_token"] > one["prefetch_per_token"]
    assert row("--gate", "predicted")["unused_per_token"] < one["unused_per_token"]
    assert row("--eviction", "lru") != one


def test_calibration_comes_from_the_other_trace(edgemoe, traces):
    command = [traces / "m.npz", "--capacity", "8", "--policy", "cache-prior", "--calibration", traces / "m.npz"]
    answer = json.loads(edgemoe(*command, "--json"))
    trace = load_trace(traces / "m.npz")
    expected = simulate(trace, [8], ["cache-prior"], calibration=Calibration.measured(trace, trace))
    assert answer["rows"] == expected.to_dict("records")
    assert "mean range from m; warm set: experts by frequency from m" in answer["notes"][-1]


def test_sweep_plot_and_csv(edgemoe, traces, tmp_path):
    picture, table = tmp_path / "sweep.png", tmp_path / "rows.csv"
    out = edgemoe(
        *(traces / "m.npz", "--policy", "lru,belady,psr", "--capacity", "50%", "--sweep"),
        *("--plot", picture, "--csv", table),
    )
    assert picture.read_bytes().startswith(b"\x89PNG")
    rows = pd.read_csv(table)
    assert sorted(set(rows["capacity"])) == list(range(1, 17))
    assert min(rows.loc[rows["policy"] == "psr", "capacity"]) == 8  # the window of 8 fits from there on
    hits = rows[rows["policy"] == "belady"].sort_values("capacity")["hit_rate"]
    assert hits.is_monotonic_increasing
    assert str(picture) in out and str(table) in out


def test_a_plot_leaves_the_rows_to_the_capacities_asked_for(edgemoe, traces, tmp_path):
    answer = json.loads(
        edgemoe(traces / "m.npz", "--policy", "lru", "--capacity", "50%", "--plot", tmp_path / "p.png", "--json")
    )
    assert [row["capacity"] for row in answer["rows"]] == [8]
    assert (tmp_path / "p.png").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["m.npz", "--policy", "fifo"], "no policy 'fifo'"),
        (["m.npz", "--policy", ""], "no policy ''"),
        (["m.npz", "--lambda", "0.2"], "lambda means nothing to eviction rules"),
        (["m.npz", "--policy", "exact-lru", "--top-j", "2"], "top-J protection means nothing to exact-lru"),
        (["m.npz", "--policy", "psr", "--eviction", "belady"], "'belady' is not one of"),
        (["m.npz", "--policy", "psr", "--capacity", "8", "--budget", "9"], "exceeds the window"),
        (["m.npz", "--policy", "psr", "--budget", "some"], "--budget some"),
        (["m.npz", "--policy", "exact-lru", "--capacity", "3"], "cannot hold the 4 experts"),
        (["m.npz", "--policy", "psr", "--capacity", "7"], "window of 8"),
        (["m.npz", "--capacity", "17"], "17 slots"),
        (["m.npz", "--capacity", "6GB"], "needs the size of an expert"),
        (["m.npz", "--capacity", "8", "--expert-bytes", "big"], "not a size"),
        (["m.npz", "--expert-bytes", "0B"], "at least 1 byte"),
        (["m.npz", "--expert-bytes", "1MB", "--model", "x.gguf"], "give one"),
        (["m.npz", "--model", "missing.gguf"], "missing.gguf"),
        (["m.npz", "--layer", "x"], "--layer x"),
        (["m.npz", "--layer", "0"], "no MoE layer 0"),
        (["m.npz", "--domain", "math"], "prose, code"),
        (["m.npz", "--csv", "m.npz/rows.csv"], "--csv m.npz/rows.csv: cannot be written (a file is where"),
        (["m.npz", "--csv", "."], "--csv .: a folder"),
        (["m.npz", "--plot", "."], "--plot .: a folder"),
        (["m.npz", "--plot", "picture"], "--plot picture: expected a name ending in .png"),
        (["m.npz", "--plot", "x.nope"], "--plot x.nope: expected a name ending in .png"),
        (["m.npz", "--plot", "m.npz/x.png"], "cannot be written"),
        (["m.npz", "--layer", "9" * 5000], "expected a layer number"),
        (["m.npz", "--policy", "psr", "--budget", "9" * 5000], "expected a number of prefetches"),
        (["m.npz", "--capacity", "9" * 5000], "is not a residency"),
        (["m.npz", "--expert-bytes", "9" * 400 + "GB"], "is not a size"),
        (["m.npz", "--policy", "psr", "--capacity", "8", "--calibration", "other.npz"], "32 experts"),
        (["m.npz", "--plan", "missing.json"], "missing.json: no such"),
        (["m.npz", "--plan", "m.npz"], "not a placement plan"),
        (["m.npz", "--plan", "."], "edgemoe: .: "),
        (["other.npz", "--plan", "plan.json"], "which has 16 experts per layer, not for what other was traced on"),
        (["m.npz", "--plan", "less.json"], "which has no layer 2"),
        (["missing.npz"], "no such trace file"),
        (["loads.npz", "--policy", "psr", "--capacity", "8"], "--scores"),
    ],
)
def test_mistakes_are_one_line(edgemoe, traces, monkeypatch, arguments, says):
    monkeypatch.chdir(traces)
    error = edgemoe(*arguments, expected=2)
    [line] = error.splitlines()  # and nothing was replayed before it
    assert line.startswith("edgemoe: ") and says in line
    assert not Path("picture.png").exists() and not Path("x.nope").exists()


def test_folders_of_what_is_written_are_made(edgemoe, traces, tmp_path):
    table, picture = tmp_path / "new" / "rows.csv", tmp_path / "other" / "p.svg"
    edgemoe(traces / "m.npz", "--policy", "lru", "--csv", table, "--plot", picture)
    assert table.exists() and picture.read_text().startswith("<?xml")


def test_a_refusal_leaves_no_empty_file(edgemoe, traces, tmp_path):
    edgemoe(traces / "m.npz", "--policy", "exact-lru", "--capacity", "3", "--csv", tmp_path / "rows.csv", expected=2)
    assert list(tmp_path.iterdir()) == []


def test_names_are_never_markup(edgemoe, traces, tmp_path):
    odd = "[b]m[ x]"
    trace = replace(load_trace(traces / "m.npz"), domains=("[/x]", "[/x]", "code"))
    save_trace(trace, tmp_path / f"{odd}.npz")
    picture = tmp_path / "[/a][b]" / "p.png"
    out = edgemoe(
        *(tmp_path / f"{odd}.npz", "--policy", "cache-prior", "--capacity", "8", "--plot", picture),
        *("--calibration", tmp_path / f"{odd}.npz", "--domain", "[/x]"),
    )
    assert f"{odd}:[/x]: 60 tokens" in out and f"mean range from {odd}" in out and f"wrote {picture}" in out
