"""What `edgemoe bench ssd` prints: every figure beside its limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.table import Table

    from edgemoe.bench.bars import Bar
    from edgemoe.bench.ssd import Report


def show(report: Report) -> None:
    """Print a report: what was run and its limits, the cases, where steps go, the wall, quality, and the bars."""
    from edgemoe.cli.output import console, say, say_notes

    out = console()
    say(out, _head(report))
    for part in (_cases, _steps, _reads, _alone, _wall, _said, _quality, _bars):
        made = part(report)
        if made.row_count:
            out.print("", made)
    out.print("")
    say_notes(out, _notes(report), ())


def _head(report: Report) -> str:
    from edgemoe.units import format_bytes

    limits = report.limits
    threads = f"{report.threads} {'thread' if report.threads == 1 else 'threads'}"
    return (
        f"{format_bytes(report.model_bytes)} of model, {report.n_layers} layers of {report.trace.n_experts} experts, "
        f"in {format_bytes(report.limit)} of memory ({report.model_bytes / report.limit:.2f} ×); "
        f"{threads}, {report.readers} reads in flight; recorded routing: {report.trace.name}\n"
        f"{limits.ssd.label}: {format_bytes(limits.disk)}/s in random reads of {format_bytes(limits.piece)} "
        f"({format_bytes(report.disk_after)}/s at the end)"
    )


def _cases(report: Report) -> Table:
    from edgemoe.bench.report import rows_of
    from edgemoe.cli.output import table
    from edgemoe.units import format_bytes

    made = table("routing × streams", "", "tok/s", "× mmap", "rounds", "slots", "memory held", "config")
    for result in report.results:
        for row in rows_of(result):
            times = result.outcome.speedup if row.engine == "edgemoe" else None
            made.add_row(
                result.outcome.case.name if row.engine == "edgemoe" else "",
                row.engine,
                "–" if row.problem else f"{row.tokens_per_s:.3g} ±{row.spread:.0%}",
                f"{times:.1f}" if times else "",
                str(row.rounds),
                str(row.slots or ""),
                format_bytes(row.group_peak) if row.group_peak else "",
                row.config,
            )
    return made


def _steps(report: Report) -> Table:
    """Where a step's time goes."""
    from edgemoe.bench.report import over_longest, rows_of
    from edgemoe.cli.output import table

    made = table("ms per step", "step", "computing", "waiting", "policy", "step / longer of both")
    for result in report.results:
        row = rows_of(result)[0]
        if (reading := row.reading) is None:
            continue
        made.add_row(
            result.outcome.case.name,
            *(_ms(value) for value in (row.step_s, reading.compute_s, reading.wait_s, reading.policy_s)),
            _times(over_longest(row)),
        )
    return made


def _reads(report: Report) -> Table:
    """What a step reads."""
    from edgemoe.bench.report import rows_of
    from edgemoe.cli.output import table
    from edgemoe.units import format_bytes

    made = table("reads per step", "bytes", "mmap's", "hits", "issued early", "hidden")
    for result in report.results:
        rows = rows_of(result)
        if (reading := rows[0].reading) is None:
            continue
        fetched = rows[1].fetched_bytes if len(rows) > 1 else None
        made.add_row(
            result.outcome.case.name,
            format_bytes(reading.read_bytes),
            format_bytes(fetched) if fetched else "–",
            *(_share(value) for value in (reading.hit_rate, reading.early, reading.hidden)),
        )
    return made


def _alone(report: Report) -> Table:
    """The same reads without inference, beside what they took in the run and what the disk gives."""
    from edgemoe.bench.report import rows_of
    from edgemoe.cli.output import table
    from edgemoe.units import format_bytes

    made = table("reads alone", "ms", "/ in the run", "bytes/s", "of the disk", "into a buffer", "/ in the run")
    for result in report.results:
        if (reading := rows_of(result)[0].reading) is None:
            continue
        rate = reading.read_bytes / reading.alone_s if reading.alone_s else None
        made.add_row(
            result.outcome.case.name,
            _ms(reading.alone_s),
            _share(reading.alone_share),
            f"{format_bytes(rate)}/s" if rate else "–",
            _share(rate / report.limits.disk if rate else None),
            _ms(reading.buffer_s),
            _share(reading.buffer_share),
        )
    return made


