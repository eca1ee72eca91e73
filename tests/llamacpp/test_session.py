"""Sessions: what they refuse, and that an interrupt leaves them fit for use."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgemoe.errors import UserError
from edgemoe.llamacpp.graph import Gate, find_routers
from edgemoe.llamacpp.hub import Hub
from edgemoe.llamacpp.session import Session
from edgemoe.model.synthetic import write_synthetic


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_synthetic(tmp_path_factory.mktemp("session") / "m.gguf", n_layers=8, d_model=128, add_bos=True)[0]


TOKENS = np.random.default_rng(1).integers(0, 500, 512).astype(np.int32)


def test_tokens_are_plain_text(path: Path) -> None:
    with Session(path) as session:
        assert session.bos is not None
        tokens = session.tokenize(b"some plain text")
        assert session.bos not in tokens and tokens.dtype == np.int32
        assert len(session.tokenize(b"")) == 0


def test_a_decode_leaves_logits_of_every_row_and_clear_forgets(path: Path) -> None:
    with Session(path, n_threads=1) as session:
        session.decode(TOKENS[:20])
        first = session.logits(20)
        assert first.shape == (20, session.n_vocab) and np.isfinite(first).all()
        session.decode(TOKENS[:20], 20)
        assert not np.allclose(session.logits(20), first, atol=1e-4)
        session.clear()
        session.decode(TOKENS[:20])
        assert np.array_equal(session.logits(20), first)


@pytest.fixture
def sigint_raises() -> Iterator[None]:
    """Also where the test run is in the background of a shell, which ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_stops_the_graph_and_the_session_survives(path: Path, sigint_raises: None) -> None:
    with Session(path, n_threads=1, hub=Hub()) as session:
        start = time.monotonic()
        session.decode(TOKENS)
        whole = time.monotonic() - start
        expected = session.logits(512)
        timer = threading.Timer(whole / 4, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        interrupted = False
        try:
            for _ in range(100):
                session.clear()
                session.decode(TOKENS)
        except KeyboardInterrupt:
            interrupted = True
        timer.join()
        assert interrupted
        session.clear()
        session.decode(TOKENS)
        assert np.array_equal(session.logits(512), expected)


def test_an_interrupt_ends_a_call_into_llama_cpp_before_it_is_raised(path: Path, sigint_raises: None) -> None:
    """Loading is such a call: its progress callback sees the interrupt, and nothing is freed while it runs."""
    with Session(path, n_threads=1) as session:
        seen: list[bool] = []

        def loads() -> None:
            for tick in range(30_000):
                if tick % 500 == 0:  # again: Python misses one that comes just as its main thread begins to wait
                    os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.01)
                if session._interrupted:
                    break
            seen.append(session._interrupted)

        with pytest.raises(KeyboardInterrupt):
            session._call(loads)
        assert seen == [True]
        session.decode(TOKENS[:4])


def test_a_model_that_does_not_load_gives_llama_cpp_s_reason(path: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(UserError) as caught:
        Session(broken)
    assert str(broken) in str(caught.value) and "\n" not in str(caught.value)
    assert "no reason" not in str(caught.value)


def test_gpu_layers_without_a_gpu_build_are_refused(path: Path) -> None:
    from edgemoe.llamacpp.libraries import llama

    if llama().llama_supports_gpu_offload():
        pytest.skip("this build has GPU support")
    with pytest.raises(UserError, match="no GPU support"):
        Session(path, n_gpu_layers=1)


@pytest.mark.parametrize(
    ("shape", "steps", "masked"),
    [
        ({"arch": "olmoe"}, (), False),
        ({"arch": "deepseek2", "leading_dense": 2}, ("SIGMOID", "ADD"), False),
        ({"arch": "deepseek2", "selection_bias": False}, ("SIGMOID",), False),
        ({"arch": "deepseek2", "gating": "softmax", "selection_bias": True}, ("SOFT_MAX", "ADD"), False),
        (
            {
                "arch": "deepseek2",
                "gating": "softmax",
                "selection_bias": False,
                "expert_groups": 4,
                "expert_groups_used": 2,
            },
            (),
            True,
        ),
    ],
)
def test_routers_are_found_in_the_graph(tmp_path: Path, shape: dict, steps: tuple, masked: bool) -> None:
    [path] = write_synthetic(tmp_path / "m.gguf", n_layers=4, n_experts=16, top_k=3, **shape)
    hub = Hub()
    with Session(path, n_threads=1, hub=hub) as session:
        with hub.survey():
            session.decode(TOKENS[:2])
        routers = find_routers(hub.nodes())
    dense = shape.get("leading_dense", 0)
    assert list(routers) == list(range(dense, 4))
    for layer, router in routers.items():
        assert (router.n_experts, router.top_k) == (16, 3)
        assert isinstance(router.gate, Gate)
        assert router.gate.weight == f"blk.{layer}.ffn_gate_inp.weight"
        assert tuple(name for name, _ in router.gate.steps) == steps
        assert (router.mask is not None) == masked


def test_a_dense_graph_has_no_routers(tmp_path: Path) -> None:
    [path] = write_synthetic(tmp_path / "dense.gguf", "llama")
    hub = Hub()
    with Session(path, n_threads=1, hub=hub) as session:
        with hub.survey():
            session.decode(TOKENS[:2])
        assert hub.nodes() and not find_routers(hub.nodes())


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        ({"n_ctx": 4294967298}, "a context of 4294967298 tokens: expected 1 to 1048576"),
        ({"n_ctx": 0}, "a context of 0 tokens"),
        ({"n_threads": 100_000}, "100000 threads: expected 1 to 512"),
        ({"n_threads": -1}, "-1 threads"),
    ],
)
def test_numbers_that_would_stop_the_process_are_refused(path: Path, limits: dict[str, int], says: str) -> None:
    with pytest.raises(UserError, match=says):
        Session(path, **limits)


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupt_around_the_handing_over_frees_nothing_that_runs(
    path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Ctrl-C between submitting a call and knowing that it was submitted: `close` must not free its context."""
    begun, ended = threading.Event(), threading.Event()
    late: list[Any] = []

    def runs() -> None:
        begun.set()
        time.sleep(0.2)
        ended.set()

    class Submits:
        def submit(self, call: Any) -> Any:
            if when == "after":
                threading.Thread(target=call).start()
                assert begun.wait(300)
            else:
                late.append(call)
            raise KeyboardInterrupt

    session = Session(path, n_threads=1)
    monkeypatch.setattr("edgemoe.llamacpp.session.decoder", Submits)
    with pytest.raises(KeyboardInterrupt):
        session._call(runs)
    session.close()
    if when == "after":
        assert ended.is_set(), "close has waited for the call"
    else:
        late[0]()
        assert not begun.is_set(), "a call that was given up before it began never begins"
