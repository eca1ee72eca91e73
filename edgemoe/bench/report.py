"""A report as figures: one row per side of each case, the bars that the tier is held to, and one JSON object."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from edgemoe.bench.bars import Bar
from edgemoe.bench.case import Outcome, Side, spread
from edgemoe.bench.ssd import Report, Result
from edgemoe.units import format_bytes

SPEEDUP, REPLAY, LONGEST, WALL, EARLY = 5.0, 0.85, 1.2, 0.20, 0.80


@dataclass(frozen=True)
class Reading:
    """Where a step of the tier goes, in seconds, and what it reads. Medians over rounds.

    `busy_s`: a read was queued or under way; `alone_s`, `buffer_s`: the same reads without inference (`case.Replay`).
    `early`: the share of reads that were
    issued a layer early. `hit_rate`: the share of distinct experts per layer that were in RAM.
    """

    wait_s: float
    compute_s: float
    policy_s: float
    busy_s: float | None
    alone_s: float | None
    buffer_s: float | None
    read_bytes: float
    reads: float
    early: float
    in_time: float | None  # share of the early reads
    hit_rate: float | None

    @property
    def alone_share(self) -> float | None:
        """The replay's time over the run's: 1 where the tier adds nothing to the disk. Of demand reads only: what is
        read early gives way to them."""
        return self._of_busy(self.alone_s)

    @property
    def buffer_share(self) -> float | None:
        """The same of the replay into one buffer per reader: what any memory for experts costs counts against it."""
        return self._of_busy(self.buffer_s)

    def _of_busy(self, seconds: float | None) -> float | None:
        return None if seconds is None or not self.busy_s or self.early else seconds / self.busy_s

    @property
    def hidden(self) -> float | None:
        """The share of the time that reads take which computing hid."""
        return max(1 - self.wait_s / self.busy_s, 0.0) if self.busy_s else None


@dataclass(frozen=True)
class Row:
    """One side of one case. `step_s` decodes a token of each stream."""

    load: str
    streams: int
    policy: str
    engine: str
    config: str
    tokens_per_s: float
    spread: float
    step_s: float
    rounds: int
    steps: int
    slots: int | None
    reading: Reading | None
    fetched_bytes: float | None  # mmap: from the disk per step, as the kernel counts
    group_peak: int | None
    problem: str


def rows_of(result: Result) -> list[Row]:
    outcome = result.outcome
    return [_row(outcome, side) for side in (outcome.streamed, outcome.mapped) if side is not None]


def _row(outcome: Outcome, side: Side) -> Row:
    case, ours = outcome.case, side is outcome.streamed
    rates = side.tokens_per_s(case.streams)
    return Row(
        load=case.load,
        streams=case.streams,
        policy=case.policy_name if ours else "",
        engine="edgemoe" if ours else "mmap",
        config=str(side.described.get("config", "")),
        tokens_per_s=median(rates) if rates else 0.0,
        spread=spread(rates) if rates else 0.0,
        step_s=case.streams / median(rates) if rates else 0.0,
        rounds=len(rates),
        steps=sum(len(one.seconds) for one in side.rounds),
        slots=side.described.get("slots"),
        reading=_reading(side) if ours and rates else None,
        fetched_bytes=side.median("fetched_bytes") if not ours and rates else None,
        group_peak=side.peak,
        problem=side.problem,
    )


def _reading(side: Side) -> Reading:
    total = {
        name: sum(one.counted[name] for one in side.rounds)
        for name in ("demand_reads", "prefetch_reads", "prefetch_in_time", "distinct")
    }
    busy = [one.replay.busy_s / len(one.seconds) for one in side.rounds if one.replay]
    alone = [one.replay.alone_s / len(one.seconds) for one in side.rounds if one.replay]
    buffer = [one.replay.buffer_s / len(one.seconds) for one in side.rounds if one.replay]
    reads, early = total["demand_reads"] + total["prefetch_reads"], total["prefetch_reads"]
    return Reading(
        wait_s=side.median("demand_wait_s"),
        compute_s=side.median("compute_s"),
        policy_s=side.median("policy_s"),
        busy_s=median(busy) if busy else None,
        alone_s=median(alone) if alone else None,
        buffer_s=median(buffer) if buffer else None,
        read_bytes=median((one.per_step("demand_bytes") + one.per_step("prefetch_bytes")) for one in side.rounds),
        reads=median((one.per_step("demand_reads") + one.per_step("prefetch_reads")) for one in side.rounds),
        early=early / reads if reads else 0.0,
        in_time=total["prefetch_in_time"] / early if early else None,
        hit_rate=1 - reads / total["distinct"] if total["distinct"] else None,
    )


def over_longest(row: Row) -> float | None:
    """A step over the longer of its reads' time and its computing."""
    reading = row.reading
    if reading is None or reading.alone_s is None:
        return None
    return row.step_s / max(reading.alone_s, reading.compute_s)


