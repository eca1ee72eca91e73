"""`edgemoe demo`: the whole tool in a minute, on the model that comes with it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

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
    from rich.console import Console

    from edgemoe.demo import as_json as plain
    from edgemoe.demo import demo_model, record, study
    from edgemoe.progress import progress

    console = Console(highlight=False, quiet=as_json)
    _introduce(demo_model(), console)
    path = record(plots, max_tokens, lambda total: progress("tracing", total, quiet=as_json))
    with progress("looking for a pattern", 4, "steps", quiet=as_json) as advance:
        found = study(path, advance)
    if as_json:
        from json import dumps

        typer.echo(dumps(plain(found)))
    else:
        _show(found, console)


def _introduce(model: Path, console: Console) -> None:
    from rich.panel import Panel

    from edgemoe.cli.info import identity
    from edgemoe.model import read_model

    described = read_model(model)
    title = f"[bold]{described.geometry.name}[/]"
    console.print(Panel(identity(described), title=title, title_align="left", padding=(0, 1)))
    console.print("Four texts that it never saw in training: prose, code, math and manuals.\n")


def _show(found: Demo, console: Console) -> None:
    console.print(_texts(found))
    console.print()
    console.print(_caches(found))
    console.print()
    console.print(_findings(found))
    console.print(f"\nTrace and {len(found.pictures)} pictures: {found.path.parent}/")
    for picture in found.pictures:
        console.print(f"  {picture}", style="dim", soft_wrap=True)
    console.print(
        f"\nLook closer:     [bold]edgemoe stats {found.path}[/]\n"
        "Your own model:  [bold]edgemoe trace MODEL.gguf -f TEXT -o trace.npz[/]",
        soft_wrap=True,
    )


def _texts(found: Demo) -> RenderableType:
    table = _table("text", "reused by the next token", "chance", "experts for 95%", "busiest expert")
    summary = found.summary
    for trace in summary.traces:
        reuse, working, load = (
            frame[(frame["trace"] == trace.name) & (frame["layer"] == "all")]
            for frame in (summary.reuse, summary.working_set, summary.load)
        )
        first = reuse[reuse["lag"] == 1].iloc[0]
        share = working[working["coverage"] == 0.95]["share"].iloc[0]
        table.add_row(
            trace.name.split(":")[-1],
            f"{first['reuse']:.1%}",
            f"{first['chance']:.1%}",
            f"{share:.0%} of {trace.n_experts}",
            f"{load['imbalance'].iloc[0]:.1f}× the mean",
        )
    return table


def _caches(found: Demo) -> RenderableType:
    from edgemoe.demo import SHARES

    table = _table("experts that fit", "LRU cache", "best fixed set", "knowing the future")
    rows = found.caches.set_index(["policy", "capacity"])
    for share in SHARES:
        slots = round(share * found.trace.n_experts)
        hits = [f"{rows.loc[(rule, slots), 'hit_rate']:.1%}" for rule in ("lru", "static-oracle", "belady")]
        table.add_row(f"{share:.1%} ({slots} per layer)".replace(".0%", "%"), *hits)
    return table


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


def _table(*columns: str) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False, show_edge=False, header_style="bold")
    for at, column in enumerate(columns):
        table.add_column(column, justify="right" if at else "left")
    return table
