"""The `edgemoe` command: one module per verb, each thin (parse, call, print).

Verb modules import nothing heavy at the top: `edgemoe --help` must answer at once.
"""

import os
import sys

import typer

from edgemoe import __version__
from edgemoe.cli.demo import demo
from edgemoe.cli.doctor import doctor
from edgemoe.cli.info import info
from edgemoe.cli.probe import probe
from edgemoe.cli.simulate import simulate
from edgemoe.cli.stats import stats
from edgemoe.cli.trace import trace
from edgemoe.cli.wall import wall
from edgemoe.errors import UserError

app = typer.Typer(
    name="edgemoe",
    help="Which experts of a Mixture-of-Experts model fire, and how fast this machine can run it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
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
for verb in (demo, info, trace, stats, simulate, probe, wall, doctor):
    app.command()(verb)


def main() -> None:
    """Run the command line: a `UserError` is one line on stderr and exit code 2, Ctrl-C is exit code 130."""
    try:
        app()
    except UserError as error:
        print(f"edgemoe: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(2)
    except KeyboardInterrupt:
        print("edgemoe: interrupted", file=sys.stderr)  # noqa: T201
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
