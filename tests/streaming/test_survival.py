"""Machines and moments that streaming must survive: no O_DIRECT, no address space, a kill, a disk that lies."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgemoe.errors import UserError
from edgemoe.machine.page_cache import make_cold, resident_share
from edgemoe.model.synthetic import write_synthetic
from edgemoe.policy import preset
from edgemoe.streaming import store
from edgemoe.streaming.engine import StreamingEngine
from edgemoe.units import Residency

TOKENS = list(range(3, 43))
SMALL = {"residency": Residency.parse("5"), "n_ctx": 128, "n_threads": 1, "chunk": 16}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    [path] = write_synthetic(tmp_path_factory.mktemp("survival") / "m.gguf", d_expert=256, d_model=256)
    return path


def test_without_o_direct_the_same_is_read_and_the_page_cache_is_left_as_it_was(path, monkeypatch):
    with StreamingEngine(path, **SMALL) as engine:
        expected = engine.prefill(TOKENS)
    monkeypatch.setattr(store, "open_direct", lambda *_: None)
    left = []
    with path.open("rb") as file:
        os.fsync(file.fileno())
        while len(left) < 5 and min(left, default=1.0) >= 0.3:
            cold = make_cold(file.fileno(), 0.01)
            with StreamingEngine(path, **SMALL) as engine:
                assert not engine.direct
                assert np.array_equal(engine.prefill(TOKENS), expected)
                left.append(resident_share(file.fileno()))
    if cold is None or cold > 0.01:
        pytest.skip("the page cache does not let go of this file system's pages (tmpfs?): only the bytes were compared")
    # On a busy machine the kernel may still be reading ahead when a page is given back, which then stays.
    assert min(left) < 0.3, "what reads bring into the page cache is dropped"


def test_a_disk_that_lies_is_caught_and_no_token_comes_of_it(path, tmp_path):
    """Another model's bytes under the same descriptor: finite logits, plausible text, unless reads are verified."""
    [other] = write_synthetic(tmp_path / "other.gguf", d_expert=256, d_model=256, seed=1)
    with StreamingEngine(path, verify_reads=True, **SMALL) as engine:
        engine.prefill(TOKENS[:8])
        direct = engine._store._files[0][0]
        kept, wrong = os.dup(direct), os.open(other, os.O_RDONLY)
        os.dup2(wrong, direct)
        with pytest.raises(UserError, match=r"expert \d+ of layer \d reads differently the second time"):
            engine.prefill(TOKENS[8:])
        assert engine.position == 8
        os.dup2(kept, direct)
        os.close(kept)
        os.close(wrong)
        found = engine.prefill(TOKENS[8:])
    with StreamingEngine(path, **SMALL) as engine:
        engine.prefill(TOKENS[:8])
        assert np.array_equal(found, engine.prefill(TOKENS[8:]))


def test_a_file_that_was_cut_between_loads_is_refused(path, tmp_path):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(UserError) as refusal:
        StreamingEngine(cut, **SMALL)
    assert str(cut) in str(refusal.value) and "\n" not in str(refusal.value)


LIMITED = """
import resource, sys
from edgemoe.streaming.store import ExpertStore
from edgemoe.model import read_model
from edgemoe.errors import UserError
model = read_model(sys.argv[1])
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 20), resource.RLIM_INFINITY))
try:
    ExpertStore(model)
except UserError as error:
    print(error)
"""


def test_too_little_address_space_is_one_line(path):
    run = [sys.executable, "-c", LIMITED, str(path)]
    out = subprocess.run(run, capture_output=True, text=True, timeout=300, check=True).stdout
    assert out.startswith("no address space for") and "ulimit -v" in out and out.count("\n") == 1


LOADED = """
import resource, sys
from edgemoe.streaming.engine import StreamingEngine
from edgemoe.errors import UserError
from edgemoe.units import Residency
StreamingEngine(sys.argv[1], residency=Residency.parse("5"), n_ctx=128, n_threads=1, chunk=16, readers=1).close()
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
for more in (2 << 30, 160 << 20):
    resource.setrlimit(resource.RLIMIT_AS, (used + more, resource.RLIM_INFINITY))
    try:
        with StreamingEngine(sys.argv[1], residency=Residency.parse("5"), n_ctx=128, n_threads=1, chunk=16,
                             readers=1) as engine:
            engine.prefill(list(range(3, 43)))
            print("loaded")
    except UserError as error:
        print(error)
"""


def test_address_space_that_does_not_suffice_for_llama_cpp_is_one_line(path):
    """llama.cpp would end the process: it is not asked."""
    out = subprocess.run([sys.executable, "-c", LOADED, str(path)], capture_output=True, text=True, timeout=300)
    assert out.returncode == 0, out.stderr
    first, second = out.stdout.splitlines()
    assert first == "loaded" and "no address space" in second and "ulimit -v" in second


