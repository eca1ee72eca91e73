"""The device's executor: what it decides, moves and computes is the CPU's, here in Triton's interpreter."""

import json
from pathlib import Path

import pytest
from programs import run

for name in ("torch", "triton"):
    pytest.importorskip(name)


def test_a_token_on_the_device_is_the_cpu_s(tmp_path: Path) -> None:
    """Whatever part of the copies has arrived when an expert's block begins; and what ran compiles for GPUs."""
    found = json.loads(run("interpreted_device.py", tmp_path / "launches"))
    assert {name: case["wrong"] for name, case in found.items()} == {name: [] for name in found}
    assert len(found) == 3 and max(case["worst"] for case in found.values()) < 2e-6
    assert found["psr-gated/1"]["late"] > 0
    compiled = json.loads(run("launches.py", tmp_path / "launches"))
    assert {"attention.attend", "copying.serve", "deciding.decide", "experts.down", "steps.chunk"} <= set(compiled)
