"""Ctrl-C at each line of the engine in turn: position, logical cache and what was told are one moment's, and go on."""

import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the GPU tier needs torch (pip install edgemoe[gpu])")

from offload_engines import POLICIES, PROMPT, TINY, make

from edgemoe.generation import Options
from edgemoe.gpu_offload import engine as engine_module
from edgemoe.gpu_offload import target as target_module
from edgemoe.gpu_offload.engine import OffloadEngine
from edgemoe.model.synthetic import write_synthetic

FILES = {engine_module.__file__, target_module.__file__}
FIRST, SECOND = PROMPT[:8], PROMPT[8:12]
GREEDY = Options(temperature=0.0, ignore_eos=True)


class Listening:
    """Counts the tokens that it was told of."""

    count = 0

    def reset(self) -> None:
        self.count = 0

    def decoded(self, tokens: np.ndarray, rows: Mapping[str, np.ndarray]) -> None:
        self.count += len(tokens)


def interrupted(act: Callable[[], object], line: int) -> bool:
    """Whether `act` came to its so many-th line of the engine, where SIGINT was."""
    left = line

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if event == "line":
            left -= 1
            if left == -1:
                signal.raise_signal(signal.SIGINT)
        return trace if frame.f_code.co_filename in FILES else None

    before = sys.gettrace()
    try:
        sys.settrace(trace)
        act()
    except KeyboardInterrupt:
        assert left < 0
    finally:
        sys.settrace(before)
    return left < 0


def seen(engine: OffloadEngine) -> tuple[bytes, bytes]:
    """What is resident, and the logits after one more token."""
    engine.verify()
    return (engine.executor.slot_of() >= 0).tobytes(), engine.decode(3).tobytes()


ACTS: dict[str, tuple[Callable[[OffloadEngine], object], Callable[[OffloadEngine], object], set[int]]] = {
    "a token": (lambda engine: None, lambda engine: engine.decode(SECOND[0]), {8, 9}),
    "a chunk": (lambda engine: None, lambda engine: engine.prefill(SECOND), {8, 12}),
    "a block": (lambda engine: None, lambda engine: engine.extend(7, 4, GREEDY), {8, 12}),
    "into a block": (lambda engine: engine.extend(7, 4, GREEDY), lambda engine: engine.rewind(10), {8, 10, 12}),
    "into a prompt": (lambda engine: engine.prefill(SECOND), lambda engine: engine.rewind(9), {8, 12}),
    "a new sequence": (lambda engine: None, lambda engine: engine.reset(), {0, 8}),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_synthetic(tmp_path / "m.gguf", **{**TINY, "n_layers": 2})[0]


@pytest.mark.parametrize("name", ACTS)
def test_an_interrupt_at_any_line_leaves_one_moment(name: str, path: Path) -> None:
    prepare, act, positions = ACTS[name]
    told = Listening()
    with make(path, policy=POLICIES["psr"], chunk=8, observer=told) as engine:

        def begin(*steps: Callable[[OffloadEngine], object]) -> int:
            engine.reset()
            engine.prefill(FIRST)
            for step in steps:
                step(engine)
            return engine.position

        expected = {begin(*steps): seen(engine) for steps in ((), (prepare,), (prepare, act))}
        found, line = set(), 0
        while begin(prepare) and interrupted(lambda: act(engine), line):
            position, line = engine.position, line + 1
            found.add(position)
            assert "block" in name or told.count == (12 if name == "into a prompt" else position)
            assert seen(engine) == expected[position], line
    assert found == positions and line > 8


def test_a_chunk_is_not_computed_to_its_end_first(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make(path) as engine:
        computed, experts = [], engine.executor._union  # type: ignore[attr-defined]

        def union(layer: int, *arguments: object) -> object:
            computed.append(layer)
            signal.raise_signal(signal.SIGINT)
            return experts(layer, *arguments)

        monkeypatch.setattr(engine.executor, "_union", union)
        with pytest.raises(KeyboardInterrupt):
            engine.prefill(FIRST)
        assert computed == [0] and engine.position == 0
