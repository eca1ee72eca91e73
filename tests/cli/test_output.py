"""What commands print with: words wrap, paths do not, names are no markup, cells are never cut short."""

import io
import re

import pytest
from rich.text import Text

from edgemoe.cli import output


def printed(monkeypatch: pytest.MonkeyPatch, width: int, terminal: bool, text: str, hang: int = 0) -> list[str]:
    for name in ("FORCE_COLOR", "NO_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    out = output.console()
    out.file, out._force_terminal, out.width = io.StringIO(), terminal, width
    output.say(out, text, hang)
    return re.sub("\x1b\\[[0-9;]*m", "", out.file.getvalue()).splitlines()


def test_a_terminal_gets_whole_words(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "one two three four five /a/path/longer/than/the/line seven"
    lines = printed(monkeypatch, 14, True, text, hang=2)
    assert lines == ["one two three", "  four five", "  /a/path/longer/than/the/line", "  seven"]
    assert printed(monkeypatch, 80, True, "above\n\n  indented") == ["above", "", "  indented"]


def test_a_pipe_gets_the_paragraph_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "word " * 50 + "end"
    assert printed(monkeypatch, 40, False, text, hang=2) == [text]


@pytest.mark.parametrize("name", ["[/x]", "[b]m[/b]", "[red", "x\\\\[b]", ":smile:", "a\\"])
def test_names_stay_as_they_are(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert printed(monkeypatch, 40, False, name) == [name]
    out = output.console()
    out.file = io.StringIO()
    table = output.table(Text(f"{name}1"), "n")
    table.add_row(Text(name), "1")
    out.print(table)
    heading, _, row = out.file.getvalue().splitlines()
    assert heading.split()[0] == f"{name}1" and row.split()[0] == name


def test_the_width_is_the_columns_or_120(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "66")
    assert output.console().width == 66
    monkeypatch.delenv("COLUMNS")
    assert output.console().width == 120


def test_a_cell_that_does_not_fit_is_folded_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "12")
    out = output.console()
    out.file = io.StringIO()
    table = output.table("name", "figure")
    table.add_row("abcdefghijklmnop", "12345.678")
    out.print(table)
    letters = "".join(re.findall("[a-p]", "".join(line[:6] for line in out.file.getvalue().splitlines()[2:])))
    assert "…" not in out.file.getvalue()
    assert letters == "abcdefghijklmnop"
