"""What must not become a wrong token: disks that fail, files that change, interrupts, models that do not fit."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from interrupting import interrupt_while_reading

from edgemoe.demo import demo_model
from edgemoe.errors import UserError
from edgemoe.model import read_model
from edgemoe.model.synthetic import write_synthetic
from edgemoe.policy import preset
from edgemoe.streaming.budget import RUNTIME_BYTES
from edgemoe.streaming.engine import StreamingEngine
from edgemoe.units import Residency, parse_bytes

TEXT = Path(__file__).read_bytes()[:1200]
SMALL = {"residency": Residency.parse("5"), "n_ctx": 128, "n_threads": 1, "chunk": 16}


def test_a_truncated_file_ends_the_decode_and_only_that(tmp_path):
    [path] = write_synthetic(tmp_path / "m.gguf", d_expert=128)
    whole = path.read_bytes()
    with StreamingEngine(path, **SMALL) as engine:
        tokens = engine.tokenize(TEXT)[:20]
        engine.prefill(tokens[:10])
        os.truncate(path, len(whole) // 3)
        with pytest.raises(UserError, match="changed while it was in use"):
            engine.prefill(tokens[10:])
        assert engine.position == 10


def test_a_read_that_fails_is_undone(tmp_path):
    """The descriptor is swapped for one that gives nothing, and back: the engine goes on as if nothing had been."""
    [path] = write_synthetic(tmp_path / "m.gguf", d_expert=128)
    with StreamingEngine(path, **SMALL) as engine, StreamingEngine(path, **SMALL) as other:
        tokens = engine.tokenize(TEXT)[:40]
        engine.prefill(tokens[:20])
        fd = engine._store._files[0][0]
        kept, empty = os.dup(fd), os.open(os.devnull, os.O_RDONLY)
        os.dup2(empty, fd)
        with pytest.raises(UserError, match=r"m\.gguf: expert \d+ of layer \d cannot be read \(the file ends there\)"):
            engine.prefill(tokens[20:])
        assert engine.position == 20
        os.dup2(kept, fd)
        os.close(kept)
        os.close(empty)
        found = engine.prefill(tokens[20:])
        other.prefill(tokens[:20])
        assert np.array_equal(found, other.prefill(tokens[20:]))
        assert engine.stats().tokens == other.stats().tokens == 40


@pytest.mark.parametrize("policy", ["exact-lru", "psr"])
def test_an_interrupt_takes_the_token_back(policy):
    options = {"residency": Residency.parse("16"), "n_ctx": 128, "n_threads": 1, "chunk": 32, "policy": preset(policy)}
    with StreamingEngine(demo_model(), readers=1, **options) as engine:
        tokens = engine.tokenize(TEXT)[:60]
        engine.prefill(tokens[:20])
        before = replace(engine.stats(), ram_bytes=0)
        with interrupt_while_reading(engine._store, begun=3), pytest.raises(KeyboardInterrupt):
            engine.prefill(tokens[20:])
        assert engine.position == 20
        assert replace(engine.stats(), ram_bytes=0) == before, "what did not happen is not counted, nor its time"
        found = engine.prefill(tokens[20:])
    with StreamingEngine(demo_model(), **options) as engine:
        engine.prefill(tokens[:20])
        assert np.array_equal(found, engine.prefill(tokens[20:]))


def test_two_engines_at_once_do_not_disturb_each_other(tmp_path):
    [path] = write_synthetic(tmp_path / "m.gguf")
    with StreamingEngine(path, **SMALL) as alone:
        tokens = alone.tokenize(TEXT)[:60]
        expected = alone.prefill(tokens)
    with StreamingEngine(path, **SMALL) as one, StreamingEngine(path, **SMALL) as two:
        for at in range(0, 60, 20):
            last = one.prefill(tokens[at : at + 20]), two.prefill(tokens[at : at + 20])
        assert np.array_equal(last[0], last[1])
    assert expected.shape == last[0].shape


def test_a_context_that_overflows_is_refused_before_anything_is_decoded(tmp_path):
    [path] = write_synthetic(tmp_path / "m.gguf")
    with StreamingEngine(path, **SMALL) as engine:
        tokens = engine.tokenize(TEXT)[:100]
        engine.prefill(tokens)
        with pytest.raises(UserError, match="100 tokens after 100 do not fit into a context of"):
            engine.prefill(tokens)
        assert engine.position == 100


def test_models_that_cannot_be_streamed_are_refused(tmp_path):
    [dense] = write_synthetic(tmp_path / "d.gguf", arch="llama")
    with pytest.raises(UserError, match="a dense model, without experts to stream"):
        StreamingEngine(dense, **SMALL)
    [moe] = write_synthetic(tmp_path / "m.gguf")
    with pytest.raises(UserError, match="gate elision cannot be done"):
        StreamingEngine(moe, policy=preset("exact-lru", elide=0.1), **SMALL)
    with pytest.raises(UserError, match="needs as many slots"):
        StreamingEngine(moe, policy=preset("psr"), **SMALL)
    for more, what in (
        ({"kv_type": "f8"}, "KV type 'f8'"),
        ({"chunk": 0}, "a chunk of 0"),
        ({"readers": 0}, "0 readers"),
    ):
        with pytest.raises(UserError, match=what):
            StreamingEngine(moe, **{**SMALL, **more})


def test_a_budget_below_the_minimum_is_refused_with_the_minimum(tmp_path):
    [path] = write_synthetic(tmp_path / "m.gguf")
    with pytest.raises(UserError, match=r"100 MB of RAM are too little: .* need \d+ MB: give at least that") as refusal:
        StreamingEngine(path, ram=100_000_000, n_ctx=128, chunk=16)
    least = parse_bytes(str(refusal.value).split(" need ")[1].split(":")[0])
    assert RUNTIME_BYTES < least < RUNTIME_BYTES + 50_000_000
    with StreamingEngine(path, ram=least + 500_000, n_ctx=128, n_threads=1, chunk=16) as engine:
        assert engine.capacity >= 4 and engine.budget.total <= least + 500_000
    with StreamingEngine(path, ram=10 * least, n_ctx=128, n_threads=1, chunk=16) as engine:
        assert engine.capacity == 16


PROMISE = """
import sys
from edgemoe.streaming.engine import StreamingEngine
from edgemoe.streaming.memory import held_bytes
from edgemoe.policy import preset
ram = int(sys.argv[2])
with StreamingEngine(sys.argv[1], ram=ram, policy=preset(sys.argv[3]), n_ctx=512, n_threads=1, chunk=32) as engine:
    held = [held_bytes()]
    logits = engine.prefill(list(range(40, 140)))
    held.append(held_bytes())
    for _ in range(12):
        logits = engine.decode(int(logits.argmax()))
        held.append(held_bytes())
    print(engine.capacity, max(held), engine.stats().demand_bytes)
