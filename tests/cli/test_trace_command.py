"""`edgemoe trace` as a person runs it: exit codes, one-line errors, Ctrl-C, kills, JSON."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgemoe.model.synthetic import write_synthetic
from edgemoe.tracing import load_trace

COMMAND = [sys.executable, "-m", "edgemoe.cli", "trace"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trace")
    write_synthetic(folder / "moe.gguf")
    write_synthetic(folder / "dense.gguf", "llama")
    write_synthetic(folder / "split.gguf", shards=2)
    (folder / "split-00002-of-00002.gguf").unlink()
    write_synthetic(folder / "whole.gguf", shards=2)
    (folder / "linked.gguf").symlink_to("moe.gguf")
    whole = (folder / "moe.gguf").read_bytes()
    (folder / "truncated.gguf").write_bytes(whole[:-1000])
    (folder / "headless.gguf").write_bytes(whole[:100])
    (folder / "corrupt.gguf").write_bytes(whole[:16] + b"\xff" * 64 + whole[80:])
    (folder / "junk.gguf").write_bytes(bytes(range(256)))
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog, again and again.\n" * 4000)
    (folder / "short.txt").write_text("hi")
    (folder / "exists.npz").write_bytes(b"precious")
    return folder


def trace(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], cwd=folder, capture_output=True, text=True, timeout=300)


def test_a_whole_run(folder: Path) -> None:
    done = trace(folder, "moe.gguf", "-f", "a=text.txt", "-f", "text.txt", "-o", "t.npz", "--max-tokens", "100")
    assert done.returncode == 0, done.stderr
    assert "200 tokens in 2 windows in batches, 4 MoE layers, top-4 of 16 experts" in done.stdout
    assert "self-check passed; next: edgemoe stats t.npz" in done.stdout
    assert "\x1b" not in done.stdout + done.stderr
    assert load_trace(folder / "t.npz").domains == ("a", "text")


def test_json_is_one_object_and_nothing_else(folder: Path) -> None:
    options = ("--max-tokens", "64", "--ctx", "32", "--decode", "--scores", "--layers", "1,3", "--json")
    done = trace(folder, "moe.gguf", "-f", "text.txt", "-o", "j.npz", *options)
    assert done.returncode == 0 and done.stderr == ""
    said: dict[str, Any] = json.loads(done.stdout)
    assert said["path"] == "j.npz" and said["n_tokens"] == 64 and said["n_windows"] == 2
    assert said["layers"] == [1, 3] and said["members"] == ["experts", "scores"]
    assert said["partial"] is False and said["failures"] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("dense.gguf", "-f", "text.txt"), "a dense model (llama)"),
        (("nope.gguf", "-f", "text.txt"), "no such file"),
        (("split-00001-of-00002.gguf", "-f", "text.txt"), "split-00002-of-00002.gguf is missing"),
        (("truncated.gguf", "-f", "text.txt"), "truncated"),
        (("headless.gguf", "-f", "text.txt"), "not a readable GGUF"),
        (("corrupt.gguf", "-f", "text.txt"), "corrupt.gguf"),
        (("junk.gguf", "-f", "text.txt"), "expected a GGUF file"),
        ((".", "-f", "text.txt"), "edgemoe: ."),
        (("moe.gguf", "-f", "nope.txt"), "nope.txt: cannot be read"),
        (("moe.gguf", "-f", "short.txt"), "text too short"),
        (("moe.gguf", "-f", "moe.gguf"), "not UTF-8"),
        (("moe.gguf", "-f", "text.txt", "--layers", "0,7"), "layer 7 is no MoE layer: they are 0-3"),
        (("moe.gguf", "-f", "text.txt", "--layers", "x"), "expected layer numbers"),
        (("moe.gguf", "-f", "text.txt", "--layers", "0-999999999"), "layer 4 is no MoE layer: they are 0-3"),
        (("moe.gguf", "-f", "text.txt", "--layers", "9" * 5000), "expected layer numbers"),
        (("moe.gguf", "-f", "text.txt", "--ctx", "4294967298"), "a context of 4294967298 tokens: expected 1 to"),
        (("moe.gguf", "-f", "text.txt", "--threads", "100000"), "100000 threads: expected 1 to 512"),
        (("moe.gguf", "-f", "text.txt", "-o", "exists.npz"), "exists already"),
        (("moe.gguf", "-f", "text.txt", "-o", "moe.gguf", "--overwrite"), "is what the trace would be made of"),
        (("moe.gguf", "-f", "text.txt", "-o", "linked.gguf", "--overwrite"), "is what the trace would be made of"),
        (("moe.gguf", "-f", "text.txt", "-o", "text.txt", "--overwrite"), "is what the trace would be made of"),
        (("whole-00001-of-00002.gguf", "-f", "text.txt", "-o", "whole-00002-of-00002.gguf", "--overwrite"), "made of"),
        (("moe.gguf", "-f", "text.txt", "-o", "."), "a folder, expected a file"),
        (("moe.gguf", "-f", "text.txt", "-o", "no/such/t.npz"), "no folder no/such"),
        (("moe.gguf", "-f", "text.txt", "-o", "/proc/t.npz"), "cannot be written to"),
    ],
)
def test_mistakes_are_one_line_and_lose_nothing(folder: Path, arguments: tuple[str, ...], message: str) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    done = trace(folder, *arguments, *(() if "-o" in arguments else ("-o", "new.npz")))
    assert done.returncode == 2 and done.stdout == ""
    assert message in done.stderr and done.stderr.count("\n") == 1 and done.stderr.startswith("edgemoe: ")
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_overwrite_replaces_only_with_a_whole_trace(folder: Path) -> None:
    target = folder / "again.npz"
    target.write_bytes(b"old")
    assert trace(folder, "moe.gguf", "-f", "short.txt", "-o", "again.npz", "--overwrite").returncode == 2
    assert target.read_bytes() == b"old"
    options = ("--max-tokens", "64", "--overwrite")
    assert trace(folder, "moe.gguf", "-f", "text.txt", "-o", "again.npz", *options).returncode == 0
    assert load_trace(target).n_tokens == 64


def start(folder: Path, out: str, *options: str) -> subprocess.Popen[str]:
    """Start a run of minutes, and return once it has spooled a few hundred tokens."""
    process = subprocess.Popen(
        [*COMMAND, "moe.gguf", "-f", "text.txt", "-o", out, "--decode", "--threads", "1", *options],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    tokens = folder / f"{out}.partial" / "tokens.i32"
    deadline = time.monotonic() + 300
    while not (tokens.exists() and tokens.stat().st_size >= 4 * 200):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    return process


def end(process: subprocess.Popen[str], number: int, times: int = 1) -> subprocess.CompletedProcess[str]:
    for _ in range(times):
        os.kill(process.pid, number)
        time.sleep(0.03 if times > 1 else 0)
    stdout, stderr = process.communicate(timeout=300)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_is_kept_and_says_so(folder: Path, number: int) -> None:
    done = end(start(folder, f"i{number}.npz"), number)
    assert done.returncode == 130, done.stderr
    assert "PARTIAL: interrupted after" in done.stdout and "Traceback" not in done.stderr
    kept = load_trace(folder / f"i{number}.npz")
    assert kept.meta["partial"] is True and kept.meta["self_check"] == "passed" and kept.n_tokens >= 200
    assert not (folder / f"i{number}.npz.partial").exists()
    same = ("--max-tokens", str(kept.n_tokens), "--decode", "--threads", "1")
    assert trace(folder, "moe.gguf", "-f", "text.txt", "-o", f"w{number}.npz", *same).returncode == 0
    assert np.array_equal(kept.experts, load_trace(folder / f"w{number}.npz").experts)


def test_an_impatient_ctrl_c_loses_nothing(folder: Path) -> None:
    """Further ones come while the run ends and while the spool is being turned into the trace file."""
    done = end(start(folder, "often.npz", "--scores"), signal.SIGINT, times=3)
    assert done.returncode in (130, -signal.SIGINT) and "ZipFile" not in done.stderr, done.stderr
    assert load_trace(folder / "often.npz").meta["partial"] is True
    assert not (folder / "often.npz.partial").exists()


def test_inside_the_last_step_interrupts_are_ignored_and_afterwards_not() -> None:
    from edgemoe.tracing.interrupts import interrupts_ignored

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with interrupts_ignored():
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_second_run_onto_the_same_file_is_refused_while_the_first_goes_on(folder: Path) -> None:
    first = start(folder, "both.npz")
    for options in ((), ("--overwrite",)):
        second = trace(folder, "moe.gguf", "-f", "text.txt", "-o", "both.npz", *options)
        assert second.returncode == 2 and "both.npz.partial: another run is writing it" in second.stderr
        assert second.stderr.count("\n") == 1
    done = end(first, signal.SIGINT)
    assert done.returncode == 130, done.stderr
    kept = load_trace(folder / "both.npz")
    same = ("--max-tokens", str(kept.n_tokens), "--decode", "--threads", "1")
    assert trace(folder, "moe.gguf", "-f", "text.txt", "-o", "alone.npz", *same).returncode == 0
    assert np.array_equal(kept.experts, load_trace(folder / "alone.npz").experts)


def test_a_text_from_a_pipe_is_traced_whole(folder: Path) -> None:
    text = (folder / "text.txt").read_text()[:60_000]
    (folder / "piped.txt").write_text(text)
    for name, source in (("pipe.npz", "a=/dev/stdin"), ("file.npz", "a=piped.txt")):
        command = [*COMMAND, "moe.gguf", "-f", source, "-o", name, "--threads", "1"]
        done = subprocess.run(command, cwd=folder, input=text, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
    piped, read = load_trace(folder / "pipe.npz"), load_trace(folder / "file.npz")
    assert np.array_equal(piped.tokens, read.tokens)
    assert piped.meta["texts"][0]["sha256"] == read.meta["texts"][0]["sha256"]


def test_a_killed_run_leaves_a_readable_spool(folder: Path) -> None:
    done = end(start(folder, "k.npz"), signal.SIGKILL)
    assert done.returncode == -signal.SIGKILL
    left = load_trace(folder / "k.npz.partial")
    assert left.meta["partial"] is True and left.n_tokens >= 200 and not (folder / "k.npz").exists()
    refused = trace(folder, "moe.gguf", "-f", "text.txt", "-o", "k.npz")
    assert refused.returncode == 2 and "interrupted run captured" in refused.stderr
    assert load_trace(folder / "k.npz.partial").n_tokens == left.n_tokens
    done = trace(folder, "moe.gguf", "-f", "text.txt", "-o", "k.npz", "--max-tokens", "64", "--overwrite")
    assert done.returncode == 0 and not (folder / "k.npz.partial").exists()


def test_a_full_disk_at_the_very_end_names_the_spool(folder: Path) -> None:
    """Each array of the spool fits, the trace file of them all does not; zipfile has nothing to add."""
    options = "--scores --max-tokens 2000 --threads 1"
    limited = f"ulimit -f 150; exec {' '.join(COMMAND)} moe.gguf -f text.txt -o late.npz {options}"
    done = subprocess.run(
        ["bash", "-c", f"trap '' XFSZ; {limited}"], cwd=folder, capture_output=True, text=True, timeout=300
    )
    errors = [line for line in done.stderr.splitlines() if not line.startswith("tracing: ")]
    assert done.returncode == 2 and len(errors) == 1, done.stderr
    assert "late.npz: cannot be written (File too large); what was captured is in late.npz.partial" in errors[0]
    assert load_trace(folder / "late.npz.partial").n_tokens == 2000 and not (folder / "late.npz").exists()


@pytest.mark.parametrize(("kilobytes", "captured"), [(1, False), (8, True)])
def test_a_full_disk_is_one_line(folder: Path, kilobytes: int, captured: bool) -> None:
    """A limit on file size stands in for the full disk: writing fails at the start, or in the middle of a run."""
    limited = f"ulimit -f {kilobytes}; exec {' '.join(COMMAND)} moe.gguf -f text.txt -o full.npz --threads 1"
    done = subprocess.run(
        ["bash", "-c", f"trap '' XFSZ; {limited}"], cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 2, done.stderr
    assert "full.npz.partial: cannot be written (File too large)" in done.stderr and "Traceback" not in done.stderr
    assert (folder / "full.npz.partial").exists() == captured and not (folder / "full.npz").exists()
    if captured:
        assert load_trace(folder / "full.npz.partial").n_tokens >= 512


def test_a_trace_that_fails_its_check_is_kept_and_exits_1(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import typer

    from edgemoe.cli.trace import trace as command
    from edgemoe.tracing import capture

    monkeypatch.setattr(capture, "failures", lambda *_: ["expert counts are uniform"])
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(typer.Exit) as left:
        command(model=folder / "moe.gguf", files=[str(folder / "text.txt")], out=folder / "bad.npz", max_tokens=64)
    signal.signal(signal.SIGTERM, before)
    assert left.value.exit_code == 1
    assert "SELF-CHECK FAILED: expert counts are uniform" in capsys.readouterr().out
    assert load_trace(folder / "bad.npz").meta["self_check"] == ["expert counts are uniform"]
