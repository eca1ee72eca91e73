"""The callback's machine code is kept on disk, and never run when the offsets it was compiled with have changed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import edgemoe

PROGRAM = """
from edgemoe.llamacpp import native
callback = native.callback()
print(callback.cache_hits, callback.address != 0)
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of what the callback is compiled from."""
    source = Path(edgemoe.__file__).parent
    (tmp_path / "edgemoe").mkdir()
    for name in ("__init__.py", "errors.py"):
        shutil.copy(source / name, tmp_path / "edgemoe" / name)
    for name in ("policy", "llamacpp"):
        shutil.copytree(source / name, tmp_path / "edgemoe" / name, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def run(package: Path, **environment: str) -> list[str]:
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(package)!r})\n{PROGRAM}"]
    clean = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    done = subprocess.run(command, capture_output=True, text=True, env={**clean, **environment})
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_an_edit_of_the_layout_discards_the_machine_code(package: Path) -> None:
    assert run(package) == ["0", "True"]
    assert run(package) == ["1", "True"]
    layout = package / "edgemoe" / "llamacpp" / "layout.py"
    text = layout.read_text()
    field = '        ("view_offs", ctypes.c_size_t),\n'
    assert field in text
    layout.write_text(text.replace(field, field + '        ("inserted", ctypes.c_size_t),\n'))
    assert run(package) == ["0", "True"]


def test_without_a_place_for_machine_code_it_still_runs(package: Path) -> None:
    nowhere = package / "file"
    nowhere.write_text("")
    for name in ("policy", "llamacpp"):  # neither the package nor the home directory can take a cache
        (package / "edgemoe" / name / "__pycache__").write_text("")
    environment = {"HOME": str(nowhere), "XDG_CACHE_HOME": str(nowhere), "PYTHONDONTWRITEBYTECODE": "1"}
    assert run(package, **environment) == ["0", "True"]
