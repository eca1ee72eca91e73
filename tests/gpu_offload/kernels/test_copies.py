"""Copies that the device decides, issues and waits for: what one can see of them without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the GPU tier needs torch (pip install edgemoe[gpu])")
pytest.importorskip("triton", reason="the GPU tier needs Triton (pip install edgemoe[gpu])")

CHUNKS = [0, 1, 2]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    program = Path(__file__).with_name("interpreted_copies.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    read: dict[str, Any] = json.loads(done.stdout)
    return read


@pytest.mark.parametrize("moved", range(4))
def test_a_demand_copy_cancels_the_prefetch_in_its_slot(found: dict[str, Any], moved: int) -> None:
    """However much of it was there: the rest is never moved, and what was in flight comes first."""
    case = found[f"cancelled/{moved}"]
    assert case["before"] == CHUNKS[:moved] and case["waits_for"] == case["moved_of_the_old"] == moved
    assert case["holds"] == CHUNKS and case["error"] == 0
    assert case["records"] == [True, 1]  # the other one of its slot


def test_a_waiter_moves_what_nobody_has_claimed(found: dict[str, Any]) -> None:
    assert found["waited"] == [CHUNKS, 0]


def test_demand_goes_before_prefetch(found: dict[str, Any]) -> None:
    """With time for one copy, that is which; the other has not begun."""
    assert found["first"] == [True, True]


def test_nothing_is_moved_once_the_text_has_ended(found: dict[str, Any]) -> None:
    assert found["stopped"] == []


def test_a_spin_is_bounded_and_says_so(found: dict[str, Any]) -> None:
    """A chunk that is claimed and never arrives: an expert's, and one of a cancelled copy. A turn that is not dealt."""
    assert found["gave_up"] == 2 and found["gave_up_on_the_old"] == 1
    assert found["taken"] == [-5, 3, 0] and found["gave_up_on_a_turn"][::2] == [-(1 << 30), 8]


def test_counters_start_anew_with_every_copy(found: dict[str, Any]) -> None:
    """However often a slot is filled: a block counts a copy at most once when all its chunks are claimed, and one that
    waits for somebody's chunk does not count its looks."""
    blocks = 2
    for (claimed, cancelled, done, moved, error, held), before in zip(found["reused"], (1, 0, 3, 2), strict=True):
        assert claimed == len(CHUNKS) + blocks and cancelled == (1 << 20) + blocks
        assert (done, moved, error, held) == (len(CHUNKS), before, 0, len(CHUNKS))
    assert found["claimed"] == len(CHUNKS)


def test_what_is_there_is_worked_on_first(found: dict[str, Any]) -> None:
    """Then what is on its way, then what nobody has begun, as the demand queue has them; each in the router's order.
    What this token brought has a record to look at, though it is there."""
    case, nobody = found["turns"], -(1 << 30)
    new, begun, promoted = 2 * 2, 2 * 4 + 1, 2 * 0  # records; the new one is the other of its slot
    there, arrived = -1 - 1, 2 * 3  # the one there was in its slot before the token
    assert case["tickets"] == [new, promoted, begun, there, arrived, nobody]
    order = [(3, there), (4, arrived), (2, begun), (0, new), (1, promoted), (5, nobody)]
    assert case["turns"] == [[7, place, ticket] for place, ticket in order]
    assert case["queue"] == [[begun, new, promoted], 5]


def test_marks_are_counted_once_and_taken_off(found: dict[str, Any]) -> None:
    case = found["turns"]
    assert case["counts"] == [2, 1, 1, 1, 1]  # demand copies, promoted, in time, late, unused
    assert case["marks"] == 0


def test_a_copy_begins_with_a_record_of_its_own(found: dict[str, Any]) -> None:
    expert, claims, done, cancelled, current = found["turns"]["fresh"]
    assert (expert, claims, done, current) == (3, 0, 0, 0) and cancelled > 3


def test_lists_and_queues_hold_all_that_can_be_asked_for(found: dict[str, Any]) -> None:
    """k demand and n prefetch copies in every layer but the first, which nothing predicts."""
    case, k, n = found["most"], 2, 4
    assert case["counts"] == [[k, k, 0], [k, k, n], [k, k, n]] and case["compared"] == 18
    assert case["asked"] == [3 * k, 2 * n]
    assert case["places"][0] >= 3 * k and case["places"][1] >= 3 * n
