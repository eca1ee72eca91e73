"""`--metrics` of run and chat: where its lines go, and what they never replace."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgemoe.cli import commands
from edgemoe.errors import UserError

DEMO = str(Path(__file__).parents[2] / "edgemoe" / "data" / "demo-moe-32m-q8_0.gguf")
SHORT = ["--threads", "1", "-n", "2", "--seed", "1"]


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """A command takes SIGTERM for itself: a test that runs one in this process gives it back."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy: whatever a run does to its model here, the one that other tests need stays whole."""
    return Path(shutil.copy(DEMO, tmp_path_factory.mktemp("model")))


@pytest.fixture
def folder(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("old.jsonl", "prompt.txt", "t.jinja", "c.calib", "plan.json"):
        (tmp_path / name).write_text("precious")
    (tmp_path / "link.jsonl").symlink_to("prompt.txt")
    (tmp_path / "dangling.jsonl").symlink_to("elsewhere.jsonl")
    (tmp_path / "model.gguf").symlink_to(model)
    return tmp_path


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".gguf" and path.exists()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("option", ["--metrics", "--trace"])
@pytest.mark.parametrize("more", [[], ["--overwrite"]])
@pytest.mark.parametrize(
    ("read", "name"),
    [
        ([], "model.gguf"),
        (["-f", "prompt.txt"], "prompt.txt"),
        (["-f", "prompt.txt"], "link.jsonl"),
        (["-p", "a", "--chat-template", "t.jinja"], "t.jinja"),
        (["-p", "a", "--residency", "50%", "--calibration", "c.calib"], "c.calib"),
        (["-p", "a", "--residency", "50%", "--plan", "plan.json"], "plan.json"),
    ],
)
def test_what_a_run_reads_is_never_replaced(
    option: str, more: list[str], read: list[str], name: str, folder: Path
) -> None:
    before, prompt = content(folder), read or ["-p", "a"]
    with pytest.raises(UserError, match=f"{option} {name}: is what the run reads: choose another name"):
        commands.run(["run", "model.gguf", *SHORT, *prompt, option, name, *more])
    assert content(folder) == before and names(folder) == sorted([*before, "dangling.jsonl", "model.gguf"])
    assert (folder / "model.gguf").stat().st_size == Path(DEMO).stat().st_size


def test_the_text_on_standard_input_is_never_replaced(folder: Path) -> None:
    command = [sys.executable, "-m", "edgemoe.cli", "run", DEMO, *SHORT, "--metrics", "prompt.txt", "--overwrite"]
    with (folder / "prompt.txt").open() as text:
        done = subprocess.run(command, stdin=text, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "--metrics prompt.txt: is what the run reads" in done.stderr
    assert (folder / "prompt.txt").read_text() == "precious"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--metrics", "old.jsonl"], "--metrics old.jsonl: exists already: choose another name, or give --overwrite"),
        (["--metrics", "dangling.jsonl"], "exists already"),
        (["--metrics", "none/x.jsonl"], "--metrics none/x.jsonl: no folder none: make it first"),
        (["--metrics", "."], "a folder, expected a file's name"),
        (["--metrics", "/dev/fd/99"], "cannot be written"),
        (["--metrics", "new.jsonl", "--trace", "./new.jsonl"], "both name new.jsonl"),
        (["--overwrite"], "--overwrite is about --trace and --metrics"),
    ],
)
@pytest.mark.usefixtures("nothing_loads")
@pytest.mark.parametrize("verb", ["run", "chat"])
def test_what_cannot_be_written_is_refused_before_the_model_is_loaded(
    verb: str, arguments: list[str], said: str, folder: Path
) -> None:
    before = content(folder), names(folder)
    text = ["-p", "a"] if verb == "run" else ["--chat-template", "t.jinja"]
    with pytest.raises(UserError) as refused:
        commands.run([verb, DEMO, *SHORT, *text, *arguments])
    assert said in str(refused.value) and "\n" not in str(refused.value)
    assert (content(folder), names(folder)) == before


@pytest.mark.parametrize("name", ["old.jsonl", "new.jsonl"])
def test_a_run_that_is_refused_makes_and_empties_nothing(name: str, folder: Path) -> None:
    before = content(folder)
    with pytest.raises(UserError, match="the context holds 2"):
        commands.run(["run", DEMO, *SHORT, "-c", "2", "-p", "Hello hello hello", "--metrics", name, "--overwrite"])
    assert content(folder) == before


