"""Writing results: resumed after any interruption, never mixed, whole or not at all."""

import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
from evaluations import header, items, write

from edgemoe.errors import UserError
from edgemoe.evaluation.results import Item, load_results
from edgemoe.evaluation.writer import ResultWriter, partial_path

HEAD = header({"arc": 3, "gsm8k": 2})
ITEMS = [*items("arc", [1, 0, 1]), *items("gsm8k", [0.1, 1 / 3])]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "a.json"


def interrupted(out: Path, count: int = 3) -> Path:
    with ResultWriter(out, HEAD) as writer:
        for item in ITEMS[:count]:
            writer.add(item)
    assert not out.exists()
    return partial_path(out)


def test_finished_items_are_kept_and_the_end_is_the_same(out: Path, tmp_path: Path) -> None:
    interrupted(out)
    with ResultWriter(out, HEAD) as writer:
        assert (writer.resumed, len(writer), list(writer)) == (3, 3, ITEMS[:3])
        assert writer.has("arc", "2") and not writer.has("gsm8k", "0")
        for item in ITEMS:
            if not writer.has(item.task, item.id):
                writer.add(item)
        writer.finish()
    write(tmp_path / "b.json", HEAD, ITEMS)
    assert out.read_bytes() == (tmp_path / "b.json").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "b.json"]


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_torn_last_line_is_lost_and_nothing_else(out: Path, cut: int) -> None:
    spool = interrupted(out)
    spool.write_bytes(spool.read_bytes()[:-cut])
    with ResultWriter(out, HEAD) as writer:
        assert writer.resumed == 2
        writer.add(ITEMS[2])
    with ResultWriter(out, HEAD) as writer:
        assert list(writer) == ITEMS[:3]


def test_a_torn_header_is_begun_again(out: Path) -> None:
    spool = interrupted(out)
    spool.write_bytes(spool.read_bytes()[:40])
    with ResultWriter(out, HEAD) as writer:
        assert writer.resumed == 0
        writer.add(ITEMS[0])
    with ResultWriter(out, HEAD) as writer:
        assert writer.resumed == 1


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (replace(HEAD, config={**HEAD.config, "policy": {"lam": 0.2}}), "config.policy.lam was 0.0, is now 0.2"),
        (replace(HEAD, config={**HEAD.config, "batch": 8}), "config.batch was absent, is now 8"),
        (replace(HEAD, seeds={"generation": 1}), "seeds.generation was 0, is now 1"),
        (replace(HEAD, model=replace(HEAD.model, fingerprint="x" * 64)), "model.fingerprint was"),
        (replace(HEAD, edgemoe="99"), "edgemoe was"),
        (header({"arc": 3, "gsm8k": 4}), "tasks.gsm8k.items was 2, is now 4"),
        (replace(HEAD, kind="divergence"), "kind was tasks, is now divergence"),
    ],
)
def test_another_configuration_is_not_resumed(out: Path, other, says: str) -> None:
    spool = interrupted(out)
    before = spool.read_bytes()
    with pytest.raises(UserError) as refused:
        ResultWriter(out, other)
    assert says in str(refused.value) and "\n" not in str(refused.value)
    assert spool.read_bytes() == before
    with ResultWriter(out, other, overwrite=True) as writer:
        assert writer.resumed == 0


def test_overwriting_replaces_a_result_and_resumes_the_same_run(out: Path) -> None:
    write(out, HEAD, ITEMS)
    with pytest.raises(UserError, match="exists already"):
        ResultWriter(out, HEAD)
    assert not partial_path(out).exists()
    before = out.read_bytes()
    with ResultWriter(out, HEAD, overwrite=True) as writer:
        writer.add(ITEMS[0])
    assert out.read_bytes() == before  # until the new one is whole
    with ResultWriter(out, HEAD, overwrite=True) as writer:
        assert writer.resumed == 1
        for item in [*ITEMS[1:4], Item("gsm8k", "1", {"acc": 5})]:
            writer.add(item)
        writer.finish()
    assert load_results(out).of("gsm8k")[1].metrics == {"acc": 5}


