"""docs/benchmarks.md: its tables are those of the run beside it, and say what the run says."""

import json
import shutil
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT, PAGE, RUN = ROOT / "scripts" / "bench_tables", ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "bench-ssd.json"


@pytest.fixture(scope="module")
def script():
    loader = SourceFileLoader("bench_tables", str(SCRIPT))
    module = module_from_spec(spec_from_loader("bench_tables", loader))
    loader.exec_module(module)
    return module


def test_the_page_is_what_the_script_writes(tmp_path):
    page = shutil.copy(PAGE, tmp_path / "page.md")
    check = [sys.executable, str(SCRIPT), str(RUN), "--page", str(page), "--check"]
    assert subprocess.run(check, capture_output=True, timeout=120).returncode == 0
    page.write_text(PAGE.read_text().replace("| random ×1 |", "| random ×1 or so |", 1))
    refused = subprocess.run(check, capture_output=True, text=True, timeout=120)
    assert refused.returncode == 1 and "run scripts/bench_tables" in refused.stderr
    subprocess.run(check[:-1], check=True, timeout=120)
    assert page.read_text() == PAGE.read_text()


def test_every_bar_and_every_case_is_there(script):
    run = json.loads(RUN.read_text())
    written = script.tables(run)
    for case in run["cases"]:
        assert written.count(f"| {case['name']} |") == 2 + bool(case["wall"])
    lines = {line.split(" | ")[0].removeprefix("| "): line for line in script.held_to(run).splitlines()[2:]}
    assert list(lines) == [bar["what"] for bar in run["bars"]]
    for bar in run["bars"]:
        verdict, why = lines[bar["what"]].removesuffix(" |").split(" | ")[3:]
        assert verdict == {True: "holds", False: "**missed**", None: "–"}[bar["holds"]]
        assert bool(why.strip()) == (bar["holds"] is False or bool(bar["why"]))


def test_a_run_without_mmap_and_with_what_failed_still_makes_tables(script):
    run = json.loads(RUN.read_text())
    run["memory"]["no_mmap"] = "no root"
    for case in run["cases"]:
        del case["sides"][1:]
        case["speedup"] = None
    failed = run["cases"][2]
    failed["sides"][0] |= {"problem": "the kernel ended it", "reading": None, "tokens_per_s": 0.0, "slots": None}
    failed["wall"] = None
    run["bars"] = [
        {"what": failed["name"], "value": None, "bar": "measured", "holds": None, "why": "the kernel ended it"}
    ]
    written = script.tables(run)
    assert f"| {failed['name']} | – |" in written and "the kernel ended it" in written
