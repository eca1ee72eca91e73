"""`edgemoe run` as a person runs it: what goes where, exit codes, one-line errors, Ctrl-C, a terminal."""

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgemoe.cli import commands
from edgemoe.errors import UserError

DEMO = str(Path(__file__).parents[2] / "edgemoe" / "data" / "demo-moe-32m-q8_0.gguf")
COMMAND = [sys.executable, "-m", "edgemoe.cli", "run", DEMO, "--threads", "1"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{{ '<|im_start|>assistant\\n' }}"
)


def run(*arguments: str, stdin: str | bytes = "", folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    data = stdin.encode() if isinstance(stdin, str) else stdin
    done = subprocess.run([*COMMAND, *arguments], input=data, cwd=folder, capture_output=True, timeout=300)
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


@pytest.fixture
def handlers() -> Iterator[None]:
    """A command takes SIGTERM for itself: a test that runs one in this process gives it back."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_standard_output_has_the_text_and_standard_error_the_figures() -> None:
    first = run("-p", "In the beginning", "-n", "12", "--seed", "3")
    assert first.returncode == 0, first.stderr
    assert "12 tokens" in first.stderr and "tok/s" in first.stderr and "seed 3" in first.stderr
    assert "as many tokens as asked for" in first.stderr and "time per token" in first.stderr
    assert "\x1b" not in first.stdout + first.stderr
    again = run("-p", "In the beginning", "-n", "12", "--seed", "3")
    assert again.stdout == first.stdout and len(first.stdout.strip()) > 10


def test_json_is_one_object_with_every_figure() -> None:
    done = run("-p", "In the beginning", "-n", "6", "--greedy", "--json")
    assert done.returncode == 0 and done.stderr == ""
    said: dict[str, Any] = json.loads(done.stdout)
    assert said["finish"] == "length" and said["generated_tokens"] == 6 and said["experts"] == "resident"
    assert said["tokens_per_s"] > 0 and said["first_token_s"] > 0 and said["decode_phase"]["tokens"] == 5
    assert said["seconds_per_token"]["compute"] > 0


def test_the_prompt_from_a_file_and_from_a_pipe_is_the_same_prompt(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("def main(self):\n")
    texts = [
        run("-p", "def main(self):", "-n", "8", "--greedy").stdout,
        run("-f", str(tmp_path / "p.txt"), "-n", "8", "--greedy").stdout,
        run("-n", "8", "--greedy", stdin="def main(self):\n").stdout,
    ]
    assert texts[0] == texts[1] == texts[2] != ""


def test_emoji_are_whole_in_a_pipe() -> None:
    """Read byte by byte as they come: no write ends within a character."""
    command = [*COMMAND, "-p", "Weather: 🙂🙃🙂🙃🙂🙃🙂🙃🙂🙃🙂🙃🙂", "-n", "24", "--greedy"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout
        parts = list(iter(lambda: os.read(process.stdout.fileno(), 1 << 16), b""))
    assert "🙂" in b"".join(parts).decode()
    for part in parts:
        part.decode()


def test_metrics_are_a_line_per_token(tmp_path: Path) -> None:
    done = run("-p", "In the", "-n", "5", "--seed", "1", "--metrics", "m.jsonl", "--json", folder=tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert [line["index"] for line in lines] == [0, 1, 2, 3, 4] and lines[-1]["finish"] == "length"
    assert "".join(line["text"] for line in lines) == json.loads(done.stdout)["text"]
    assert [line["tokens"] for line in lines][1:] == [1, 1, 1, 1] and lines[0]["tokens"] > 1
    assert all(line["latency_s"] > 0 for line in lines)


def test_a_chat_template_makes_the_prompt_a_turn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], handlers: None
) -> None:
    (tmp_path / "t.jinja").write_text(CHATML)
    template = ["--chat-template", str(tmp_path / "t.jinja")]
    said = []
    for more in ([], template, [*template, "--system", "Be brief."]):
        assert commands.run(["run", DEMO, "--threads", "1", "-p", "Hello", "-n", "2", "--json", *more]) == 0
        said.append(json.loads(capsys.readouterr().out)["prompt_tokens"])
    assert said[0] < said[1] < said[2]


def test_a_models_own_template_is_used_unless_raw(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], handlers: None
) -> None:
    model = str(_with_template(tmp_path / "chat.gguf"))
    said = []
    for more in ([], ["--chat"], ["--raw"]):
        assert commands.run(["run", model, "--threads", "1", "-p", "Hello", "-n", "2", "--json", *more]) == 0
        said.append(json.loads(capsys.readouterr().out)["prompt_tokens"])
    assert said[0] == said[1] > said[2]


def _with_template(path: Path) -> Path:
    """The demo model with a chat template in its header."""
    import gguf
    from gguf.scripts.gguf_new_metadata import MetadataDetails, copy_with_new_metadata

    reader = gguf.GGUFReader(DEMO)
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    template = {gguf.Keys.Tokenizer.CHAT_TEMPLATE: MetadataDetails(gguf.GGUFValueType.STRING, CHATML)}
    copy_with_new_metadata(reader, writer, template, [])
    return path


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-p", ""], "the prompt is empty"),
        ([], "the prompt is empty"),
        (["-p", "a", "-f", "b"], "give one"),
        (["-f", "missing.txt"], "-f missing.txt: cannot be read (No such file or directory)"),
        (["-f", "."], "cannot be read"),
        (["-f", "latin.txt"], "not UTF-8 text (byte 3)"),
        (["-p", "a", "--temperature", "-1"], "temperature -1.0 is out of range"),
        (["-p", "a", "--top-p", "0"], "top-p 0.0 is not a probability"),
        (["-p", "a", "-n", "0"], "0 tokens: give at least 1"),
        (["-p", "a", "--stop", ""], "an empty stop string"),
        (["-p", "a", "--kv-type", "q3"], "KV type 'q3' is not one of f16"),
        (["-p", "a", "--chat"], "no chat template"),
        (["-p", "a", "--system", "b"], "--system"),
        (["-p", "a", "--chat-template", "bad.jinja"], "no valid Jinja template"),
        (["-p", "a", "--metrics", "."], "a folder"),
        (["-p", "word " * 90, "-c", "64"], "the prompt has"),
        (["-p", "a", "--policy", "psr"], "--policy is about experts on disk: give --ram or --residency"),
        (["-p", "a", "--lambda", "0.1"], "--lambda is about experts on disk"),
        (["-p", "a", "--ram", "6"], "'6' is not a size"),
        (["-p", "a", "--residency", "50%", "--policy", "fast"], "no policy preset 'fast'"),
        (["-p", "a", "--residency", "50%", "--policy", "psr", "--budget", "many"], "--budget many"),
        (["-p", "a", "--residency", "50%", "-ngl", "1"], "leave out --n-gpu-layers"),
        (["-p", "a", "--residency", "50%", "--calibration", "none.calib"], "none.calib"),
        (["-p", "a", "--ram", "1MB"], "too little"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    handlers: None,
) -> None:
    (tmp_path / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    (tmp_path / "bad.jinja").write_text("{% for %}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    with pytest.raises(UserError) as refusal:
        commands.run(["run", DEMO, "--threads", "1", *arguments])
    assert said in str(refusal.value) and "\n" not in str(refusal.value)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ram", "1MB"], "too little"),
        (["--ram", "350MB", "-c", "1024", "--parallel", "40"], "for 40 streams"),
        (["--residency", "8", "--policy", "psr", "--window", "9"], "needs as many slots"),
        (["--residency", "50%", "--kv-type", "q3"], "KV type 'q3'"),
        (["--residency", "50%", "--policy", "psr", "--scale", "fixed"], "--scale fixed needs the bonus scale of a"),
        (["--residency", "50%", "--prefetch", "token-prior"], "needs the token prior of a calibration: give --cal"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_compiled(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, handlers: None
) -> None:
    def compiling(quiet: bool) -> None:
        raise AssertionError("compiled for nothing")

    monkeypatch.setattr("edgemoe.cli.generating.make_ready", compiling)
    with pytest.raises(UserError, match=said):
        commands.run(["run", DEMO, "--threads", "1", "-p", "a", *arguments])
    with pytest.raises(AssertionError, match="for nothing"):
        commands.run(["run", DEMO, "--threads", "1", "-p", "a", "--ram", "900MB"])


@pytest.mark.parametrize("name", ["missing.gguf", "junk.gguf", "folder"])
def test_what_is_no_model_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "junk.gguf").write_bytes(bytes(range(256)))
    (tmp_path / "folder").mkdir()
    command = [sys.executable, "-m", "edgemoe.cli", "run", name, "-p", "a"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and done.stderr.startswith("edgemoe: ") and done.stderr.count("\n") == 1
    assert name in done.stderr


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_keeps_the_text_and_prints_the_summary(how: signal.Signals) -> None:
    command = [*COMMAND, "-p", "In the beginning", "--ignore-eos", "--seed", "1", "-c", "9000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout
    text = os.read(process.stdout.fileno(), 100)  # it writes: now stop it
    process.send_signal(how)
    rest, errors = process.communicate(timeout=300)
    assert process.returncode == 130
    assert len(text + rest) > 0 and "ended: interrupted" in errors.decode()
    assert "Traceback" not in errors.decode()


def test_a_reader_that_leaves_ends_it_quietly() -> None:
    process = subprocess.Popen(
        [*COMMAND, "-p", "In the beginning", "--ignore-eos"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout and process.stderr
    os.read(process.stdout.fileno(), 10)
    process.stdout.close()
    errors = process.stderr.read().decode()
    assert process.wait(300) == 141 and "Traceback" not in errors


def test_a_full_context_ends_the_text_and_says_so() -> None:
    done = run("-p", "In the beginning", "-c", "32", "--ignore-eos", "--seed", "1")
    assert done.returncode == 0 and "the context is full: -c gives a larger one" in done.stderr


class TestTerminal:
    """On a terminal a status line stays at its bottom while the text scrolls, and is gone at the end."""

    def seen(self, *arguments: str, env: dict[str, str] | None = None) -> str:
        pid, master = pty.fork()
        if pid == 0:
            os.environ.update({"TERM": "xterm-256color", "LINES": "24", "COLUMNS": "80", **(env or {})})
            os.execv(sys.executable, [*COMMAND, *arguments])
        shown, until = b"", time.monotonic() + 300
        while time.monotonic() < until:
            if select.select([master], [], [], 1)[0]:
                try:
                    part = os.read(master, 65536)
                except OSError:  # the terminal's other end is closed
                    break
                if not part:
                    break
                shown += part
        os.close(master)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        return shown.decode()

    def test_the_line_shows_figures_and_the_terminal_is_given_back(self) -> None:
        shown = self.seen("-p", "In the beginning", "-n", "40", "--seed", "1")
        assert re.search(r"\x1b\[24;1H\x1b\[2K.*tokens? · .*RAM .*context \d+ of 1,024", shown)
        assert "\x1b[1;23r" in shown  # the last row is kept from scrolling …
        assert shown.rindex("\x1b[r") > shown.rindex("\x1b[1;23r")  # … and given back
        assert "40 tokens" in shown

    def test_no_color_is_honoured(self) -> None:
        shown = self.seen("-p", "In the", "-n", "10", "--seed", "1", env={"NO_COLOR": "1"})
        assert not re.search(r"\x1b\[[0-9;]*3\dm", shown)

    def test_a_dumb_terminal_gets_no_line(self) -> None:
        assert "\x1b[1;23r" not in self.seen("-p", "In the", "-n", "10", "--seed", "1", env={"TERM": "dumb"})
