"""`edgemoe stats`: what a trace says about caching, in tables, pictures, CSV or JSON."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from edgemoe.tracing.summary import Summary

# What a lag, a share and a name need at most to fit side by side in a narrow terminal.
SHOWN_LAGS = (1, 2, 4, 8, 32, 128, 512)


def stats(
    traces: Annotated[
        list[Path],
        typer.Argument(metavar="TRACE", help="Trace files. One with several domains counts as its domains."),
    ],
    domain: Annotated[
        list[str] | None, typer.Option("--domain", metavar="NAME", help="Only this domain. May be given again.")
    ] = None,
    layer: Annotated[
        str | None,
        typer.Option(
            "--layer",
            metavar="N|all",
            help="One MoE layer, by the model's numbering, or only the figures over all layers. Without it: both"
            " in --json and --csv, all layers in the tables.",
        ),
    ] = None,
    lags: Annotated[
        str | None,
        typer.Option(
            "--lags",
            metavar="N,N,...",
            help="Distances in tokens at which reuse is measured. Default: 1, 2, 4, ... 512, as far as the text goes.",
        ),
    ] = None,
    plots: Annotated[
        Path | None, typer.Option("--plots", metavar="DIR", help="Write the pictures (PNG) into this folder.")
    ] = None,
    csv: Annotated[
        Path | None,
        typer.Option("--csv", metavar="FILE|DIR", help="Write one long table (a name in .csv) or a folder of tables."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Show how well the experts of a trace could be cached: reuse, working set, load, drift, similarity of domains."""
    import json

    from edgemoe.cli.options import layer_option, writable_file, writable_folder
    from edgemoe.progress import progress
    from edgemoe.tracing.stats import split
    from edgemoe.tracing.summary import summarise
    from edgemoe.tracing.tracefile import load_trace

    which, distances = layer_option(layer), _lags(lags)
    parts = split([load_trace(path) for path in traces], domain or ())
    writable_folder("--plots", plots)
    if csv and csv.suffix.lower() == ".csv":
        writable_file("--csv", csv)
    else:
        writable_folder("--csv", csv)
    with progress("statistics", len(parts), "texts", quiet=as_json) as advance:
        summary = summarise(parts, distances, which, advance)
    written = summary.write_csv(csv) if csv else []
    if plots:
        from edgemoe.tracing.pictures import write_all

        written += write_all(summary, plots)
    if as_json:
        typer.echo(json.dumps(summary.as_json(), allow_nan=False))
    else:
        _print(summary, which, written)


def _lags(text: str | None) -> list[int] | None:
    from edgemoe.errors import UserError
    from edgemoe.units import parse_count, shown

    if text is None:
        return None
    lags = []
    for part in text.split(","):
        lag = parse_count(part)
        if not lag:
            raise UserError(f"--lags {shown(text)}: expected distances in tokens, at least 1, like 1,2,4")
        lags.append(lag)
    return lags


def _print(summary: Summary, layer: int | str | None, written: list[Path]) -> None:
    from rich.text import Text

    from edgemoe.cli.output import console, say, say_notes

    out, plain = console(), _names(summary)
    over = f"layer {layer}" if isinstance(layer, int) else "all layers"
    for trace in summary.traces:
        shape = f"{trace.n_layers} MoE layers of {trace.n_experts} experts, {trace.top_k} per token and layer"
        say(out, f"{plain[trace.name]}: {trace.n_tokens:,} tokens through {shape}")
    names = {name: Text(short) for name, short in plain.items()}
    sections = (
        ("Reuse", _reuse_words(), _reuse_table),
        (
            "Working set",
            "The fewest experts of a layer (share and count) that serve so many of its loads.",
            _working_set_table,
        ),
        ("Load", _load_words(), _load_table),
        ("Drift", _drift_words(), _drift_table),
        ("Pre-gate", _pregate_words(), _pregate_table),
    )
    for title, words, table in sections:
        filled = table(summary, names)
        if filled.row_count:
            out.print(f"\n[bold]{title}[/bold] ({over}). {words}\n")
            out.print(filled)
    if len(summary.traces) > 1:
        _print_similarity(out, summary, names)
    out.print()
    say_notes(out, summary.notes, written)


def _reuse_words() -> str:
    return (
        "How many of the experts that one token uses are used again so many tokens (the lag) later. Chance is what the"
        " same experts, equally popular but drawn without memory, would give: a cache lives off the difference."
    )


def _load_words() -> str:
    return (
        "How evenly the experts work. Effective: so many experts, used evenly, would be as unpredictable. Busiest: the"
        " busiest expert's load over the mean. Never: how many experts no token of this text used."
    )


