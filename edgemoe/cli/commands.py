"""The commands, and how a command line runs: parse, call, and an exit code."""

from typing import cast

import typer

from edgemoe import __version__
from edgemoe.cli.bench import bench
from edgemoe.cli.calibrate import calibrate
from edgemoe.cli.chat import chat
from edgemoe.cli.demo import demo
from edgemoe.cli.doctor import doctor
from edgemoe.cli.eval import app as evaluate
from edgemoe.cli.groups import SETTINGS
from edgemoe.cli.info import info
from edgemoe.cli.probe import probe
from edgemoe.cli.run import run as generate
from edgemoe.cli.simulate import simulate
from edgemoe.cli.stats import stats
from edgemoe.cli.trace import trace
from edgemoe.cli.tune import tune
from edgemoe.cli.wall import wall
from edgemoe.errors import UserError

app = typer.Typer(
    name="edgemoe",
    help="Which experts of a Mixture-of-Experts model fire, and how fast this machine can run it.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings=SETTINGS,
    rich_markup_mode=None,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"edgemoe {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Which experts of a Mixture-of-Experts model fire, and how fast this machine can run it."""


# Verbs in the order in which a newcomer meets them.
for verb in (demo, info, trace, stats, simulate, calibrate, probe, wall, tune, generate, chat, doctor):
    app.command()(verb)

# Groups of verbs (`edgemoe.cli.groups`), after them.
GROUPS: tuple[typer.Typer, ...] = (evaluate, bench)
for verbs_of in GROUPS:
    app.add_typer(verbs_of)


def verbs() -> list[tuple[str, ...]]:
    """The commands' names, in order: `("info",)`, or for one in a group the group's first, `("eval", "compare")`."""
    nested = [(str(group.info.name), name) for group in GROUPS for name in ("", *_names(group))]
    return [(name,) for name in _names(app)] + [tuple(filter(None, names)) for names in nested]


def _names(commands: typer.Typer) -> list[str]:
    registered = commands.registered_commands
    return [str(command.name or getattr(command.callback, "__name__", "")) for command in registered]


# The base of BadParameter is UsageError, of click or of the copy of it that newer Typers carry.
_UsageError = cast("type[Exception]", typer.BadParameter.__base__)


def run(arguments: list[str]) -> int:
    """Run a command line (without the program's name; help if it is empty) and return its exit code.

    Raises `UserError` for a line that is no command, and whatever the command raises: Typer's own entry point would
    answer a mistake in four lines, Ctrl-C in none, and a reader that has gone with exit code 1.
    """
    command = typer.main.get_command(app)
    try:
        with command.make_context("edgemoe", list(arguments) or ["--help"]) as context:
            command.invoke(context)
    except typer.Exit as stop:
        return stop.exit_code
    except _UsageError as mistake:
        raise UserError(_in_one_line(mistake)) from None
    return 0


def _in_one_line(mistake: Exception) -> str:
    said: str = mistake.format_message()  # type: ignore[attr-defined]
    where = getattr(mistake, "ctx", None)
    verb = where.command_path if where else "edgemoe"
    return f"{' '.join(said.split()).rstrip('.')} (see {verb} --help)"
