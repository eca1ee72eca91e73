"""scripts/bench_gpu_pictures: the page's pictures come from the run that is kept beside it."""

import json
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest

for name in ("torch", "matplotlib"):
    pytest.importorskip(name)

ROOT = Path(__file__).parents[2]
RUN = ROOT / "docs" / "bench-gpu.json"


@pytest.mark.skipif(not RUN.exists(), reason="no run on a GPU is kept")
def test_the_kept_run_gives_the_page_s_pictures(tmp_path: Path) -> None:
    loader = SourceFileLoader("bench_gpu_pictures", str(ROOT / "scripts/bench_gpu_pictures"))
    script = module_from_spec(spec_from_loader("bench_gpu_pictures", loader))
    loader.exec_module(script)
    run = json.loads(RUN.read_text(encoding="utf-8"))
    assert [row.as_json() for row in script.rows_of(run)][-1]["config"] == run["rows"][-1]["config"]
    page = (ROOT / "docs/benchmarks-gpu.md").read_text(encoding="utf-8")
    drawn = script.pictures(run, tmp_path)
    assert {"gpu-latency.png", "gpu-copies.png"} <= {path.name for path in drawn}
    for path in drawn:
        assert path.read_bytes().startswith(b"\x89PNG")
        assert f"pictures/{path.name}" in page and (ROOT / "docs/pictures" / path.name).exists()
