"""`edgemoe bench ssd` as a person runs it, on a model of 30 MB: every figure is there, and nothing is left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from edgemoe.bench.case import TOLD
from edgemoe.bench.loads import shape_of
from edgemoe.bench.memory_group import find_hierarchy
from edgemoe.model import read_model
from edgemoe.model.synthetic import write_synthetic
from edgemoe.policy import Policy
from edgemoe.streaming.budget import budget_of_streams, expert_pages

SIZE = 16_000_000
HIERARCHY = find_hierarchy()
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def ram(tmp_path_factory):
    """What holds a third of the experts, for one stream and for two."""
    shape = shape_of(SIZE, n_experts=64)
    [path] = write_synthetic(tmp_path_factory.mktemp("shape") / "hole.gguf", hole=True, **shape.fields)
    model = read_model(path)
    needs = [
        budget_of_streams(
            model, Policy(), streams, n_ctx=n_ctx, kv_type="f16", expert_bytes=expert_pages(model), chunk=1, slots=22
        ).total
        for streams, n_ctx in ((1, 256), (2, 64))
    ]
    return round(max(needs) / TOLD)


def command(folder, ram, *more):
    options = ["--dir", folder, "--size", f"{SIZE}B", "--ram", f"{ram}B", "--quick", "--threads", "1", *more]
    return [sys.executable, "-m", "edgemoe.cli", "bench", "ssd", *map(str, options)]


def groups():
    if isinstance(HIERARCHY, str):
        return []
    return [path.name for path in HIERARCHY.parent.glob("edgemoe-bench-*")]


@pytest.mark.slow
def test_every_figure_is_there(tmp_path, ram):
    result = subprocess.run(
        command(tmp_path, ram, "--streams", "2", "--json"),
        capture_output=True,
        text=True,
        timeout=1200,
        env=ENVIRONMENT,
    )
    assert (result.returncode, result.stderr) == (0, "")
    report = json.loads(result.stdout)
    assert not any(tmp_path.iterdir())
    assert [case["name"] for case in report["cases"]] == [
        *("random ×1", "recorded ×2", "random ×1 speculative", "random ×1 exact-prefetch")
    ]
    assert bool(report["memory"]["no_mmap"]) == isinstance(HIERARCHY, str)
    for case, beside in zip(report["cases"], (True, True, False, False), strict=True):
        ours, *theirs = case["sides"]
        assert [side["engine"] for side in theirs] == (["mmap"] if beside and not report["memory"]["no_mmap"] else [])
        for side in case["sides"]:
            assert side["problem"] == "" and side["rounds"] > 0 and side["tokens_per_s"] > 0
            assert side["group_peak"] is None or 0 < side["group_peak"] <= report["memory"]["limit"]
        assert len(ours["config"]) == 12 and ours["slots"] >= 8
        assert ours["reading"]["reads"] > 0 and 0 <= ours["reading"]["hit_rate"] < 1
    assert report["cases"][2]["sides"][0]["reading"]["early"] > 0
    assert report["limits"]["disk_bytes_per_s"] > 0 and report["bars"]
    assert report["machine"]["cpu"] and report["machine"]["ram_bytes"] > 0
    assert report["read_ahead_bytes"] is None or report["read_ahead_bytes"] % 4096 == 0
    points = report["quality"]
    assert len(points) == 10 and len({point["config"] for point in points}) == 10
    for point in points:
        exact = point["policy"].startswith("exact")
        assert (point["kl"] == 0) == exact and (point["ppl"] == point["perplexity_exact"]) == exact
        assert (point["replaced"] == 0) == exact and point["reads"] > 0 and point["token_s"] > 0


@pytest.mark.parametrize(
    ("moment", "number"), [("writing", signal.SIGTERM), ("measuring", signal.SIGINT), ("writing", signal.SIGHUP)]
)
def test_an_interrupt_leaves_nothing(tmp_path, ram, moment, number):
    def reached():
        names = [path.name for path in Path(tmp_path).iterdir()]
        if moment == "writing":
            return any(name.endswith(".partial") for name in names)
        if isinstance(HIERARCHY, str):
            return any(name.endswith(".gguf") for name in names)
        return any(f"-{process.pid}-streamed" in name for name in groups())

    process = subprocess.Popen(
        command(tmp_path, ram, "--streams", "1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    try:
        deadline = time.monotonic() + 600
        while not reached() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(number)
        out, errors = process.communicate(timeout=300)
    finally:
        process.kill()
    assert (process.returncode, out) == (130, "")
    assert errors.endswith("edgemoe: interrupted\n")
    assert not any(tmp_path.iterdir())
    assert not [name for name in groups() if f"-{process.pid}-" in name]
