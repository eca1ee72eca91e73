"""Progress where nobody sees a bar: a line now and then, with rate and remaining time; nothing for a program."""

import pytest

from edgemoe import progress as module
from edgemoe.progress import progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_lines_say_rate_and_remaining_time(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with progress("measuring", 4000, "tokens") as advance:
        advance(1)  # too soon to be said
        clock[0] += 10
        advance(999)
        clock[0] += 30
        advance(3000)
        clock[0] += 10
    out, err = capsys.readouterr()
    assert out == "" and err.splitlines() == [
        "measuring: 1,000/4,000 tokens, 100/s, ETA 0:00:30",
        "measuring: 4,000/4,000 tokens, 100/s",
        "measuring: 4,000/4,000 tokens, 80/s",
    ]


def test_nothing_where_a_program_reads_and_nothing_odd_where_nothing_was_done(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with progress("measuring", 10, quiet=True) as advance:
        clock[0] += 60
        advance(10)
    with progress("measuring", 10):
        clock[0] += 60
    assert capsys.readouterr().err == "measuring: 0/10 tokens, 0/s\n"