"""


PROMISE_OF_MANY = """
import sys
from edgemoe.streaming.streams import Streams
from edgemoe.streaming.memory import held_bytes
from edgemoe.policy import preset
options = {"policy": preset(sys.argv[3]), "n_ctx": 256, "n_threads": 1, "chunk": 32}
with Streams(sys.argv[1], 6, ram=int(sys.argv[2]), **options) as streams:
    held = [held_bytes()]
    texts = []
    for i in range(6):
        texts.append(streams.join(list(range(40 + 90 * i, 100 + 90 * i))))
        held.append(held_bytes())
    for _ in range(6):
        streams.step({text: int(text.logits.argmax()) for text in texts})
        held.append(held_bytes())
    print(streams.capacity, max(held), streams.stats().demand_bytes)
"""


@pytest.fixture(scope="module")
def gigabyte(tmp_path_factory):
    """A model of 1 GB: 8 layers of 32 experts of 3.8 MB, and dense weights of 45 MB."""
    shape = {"n_layers": 8, "n_experts": 32, "top_k": 4, "d_model": 1024, "d_expert": 1152, "n_vocab": 8192}
    [path] = write_synthetic(tmp_path_factory.mktemp("big") / "m.gguf", expert_type="Q8_0", dense_type="Q8_0", **shape)
    assert path.stat().st_size > 950_000_000
    yield path
    path.unlink()


@pytest.mark.parametrize(
    ("ram", "policy", "program"),
    [
        (600_000_000, "exact-lru", PROMISE),
        (750_000_000, "psr-gated", PROMISE),
        (750_000_000, "psr-gated", PROMISE_OF_MANY),
    ],
    ids=["exact-lru", "psr-gated", "many streams"],
)
def test_ram_is_a_promise(gigabyte, ram, policy, program):
    run = [sys.executable, "-c", program, str(gigabyte), str(ram), policy]
    out = subprocess.run(run, capture_output=True, text=True, timeout=300, check=True).stdout
    capacity, held, read = map(int, out.split())
    model = read_model(gigabyte)
    assert 4 <= capacity < 32 and read > 32 * model.geometry.expert_bytes[0]
    assert capacity * model.geometry.slot_bytes < held <= 1.05 * ram
    assert held > 0.45 * ram, "what a compiling start and a chunk need at times is kept free, but not more"
