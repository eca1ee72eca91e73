"""`edgemoe doctor`: is this install sound, and what can this machine run?"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from edgemoe.doctor import Diagnosis


def doctor(
    dir: Annotated[
        Path, typer.Option("--dir", metavar="DIR", help="Where your models are: its disk is checked.")
    ] = Path(),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of lines.")] = False,
) -> None:
    """Check this install and this machine, one line each, and say what can be run here.

    Loads llama.cpp, traces tiny models through it, and looks at RAM (within a container's limit), disk and GPUs.
    Every line is ok, warn (something optional is missing) or fix, with the command that mends it. The exit code is 0
    if nothing needs fixing, and 1 otherwise.
    """
    from edgemoe.doctor import diagnose

    diagnosis = diagnose(dir.resolve())
    if as_json:
        from dataclasses import asdict
        from json import dumps

        typer.echo(dumps({"healthy": diagnosis.healthy, **asdict(diagnosis)}, ensure_ascii=False))
    else:
        _print(diagnosis)
    if not diagnosis.healthy:
        raise typer.Exit(1)


_COLOURS = {"ok": "green", "warn": "yellow", "fix": "red"}


def _print(diagnosis: "Diagnosis") -> None:
    """Lines, not a table: a line may be long, and it can be searched for and pasted."""
    from rich.text import Text

    from edgemoe.cli.output import console, say

    out = console()
    width = max(len(check.name) for check in diagnosis.checks)
    for check in diagnosis.checks:
        status = (f"{check.status:<4}", _COLOURS[check.status])
        say(out, Text.assemble(status, f"  {check.name:<{width}}  {check.found}"), hang=width + 8)
        if check.fix:
            out.print(Text.assemble(" " * (width + 8), ("→ ", "bold"), (check.fix, "bold")), soft_wrap=True)
    say(out, Text("\nThis machine can run", style="bold"))
    width = max(len(ability.name) for ability in diagnosis.abilities)
    for ability in diagnosis.abilities:
        mark = ("yes", "green") if ability.able else ("no ", "red")
        say(out, Text.assemble(mark, f"   {ability.name:<{width}}  {ability.detail}"), hang=width + 8)
    if not diagnosis.healthy:
        count = sum(check.status == "fix" for check in diagnosis.checks)
        say(out, Text(f"\n{count} {'thing needs' if count == 1 else 'things need'} fixing.", style="red"))
