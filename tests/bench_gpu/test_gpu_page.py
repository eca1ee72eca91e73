"""docs/benchmarks-gpu.md: its tables are those of the run beside it, and say what the run says."""

import json
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from gpu_subjects import tiny_subject

from edgemoe.bench.gpu import run as bench
from edgemoe.bench.gpu.against import Split
from edgemoe.bench.gpu.report import as_json
from edgemoe.policy import preset

ROOT = Path(__file__).parents[2]
SCRIPT, PAGE, RUN, FRONTIER = (
    ROOT / where
    for where in (
        *("scripts/bench_gpu_tables", "docs/benchmarks-gpu.md"),
        *("docs/bench-gpu.json", "docs/bench-gpu-frontier.json"),
    )
)


@pytest.fixture(scope="module")
def script():
    loader = SourceFileLoader("bench_gpu_tables", str(SCRIPT))
    module = module_from_spec(spec_from_loader("bench_gpu_tables", loader))
    loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def measured() -> str:
    torch.set_num_threads(1)
    policies = {"exact-lru": preset("exact-lru"), "psr": preset("psr", window=3), "too wide": preset("psr")}
    settings = bench.Settings(
        device="cpu", policies=policies, residencies=("50%",), rounds=2, generate=2, determinism=2, prompt=6
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "_subject", lambda settings, watch: tiny_subject())
        report = bench.bench_gpu(settings)
    report.against = [Split("100%", 0, 1, 0.002, 6, best=True), Split("50%", 2, 1, 0.004, 6, best=True)]
    return json.dumps(as_json(report))


@pytest.fixture
def run(measured: str) -> dict[str, Any]:
    return json.loads(measured)


def test_a_run_without_prompts_has_no_table_of_them(script, run) -> None:
    assert "| a prompt |" in script.tables(run)
    older = {name: value for name, value in run.items() if name not in ("prompts", "load_s")}
    assert "| a prompt |" not in script.tables(older)


def test_every_row_and_every_check_is_there(script, run) -> None:
    written = script.tables(run)
    assert written.count("| exact-lru | 4 |") == 4 and "window of 8 candidates" in written
    assert f"`{run['rows'][1]['config']}`" in written and "| 50% | 2 | 1 | 4.00 | best |" in written
    assert written.count("| the logical cache |") == len(
        [one for one in run["determinism"] if one["cache"] == "logical"]
    )
    assert all(bar["what"] in written for bar in run["bars"])
    for table in written.split("\n\n"):
        lines = [line for line in table.strip().splitlines() if line.startswith("|")]
        assert len({line.count("|") for line in lines}) <= 1


def test_the_page_takes_the_tables_between_its_marks(script, run) -> None:
    text = PAGE.read_text(encoding="utf-8")
    written = script.page(text, run)
    assert script.page(written, run) == written and script.tables(run) in written
    assert written.split(script.BEGIN)[0] == text.split(script.BEGIN)[0]


@pytest.mark.skipif(not RUN.exists(), reason="no run on a GPU is kept beside the page")
def test_the_page_is_what_the_script_writes(script) -> None:
    text = PAGE.read_text(encoding="utf-8")
    run = json.loads(RUN.read_text(encoding="utf-8"))
    frontier = json.loads(FRONTIER.read_text(encoding="utf-8")) if FRONTIER.exists() else None
    assert script.page(text, run, frontier) == text


def test_the_readme_says_what_was_measured() -> None:
    run = json.loads(RUN.read_text(encoding="utf-8"))
    said = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    row = {(one["label"], one["share"]): f"{1e3 * one['mean']:.1f}" for one in run["rows"]}
    [theirs] = [1e3 * one["token_s"] for one in run["llama.cpp"] if one["share"] == "50%" and one["best"]]
    assert "H200" in run["card"] and "Measured on an H200" in said
    assert f"{row['exact-lru', '50%']} ms per token with exact routing and {row['psr-gated', '50%']} ms with" in said
    assert f"llama.cpp takes {theirs:.1f} ms" in said
