"""`edgemoe run --parallel`: texts in the file's order, figures apart, one-line errors, Ctrl-C."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from edgemoe.cli.prompts import parse_prompts
from edgemoe.demo import demo_model
from edgemoe.errors import UserError

RUN = [
    sys.executable,
    "-m",
    "edgemoe.cli",
    "run",
    str(demo_model()),
    "--threads",
    "1",
    "-c",
    "128",
    "--residency",
    "12",
]
PROMPTS = 'In the beginning\n{"prompt": "def main():", "n": 4}\n\nOnce upon a time\nThe theorem\n'


def run(*arguments: str, stdin: str = PROMPTS) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*RUN, *arguments], input=stdin, capture_output=True, text=True, timeout=300)


def test_texts_come_in_order_and_figures_apart(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text(PROMPTS)
    done = run("--parallel", "2", "-f", str(file), "-n", "9", "--greedy")
    assert done.returncode == 0, done.stderr
    headers = re.findall(r"^== .*$", done.stdout, re.M)
    assert headers == [
        "== 1 of 4: In the beginning",
        "== 2 of 4: def main():",
        "== 3 of 4: Once upon a time",
        "== 4 of 4: The theorem",
    ]
    for word in ("4 of 4 prompts", "tok/s together", "different ones per layer", "per token", "hit rate"):
        assert word in done.stderr


def test_json_is_one_object() -> None:
    done = run("--parallel", "3", "-n", "9", "--greedy", "--json", "--raw", "--policy", "psr", "--window", "4")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    said = json.loads(done.stdout)
    assert [text["prompt"] for text in said["texts"]] == [
        "In the beginning",
        "def main():",
        "Once upon a time",
        "The theorem",
    ]
    assert said["texts"][1]["tokens"] <= 4 and said["parallel"] == 3 and not said["interrupted"]
    assert said["generated_tokens"] == sum(text["tokens"] for text in said["texts"])
    assert 8 <= said["experts_per_layer"] <= 24 and said["tokens_per_s"] > 0 and said["bytes_per_token"] > 0
    again = json.loads(
        run("--parallel", "3", "-n", "9", "--greedy", "--json", "--policy", "psr", "--window", "4").stdout
    )
    assert [text["text"] for text in again["texts"]] == [text["text"] for text in said["texts"]]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--parallel", "2", "--metrics", "m.jsonl"], "--trace and --metrics follow one text"),
        (["--parallel", "2", "--device", "cpu"], "--device holds them all in RAM: leave one out"),
        (["--parallel", "300"], "300 streams: expected 1 to 256"),
        (["--parallel", "40", "--ram", "350MB", "-c", "1024"], r"for 40 streams: .*; \d+ would fit"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], expected: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2 and re.search(expected, done.stderr) and done.stdout == ""
    assert "Traceback" not in done.stderr


def test_experts_in_ram_are_refused() -> None:
    done = subprocess.run([*RUN[:-2], "--parallel", "2"], input="a\n", capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "give --ram or --residency with it" in done.stderr


def test_prompts_are_lines_or_json() -> None:
    assert parse_prompts('a b\n\n{"prompt": "c\\nd"}\n{"prompt": "e", "n": 3}\n{ no json }', 5) == (
        ["a b", "c\nd", "e", "{ no json }"],
        [5, 5, 3, 5],
    )
    for text, expected in (
        ("\n \n", "no prompts"),
        ('a\n{"prompt": "b"', "line 2: expected a prompt, or an object"),
        ('{"prompt": ""}', "line 1: expected a prompt, or an object"),
        ('{"prompt": "b", "m": 1}', "line 1: expected a prompt, or an object"),
        ('{"prompt": "b", "n": 0}', "line 1: n 0 is no number of tokens"),
    ):
        with pytest.raises(UserError, match=expected):
            parse_prompts(text, None)


def test_ctrl_c_prints_what_is_there() -> None:
    process = subprocess.Popen(
        [*RUN, "--parallel", "2", "--ignore-eos", "--greedy", "-n", "120"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin and process.stdout
    process.stdin.write('{"prompt": "In the beginning", "n": 2}\n' + "Once upon a time\n" * 500)
    process.stdin.close()
    first = process.stdout.readline()  # the first text is whole, others are under way
    process.send_signal(signal.SIGINT)
    out, err = process.stdout.read(), process.stderr.read() if process.stderr else ""
    assert process.wait(timeout=300) == 130, err
    assert first == "== 1 of 501: In the beginning\n"
    assert "interrupted: Once upon a time" in out and "of 501 prompts" in err and "Traceback" not in err