def _drift_words() -> str:
    return (
        "Whether the first 20% of the text tells which experts the rest needs. Changed: the share of the load that"
        " moved to other experts; beside it, what sampling alone moves. Hits: the loads of the rest that a quarter of"
        " the experts, kept for good, serve: chosen from the first 20%, and with hindsight."
    )


def _pregate_words() -> str:
    return (
        "How many of a layer's experts are among the first so many that its router names one layer early; beside"
        " it, what the text's most frequent experts would have served."
    )


def _reuse_table(summary: Summary, names: dict[str, Text]) -> Table:
    from edgemoe.cli.output import table

    rows = _shown(summary.reuse)
    lags = list(dict.fromkeys(rows["lag"]))
    if len(lags) > len(SHOWN_LAGS):
        lags = [lag for lag in lags if lag in SHOWN_LAGS] or lags[: len(SHOWN_LAGS)]
    columns = ["text", f"lag {lags[0]:,}", *(f"{lag:,}" for lag in lags[1:]), "chance", "× chance"]
    filled = table(*columns)
    for name, group in rows.groupby("trace", sort=False):
        by_lag = group.set_index("lag")
        first, chance = by_lag["reuse"].get(lags[0], float("nan")), by_lag["chance"].iloc[0]
        cells = [_percent(by_lag["reuse"].get(lag, float("nan"))) for lag in lags]
        filled.add_row(names[str(name)], *cells, _percent(chance), _number(first / chance))
    return filled


def _working_set_table(summary: Summary, names: dict[str, Text]) -> Table:
    from edgemoe.cli.output import table

    rows = _shown(summary.working_set)
    coverages = list(dict.fromkeys(rows["coverage"]))
    filled = table("text", *(f"{coverage:.0%} of the loads" for coverage in coverages))
    for name, group in rows.groupby("trace", sort=False):
        cells = [f"{_percent(row['share'])} ({_number(row['experts'])})" for _, row in group.iterrows()]
        filled.add_row(names[str(name)], *cells)
    return filled


def _load_table(summary: Summary, names: dict[str, Text]) -> Table:
    from edgemoe.cli.output import table

    filled = table("text", "entropy", "effective", "busiest", "never")
    for _, row in _shown(summary.load).iterrows():
        entropy, effective = _number(row["entropy"], " bits", 2), _number(row["effective"])
        filled.add_row(names[row["trace"]], entropy, effective, _number(row["imbalance"], "×"), f"{row['never']:,.0f}")
    return filled


def _drift_table(summary: Summary, names: dict[str, Text]) -> Table:
    from edgemoe.cli.output import table

    filled = table("text", "changed", "by sampling", "hits", "with hindsight", "lost")
    for _, row in _shown(summary.drift).iterrows():
        cells = (row[column] for column in ("variation", "sampled", "pinned", "oracle", "lost"))
        filled.add_row(names[row["trace"]], *(_percent(cell) for cell in cells))
    return filled


def _pregate_table(summary: Summary, names: dict[str, Text]) -> Table:
    from edgemoe.cli.output import table

    rows = _shown(summary.pregate)
    filled = table("text", "first", "found", "most frequent")
    for _, row in rows.iterrows():
        found, frequent = _percent(row["recall"]), _percent(row["frequent"])
        filled.add_row(names[row["trace"]], f"{row['width']:,}", found, frequent)
    return filled


def _print_similarity(out: Console, summary: Summary, names: dict[str, Text]) -> None:
    from rich.text import Text

    from edgemoe.cli.output import table

    measures = (
        (summary.cosine, "Cosine of the loads of all experts: 1 is the same use, 0 no expert in common."),
        (summary.jaccard, "Jaccard index of the sets that serve 95%: experts in both over experts in either."),
    )
    out.print("\n[bold]Similarity[/bold]. Whether the texts use the same experts.")
    columns = list(names.values())
    if sum(map(len, columns)) + max(map(len, columns)) > out.width - 4 * len(columns):
        names = {full: Text(f"{at} {name}") for at, (full, name) in enumerate(names.items(), 1)}
        columns = [Text(str(at)) for at in range(1, len(columns) + 1)]
    for frame, words in measures:
        filled = table("", *columns)
        for name, row in frame.iterrows():
            filled.add_row(names[str(name)], *(_number(value, digits=2) for value in row))
        out.print(f"\n{words}\n")
        out.print(filled)


def _names(summary: Summary) -> dict[str, str]:
    from edgemoe.tracing.summary import short_names

    full = [trace.name for trace in summary.traces]
    return dict(zip(full, short_names(full), strict=True))


def _shown(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows over all layers; where one layer was asked for, its own."""
    rows = frame[frame["layer"] == "all"]
    return rows if len(rows) else frame


def _percent(value: float) -> str:
    return "–" if value != value else f"{value:.1%}"


def _number(value: float, unit: str = "", digits: int = 1) -> str:
    return "–" if value != value else f"{value:,.{digits}f}{unit}"
