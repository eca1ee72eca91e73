"""Files that are whole or not there, and JSON whose damage is told in one line."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from edgemoe.errors import UserError
from edgemoe.files import read_json, whole_file, write_json


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as refused:
        read_json(path, "shopping list", "write one")
    assert "\n" not in str(refused.value) and str(refused.value).startswith(f"{path}: ")
    return str(refused.value)


def test_the_old_file_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    with whole_file(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_what_raises_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "a.bin"
    for before in ([], [path]):
        with pytest.raises(error), whole_file(path) as file:
            file.write(b"half")
            raise error
        assert list(tmp_path.iterdir()) == before
        path.write_bytes(b"old")
    assert path.read_bytes() == b"old"


def test_where_it_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for path, reason in ((tmp_path / "none" / "a", "No such file"), (tmp_path / "folder", "Is a directory")):
        with pytest.raises(UserError, match=rf"{path}: cannot be written \({reason}"), whole_file(path) as file:
            file.write(b"x")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")
    code = f"from edgemoe.files import write_json; write_json({str(path)!r}, 'x' * 100_000)"

    def small() -> None:  # pragma: no cover - in the child
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    done = subprocess.run([sys.executable, "-c", code], preexec_fn=small, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "cannot be written (File too large)" in done.stderr
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_json_comes_back_and_numbers_that_it_lacks_do_not_go_in(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"naïve": [1, 2.5, None]}, indent=2)
    assert read_json(tmp_path / "a.json", "list", "again") == {"naïve": [1, 2.5, None]}
    assert "naïve" in (tmp_path / "a.json").read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "b.json", float("nan"))
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not a shopping list (not JSON: Expecting value"),
        (b"[1, NaN]", "NaN is not a number"),
        (b"[1, -Infinity]", "-Infinity is not a number"),
        (b"\xff\xfe", "'utf-8' codec"),
        (b"[" * 100_000, "not a shopping list (not JSON: "),
        (b'{"a": 1', "write one"),
    ],
)
def test_damage_is_told_in_one_line(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "a.json").write_bytes(content)
    assert words in refusal(tmp_path / "a.json")


def test_what_is_not_there_or_no_file(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none.json").endswith("no such shopping list: write one")
    assert "a folder, expected a shopping list" in refusal(tmp_path)
    (tmp_path / "file").write_text("")
    assert "cannot be read (Not a directory)" in refusal(tmp_path / "file" / "a.json")
