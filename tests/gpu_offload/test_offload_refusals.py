"""RAM that the system refuses, while loading or midway, is one line; other errors are not taken for it."""

import subprocess
import sys
import weakref

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU tier needs torch (pip install edgemoe[gpu])")

from offload_engines import PROMPT, TINY, make  # noqa: E402

from edgemoe.demo import demo_model  # noqa: E402
from edgemoe.errors import UserError  # noqa: E402
from edgemoe.gpu_offload import cpu, refusals  # noqa: E402
from edgemoe.gpu_offload import engine as engine_module  # noqa: E402
from edgemoe.gpu_offload.target import find_target  # noqa: E402
from edgemoe.model.synthetic import write_synthetic  # noqa: E402

BEYOND = 1 << 50  # bytes that no address space has


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_synthetic(tmp_path_factory.mktemp("tiny") / "tiny.gguf", **TINY, add_bos=True)[0]


def no_thread():
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize(
    ("allocate", "says"),
    [
        (lambda: torch.empty(BEYOND, dtype=torch.uint8), "1126 TB more of RAM are refused"),
        (lambda: np.empty(BEYOND, np.uint8), r"1\.00 PiB more of RAM are refused"),
        (no_thread, "RAM for another thread is refused"),
    ],
    ids=["torch", "numpy", "thread"],
)
def test_each_library_s_refusal_is_a_line(allocate, says):
    with pytest.raises(UserError, match=says) as refusal, find_target("cpu").use():
        allocate()
    assert "--residency" in str(refusal.value) and "\n" not in str(refusal.value)
    assert refusal.value.__suppress_context__


@pytest.mark.parametrize("error", [RuntimeError("shapes cannot be multiplied"), ValueError("allocate 3 bytes")])
def test_other_errors_go_through(error):
    with pytest.raises(type(error)) as caught, find_target("cpu").use():
        raise error
    assert caught.value is error


def test_what_is_free_or_the_limit_is_said(monkeypatch):
    monkeypatch.setattr(refusals, "limit", lambda name: None)
    assert "are free): close other programs, or" in str(refusals.ram_full(MemoryError()))
    monkeypatch.setattr(refusals, "limit", lambda name: 1_500_000_000)
    assert "(`ulimit -v` allows 1.50 GB in all): raise that limit, or" in str(refusals.ram_full(MemoryError()))


def test_a_refusal_while_opening_leaves_nothing(tiny, monkeypatch):
    loaded, load = [], engine_module.load_weights

    def remembered(*arguments, **more):
        weights = load(*arguments, **more)
        loaded.append(weakref.ref(weights.arena))
        return weights

    monkeypatch.setattr(engine_module, "load_weights", remembered)
    monkeypatch.setattr(cpu, "rotations", lambda *_: torch.zeros(BEYOND))
    with pytest.raises(UserError, match="more of RAM are refused"):
        make(tiny)
    assert len(loaded) == 1 and loaded[0]() is None


def test_a_refusal_midway_takes_the_step_back(tiny, monkeypatch):
    with make(tiny) as engine:
        engine.prefill(PROMPT[:24])
        with monkeypatch.context() as full:
            full.setattr(cpu.F, "scaled_dot_product_attention", lambda *_, **__: torch.zeros(BEYOND))
            with pytest.raises(UserError, match="more of RAM are refused"):
                engine.prefill(PROMPT[24:48])
        assert engine.position == 24
        found = engine.prefill(PROMPT[24:48])
        engine.reset()
        engine.prefill(PROMPT[:24])
        assert np.array_equal(found, engine.prefill(PROMPT[24:48]))


LIMITED = """
import resource, sys
from edgemoe.errors import UserError
from edgemoe.generation import load
settings = {"device": "cpu", "residency": "50%", "n_threads": 1}
load(sys.argv[1], n_ctx=64, **settings).close()
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
for more in (400 << 20, 8 << 30):
    resource.setrlimit(resource.RLIMIT_AS, (used + more, resource.RLIM_INFINITY))
    try:
        with load(sys.argv[1], n_ctx=50_000, **settings) as writer:
            writer.engine.prefill([1, 2, 3])
            print("loaded")
    except UserError as error:
        print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of address space are Linux's")
def test_a_limit_of_the_system_is_a_line():
    run = [sys.executable, "-c", LIMITED, str(demo_model())]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert "refused (`ulimit -v` allows" in first and second == "loaded"
