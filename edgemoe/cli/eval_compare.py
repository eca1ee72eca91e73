"""`edgemoe eval compare`: result files in pairs, with what is significant, nominal, or unresolved."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from edgemoe.evaluation.compare import Comparison, Overall, Row

NARROW = (
    ("task", "metric", "n", "reference", "run", "difference", "verdict"),
    ("task", "test", "p", "Holm", "won:lost", "detectable"),
)
WIDE = ("task", "metric", "n", "reference", "run", "difference", "p", "Holm", "won:lost", "detectable", "verdict")


def compare(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="RESULTS", help="Result files of `edgemoe eval`. The first is the reference."),
    ],
    reference: Annotated[
        Path | None, typer.Option("--reference", metavar="RESULTS", help="Another reference than the first file.")
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option("--metric", metavar="NAME", help="The metric, for all tasks. Default: each task's own."),
    ] = None,
    alpha: Annotated[
        float, typer.Option("--alpha", metavar="P", help="The chance of a false alarm that a verdict may have.")
    ] = 0.05,
    any_model: Annotated[
        bool,
        typer.Option("--any-model", help="Compare different model files, too. The tokenizer still has to agree."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Compare runs on the same questions: paired differences, tests with Holm's correction, and what is unresolved."""
    import json

    from edgemoe.errors import UserError
    from edgemoe.evaluation.compare import compare as compared
    from edgemoe.evaluation.results import load_results

    if not 0 < alpha <= 0.5:
        raise UserError(f"--alpha {alpha:g}: expected a probability above 0 and up to 0.5, like 0.05")
    paths = [reference, *(path for path in files if path != reference)] if reference else files
    twice = next((path for at, path in enumerate(paths) if path in paths[:at]), None)
    if twice:
        raise UserError(f"{twice} is given twice: name each result file once")
    found = compared(
        [(str(path), load_results(path)) for path in paths], metric=metric, alpha=alpha, same_model=not any_model
    )
    if as_json:
        typer.echo(json.dumps(found.as_json(), allow_nan=False))
    else:
        _print(found)


def _print(found: Comparison) -> None:
    from rich.text import Text

    from edgemoe.cli.output import console, say, say_notes

    out = console()
    for run in found.runs:
        metric = f": {found.rows[0].metric}" if _one_metric(found.rows) else ""
        say(out, Text.assemble((run, "bold"), " against ", (found.reference, "bold"), f", the reference{metric}"))
        rows = [row for row in found.rows if row.run == run]
        overall = [row for row in found.overall if row.run == run]
        for filled in _tables(out, rows, overall):
            out.print()
            out.print(filled)
        out.print()
    for paragraph in _words(found):
        say(out, paragraph)
    grouped = {row.task: row for row in found.rows if row.units < row.n}
    notes = [
        f"{task}: {row.n:,} pairs in {row.units:,} groups, which are the unit: cluster-robust interval, sign-flip test"
        for task, row in grouped.items()
    ]
    say_notes(out, [*notes, *found.notes], ())


def _words(found: Comparison) -> list[str]:
    alpha = f"{found.alpha:g}"
    points = "in points, " if any(row.binary for row in found.rows) else ""
    paragraphs = [
        f"Difference: run − reference in pairs, {points}± the half-width of its 95% interval.",
        f"Verdict: significant is p ≤ {alpha} after Holm's correction over {found.family}; nominal, p ≤ {alpha} before"
        " it only; unresolved, neither: that does not show that the two are equal.",
        f"Detectable: the smallest true difference that a sample like this one finds at {alpha}, uncorrected, with 80%"
        " probability.",
    ]
    if found.overall:
        paragraphs.append("Mean over tasks: every task counts the same; an interval, without a test.")
    return paragraphs


def _tables(out: Console, rows: Sequence[Row], overall: Sequence[Overall]) -> list[Table]:
    """One table where it fits, otherwise one of the differences and one of the tests."""
    from rich.measure import Measurement

    needed = {"metric": not _one_metric(rows), "won:lost": any(row.binary for row in rows)}
    shown = [name for name in WIDE if needed.get(name, True)]
    whole = _table(shown, rows, overall)
    if Measurement.get(out, out.options.update(max_width=10**6), whole).maximum <= out.width:
        return [whole]
    first, second = ([name for name in part if name in (*shown, "test")] for part in NARROW)
    return [_table(first, rows, overall), _table(second, rows, ())]


def _table(names: Sequence[str], rows: Sequence[Row], overall: Sequence[Overall]) -> Table:
    from edgemoe.cli.output import table

    filled = table(*names, left=("metric", "verdict", "test"))
    for at, row in enumerate(rows):
        style = "bold" if row.verdict == "significant" else None
        filled.add_row(*(CELLS[name](row) for name in names), style=style, end_section=at == len(rows) - 1)
    for mean in overall:
        cells = {
            "task": "mean over tasks",
            "n": f"{mean.n:,}",
            "reference": _level(mean.reference_mean, mean.binary),
            "run": _level(mean.mean, mean.binary),
            "difference": _between(mean.difference.mean, mean.difference.half_width, mean.binary),
            "detectable": _size(mean.detectable, mean.binary),
        }
        filled.add_row(*(cells.get(name, "–") for name in names))
    return filled


def _task(row: Row) -> Text:
    from rich.text import Text

    return Text(row.task)


def _metric(row: Row) -> Text:
    from rich.text import Text

    return Text(row.metric)


def _one_metric(rows: Sequence[Row]) -> bool:
    return len({row.metric for row in rows}) == 1


CELLS: dict[str, Callable[[Row], str | Text]] = {
    "task": _task,
    "metric": _metric,
    "n": lambda row: f"{row.n:,}",
    "reference": lambda row: _level(row.reference_mean, row.binary),
    "run": lambda row: _level(row.mean, row.binary),
    "difference": lambda row: _between(row.difference.mean, row.difference.half_width, row.binary),
    "test": lambda row: {"t": "paired t", "mcnemar": "exact McNemar", "sign-flip": "sign flips"}[row.test],
    "p": lambda row: _p(row.p),
    "Holm": lambda row: _p(row.p_holm),
    "won:lost": lambda row: "–" if row.won is None else f"{row.won:,}:{row.lost:,}",
    "detectable": lambda row: _size(row.detectable, row.binary),
    "verdict": lambda row: row.verdict,
}


def _level(mean: float, binary: bool) -> str:
    return f"{mean:.1%}" if binary else f"{mean:.4g}"


def _between(mean: float, half: float, binary: bool) -> str:
    """`+1.2 ± 0.9`: with as many decimals as two digits of the half-width need."""
    if binary:
        return f"{100 * mean:+.1f} ± {100 * half:.1f}"
    if not half:
        return f"{mean:+.4g} ± 0"
    decimals = 1 - math.floor(math.log10(half))
    if decimals > 6:
        return f"{mean:+.1e} ± {half:.1e}"
    return f"{mean:+,.{max(decimals, 0)}f} ± {half:,.{max(decimals, 0)}f}"


def _size(effect: float | None, binary: bool) -> str:
    if effect is None:
        return "–"
    return f"{100 * effect:.1f}" if binary else f"{effect:.2g}"


def _p(p: float) -> str:
    return "<0.001" if p < 0.001 else f"{p:.3f}"