def _wall(report: Report) -> Table:
    """Measured beside what the wall says, for either order of reads and computing."""
    from edgemoe.bench.report import rows_of
    from edgemoe.cli.output import table

    made = table("tok/s", "mmap", "measured", "reads + computing", "off by", "max of both", "off by")
    for result in report.results:
        rows, said = rows_of(result), result.prediction
        if said is None or rows[0].reading is None:
            continue
        measured = rows[0].tokens_per_s
        made.add_row(
            result.outcome.case.name,
            f"{rows[1].tokens_per_s:.3g}" if len(rows) > 1 and not rows[1].problem else "–",
            f"{measured:.3g}",
            f"{said.serial:.3g}",
            f"{said.serial_error(measured):+.0%}",
            f"{said.wall:.3g}",
            f"{said.error(measured):+.0%}",
        )
    return made


def _said(report: Report) -> Table:
    """What the wall's figures are made of."""
    from edgemoe.bench.report import rows_of
    from edgemoe.cli.output import table

    made = table("the wall's", "reads, ms", "computing, ms", "union", "hits", "measured", "wall --batch, tok/s")
    for result in report.results:
        reading, said = rows_of(result)[0].reading, result.prediction
        if said is None or reading is None:
            continue
        made.add_row(
            result.outcome.case.name,
            _ms(said.read_s),
            _ms(said.compute_s),
            f"{said.union:.1f}",
            f"{said.hit_rate:.0%}",
            _share(reading.hit_rate),
            f"{said.least:.3g} to {said.most:.3g}",
        )
    return made


def _quality(report: Report) -> Table:
    from edgemoe.cli.output import table

    made = table(
        *("demo model", "slots", "reads", "ms", "KL", "perplexity", "same top-1", "replaced"),
        "config",
    )
    for point in report.quality:
        found = point.divergence
        made.add_row(
            point.policy,
            f"{point.slots} ({point.residency})",
            f"{point.reads:.2f}",
            _ms(point.token_s),
            f"{found.kl.mean():.4f}",
            f"{found.perplexity:.2f}",
            f"{found.agree.mean():.1%}",
            f"{found.replaced.mean():.1f}",
            point.config,
        )
    return made


def _bars(report: Report) -> Table:
    from edgemoe.bench.report import bars

    return bars_table(bars(report))


def bars_table(bars: Iterable[Bar]) -> Table:
    """What a tier is held to, and whether it keeps it."""
    from edgemoe.cli.output import table

    made = table("held to", "measured", "bar", "", left=("bar",))
    for bar in bars:
        verdict = "–" if bar.holds is None else "holds" if bar.holds else "MISSED"
        value = "–" if bar.value is None else f"{bar.value:.2f}"
        made.add_row(bar.what, value, bar.bar, verdict + (f" ({bar.why})" if bar.why else ""))
    return made


def _notes(report: Report) -> list[str]:
    from edgemoe.bench.report import rows_of
    from edgemoe.units import format_bytes

    notes = []
    if report.quick:
        notes.append("a quick run: rounds are too short to be quoted")
    if report.no_mmap:
        notes.append(f"nothing stands beside: {report.no_mmap}")
    if report.read_ahead and not report.no_mmap:
        around = format_bytes(report.read_ahead)
        notes.append(
            f"the kernel reads {around} around a page fault, which decides what mmap fetches: quote it with × mmap"
        )
    if not report.shape.real_widths:
        notes.append("experts are narrower than Qwen3-30B-A3B's, because --size holds too few layers of real ones")
    problems = [
        f"{result.outcome.case.name}, {row.engine}: {row.problem}"
        for result in report.results
        for row in rows_of(result)
        if row.problem
    ]
    return [*notes, *problems, "± is half the range of the rounds over their median"]


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1e3 * seconds:.2f}" if seconds < 0.1 else f"{1e3 * seconds:,.0f}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def _times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
