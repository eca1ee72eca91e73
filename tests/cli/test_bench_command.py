"""`edgemoe bench ssd`: what it refuses, before anything is written."""

import sys
from pathlib import Path

import numpy as np
import pytest

from edgemoe.cli import main
from edgemoe.tracing import Trace
from edgemoe.tracing.tracefile import save_trace


@pytest.fixture
def refused(monkeypatch, capsys, tmp_path):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["edgemoe", "bench", "ssd", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            main()
        assert stopped.value.code == 2
        assert not list(tmp_path.glob("*.gguf"))
        return capsys.readouterr().err

    return run


def short_trace(path: Path, tokens: int = 40) -> Path:
    experts = np.tile(np.array([0, 1], np.int16), (2, tokens, 1))
    save_trace(Trace(experts, 8, np.arange(2, dtype=np.int32), np.zeros(1, np.int64), ("a",), "short"), path)
    return path


def test_what_it_refuses(refused, tmp_path):
    trace = short_trace(tmp_path / "short.npz")
    assert "no such directory" in refused("--dir", tmp_path / "none", "--trace", trace, "--streams", "1")
    assert "32 streams need" in refused("--dir", tmp_path, "--trace", trace)
    assert "expected 16.0 MB" in refused("--dir", tmp_path, "--trace", trace, "--size", "1MB")
    assert "lower --ram or --size" in refused("--dir", tmp_path, "--trace", trace, "--streams", "1", "--ram", "900TB")
    few = refused("--dir", tmp_path, "--trace", trace, "--streams", "1", "--ram", "100MB")
    assert few.count("\n") == 1 and "100 MB of memory are too little for random ×1 speculative" in few
    least = int(few.split("give --ram ")[1].split("MB")[0])
    almost = refused("--dir", tmp_path, "--trace", trace, "--streams", "1", "--ram", f"{least - 2}MB")
    assert f"give --ram {least}MB" in almost
    many = short_trace(tmp_path / "many.npz", 600)
    few = refused("--dir", tmp_path, "--trace", many, "--ram", f"{least}MB")
    assert "recorded ×32" in few and "or fewer --streams" in few
    assert "so there is no disk to measure" in refused("--dir", "/dev/shm", "--trace", trace)
    assert "no such directory" in refused("--dir", tmp_path / "none")  # and the demo model is not traced before
    assert "--streams 0: expected" in refused("--dir", tmp_path, "--trace", trace, "--streams", "0")
    assert "at most 256" in refused("--dir", tmp_path, "--trace", trace, "--streams", "300")
    assert "missing.npz" in refused("--dir", tmp_path, "--trace", tmp_path / "missing.npz")
