"""The device's policy and sampling against the host's: in Triton's interpreter, as machine code, and on a GPU."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

for name in ("torch", "triton"):
    pytest.importorskip(name)

HERE = Path(__file__).parent
NAMES = (
    "every_policy",
    "every_budget_and_window",
    "corners",
    "a_long_sequence",
    "a_model_s_size",
    "a_reset_in_the_middle",
    "the_sparse_prior",
    "tokens_are_those_of_the_reference",
    "a_text_ends",
)


def has_gpu() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    """What the checks found, run once: starting Python with torch and Triton takes longer than most of them."""
    out = tmp_path_factory.mktemp("interpreted") / "found.json"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(HERE / "interpreted.py"), str(out)], capture_output=True, text=True, env=environment
    )
    assert out.exists(), done.stderr
    found: dict[str, dict[str, object]] = json.loads(out.read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_the_interpreter_decides_what_the_host_decides(name: str, interpreted: dict[str, dict[str, int]]) -> None:
    assert set(interpreted) == set(NAMES)
    assert "error" not in interpreted[name], interpreted[name]["error"]
    assert interpreted[name]["compared"] > 0


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("compiled"))
    done = subprocess.run([sys.executable, str(HERE / "compiled.py")], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_machine_code_rounds_every_product_and_stays_in_one_warp(compiled: dict[str, Any]) -> None:
    """What the interpreter cannot see: fused multiply-adds, flushed denormals, spills; an Ada GPU as the target."""
    found = compiled["counted"]
    for kernel, counts in found.items():
        assert counts["fma."] == counts["mad.f"] == counts[".ftz"] == counts[".local"] == 0, (kernel, counts)
        assert kernel == "choose" or found[kernel]["redux.sync"] > 0, (kernel, counts)
    assert found["chunk"]["bar.sync"] == 0


def test_the_machine_code_reads_an_expert_s_bytes_after_their_arrival(compiled: dict[str, Any]) -> None:
    """Stores, a barrier, a release; an acquire, a barrier, loads past the L1 cache and not on the read-only path. Of
    GPUs with and without kernels that begin early; one that does reads slots once the kernel before has ended."""
    ordered = compiled["ordered"]
    assert [len(ordered[name]) for name in ("waits", "serves", "follows")] == [2, 2, 1]
    for code in ordered["waits"] + ordered["follows"]:
        assert code["met"] and code["loads"], code
        assert all("cg" in load.split(".") and "nc" not in load.split(".") for load in code["loads"]), code
    for code in ordered["waits"]:
        assert code["looks"] and all("acquire" in look.split(".") for look in code["looks"]), code
    for code in ordered["waits"] + ordered["serves"]:
        assert code["stored"] and code["told"], code
        assert all("release" in told.split(".") for told in code["told"]), code


@pytest.mark.gpu
@pytest.mark.skipif(not has_gpu(), reason="needs a CUDA device that torch can use")
def test_a_gpu_decides_what_the_host_decides() -> None:
    from edgemoe.gpu_offload.kernels.selfcheck import check_on_device

    report = check_on_device(budget_s=600)
    assert report["ok"], report
    assert report["policy"]["skipped"] == 0
    assert report["policy"]["decisions"] > 1000 and report["sampling"]["tokens"] > 100
