"""The spool: what a run leaves is readable whatever ended it, and becomes the trace file without being read whole."""

import gc
import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edgemoe.errors import UserError
from edgemoe.tracing import load_trace
from edgemoe.tracing.output import prepare
from edgemoe.tracing.spool import Spool, is_being_written

META = {"num_experts": 16, "top_k": 3, "note": "x"}


def filled(path: Path) -> tuple[Spool, dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    spool = Spool.create(path, [1, 2, 5], {"experts": 3, "scores": 16}, META)
    experts = np.argsort(rng.random((3, 50, 16)), axis=2)[:, :, :3].astype(np.int16)
    scores = rng.standard_normal((3, 50, 16)).astype(np.float32)
    tokens = np.arange(50, dtype=np.int32)
    for start, end, domain in ((0, 20, "code"), (20, 30, None), (30, 50, "prose")):
        if domain:
            spool.begin_window(domain)
        spool.append(
            tokens[start:end],
            {"experts": list(experts[:, start:end]), "scores": list(scores[:, start:end])},
        )
    return spool, {"experts": experts, "scores": scores, "tokens": tokens}


def test_assembled_equals_spooled(tmp_path: Path) -> None:
    spool, arrays = filled(tmp_path / "t.npz.partial")
    before = load_trace(spool.path)
    assert before.meta["partial"] is True
    spool.assemble(tmp_path / "t.npz", partial=False)
    after = load_trace(tmp_path / "t.npz")
    for trace in (before, after):
        for name, array in arrays.items():
            assert np.array_equal(getattr(trace, name), array)
        assert trace.layers.tolist() == [1, 2, 5]
        assert trace.windows.tolist() == [0, 30] and trace.domains == ("code", "prose")
        assert trace.meta["num_tokens"] == 50 and trace.meta["note"] == "x"
    assert after.meta["partial"] is False
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.npz"]


def test_numpy_alone_reads_it(tmp_path: Path) -> None:
    spool, arrays = filled(tmp_path / "t.npz.partial")
    spool.assemble(tmp_path / "t.npz")
    with np.load(tmp_path / "t.npz", allow_pickle=False) as archive:
        assert np.array_equal(archive["experts"], arrays["experts"])
        assert json.loads(str(archive["meta"]))["num_experts"] == 16


@pytest.mark.parametrize("cut", ["tokens.i32", "experts.2.raw", "scores.1.raw"])
def test_a_torn_write_costs_its_token_only(tmp_path: Path, cut: str) -> None:
    spool, arrays = filled(tmp_path / "t.npz.partial")
    file = spool.path / cut
    file.write_bytes(file.read_bytes()[:-1])
    trace = load_trace(spool.path)
    assert trace.n_tokens == 49
    assert np.array_equal(trace.experts, arrays["experts"][:, :49])


def test_windows_without_a_whole_token_are_dropped(tmp_path: Path) -> None:
    spool, _ = filled(tmp_path / "t.npz.partial")
    spool.begin_window("late")
    with (spool.path / "windows.jsonl").open("a") as file:
        file.write('{"start": 5')
    assert load_trace(spool.path).domains == ("code", "prose")


def test_the_error_for_a_missing_trace_points_at_the_spool(tmp_path: Path) -> None:
    filled(tmp_path / "t.npz.partial")
    with pytest.raises(UserError, match=r"no such trace file; an interrupted run left t\.npz\.partial"):
        load_trace(tmp_path / "t.npz")


def test_a_spool_without_a_token(tmp_path: Path) -> None:
    empty = Spool.create(tmp_path / "e.npz.partial", [0], {"experts": 2}, META)
    with pytest.raises(UserError, match="before its first token"):
        load_trace(empty.path)


def test_an_interrupted_assembly_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    spool, arrays = filled(tmp_path / "t.npz.partial")
    (tmp_path / "t.npz").write_bytes(b"old")
    monkeypatch.setattr("edgemoe.tracing.spool.os.fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        spool.assemble(tmp_path / "t.npz")
    assert (tmp_path / "t.npz").read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.npz", "t.npz.partial"]
    assert np.array_equal(load_trace(spool.path).experts, arrays["experts"])


def test_two_runs_never_share_a_spool(tmp_path: Path) -> None:
    """The name may be taken away from under a run: what it writes still goes nowhere else."""
    spool, _ = filled(tmp_path / "t.npz.partial")
    assert is_being_written(spool.path)
    with pytest.raises(UserError, match="another run is writing it"):
        prepare(tmp_path / "t.npz", True, [0], {"experts": 3}, META)
    spool.path.rename(tmp_path / "moved")
    with prepare(tmp_path / "t.npz", True, [1, 2, 5], {"experts": 3, "scores": 16}, META) as other:
        spool.append(np.zeros(4, np.int32), {"experts": [np.zeros((4, 3))] * 3, "scores": [np.zeros((4, 16))] * 3})
        assert other.n_tokens == 0 and spool.n_tokens == 54
    assert not is_being_written(other.path) and is_being_written(tmp_path / "moved")
    with spool:
        pass
    assert not is_being_written(tmp_path / "moved") and load_trace(tmp_path / "moved").n_tokens == 54


def test_a_spool_is_readable_while_it_grows(tmp_path: Path) -> None:
    spool, arrays = filled(tmp_path / "t.npz.partial")
    spool._append("experts.0.raw", np.zeros((9, 3), np.int16))
    assert np.array_equal(load_trace(spool.path).experts, arrays["experts"])


def test_a_failure_in_the_middle_of_the_archive_says_nothing_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """zipfile complains on stderr if an archive is dropped with an open member in it."""
    spool, _ = filled(tmp_path / "t.npz.partial")

    def pieces(*_: object) -> Iterator[np.ndarray]:
        yield np.zeros((10, 3), np.int16)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Spool, "pieces", pieces)
    with pytest.raises(OSError, match="Input/output error"):
        spool.assemble(tmp_path / "t.npz")
    gc.collect()
    assert capsys.readouterr().err == "" and sorted(path.name for path in tmp_path.iterdir()) == ["t.npz.partial"]


def test_assembling_needs_little_memory(tmp_path: Path) -> None:
    spool = Spool.create(tmp_path / "t.npz.partial", range(4), {"experts": 2, "scores": 256}, META)
    spool.begin_window("x")
    block = np.zeros((20000, 256), np.float32)
    spool.append(np.zeros(20000, np.int32), {"experts": [np.zeros((20000, 2), np.int16)] * 4, "scores": [block] * 4})
    del block
    tracemalloc.start()
    spool.assemble(tmp_path / "t.npz")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (tmp_path / "t.npz").stat().st_size > 80e6
    assert peak < 15e6
