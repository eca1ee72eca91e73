"""Exact policies: streaming gives the bits that the same llama.cpp gives with the whole model in RAM."""

from pathlib import Path

import numpy as np
import pytest

from edgemoe.demo import demo_model
from edgemoe.llamacpp.resident import ResidentEngine
from edgemoe.model.synthetic import write_synthetic
from edgemoe.policy import preset
from edgemoe.streaming.engine import StreamingEngine
from edgemoe.units import Residency

TEXT = Path(__file__).read_bytes()[:1500]
ARCHITECTURES = {
    "olmoe": {},
    "qwen3moe": {"arch": "qwen3moe"},
    "gpt-oss": {"arch": "gpt-oss"},
    "deepseek2": {"arch": "deepseek2", "leading_dense": 1, "expert_groups": 4, "expert_groups_used": 2},
    "merged": {"arch": "deepseek2", "merged_gate_up": True, "gating": "softmax"},
    "shards": {"shards": 3},
}
TYPES = "F16 BF16 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS MXFP4".split()  # noqa: SIM905
CASES = {
    **ARCHITECTURES,
    **{kind: {"expert_type": kind, "d_model": 256, "d_expert": 256, "n_layers": 2} for kind in TYPES},
}


def run(engine, tokens, steps):
    """Logits of a prompt and of greedy steps after it."""
    out = [engine.prefill(tokens)]
    for _ in range(steps):
        out.append(engine.decode(int(out[-1].argmax())))
    return np.stack(out)


def both(path, steps=12, n_tokens=70, chunk=32, slots="6", policy="exact-lru", **more):
    with ResidentEngine(path, n_ctx=256, n_threads=1, n_ubatch=chunk, all_rows=True, repack=False) as engine:
        tokens = engine.tokenize(TEXT)[:n_tokens]
        expected = run(engine, tokens, steps)
    options = {"n_ctx": 256, "n_threads": 1, "chunk": chunk, "verify_reads": True, "readers": 3}
    residency = Residency.parse(slots)
    with StreamingEngine(path, policy=preset(policy), residency=residency, **{**options, **more}) as engine:
        found = run(engine, tokens, steps)
        return expected, found, engine.stats()


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_resident_model(tmp_path, case):
    path = write_synthetic(tmp_path / "m.gguf", **CASES[case])[0]
    expected, found, stats = both(path)
    assert np.array_equal(expected, found) and np.ptp(found, axis=1).min() > 0
    assert stats.tokens == 82 and stats.demand_reads > 100
    assert stats.loads - stats.hits > 0


@pytest.mark.parametrize("policy", ["exact-lru", "exact-score", "exact-prefetch"])
@pytest.mark.parametrize("slots", ["8", "50%", "64"])
def test_demo_model_whatever_the_cache_does(policy, slots):
    expected, found, stats = both(demo_model(), policy=policy, slots=slots, steps=30)
    assert np.array_equal(expected, found)
    assert stats.loads == 8 * 8 * 100
    if slots == "64":
        assert stats.hits == stats.loads and stats.demand_reads + stats.prefetch_reads <= 8 * 64
    elif policy == "exact-prefetch":
        assert stats.prefetch_reads > 0


def test_a_second_sequence_is_as_the_first(tmp_path):
    path = write_synthetic(tmp_path / "m.gguf")[0]
    with StreamingEngine(path, residency=Residency.parse("5"), n_ctx=128, n_threads=1, chunk=16) as engine:
        tokens = engine.tokenize(TEXT)[:40]
        first = run(engine, tokens, 5)
        engine.reset()
        assert engine.position == 0
        assert np.array_equal(first, run(engine, tokens, 5))
        assert engine.rewind(40) == 40 and engine.position == 40
        assert np.array_equal(first[1], engine.decode(int(first[0].argmax())))
