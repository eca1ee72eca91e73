"""Options to choose tokens by: a device keeps a graph for the last few, however many a program asks for."""

import json

import pytest
from programs import run

for name in ("torch", "triton"):
    pytest.importorskip(name)


def test_the_options_used_least_recently_go_and_come_back_the_same() -> None:
    """In Triton's interpreter, something else in the place of graphs. None goes before the device was waited for."""
    found = json.loads(run("interpreted_choices.py"))
    texts, made = found["texts"], ["made"]  # the token's own
    for which in range(4):
        made += [f"asked {which}", "made"]
    again = ["asked 0", "asked 4", "waited", "freed", "made", "asked 0", "asked 1", "waited", "freed", "made"]
    assert found["happened"] == [*made, *again]
    assert found["samplers"] == 4 and found["closed"] == [7, 7, 0]
    assert texts[0] == texts[4] == texts[6] and texts[1] == texts[7]
    assert len({tuple(text) for text in texts}) == 5
