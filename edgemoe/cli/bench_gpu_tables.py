"""What `edgemoe bench gpu` prints: every row beside its limits."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from rich.table import Table

    from edgemoe.bench.gpu.rows import Row
    from edgemoe.bench.gpu.run import Report

    Columns = dict[str, Callable[[Row], str]]


def show(report: Report, written: Iterable[Path] = ()) -> None:
    """Print a report: what was run and its limits, the rows, their copies, ratios, and what was checked."""
    from edgemoe.cli.output import console, say, say_notes

    out = console()
    say(out, _head(report))
    for made in (
        *(_rows(report, out.width), _copies(report, out.width), _ratios(report), _equal_kl(report), _prompts(report)),
        *(_generated(report), _against(report), _determinism(report), _bars(report)),
    ):
        if made.row_count:
            out.print("", made)
    out.print("")
    say_notes(out, _notes(report), written)


def _head(report: Report) -> str:
    from edgemoe.cli.output import counted
    from edgemoe.units import format_bytes

    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    windows = f"{counted(len(report.domains), 'window')} of up to {counted(report.window_tokens, 'token')}"
    windows += f" ({', '.join(report.domains)}), {counted(report.ended.rounds, 'round')}"
    lines = [f"{report.subject} on {report.card}; {versions}", windows]
    if (rates := report.rates) is not None:
        link = f"{format_bytes(rates.link)}/s in large copies, {format_bytes(rates.link_expert)}/s in copies of "
        lines.append(f"link {link}{format_bytes(report.expert_bytes)}; memory {format_bytes(rates.memory)}/s")
        least = next((row.memory_s for row in report.rows if row.memory_s), None)
        if least is not None:
            lines.append(f"reading the active weights once takes {1e3 * least:.2f} ms per token")
    if report.load_s is not None:
        lines.append(f"weights loaded in {report.load_s:.1f} s")
    if (far := report.far) is not None:
        lines.append(
            f"everything resident, context of {far.position:,}: {1e3 * far.token_s:.2f} ms per token, its memory's "
            f"limit {1e3 * far.memory_s:.2f} ({far.share:.0%})"
        )
    return "\n".join(lines)


_WIDE = 120  # columns of a terminal that take hashes, too


def _rows(report: Report, width: int) -> Table:
    """Without KL where there is none, and without what --json has where a terminal is narrow."""
    shown = [row for row in report.rows if not row.problem]
    columns: Columns = {
        "ms per token": lambda row: row.label,
        "slots": lambda row: str(row.slots),
        "mean": lambda row: _ms(row.mean),
        "p50": lambda row: _ms(row.p50),
        "p99": lambda row: _ms(row.p99),
        "least": lambda row: _ms(row.timeline_s),
        "× least": lambda row: _number(row.over_timeline),
        "link": lambda row: _ms(row.link_s),
        "above floor": lambda row: _ms(row.above_floor),
        "per copy": lambda row: _ms(row.per_copy),
    }
    if any(row.kl is not None for row in shown):
        columns["KL"] = lambda row: "–" if row.kl is None else f"{row.kl:.4f}"
    if width >= _WIDE:
        columns["config"] = lambda row: row.config
    else:
        del columns["p50"]
    return _by_columns(columns, shown)


def _decided(row: Row) -> str:
    if row.decided_demand is None:
        return "–"  # timing decides
    return f"{_number(row.decided_demand)}+{_number(row.decided_prefetch)}"


def _copies(report: Report, width: int) -> Table:
    from edgemoe.units import format_bytes

    columns: Columns = {
        "copies per token": lambda row: row.label,
        "slots": lambda row: str(row.slots),
        "demand": lambda row: _number(row.demand),
        "prefetch": lambda row: _number(row.prefetch),
        "in time": lambda row: _number(row.in_time),
        "late": lambda row: _number(row.late),
        "unused": lambda row: _number(row.unused),
        "bytes": lambda row: format_bytes(row.copied_bytes or 0.0),
    }
    if width >= _WIDE:
        columns["decided"] = _decided
        columns["replaced"] = lambda row: _number(row.replaced)
    columns["as decided"] = lambda row: "–" if row.agrees is None else "yes" if row.agrees else "NO"
    return _by_columns(columns, [row for row in report.rows if not row.problem and row.copies])


def _by_columns(columns: Columns, rows: Iterable[Row]) -> Table:
    from edgemoe.cli.output import table

    made = table(*columns)
    for row in rows:
        made.add_row(*(cell(row) for cell in columns.values()))
    return made


def _ratios(report: Report) -> Table:
    from edgemoe.cli.output import table

    made = table("takes as long", "as", "slots", "ratio", "95%", "p", "the paper's", left=("as", "the paper's"))
    for one in report.beside:
        ratio = one.ratio
        interval = f"{ratio.low:.2f}–{ratio.high:.2f}"
        made.add_row(
            one.slower,
            one.faster,
            str(one.slots),
            f"{ratio.ratio:.2f}",
            interval,
            f"{ratio.p:.2g}",
            one.paper,
        )
    return made


def _equal_kl(report: Report) -> Table:
    from edgemoe.cli.output import table

    made = table(
        "at equal KL", "slots", "KL", "against", "its time / the row's", "95%", "p", "95% with KL's", left=("against",)
    )
    for one in report.equal_kl:
        ratio = one.ratio
        made.add_row(
            one.row, str(one.slots), f"{one.kl:.4f}", one.family, f"{ratio.ratio:.3f}",
            f"{ratio.low:.3f}–{ratio.high:.3f}", f"{ratio.p:.2g}",
            "–" if one.with_kl is None else f"{one.with_kl[0]:.3f}–{one.with_kl[1]:.3f}",
        )  # fmt: skip
    return made


def _prompts(report: Report) -> Table:
    from edgemoe.cli.output import table
    from edgemoe.units import format_bytes

    made = table(
        *("a prompt", "slots", "tokens", "first token, ms", "not resident", "copied", "link", "compute", "× limit")
    )
    for one in report.prompts:
        made.add_row(
            *(one.label, str(one.slots), str(one.tokens), _ms(one.first_token_s)),
            *(format_bytes(one.union_bytes), format_bytes(one.copied_bytes)),
            *(_ms(one.link_s), _ms(one.compute_s), _number(one.over_limit)),
        )
    return made


def _generated(report: Report) -> Table:
    from edgemoe.cli.output import table

    made = table("free generation", "slots", "prompt ms", "ms per token", "copies")
    for one in report.generated:
        made.add_row(one.label, str(one.slots), _ms(one.first_token_s), _ms(one.token_s), _number(one.copies))
    return made


def _against(report: Report) -> Table:
    from edgemoe.bench.gpu.report import against_best
    from edgemoe.cli.output import table

    made = table(
        "llama.cpp", "layers' experts on the CPU", "threads", "ms per token", "", "row", "times", left=("row",)
    )
    for split in report.against:
        best = "best" if split.best else ""
        made.add_row(split.share, str(split.n_cpu_moe), str(split.threads), _ms(split.token_s), best, "", "")
    for split, row in against_best(report):
        if row.mean:
            made.add_row(
                split.share, str(split.n_cpu_moe), str(split.threads), _ms(split.token_s), "best",
                row.label, f"{split.token_s / row.mean:.2f}",
            )  # fmt: skip
    return made


def _determinism(report: Report) -> Table:
    from edgemoe.cli.output import table

    made = table("routing on", "executor", "bytes are moved", "text", left=("executor", "bytes are moved", "text"))
    for run in report.determinism:
        said = "reference" if run.reference else "the same" if run.same else f"differs after {run.same_tokens} tokens"
        if not run.reference and not run.same and run.same_tokens == len(run.tokens):
            said = "the same, with other residents"
        made.add_row(f"the {run.cache} cache", run.executor, run.how, run.problem or said)
    return made


def _bars(report: Report) -> Table:
    from edgemoe.bench.gpu.report import bars
    from edgemoe.cli.bench_tables import bars_table

    return bars_table(bars(report))


def _notes(report: Report) -> list[str]:
    notes = list(report.notes)
    if report.device == "cpu":
        notes.append(
            "these are the CPU's figures, where device and host are the same RAM, and a busy machine's rows may outrun "
            "their limits: they say nothing of a GPU"
        )
    notes += [f"{row.name}, {row.slots} slots, {row.executor}: {row.problem}" for row in report.rows if row.problem]
    if report.ended.why:
        notes.append(report.ended.why)
    if report.quality_models:
        notes.append(f"KL was measured on {', '.join(report.quality_models)}")
    if any(row.timeline_s for row in report.rows):
        notes.append(
            "least: the same copies issued as the decisions allow, through one link at its rate, and the computing of "
            "everything resident, divided among its parts as their bytes are"
        )
    return notes


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1e3 * seconds:.2f}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
