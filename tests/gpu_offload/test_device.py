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
    cases, wrapped = found["cases"], found["wrapped"]
    assert {name: case["wrong"] for name, case in cases.items()} == {name: [] for name in cases}
    assert len(cases) == 3 and max(case["worst"] for case in cases.values()) < 2e-6
    assert cases["psr-gated/1"]["late"] > 0
    # Tokens have numbers modulo 2²³; which ones, decides nothing.
    assert wrapped == {"numbers": [[1, 2, 3], [2**23 - 1, 0, 1]], "same": [True] * 3}
    compiled = json.loads(run("launches.py", tmp_path / "launches"))
    assert {"attention.attend", "copying.serve", "deciding.decide", "experts.down", "steps.chunk"} <= set(compiled)


def test_what_a_spin_that_gave_up_spoilt_is_taken_back() -> None:
    """A step or a text fails whole, with a line that says which wait was in vain; what follows is as without it."""
    found = json.loads(run("interpreted_faults.py"))
    said = {name: found["said"].pop(name) for name in ("TURN in a step", "TURN in a text")}
    assert all("waited in vain for the GPU's decision: give --executor host" in words for words in said.values()), said
    codes = {"lost": 3, "overwritten": 1, "CANCELLED_COPY": 1, "EXPERT": 2, "DECISION": 4}
    assert set(found["said"]) == {f"{kind} in a {call}" for kind in codes for call in ("step", "text")}
    for name, words in found["said"].items():
        expected = f"a copy on the GPU did not arrive within its bound (code {codes[name.split()[0]]}): another program"
        assert words.startswith(expected) and words.endswith("try again, or give --device cpu"), (name, words)
    assert found["wrong"] == []
