"""The command as a whole: it answers at once, errors are one line, the documentation is what --help says."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("numpy", "numba", "pandas", "matplotlib", "llama_cpp", "gguf", "torch", "transformers", "psutil")


def run(*arguments: str, code: str | None = None) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", code] if code else [sys.executable, "-m", "edgemoe.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_the_package_and_its_help_import_nothing_heavy() -> None:
    code = f"""
import sys
import edgemoe, edgemoe.cli
from typer.testing import CliRunner
assert CliRunner().invoke(edgemoe.cli.app, ["--help"]).exit_code == 0
print([name for name in {HEAVY!r} if name in sys.modules])
"""
    assert run(code=code).stdout.strip() == "[]"


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


def test_the_command_line_documentation_is_what_help_says() -> None:
    result = subprocess.run(
        [sys.executable, ROOT / "scripts" / "make_cli_docs", "--check"], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
