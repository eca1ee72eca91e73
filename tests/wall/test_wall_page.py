"""docs/wall.md: its command prints what the page shows, its example reads a plan, its figures are the code's."""

import re
import shlex
import sys
from pathlib import Path

import pytest
from wall_fixtures import small_geometry, small_trace

from edgemoe.cli import main
from edgemoe.wall.ceiling import hit_rate_for, tokens_per_s
from edgemoe.wall.hits import LRU_BAND
from edgemoe.wall.plan import KIND, VERSION, make_plan, save_plan

PAGE = (Path(__file__).parents[2] / "docs" / "wall.md").read_text()


def test_the_command_prints_what_the_page_shows(monkeypatch, capsys):
    [(command, shown)] = re.findall(r"```console\n\$ (edgemoe wall .*?)\n(.*?)```", PAGE, flags=re.DOTALL)
    monkeypatch.setattr(sys, "argv", shlex.split(command))
    with pytest.raises(SystemExit):
        main()
    printed = [line.rstrip() for line in capsys.readouterr().out.rstrip().splitlines()]
    assert printed == shown.rstrip().splitlines()


def test_the_example_reads_a_plan(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_plan(make_plan(small_geometry(), (), [small_trace()], 9000, 12_000), Path("plan.json"))
    [example] = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    exec(compile(example, "docs/wall.md", "exec"), {})
    assert capsys.readouterr().out.startswith("1 (") and f"`{KIND}`"[1:-1] in PAGE and f", {VERSION} |" in PAGE


def test_figures_in_the_text_are_the_codes():
    low, high = LRU_BAND[0.25]
    assert f"from {low:.0%} to {high:.0%} with a quarter" in PAGE
    routed = 94 * 8 * 10.6e6
    assert (
        f"95% give {tokens_per_s(0.05 * routed, 2.4e9):.1f} tok/s; 10 need {hit_rate_for(routed, 2.4e9, 10):.1%}"
        in PAGE
    )
    assert f"{routed * 0.341 / 1e9:.2f} GB" in PAGE