def test_an_unfinished_run_cannot_be_finished_or_read(out: Path) -> None:
    spool = interrupted(out)
    with ResultWriter(out, HEAD) as writer, pytest.raises(ValueError, match="0 items of gsm8k, its header says 2"):
        writer.finish()
    assert spool.exists() and not out.exists()
    with pytest.raises(UserError, match="interrupted: run the same command again"):
        load_results(spool)


def test_items_that_do_not_belong_are_refused_and_leave_nothing(out: Path) -> None:
    with ResultWriter(out, HEAD) as writer:
        with pytest.raises(ValueError, match="has no acc"):
            writer.add(Item("arc", "0", {"other": 1}))
        writer.add(ITEMS[0])
        for item in (ITEMS[0], Item("arc", "1", {"acc": 1, "more": 2}), Item("arc", "1", {"acc": 1}, group="g")):
            with pytest.raises(ValueError, match="arc"):
                writer.add(item)
    with ResultWriter(out, HEAD) as writer:
        assert list(writer) == ITEMS[:1]


def test_a_damaged_line_is_told_by_its_number(out: Path) -> None:
    spool = interrupted(out)
    lines = spool.read_bytes().splitlines(keepends=True)
    spool.write_bytes(b"".join([*lines[:2], b"\x00\xff\n", *lines[3:]]))
    with pytest.raises(UserError, match="line 3 is damaged"):
        ResultWriter(out, HEAD)
    spool.write_bytes(b"my notes\n")
    with pytest.raises(UserError, match="not what an interrupted evaluation leaves"):
        ResultWriter(out, HEAD)
    assert spool.read_bytes() == b"my notes\n"


def test_two_runs_never_write_one_file(out: Path) -> None:
    with ResultWriter(out, HEAD) as writer:
        writer.add(ITEMS[0])
        for overwrite in (False, True):
            with pytest.raises(UserError, match="another run is writing it"):
                ResultWriter(out, HEAD, overwrite=overwrite)
        writer.add(ITEMS[1])
    with ResultWriter(out, HEAD) as writer:
        assert writer.resumed == 2


def test_places_that_cannot_be_written_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a folder"):
        ResultWriter(tmp_path, HEAD)
    with pytest.raises(UserError, match="cannot be written"):
        ResultWriter(tmp_path / "none" / "a.json", HEAD)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_line_and_loses_no_finished_item(out: Path) -> None:
    with ResultWriter(out, HEAD) as writer:
        writer.add(ITEMS[0])
        full = os.open("/dev/full", os.O_WRONLY)
        kept = os.dup(writer._journal._file.fileno())
        os.dup2(full, writer._journal._file.fileno())
        with pytest.raises(UserError, match="1 finished items are kept"):
            writer.add(ITEMS[1])
        os.dup2(kept, writer._journal._file.fileno())
        assert not writer.has("arc", "1")
        os.close(full), os.close(kept)
    with ResultWriter(out, HEAD) as writer:
        assert list(writer) == ITEMS[:1]


def test_a_killed_run_keeps_what_it_finished(out: Path) -> None:
    code = f"""
    import sys
    sys.path.insert(0, {str(Path(__file__).parent)!r})
    from pathlib import Path
    from evaluations import header, items
    from edgemoe.evaluation.writer import ResultWriter
    writer = ResultWriter(Path({str(out)!r}), header({{"arc": 3, "gsm8k": 2}}))
    for item in items("arc", [1, 0, 1]):
        writer.add(item)
    print("ready", flush=True)
    sys.stdin.read()
    """
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout and child.stdout.readline() == "ready\n"
    with pytest.raises(UserError, match="another run is writing it"):
        ResultWriter(out, HEAD)
    child.send_signal(signal.SIGKILL)
    child.communicate(timeout=60)
    with ResultWriter(out, HEAD) as writer:
        assert list(writer) == ITEMS[:3]
