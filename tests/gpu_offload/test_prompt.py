"""Prompts on the device: their kernels beside torch, and what few buffers, or what is resident, may not change."""

import json
from pathlib import Path

import numpy as np
import pytest
from programs import run

torch = pytest.importorskip("torch", reason="the GPU tier needs torch (pip install edgemoe[gpu])")

from edgemoe.gpu_offload import staging  # noqa: E402
from edgemoe.gpu_offload.arena import Arena  # noqa: E402
from edgemoe.gpu_offload.executor import kept_in_place  # noqa: E402
from edgemoe.gpu_offload.grouped import rows_by_expert  # noqa: E402
from edgemoe.gpu_offload.shape import Shape  # noqa: E402
from edgemoe.gpu_offload.slots import Slots  # noqa: E402

SHAPE = Shape(1, 4, 1, 1, 4, 9, 2, 2, 8, 16, 1e4, 1e-5, False, None, False)


def test_a_prompt_s_kernels_are_torch_s_and_buffers_change_nothing(tmp_path: Path) -> None:
    """Where buffers are few, many, or not needed at all, a prompt has the CPU's experts and counts; decided alike, it
    has the same bits. And what ran compiles for GPUs."""
    pytest.importorskip("triton")
    found = json.loads(run("interpreted_prompt.py", tmp_path / "launches"))
    compiled = json.loads(run("launches.py", tmp_path / "launches"))
    assert {"chunk_attention.attend", "chunk_attention.place", "grouped.gate_and_up"} <= set(compiled)
    assert max(found.pop(name) for name in ("attention", "clipped", "mixture")) < 2e-6
    assert found.pop("told") is True
    assert {name: case["wrong"] for name, case in found.items()} == {name: [] for name in found}
    assert len(found) == 5 and max(case["worst"] for case in found.values()) < 2e-6
    alike = [case["bits"] for name, case in found.items() if "exact-lru" in name]
    assert len(alike) == 3 and len(set(alike)) == 1
    assert max(case["unused"] for case in found.values()) > 0


def test_rows_lie_side_by_side_by_expert() -> None:
    rng = np.random.default_rng(0)
    executed = rng.integers(-1, 7, (20, 3)).astype(np.int32)
    executed[executed == 4] = 2  # one that nobody executes
    order, bounds = rows_by_expert(executed, 9)
    flat = executed.ravel()
    assert bounds[0] == 0 and bounds[-1] == len(order) == (flat >= 0).sum()
    for expert in range(9):
        assert order[bounds[expert] : bounds[expert + 1]].tolist() == np.flatnonzero(flat == expert).tolist()


def test_residents_keep_their_slots() -> None:
    """As many as can; the others fill what is free, in order."""
    rng = np.random.default_rng(1)
    for _ in range(200):
        slot_of = np.full(10, -1, np.int32)
        residents = rng.choice(10, rng.integers(0, 7), replace=False)
        slot_of[residents] = rng.permutation(6)[: len(residents)]
        held = rng.integers(-1, 10, 6)
        kept = kept_in_place(slot_of, held)
        assert ((kept >= 0) == (slot_of >= 0)).all()
        taken = kept[kept >= 0]
        assert len(set(taken.tolist())) == len(taken) and (taken < 6).all()
        for expert in residents.tolist():
            assert kept[expert] in np.flatnonzero(held == expert) or expert not in held
        moved = [kept[e] for e in sorted(residents.tolist()) if e not in held]
        assert moved == sorted(moved)


def test_buffers_are_a_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an expert will lie is known before it is sent, whatever was sent and released before."""
    monkeypatch.setattr(staging, "_MOST_AHEAD", 2)
    arena = Arena(SHAPE, torch.float32, pinned=False)
    arena.bytes.copy_(torch.arange(9, dtype=torch.uint8).view(1, 9, 1).expand_as(arena.bytes))
    ring = staging.Staging(Slots(arena, 2, torch.device("cpu")))
    assert ring.room == ring.size == 5 == staging.staging_bytes(arena.expert_bytes) // arena.expert_bytes
    coming, sent, done = [8, 1, 7, 3, 0, 2, 6, 5], 0, 0
    places = ring.places(len(coming))
    for together in (2, 1, 3, 2):
        more = min(ring.room, len(coming) - sent)
        ring.send(0, coming[sent : sent + more])
        sent += more
        ring.arrive(together)
        for i in range(done, done + together):
            assert (ring.buffers[places[i]] == coming[i]).all()
        ring.release(together)
        done += together
    assert done == len(coming) and ring.room == ring.size
    ring.send(0, coming[:4])
    ring.clear()
    assert ring.room == ring.size and ring.places(2) == [0, 1]
