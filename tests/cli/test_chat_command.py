"""`edgemoe chat`: turns from a pipe and from a person, what is kept between them, and how it ends."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from edgemoe.cli import commands
from edgemoe.errors import UserError

DEMO = str(Path(__file__).parents[2] / "edgemoe" / "data" / "demo-moe-32m-q8_0.gguf")
COMMAND = [sys.executable, "-m", "edgemoe.cli", "chat", DEMO, "--threads", "1", "--chat-template", "t.jinja"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}{{ eos_token }}\n{% endfor %}"
    "{{ '<|im_start|>assistant\\n' }}"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "t.jinja").write_text(CHATML)
    return tmp_path


def chat(folder: Path, turns: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], input=turns, cwd=folder, capture_output=True, text=True, timeout=300)


def test_piped_turns_keep_the_conversation(folder: Path) -> None:
    done = chat(folder, "Tell me of the sea\n\nAnd then?\n", "-n", "8", "--greedy", "--json")
    assert done.returncode == 0 and done.stderr == ""
    first, second = json.loads(done.stdout)["turns"]
    assert (first["user"], second["user"]) == ("Tell me of the sea", "And then?")
    assert second["prompt_tokens"] > first["prompt_tokens"] + 8
    # everything but the new turn was there already: the first prompt and (but for its last token) the reply
    assert second["reused_tokens"] >= first["prompt_tokens"] + 6
    assert second["prompt_phase"]["tokens"] == second["prompt_tokens"] - second["reused_tokens"]


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_a_line_that_is_no_text_ends_a_script_in_one_line(folder: Path, errors: str) -> None:
    """As locales differ: some refuse the bytes, others let them through."""
    done = subprocess.run(
        [*COMMAND, "-n", "2", "--json"],
        input=b"\xff\xfe\n",
        cwd=folder,
        capture_output=True,
        timeout=300,
        env={**os.environ, "PYTHONIOENCODING": f"utf-8:{errors}"},
    )
    assert done.returncode == 2 and done.stdout == b""
    assert done.stderr == b"edgemoe: this line is not UTF-8 text: convert it first\n"


def test_a_reset_starts_anew_and_exit_ends(folder: Path) -> None:
    done = chat(
        folder, "Hello\n/reset\nHello\n/exit\nnever\n", "-n", "6", "--greedy", "--json", "--system", "Be brief."
    )
    first, second = json.loads(done.stdout)["turns"]
    assert first["assistant"] == second["assistant"] and first["prompt_tokens"] == second["prompt_tokens"]


def test_a_line_that_ends_in_a_backslash_goes_on(folder: Path) -> None:
    done = chat(folder, "one\\\ntwo\n", "-n", "2", "--greedy", "--json")
    assert [turn["user"] for turn in json.loads(done.stdout)["turns"]] == ["one\ntwo"]


def test_replies_go_to_standard_output_and_figures_to_standard_error(folder: Path) -> None:
    done = chat(folder, "Hello\nAnd?\n", "-n", "4", "--seed", "1")
    assert done.returncode == 0 and done.stdout.strip()
    assert "4 tokens" in done.stderr and re.search(r"^2 turns +8 tokens", done.stderr, re.MULTILINE)
    assert "kept from before" in done.stderr and "\x1b" not in done.stdout + done.stderr


def test_a_conversation_that_outgrows_the_context_ends_in_one_line(folder: Path) -> None:
    done = chat(folder, "Hello\n" + "word " * 80 + "\n", "-n", "2", "-c", "48", "--seed", "1")
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if line.startswith("edgemoe: ")]
    assert len(errors) == 1 and "the context holds 48" in errors[0]


@pytest.mark.parametrize("tier", [[], ["--residency", "25%"]])
def test_what_was_said_before_a_turn_that_does_not_fit_is_not_lost(folder: Path, tier: list[str]) -> None:
    turns, options = "Hello\n" + "word " * 80 + "\n", [*tier, "-n", "2", "-c", "48", "--seed", "1"]
    done = chat(folder, turns, *options, "--json", "--trace", "t.npz")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    said = json.loads(done.stdout)
    assert done.stderr == f"edgemoe: {said['error']}\n" and "the context holds 48" in said["error"]
    assert [(turn["user"], turn["generated_tokens"]) for turn in said["turns"]] == [("Hello", 2)]
    assert said["trace"]["path"] == "t.npz" and said["trace"]["partial"] and (folder / "t.npz").exists()
    done = chat(folder, turns, *options, "--trace", "t.npz", "--overwrite")
    assert done.returncode == 2 and "the context holds 48" in done.stderr.splitlines()[-1]
    assert re.search(r"^1 turn +2 tokens", done.stderr, re.MULTILINE)
    assert re.search(r"^trace +t.npz: \d+ tokens", done.stderr, re.MULTILINE)


def test_a_conversation_without_a_turn_has_no_trace(folder: Path) -> None:
    said = json.loads(chat(folder, "", "--json", "--trace", "t.npz").stdout)
    assert said["turns"] == [] and said["trace"] == {"path": None, "tokens": 0, "partial": False}
    assert "no trace was written" in chat(folder, "", "--trace", "t.npz").stderr
    assert not (folder / "t.npz").exists()


@pytest.mark.usefixtures("nothing_loads")
@pytest.mark.parametrize("verb", ["chat", "run"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "no chat template"),
        (["--chat-template", "bad.jinja"], "no valid Jinja template"),
    ],
)
def test_a_template_that_does_not_serve_is_refused_before_the_model_is_loaded(
    verb: str, options: list[str], message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    (folder / "bad.jinja").write_text("{% for %}")
    term = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(UserError, match=message):
            commands.run([verb, DEMO, *(["-p", "a", "--chat"] if verb == "run" else []), *options])
    finally:
        signal.signal(signal.SIGTERM, term)


def test_a_base_model_without_a_template_is_refused(folder: Path) -> None:
    command = [sys.executable, "-m", "edgemoe.cli", "chat", DEMO, "--threads", "1"]
    done = subprocess.run(command, input="Hello\n", capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "no chat template" in done.stderr.splitlines()[-1]


class Person:
    """Someone at a terminal."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.pid, self.master = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            os.environ.update({"TERM": "xterm-256color", "LINES": "24", "COLUMNS": "100"})
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.execv(sys.executable, [*COMMAND, *arguments])
        self.seen = ""

    def reads(self, pattern: str, within: float = 300) -> str:
        """Wait for something to appear after what was read so far."""
        until = time.monotonic() + within
        while not (found := re.search(pattern, self.seen, re.DOTALL)):
            assert time.monotonic() < until, f"no {pattern!r} in {self.seen[-800:]!r}"
            if select.select([self.master], [], [], 1)[0]:
                try:
                    self.seen += os.read(self.master, 65536).decode(errors="replace")
                except OSError:
                    assert re.search(pattern, self.seen, re.DOTALL), self.seen[-800:]
        read, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return read

    def types(self, text: str) -> None:
        os.write(self.master, text.encode())

    def leaves(self, pressing: str = "", within: float = 300) -> int:
        """The exit code. `pressing` is typed every two seconds until then.

        Python notices a Ctrl-C that comes between readline's prompt and its wait for a key at the next key only.
        """
        until, press_at = time.monotonic() + within, time.monotonic()
        while not (done := os.waitpid(self.pid, os.WNOHANG))[0]:
            if time.monotonic() > until:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                raise AssertionError(f"still there after {within:.0f} s")
            if pressing and time.monotonic() >= press_at:
                self.types(pressing)
                press_at += 2
            time.sleep(0.05)
        os.close(self.master)
        return os.waitstatus_to_exitcode(done[1])


def test_a_person_stops_a_reply_goes_on_and_leaves(folder: Path) -> None:
    person = Person(folder, "--seed", "1", "-c", "9000")
    person.reads("/reset starts a new conversation")
    person.reads("> ")
    person.types("Tell me a long story 🙂\r")
    person.reads(r"tokens · .*context \d+ of 9,000")  # the status line: it writes
    person.types("\x03")
    person.reads(r"interrupted")
    person.reads("> ")
    person.types("/exit\r")
    person.reads("1 turn ")
    assert person.leaves() == 0


def test_ctrl_c_at_the_prompt_ends_it(folder: Path) -> None:
    person = Person(folder)
    person.reads("> ")
    assert person.leaves(pressing="\x03") == 130


def test_ctrl_d_at_the_prompt_ends_it_well(folder: Path) -> None:
    person = Person(folder)
    person.reads("> ")
    person.types("\x04")
    assert person.leaves() == 0