def reason(what: str, side: dict[str, Any]) -> str:
    """What a missed bar of this name is owed to. side: the tier's side of the case, as in `as_json`."""
    if what.endswith("max(reads, computing) − 1"):
        return "exact routing: a layer's reads begin when its router has spoken, so they and computing take turns"
    if what.endswith("a reused buffer / in the run"):
        return "that buffer stays in the processor's cache, as no expert's memory does: the bar above is like with like"
    reading = side["reading"]
    if what.endswith("step / max(reads, computing)") and reading["in_time"] is not None:
        waits = f"{1e3 * reading['wait_s']:.0f} of {1e3 * side['step_s']:.0f} ms are still waited for"
        return f"{reading['in_time']:.0%} of the reads that were issued early were there in time, {waits}"
    return f"{side['steps']} steps in {side['rounds']} rounds that differ by ±{side['spread']:.0%}"


def bars(report: Report) -> list[Bar]:
    """What is promised of the tier, and whether this run keeps it."""
    return [
        found if found.holds is not False else replace(found, why=found.why or said) for found, said in _bars(report)
    ]


def _bars(report: Report) -> Iterator[tuple[Bar, str]]:
    """Each with what a miss would be owed to."""
    for result in report.results:
        side = asdict(rows_of(result)[0])
        yield from ((bar, reason(bar.what, side) if side["reading"] else "") for bar in _bars_of(report, result))


def _bars_of(report: Report, result: Result) -> list[Bar]:
    found = []
    ours, name = rows_of(result)[0], result.outcome.case.name
    reading = ours.reading
    if reading is None:
        return [Bar(name, None, "measured", None, ours.problem)]
    if result.outcome.case.beside_mmap and ours.streams == 1:
        found.append(_speedup(report, result, name))
    for into, share in (("memory as experts' is", reading.alone_share), ("a reused buffer", reading.buffer_share)):
        if share is not None:
            what = f"{name}: the same reads alone, into {into} / in the run"
            found.append(Bar(what, share, f"≥ {REPLAY:g}", share >= REPLAY))
    if reading.early >= EARLY and (longest := over_longest(ours)) is not None:
        found.append(Bar(f"{name}: step / max(reads, computing)", longest, f"≤ {LONGEST}", longest <= LONGEST))
    if result.prediction is not None and result.outcome.case.forced:
        said = result.prediction
        for what, error in (("max(reads, computing)", said.error), ("reads + computing", said.serial_error)):
            off = error(ours.tokens_per_s)
            found.append(Bar(f"{name}: measured / the wall's {what} − 1", off, f"± {WALL:g}", abs(off) <= WALL))
    return found


def _speedup(report: Report, result: Result, name: str) -> Bar:
    times = result.outcome.speedup
    theirs = result.outcome.mapped
    why = report.no_mmap or (theirs.problem if theirs else "")
    large = report.model_bytes >= 2.45 * report.limit
    if not large and not why:
        why = f"the model is only {report.model_bytes / report.limit:.2f} × the memory: the bar is for 2.5 ×"
    holds = None if times is None or not large else times >= SPEEDUP
    return Bar(f"{name}: × mmap in {format_bytes(report.limit)}", times, f"≥ {SPEEDUP:g}", holds, why)


def as_json(report: Report) -> dict[str, Any]:
    """Everything that was measured. Seconds, bytes, bytes per second, shares."""
    limits = report.limits
    return {
        "model": {
            "bytes": report.model_bytes,
            "layers": report.n_layers,
            "fields": report.shape.fields,
            "real_widths": report.shape.real_widths,
        },
        "memory": {
            "limit": report.limit,
            "ratio": report.model_bytes / report.limit,
            "no_mmap": report.no_mmap or None,
        },
        "limits": {
            "disk_bytes_per_s": limits.disk,
            "disk_bytes_per_s_after": report.disk_after,
            "sequential_bytes_per_s": float(limits.ssd.sequential),
            "read_bytes": limits.piece,
            "disk": limits.ssd.label,
            "rates": {tier: asdict(speed) for tier, speed in limits.machine.speeds.items()},
        },
        "machine": {"cpu": limits.profile.host.label, "ram_bytes": limits.profile.host.ram_bytes},
        "read_ahead_bytes": report.read_ahead,
        "threads": report.threads,
        "readers": report.readers,
        "quick": report.quick,
        "trace": report.trace.name,
        "cases": [_case_json(result) for result in report.results],
        "bars": [asdict(bar) for bar in bars(report)],
        "quality": [point.as_json() for point in report.quality],
    }


def _case_json(result: Result) -> dict[str, Any]:
    rows = rows_of(result)
    ours = rows[0]
    return {
        "name": result.outcome.case.name,
        "sides": [asdict(row) for row in rows],
        "speedup": result.outcome.speedup,
        "alone_share": ours.reading.alone_share if ours.reading else None,
        "buffer_share": ours.reading.buffer_share if ours.reading else None,
        "hidden": ours.reading.hidden if ours.reading else None,
        "over_longest": over_longest(ours),
        "wall": asdict(result.prediction) if result.prediction else None,
    }
