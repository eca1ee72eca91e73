"""What commands print with: one console, one look of tables, and names that stay as they are.

Names of models, texts and files come from elsewhere and may look like rich's markup or an emoji's code: hand them over
as `rich.text.Text`, or to `say`. Call these inside a command: they import rich.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

PIPED_WIDTH = 120


def console(quiet: bool = False) -> Console:
    """Standard output: as wide as its terminal or COLUMNS says, 120 where neither does.

    A reader that has gone is a BrokenPipeError, for `main` to answer; rich's own console would exit with 1.
    """
    import os

    from rich.console import Console

    class Output(Console):
        def on_broken_pipe(self) -> None:
            raise  # the BrokenPipeError that rich is handling

    made = Output(highlight=False, emoji=False, quiet=quiet)
    if not made.is_terminal and not os.environ.get("COLUMNS", "").isdecimal():
        made.width = PIPED_WIDTH
    return made


def errors() -> Console:
    """Standard error, for what is no result: names stay as they are there, too."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, emoji=False)


def counted(number: int, noun: str) -> str:
    """`1 token`, `4,096 tokens`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def table(*columns: str | Text, left: Iterable[str] = ()) -> Table:
    """A plain table: the first column and those in `left` (or without a name) to the left, figures to the right.

    A cell that does not fit is folded, never cut short.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    made = Table(
        box=SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False, show_edge=False, header_style="bold"
    )
    flush = {str(columns[0]), "", *left}
    for column in columns:
        made.add_column(column, justify="left" if str(column) in flush else "right", overflow="fold")
    return made


def say(out: Console, text: str | Text, hang: int = 0) -> None:
    """Print a paragraph, later lines `hang` columns in: a terminal gets it wrapped between words, a pipe in one line.

    A word longer than the line, such as a path, runs on whole, so that it can be copied. A plain string is no markup.
    """
    from rich.text import Text

    paragraph = Text(text) if isinstance(text, str) else text
    if not out.is_terminal:
        out.print(paragraph, soft_wrap=True)
        return
    for line in paragraph.split("\n", allow_blank=True):
        margin = 0
        for start, end in _lines(line.plain, out.width, hang):
            out.print(Text(" " * margin).append_text(line[start:end]), soft_wrap=True)
            margin = hang


def _lines(text: str, width: int, hang: int) -> Iterator[tuple[int, int]]:
    """From where to where each line goes: broken between words, a longer word on a line of its own."""
    start, end, room = 0, 0, width
    for word in re.finditer(r"\S+", text):
        if word.end() - start > room and end > start:
            yield start, end
            start, room = word.start(), width - hang
        end = word.end()
    yield start, end


def say_notes(out: Console, notes: Iterable[str], written: Iterable[Path]) -> None:
    """The end of a report: what to know about it, and the files that were written."""
    from rich.text import Text

    for note in notes:
        say(out, Text.assemble(("note", "bold"), f" {note}"), hang=5)
    for path in written:
        out.print(Text(f"wrote {path}"), soft_wrap=True)
