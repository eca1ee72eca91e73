"""The command as a whole: it answers at once, errors are one line, the documentation is what --help says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEMO = str(ROOT / "edgemoe" / "data" / "demo-moe-32m-q8_0.gguf")
HEAVY = ("numpy", "numba", "pandas", "matplotlib", "llama_cpp", "gguf", "torch", "transformers", "psutil")


def run(*arguments: str, code: str | None = None) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", code] if code else [sys.executable, "-m", "edgemoe.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def test_the_package_and_its_help_import_nothing_heavy() -> None:
    code = f"""
import sys
import edgemoe
from edgemoe.cli.commands import run
assert run(["--help"]) == 0
print([name for name in {HEAVY!r} if name in sys.modules])
"""
    assert run(code=code).stdout.splitlines()[-1] == "[]"


def test_version() -> None:
    import edgemoe

    assert run("--version").stdout.strip() == f"edgemoe {edgemoe.__version__}"


@pytest.mark.parametrize(
    "arguments",
    [
        ("info", "no-such-file.gguf"),
        ("stats", "no-such-trace.npz"),
        ("trace", "no-such-file.gguf", "-f", __file__, "-o", "never-written.npz"),
        ("simulate", "no-such-trace.npz", "--capacity", "25%"),
    ],
)
def test_a_missing_file_is_one_line_and_exit_code_2(arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert result.returncode == 2
    assert result.stdout == ""
    assert len(result.stderr.strip().splitlines()) == 1
    assert "no-such" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("info",), "Missing argument 'MODEL' (see edgemoe info --help)"),
        (("info", "--ctx", "x", "y.gguf"), "Invalid value for '--ctx'"),
        (("demo", "--max-tokens", "3"), "(see edgemoe demo --help)"),
        (("stats", "--nope"), "No such option: --nope (see edgemoe stats --help)"),
        (("foo",), "No such command 'foo' (see edgemoe --help)"),
        (("info", "two\nlines.gguf"), "two lines.gguf"),
    ],
)
def test_a_line_that_is_no_command_is_one_line_and_exit_code_2(arguments: tuple[str, ...], says: str) -> None:
    result = run(*arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("edgemoe: ") and result.stderr.count("\n") == 1
    assert says in result.stderr


def test_help_is_there_for_the_asking() -> None:
    asked = [run(*arguments) for arguments in ((), ("-h",), ("--help",))]
    assert {(result.returncode, result.stderr) for result in asked} == {(0, "")}
    assert len({result.stdout for result in asked}) == 1 and "simulate" in asked[0].stdout
    assert "--capacity" in run("simulate", "-h").stdout


INTERRUPTING = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
sys.argv = ["edgemoe", "info", "no-such.gguf"]
from edgemoe.cli import main
main()
"""


@pytest.mark.parametrize("module", ["typer", "edgemoe.cli.info", "edgemoe.model"])
def test_ctrl_c_is_one_line_even_while_modules_load(module: str) -> None:
    result = run(code=INTERRUPTING.format(module=module))
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "edgemoe: interrupted\n")


SWALLOWING = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "edgemoe.model":
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                raise {error} from None
sys.meta_path.insert(0, Finder())
sys.argv = ["edgemoe", "info", "no-such.gguf"]
from edgemoe.cli import main
main()
"""


@pytest.mark.parametrize("error", ["ImportError('half a module')", "BufferError('exported')"])
def test_ctrl_c_that_arrives_as_another_error_is_still_ctrl_c(error: str) -> None:
    result = run(code=SWALLOWING.format(error=error))
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "edgemoe: interrupted\n")


@pytest.mark.parametrize("arguments", [("info", DEMO), ("info", DEMO, "--json"), ("--help",)])
def test_a_reader_that_has_gone_is_no_error(arguments: tuple[str, ...]) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "edgemoe.cli", *arguments]
    with os.fdopen(write, "w") as closed:
        result = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True, timeout=600)
    assert (result.returncode, result.stderr) == (141, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize(
    ("arguments", "unbuffered"),
    [
        (("info", DEMO), ""),
        (("info", DEMO, "--json"), "1"),
        (("run", DEMO, "--threads", "1", "-p", "a", "-n", "2", "--json"), ""),
        (("run", DEMO, "--threads", "1", "-p", "a", "-n", "9"), ""),
        (("--help",), ""),
    ],
)
def test_an_output_that_is_full_is_one_line(arguments: tuple[str, ...], unbuffered: str) -> None:
    command = [sys.executable, "-m", "edgemoe.cli", *arguments]
    env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=600, env=env)
    last = result.stderr.splitlines()[-1]
    name = "the output" if unbuffered else "standard output"
    assert (result.returncode, last) == (2, f"edgemoe: {name}: cannot be written (No space left on device)")
    assert "Traceback" not in result.stderr and "Exception" not in result.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("arguments", [("info", "no-such.gguf"), ("run", DEMO, "--threads", "1", "-p", "a", "-n", "2")])
def test_errors_that_cannot_be_told_have_their_exit_code(arguments: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "edgemoe.cli", *arguments]
    with Path("/dev/full").open("w") as full:
        assert subprocess.run(command, stdout=subprocess.PIPE, stderr=full, timeout=600).returncode == 2


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_standard_stream_may_be_closed(closed: str, tmp_path: Path) -> None:
    """What would go there is lost, and nothing else: no file that is opened gets its number."""
    shell = f'"$@" -p a -n 2 --seed 1 --metrics m.jsonl {closed}; echo "$?" > code'
    command = [sys.executable, "-m", "edgemoe.cli", "run", DEMO, "--threads", "1"]
    done = subprocess.run(["bash", "-c", shell, "run", *command], cwd=tmp_path, capture_output=True, text=True)
    assert (tmp_path / "code").read_text() == "0\n" and "Traceback" not in done.stderr
    lines = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert [line["index"] for line in lines] == [0, 1]
    text = "".join(line["text"] for line in lines)
    assert done.stdout == ("" if ">&- " in f"{closed} ".replace("2>&-", "") else f"{text}\n")
    assert ("generated" in done.stderr) == ("2>&-" not in closed)


def test_another_error_of_the_system_is_no_mistake_of_a_person() -> None:
    code = """
import sys
import edgemoe.cli.commands
def broken(arguments):
    raise OSError(9, "Bad file descriptor")
edgemoe.cli.commands.run = broken
from edgemoe.cli import main
main()
"""
    result = run(code=code)
    assert result.returncode == 1 and "Traceback" in result.stderr


def test_the_command_line_documentation_is_what_help_says() -> None:
    result = subprocess.run(
        [sys.executable, ROOT / "scripts" / "make_cli_docs", "--check"], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("verb", [(), ("info",), ("simulate",)])
def test_the_documentation_is_what_the_program_prints(verb: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "112")
    page = (ROOT / "docs" / "cli.md").read_text()
    section = page.split(f"## `{' '.join(('edgemoe', *verb))}`\n\n```text\n", 1)[1].split("```", 1)[0]
    assert run(*verb, "--help").stdout == section
    assert "-h, --help" in section
