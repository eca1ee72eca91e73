"""The observer of an engine: what it holds goes to the spool whole, whatever interrupts it."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from edgemoe.model import read_model
from edgemoe.model.synthetic import write_synthetic
from edgemoe.tracing import load_trace
from edgemoe.tracing.interrupts import interrupts_deferred
from edgemoe.tracing.live import HELD, LiveTrace


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("live") / "moe.gguf"
    write_synthetic(path)
    return path


def live(model: Path, out: Path, steered: bool = False) -> LiveTrace:
    made = LiveTrace(read_model(model), out)
    made.about(description="a model", bos=1, steered=steered, run={"policy": "exact"})
    return made


def rows(count: int, seed: int = 0) -> dict[str, np.ndarray]:
    scores = np.random.default_rng(seed).standard_normal((4, count, 16)).astype(np.float32)
    return {"scores": scores, "executed": np.argsort(-scores, axis=2)[:, :, :4].astype(np.int32)}


def test_what_is_held_is_little_and_all_of_it_is_written(model: Path, tmp_path: Path) -> None:
    trace, count = live(model, tmp_path / "t.npz"), 3 * HELD + 5
    all_rows = rows(count)
    for t in range(count):
        trace.decoded(np.array([t], np.int32), {name: values[:, t : t + 1] for name, values in all_rows.items()})
        assert len(trace._held) < HELD
    assert trace.finish(partial=False) == count
    found = load_trace(tmp_path / "t.npz")
    assert np.array_equal(found.experts, all_rows["executed"]) and np.array_equal(found.scores, all_rows["scores"])
    assert found.executed is None and not (tmp_path / "t.npz.partial").exists()


def test_of_a_steered_run_the_routers_own_choice_is_kept_too(model: Path, tmp_path: Path) -> None:
    trace, found = live(model, tmp_path / "t.npz", steered=True), rows(20)
    own = found["executed"]
    trace.decoded(np.arange(20, dtype=np.int32), {**found, "executed": own[:, :, ::-1].copy()})
    assert trace.finish(partial=True) == 20
    read = load_trace(tmp_path / "t.npz")
    assert np.array_equal(read.experts, own) and np.array_equal(read.executed, own[:, :, ::-1])
    assert read.meta["partial"] is True and read.meta["run"] == {"policy": "exact"}
    assert read.only("run").executed is not None


def test_nothing_decoded_is_no_file(model: Path, tmp_path: Path) -> None:
    assert live(model, tmp_path / "t.npz").finish(partial=True) == 0
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_waits_until_the_work_is_done() -> None:
    done, before = [], signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), interrupts_deferred():
        os.kill(os.getpid(), signal.SIGINT)
        done.append(True)
    assert done and signal.getsignal(signal.SIGINT) is before
