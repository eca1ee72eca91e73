"""The line at the bottom of the terminal: whole parts of it, as many as fit."""

import pytest

from edgemoe.cli.status_line import _fitting

LINE = "12.3 tok/s · 45 tokens · hit rate 83% · context 512 of 4,096"


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        (200, LINE),
        (len(LINE), LINE),
        (len(LINE) - 1, "12.3 tok/s · 45 tokens · hit rate 83%"),
        (37, "12.3 tok/s · 45 tokens · hit rate 83%"),
        (36, "12.3 tok/s · 45 tokens"),
        (12, "12.3 tok/s"),
        (4, "12.3"),
    ],
)
def test_what_does_not_fit_is_left_out_whole(columns: int, shown: str) -> None:
    assert _fitting(LINE, columns) == shown