KILLED = """
import sys
from edgemoe.streaming.engine import StreamingEngine
from edgemoe.units import Residency
engine = StreamingEngine(sys.argv[1], residency=Residency.parse("5"), n_ctx=128, n_threads=1, chunk=16,
                         read_delay=0.002)
print("loaded", flush=True)
while True:
    engine.reset()
    engine.prefill(list(range(3, 43)))
"""


def test_a_kill_leaves_nothing_behind(path, tmp_path):
    places = [path.parent, tmp_path, Path("/dev/shm")]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    before = [sorted(p.name for p in place.iterdir() if "edgemoe" in p.name or place != places[2]) for place in places]
    run = [sys.executable, "-c", KILLED, str(path)]
    with subprocess.Popen(run, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=environment) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "loaded\n"
            time.sleep(0.2)
        finally:
            process.send_signal(signal.SIGKILL)
        assert process.wait(300) == -signal.SIGKILL
    after = [sorted(p.name for p in place.iterdir() if "edgemoe" in p.name or place != places[2]) for place in places]
    assert after == before


LOADING = """
import sys
from edgemoe.streaming.engine import StreamingEngine
from edgemoe.units import Residency
def hang(_):
    print("loading", flush=True)
    sys.stdin.read()
StreamingEngine(sys.argv[1], residency=Residency.parse("5"), n_ctx=128, n_threads=1, chunk=16, advance=hang)
"""


def test_a_kill_while_loading_leaves_nothing_behind(path, tmp_path):
    run = [sys.executable, "-c", LOADING, str(path)]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    before = sorted(path.parent.iterdir())
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(run, text=True, cwd=tmp_path, env=environment, **pipes) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "loading\n"
        finally:
            process.send_signal(signal.SIGKILL)
        assert process.wait(300) == -signal.SIGKILL
    assert not [at for at in tmp_path.iterdir() if at.is_file()] and sorted(path.parent.iterdir()) == before


READS = """
import sys
from edgemoe.streaming.engine import StreamingEngine
from edgemoe.units import Residency
with StreamingEngine(sys.argv[1], residency=Residency.parse("5"), n_ctx=128, n_threads=1, chunk=16,
                     verify_reads=True) as engine:
    print("loaded", flush=True)
    sys.stdin.readline()
    for _ in range(5):
        engine.reset()
        logits = engine.prefill(list(range(3, 43)))
    print(logits.tobytes().hex())
"""


def test_two_processes_read_one_file_at_once(path):
    with StreamingEngine(path, **SMALL) as engine:
        expected = engine.prefill(TOKENS)
    run = [sys.executable, "-c", READS, str(path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    both = [subprocess.Popen(run, text=True, **pipes) for _ in range(2)]
    try:
        assert [process.stdout.readline() for process in both] == ["loaded\n"] * 2
        for process in both:
            process.stdin.write("go\n")
            process.stdin.flush()
        said = [process.communicate(timeout=300)[0] for process in both]
    finally:
        for process in both:
            process.kill()
            process.wait()
    for text in said:
        assert np.array_equal(np.frombuffer(bytes.fromhex(text), np.float32), expected)


@pytest.mark.parametrize("lacks", ["pre-gate", "scores"])
def test_a_router_that_cannot_be_read_runs_exactly_and_says_so_otherwise(path, monkeypatch, lacks):
    from edgemoe.streaming import tier

    found = tier.find_routers

    def fewer(nodes):
        change = {"gate" if lacks == "pre-gate" else "scores": "for a test"}
        return {layer: replace(router, **change) for layer, router in found(nodes).items()}

    with StreamingEngine(path, **SMALL) as engine:
        expected = engine.prefill(TOKENS)
    monkeypatch.setattr(tier, "find_routers", fewer)
    what = "no pre-gate can be formed" if lacks == "pre-gate" else "ranks no scores that could be steered"
    with pytest.raises(UserError, match=f"{what} .*for a test.*exact-lru") as refusal:
        StreamingEngine(path, policy=preset("psr", window=4), **SMALL)
    assert "\n" not in str(refusal.value)
    with StreamingEngine(path, **SMALL) as engine:
        assert np.array_equal(engine.prefill(TOKENS), expected)


def test_a_graph_with_experts_of_another_name_is_refused(path, monkeypatch):
    from edgemoe.streaming.store import ExpertStore

    lay_out = ExpertStore._lay_out

    def forgetful(self, *more):
        lay_out(self, *more)
        self.addresses.pop(next(iter(self.addresses)))

    monkeypatch.setattr(ExpertStore, "_lay_out", forgetful)
    with pytest.raises(UserError, match=r"multiplies by .*exps.*no tensor of experts .* without --ram and --residency"):
        StreamingEngine(path, **SMALL)
