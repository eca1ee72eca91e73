"""`edgemoe demo`: the whole tool in a minute, on the model that comes with it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from edgemoe.demo import Demo


def demo(
    plots: Annotated[Path, typer.Option("--plots", metavar="DIR", help="Where the trace and the pictures go.")] = Path(
        "edgemoe-demo"
    ),
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", metavar="N", min=32, help="Tokens of each of the four texts.")
    ] = 2048,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Watch a real MoE route: trace the shipped model on four texts, and see what a cache of its experts would gain.

    Needs no network and no arguments.
    """
    from edgemoe.cli.options import writable_folder
    from edgemoe.cli.output import console
    from edgemoe.demo import as_json as plain
    from edgemoe.demo import demo_model, record, study
    from edgemoe.progress import progress

    writable_folder("--plots", plots)
    out = console(quiet=as_json)
    _introduce(demo_model(), out)
    path = record(plots, max_tokens, lambda total: progress("tracing", total, quiet=as_json))
    with progress("looking for a pattern", 4, "steps", quiet=as_json) as advance:
        found = study(path, advance)
    if as_json:
        from json import dumps

        typer.echo(dumps(plain(found)))
    else:
        _show(found, out)


def _introduce(model: Path, out: Console) -> None:
    from edgemoe.cli.info import card
    from edgemoe.model import read_model

    out.print(card(read_model(model)))
    out.print("Four texts that it never saw in training: prose, code, math and manuals.\n")


def _show(found: Demo, out: Console) -> None:
    from shlex import quote

    from rich.text import Text

    for part in (_texts(found), _caches(found), _findings(found)):
        out.print(part)
        out.print()
    out.print(Text(f"Trace and {len(found.pictures)} pictures: {found.path.parent}/"), soft_wrap=True)
    for picture in found.pictures:
        out.print(Text(f"  {picture}", style="dim"), soft_wrap=True)
    out.print()
    for words, command in (
        ("Look closer:     ", f"edgemoe stats {quote(str(found.path))}"),
        ("Your own model:  ", "edgemoe trace MODEL.gguf -f TEXT -o trace.npz"),
    ):
        out.print(Text.assemble(words, (command, "bold")), soft_wrap=True)


def _texts(found: Demo) -> RenderableType:
    from edgemoe.cli.output import table

    filled = table("text", "reused by the next token", "chance", "experts for 95%", "busiest expert")
    summary = found.summary
    for trace in summary.traces:
        reuse, working, load = (
            frame[(frame["trace"] == trace.name) & (frame["layer"] == "all")]
            for frame in (summary.reuse, summary.working_set, summary.load)
        )
        first = reuse[reuse["lag"] == 1].iloc[0]
        share = working[working["coverage"] == 0.95]["share"].iloc[0]
        filled.add_row(
            trace.name.split(":")[-1],
            f"{first['reuse']:.1%}",
            f"{first['chance']:.1%}",
            f"{share:.0%} of {trace.n_experts}",
            f"{load['imbalance'].iloc[0]:.1f}× the mean",
        )
    return filled


def _caches(found: Demo) -> RenderableType:
    from edgemoe.cli.output import table
    from edgemoe.demo import SHARES

    filled = table("experts that fit", "LRU cache", "best fixed set", "knowing the future")
    rows = found.caches.set_index(["policy", "capacity"])
    for share in SHARES:
        slots = round(share * found.trace.n_experts)
        hits = [f"{rows.loc[(rule, slots), 'hit_rate']:.1%}" for rule in ("lru", "static-oracle", "belady")]
        filled.add_row(f"{share:.1%} ({slots} per layer)".replace(".0%", "%"), *hits)
    return filled


def _findings(found: Demo) -> RenderableType:
    from rich.panel import Panel
    from rich.table import Table

    f = found.findings
    a, b = f.least_alike
    lines = [
        f"A cache of 25% of the experts ({f.capacity} per layer) would serve [bold]{f.lru:.0%}[/] of the loads. "
        f"The best fixed set of that size serves {f.fixed:.0%}; no cache can serve more than {f.belady:.0%}.",
        f"An expert that one token uses is used by the next [bold]{f.reuse / f.chance:.1f}×[/] as often as chance "
        f"would have it ({f.reuse:.0%} against {f.chance:.0%}).",
        f"{a.capitalize()} and {b} share only [bold]{f.shared:.0%}[/] of the experts that do 95% of their work.",
        f"With half the experts resident, a token must fetch [bold]{f.exact_copies:.1f}[/] of the "
        f"{f.loads_per_token} it uses. Steered routing (psr-gated) fetches [bold]{f.steered_copies:.1f}[/]; "
        f"{f.replaced:.1f} of those it then uses are not the router's own choice.",
    ]
    points = Table.grid(padding=(0, 1))
    for line in lines:
        points.add_row("•", line)
    return Panel(points, title="[bold]What a cache would gain[/]", title_align="left", padding=(0, 1))
