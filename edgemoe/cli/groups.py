"""A group of verbs under one name, such as `edgemoe eval compare`: made alike, and listed with the other commands."""

import typer

HELP_WIDTH = 112  # the widest that help is set
SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": HELP_WIDTH}


def group(name: str, help: str) -> typer.Typer:
    """An empty group: its module adds verbs with `@NAME.command()`, and `edgemoe.cli.commands` lists it in `GROUPS`."""
    return typer.Typer(name=name, help=help, context_settings=SETTINGS, add_completion=False, rich_markup_mode=None)
