"""From rounds to rows and bars: medians, shares, and verdicts that can be no."""

from io import StringIO
from types import SimpleNamespace

import pytest
from rich.console import Console

from edgemoe.bench.case import Case, Outcome, Replay, Round, Side
from edgemoe.bench.limits import Prediction
from edgemoe.bench.report import bars, over_longest, rows_of
from edgemoe.bench.ssd import Result
from edgemoe.cli import bench_tables as tables
from edgemoe.policy import preset


def measured(
    seconds: float, wait: float, alone: float, early: float = 0, steps: int = 4, busy: float | None = None
) -> Round:
    counted = {
        "demand_wait_s": wait * steps,
        "compute_s": (seconds - wait) * steps,
        "policy_s": 0.0,
        "demand_reads": 10.0 * steps * (1 - early),
        "prefetch_reads": 10.0 * steps * early,
        "prefetch_in_time": 10.0 * steps * early,
        "demand_bytes": 1e6 * steps * (1 - early),
        "prefetch_bytes": 1e6 * steps * early,
        "distinct": 40.0 * steps,
    }
    return Round([seconds] * steps, counted, 10**9, Replay((busy or wait) * steps, alone * steps, alone * steps / 2))


def side(*rounds: Round) -> Side:
    return Side({"engine": "edgemoe", "slots": 8, "config": "abc"}, list(rounds))


def mapped(*seconds: float) -> Side:
    return Side({}, [Round([s] * 2, {"fetched_bytes": 2e6}, 0) for s in seconds])


def report(*results: Result, ratio: float = 2.5) -> SimpleNamespace:
    return SimpleNamespace(results=results, model_bytes=ratio * 10**9, limit=10**9, no_mmap="")


def said(wall: float, serial: float) -> Prediction:
    return Prediction(wall, serial, serial / 2, wall * 2, 1e6, 0.1, 0.1, 0.75, 8.0)


def verdicts(*results: Result, ratio: float = 2.5) -> dict[str, bool | None]:
    return {bar.what: bar.holds for bar in bars(report(*results, ratio=ratio))}


EXACT = Case("recorded", 1, "exact-lru", preset("exact-lru"), "ids.npy")


def test_medians_per_step_over_rounds() -> None:
    outcome = Outcome(EXACT, side(measured(0.2, 0.1, 0.09), measured(0.4, 0.2, 0.19), measured(0.1, 0.05, 0.04)), None)
    (row,) = rows_of(Result(outcome, None))
    assert row.tokens_per_s == pytest.approx(5) and row.step_s == pytest.approx(0.2) and row.steps == 12
    reading = row.reading
    assert reading is not None and reading.wait_s == pytest.approx(0.1) and reading.reads == pytest.approx(10)
    assert reading.hit_rate == pytest.approx(0.75) and reading.read_bytes == pytest.approx(1e6)
    assert reading.alone_share == pytest.approx(0.9) and reading.buffer_share == pytest.approx(0.45)
    assert over_longest(row) == pytest.approx(0.2 / 0.1)


def test_a_speedup_is_the_median_of_the_rounds_own() -> None:
    outcome = Outcome(EXACT, side(*[measured(0.1, 0.05, 0.05)] * 3), mapped(0.4, 0.6, 0.9))
    assert outcome.speedup == pytest.approx(6)
    found = verdicts(Result(outcome, None))
    assert found["recorded ×1: × mmap in 1.00 GB"] is True
    slower = Outcome(EXACT, outcome.streamed, mapped(0.2, 0.2, 0.2))
    assert verdicts(Result(slower, None))["recorded ×1: × mmap in 1.00 GB"] is False
    assert verdicts(Result(outcome, None), ratio=1.5)["recorded ×1: × mmap in 1.00 GB"] is None


def test_bars_of_replays_and_of_the_wall() -> None:
    outcome = Outcome(EXACT, side(measured(0.2, 0.1, 0.09)), None)
    found = verdicts(Result(outcome, said(wall=10, serial=5.5)))
    assert found["recorded ×1: the same reads alone, into memory as experts' is / in the run"] is True
    assert found["recorded ×1: the same reads alone, into a reused buffer / in the run"] is False
    assert found["recorded ×1: measured / the wall's max(reads, computing) − 1"] is False
    assert found["recorded ×1: measured / the wall's reads + computing − 1"] is True


def test_reads_issued_early_are_judged_by_what_computing_hides() -> None:
    early = Case("random", 1, "speculative", preset("speculative"))
    hidden = Outcome(early, side(measured(0.11, 0.01, 0.08, early=0.9, busy=0.1)), None)
    (row,) = rows_of(Result(hidden, None))
    assert row.reading is not None and row.reading.hidden == pytest.approx(1 - 0.01 / 0.1)
    assert row.reading.alone_share is None
    name = f"{early.name}: step / max(reads, computing)"
    assert verdicts(Result(hidden, None))[name] is True
    late = Outcome(early, side(measured(0.2, 0.1, 0.1, early=0.9)), None)
    assert verdicts(Result(late, None))[name] is False
    few = Outcome(early, side(measured(0.2, 0.1, 0.1, early=0.5)), None)
    assert name not in verdicts(Result(few, None))


def test_tables_fit_80_columns_with_every_figure_whole() -> None:
    beside = Outcome(EXACT, side(*[measured(0.2, 0.1, 0.09)] * 2), mapped(2.4, 2.6))
    early = Case("random", 1, "exact-prefetch", preset("exact-prefetch"), beside_mmap=False)
    results = (
        Result(beside, said(wall=10, serial=5.5)),
        Result(Outcome(early, side(measured(0.2, 0.1, 0.1)), None), None),
    )
    run = report(*results)
    run.limits = SimpleNamespace(disk=2e9)
    out = StringIO()
    console = Console(file=out, width=80)
    for part in (tables._cases, tables._steps, tables._reads, tables._alone, tables._wall, tables._said):
        console.print(part(run))
    printed = out.getvalue()
    assert max(map(len, printed.splitlines())) <= 80 and "…" not in printed
    for figure in ("5 ±0%", "12.5", "200", "100", "1.00 MB", "11.1 MB/s", "90%", "-9%", "-50%", "2.75 to 20", "75%"):
        assert f" {figure}" in printed, figure


def test_a_missed_bar_says_what_it_is_owed_to_and_no_other_does() -> None:
    outcome = Outcome(EXACT, side(measured(0.2, 0.1, 0.07), measured(0.3, 0.15, 0.1)), None)
    early = Case("random", 1, "speculative", preset("speculative"))
    late = Outcome(early, side(measured(0.2, 0.1, 0.1, early=0.9)), None)
    found = {bar.what: bar for bar in bars(report(Result(outcome, said(wall=10, serial=5)), Result(late, None)))}
    assert all(bool(bar.why) == (bar.holds is False) for bar in found.values())
    why = {what.split(": ")[1]: bar.why for what, bar in found.items()}
    assert "its router has spoken" in why["measured / the wall's max(reads, computing) − 1"]
    assert why["the same reads alone, into memory as experts' is / in the run"].startswith("8 steps in 2 rounds")
    assert why["step / max(reads, computing)"] == (
        "100% of the reads that were issued early were there in time, 100 of 200 ms are still waited for"
    )


def test_what_could_not_be_measured_says_why() -> None:
    (bar,) = bars(report(Result(Outcome(EXACT, Side(problem="too little"), None), None)))
    assert bar.holds is None and bar.why == "too little"
