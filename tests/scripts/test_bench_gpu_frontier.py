"""scripts/bench_gpu_frontier, small and on the CPU: KL and routing of one model, and what the page makes of a run."""

import argparse
import json
from contextlib import nullcontext
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("matplotlib")
pytest.importorskip("scipy")

import torch

from edgemoe.bench.gpu.frontier import read_quality
from edgemoe.calibration import load_calibration
from edgemoe.progress import no_progress
from edgemoe.tracing import load_trace

ROOT = Path(__file__).parents[2]


def script(name: str) -> ModuleType:
    loader = SourceFileLoader(name, str(ROOT / "scripts" / name))
    module = module_from_spec(spec_from_loader(name, loader))
    loader.exec_module(module)
    return module


def watch(*_):
    return nullcontext(no_progress)


@pytest.fixture(scope="module")
def small():
    found = script("bench_gpu_frontier")
    torch.set_num_threads(1)
    found.CALIBRATION, found.ROWS, found.PRIORS = (64, 2), {"50%": "psr-gated:λ0.2"}, {"50%": ("λ0.05", "λ0.6")}
    return found


@pytest.fixture(scope="module")
def measured(small, tmp_path_factory):
    folder = tmp_path_factory.mktemp("frontier")
    small.measure(folder, ["50%"], watch, length=12, windows=4)
    return folder


@pytest.fixture(scope="module")
def runs(small, measured):
    arguments = argparse.Namespace(
        output=measured / "run.json", residency="50%", executors="cpu", geometry="olmoe-narrow", device="cpu",
        rounds=2, windows=4, tokens=4, seconds=None,
    )  # fmt: skip
    found = small.run(measured, arguments, watch)
    assert json.loads(arguments.output.read_text(encoding="utf-8")) == json.loads(json.dumps(found))
    return found


def test_every_row_has_a_kl_and_the_trace_its_calibration_and_windows(small, measured) -> None:
    quality = read_quality([measured / "quality"])
    assert set(quality.kl) == {(policy.hash, 32) for policy in small.policies_of("50%").values()}
    assert all(kl > 0 for kl in quality.kl.values()) and quality.models == ("demo-moe-32m",)
    trace, known = load_trace(measured / "demo.scores.npz"), load_calibration(measured / "demo.calib")
    assert np.array_equal(trace.delta, known.delta) and np.array_equal(trace.warm, known.warm)
    assert len(known.prior.tokens) == 0 and not known.prior_row(5).any()
    assert len(trace.windows) == 16 and trace.n_tokens == 16 * 12 and trace.scores.shape == (8, 16 * 12, 64)
    results = sorted(measured.glob("quality/*.json"))
    before = [path.stat().st_mtime_ns for path in results]
    small.measure(measured, ["50%"], watch, length=12, windows=4)  # what is there is not measured again
    assert len(results) == 5 and [path.stat().st_mtime_ns for path in results] == before


def test_rows_at_every_residency_have_cache_priors_on_both_sides() -> None:
    whole = script("bench_gpu_frontier")
    for share in ("50%", "25%"):
        rows = whole.policies_of(share)
        for eviction in ("lru", "score"):
            for top_j in (0, 1, 2):
                family = [
                    one for one in rows.values() if (one.prefetch, one.eviction, one.top_j) == ("none", eviction, top_j)
                ]
                assert len({one.lam for one in family}) >= 2
        assert {one.lam for one in rows.values() if one.gate == "predicted"} >= {0.1, 0.2, 0.3}


def test_a_run_decides_from_the_trace_and_knows_its_kl(runs) -> None:
    [run] = runs
    assert [row["name"] for row in run["rows"]][:2] == ["resident", "psr-gated λ0.2"] and run["rounds"] == 2
    assert all(row["agrees"] and (row["kl"] is None) == (row["name"] == "resident") for row in run["rows"])
    [found] = run["equal_kl"]
    assert found["row"] == "psr-gated λ0.2" and len(found["families"]) == 2
    low, high = found["between_kl"]
    assert low <= found["kl"] <= high and found["with_kl"][0] <= found["ratio"]["ratio"] <= found["with_kl"][1]
    assert any("routing is that of demo.scores" in note for note in run["notes"])


def test_the_page_shows_it_and_has_no_section_without_it(runs, tmp_path) -> None:
    tables, pictures = script("bench_gpu_tables"), script("bench_gpu_pictures")
    text = (ROOT / "docs/benchmarks-gpu.md").read_text(encoding="utf-8")
    kept = json.loads((ROOT / "docs/bench-gpu.json").read_text(encoding="utf-8"))
    frontier = json.loads(json.dumps(runs))
    written = tables.page(text, kept, frontier)
    section = written.split(tables.FRONTIER_BEGIN)[1].split(tables.FRONTIER_END)[0]
    assert "## The frontier that was measured" in section and "- KL was measured on demo-moe-32m" in section
    assert "Of 1 steered rows" in section and f"`{frontier[0]['rows'][-1]['config']}`" in section
    assert "| psr-gated λ0.2 | 32 |" in section and section.count("at equal KL") == 1
    assert tables.page(written, kept, frontier) == written
    assert tables.FRONTIER_BEGIN + tables.FRONTIER_END in tables.page(written, kept)
    drawn = pictures.pictures(kept, tmp_path, frontier)
    assert [path.name for path in drawn] == ["gpu-latency.png", "gpu-copies.png", "gpu-frontier.png"]
    assert all(f"pictures/{path.name}" in written for path in drawn)


def test_steered_rows_are_counted_by_both_intervals() -> None:
    tables = script("bench_gpu_tables")

    def one(low, high, whole):
        return {"ratio": {"low": low, "high": high}, "with_kl": whole}

    said = tables.faster({"equal_kl": [one(1.01, 1.03, (0.99, 1.05)), one(0.9, 0.95, None), one(0.9, 1.1, (0.8, 1.2))]})
    assert said.startswith("Of 3 steered rows") and "1 faster, 1 slower, 1 undecided by the clock" in said
    assert "0 faster, 0 slower, 2 undecided with" in said