def test_an_old_file_is_replaced_when_asked_for(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("old.jsonl", "dangling.jsonl"):
        assert commands.run(["run", DEMO, *SHORT, "-p", "a", "--json", "--metrics", name, "--overwrite"]) == 0
        lines = [json.loads(line) for line in (folder / name).read_text().splitlines()]
        assert "".join(line["text"] for line in lines) == json.loads(capsys.readouterr().out)["text"]


def test_a_file_that_comes_between_is_not_replaced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from edgemoe.generation.summary import Meter

    begin = Meter.begin

    def late(self: Meter) -> None:
        (folder / "new.jsonl").write_text("precious")
        begin(self)

    monkeypatch.setattr(Meter, "begin", late)
    with pytest.raises(UserError, match=r"--metrics new.jsonl: cannot be written \(it exists by now\)"):
        commands.run(["run", DEMO, *SHORT, "-p", "a", "--metrics", "new.jsonl"])
    assert (folder / "new.jsonl").read_text() == "precious"


@pytest.mark.skipif(not Path("/dev/fd").exists(), reason="this system has no /dev/fd")
def test_pipes_and_what_is_open_already_are_written_to_as_they_are(folder: Path) -> None:
    edgemoe = [sys.executable, "-m", "edgemoe.cli", "run", DEMO, *SHORT, "-p", "a", "--json", "--metrics"]
    os.mkfifo("fifo")
    shell = """
    set -e
    run() { "$@" > text; }
    echo before > fd; run "$@" /dev/fd/3 3>> fd
    echo before > out; "$@" /dev/stdout >> out
    "$@" /dev/stdout | cat > piped
    cat fifo > read & run "$@" fifo; wait
    run "$@" /dev/null --overwrite; run "$@" /dev/null
    { run "$@" /dev/fd/4; echo after >&4; } 4> truncated
    """
    done = subprocess.run(["bash", "-c", shell, "run", *edgemoe], stdin=subprocess.DEVNULL, timeout=300)
    assert done.returncode == 0
    for name, first, last in (("fd", 1, 0), ("out", 1, 1), ("piped", 0, 1), ("read", 0, 0), ("truncated", 0, 1)):
        lines = (folder / name).read_text().splitlines()
        assert len(lines) == first + 2 + last, name
        assert [json.loads(line)["index"] for line in lines[first : first + 2]] == [0, 1]
        assert not first or lines[0] == "before"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("verb", ["run", "chat"])
def test_a_full_disk_is_one_line(verb: str, folder: Path) -> None:
    (folder / "t.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    prompt = ["-p", "a"] if verb == "run" else ["--chat-template", "t.jinja"]
    command = [sys.executable, "-m", "edgemoe.cli", verb, DEMO, *SHORT, *prompt, "--json", "--metrics", "/dev/full"]
    done = subprocess.run(command, input="Hello\n", capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    said = "edgemoe: --metrics /dev/full: cannot be written (No space left on device): name another\n"
    assert done.stderr == said


def test_of_a_model_that_is_a_folder_nothing_is_replaced(folder: Path) -> None:
    """Neither the weights nor what lies beside them."""
    pytest.importorskip("torch", reason="the model is made with torch (pip install edgemoe[gpu])")
    from edgemoe.training.export import read_gguf, weights_of, write_hf
    from edgemoe.training.model import ModelConfig, MoEModel

    config = ModelConfig(d_model=32, n_layers=1, n_heads=2, n_experts=8, top_k=2, d_expert=16, context=64)
    write_hf(folder / "hf", config, weights_of(MoEModel(config, seed=1)), read_gguf(Path(DEMO))[2])
    before = {path: path.read_bytes() for path in (folder / "hf").iterdir()}
    for path in before:
        with pytest.raises(UserError, match="is what the run reads"):
            commands.run(["run", "hf", "--device", "cpu", "-p", "a", "--metrics", str(path), "--overwrite"])
    assert len(before) > 2 and {path: path.read_bytes() for path in (folder / "hf").iterdir()} == before
