"""Small models and recorded routing for the GPU bench's tests, on the CPU."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from edgemoe.bench.gpu.geometry import GEOMETRIES, random_weights
from edgemoe.bench.gpu.replay import Routing
from edgemoe.bench.gpu.routing import Recording
from edgemoe.bench.gpu.subject import Subject
from edgemoe.tracing import Trace
from edgemoe.tracing.tracefile import save_trace

TINY = replace(
    GEOMETRIES["olmoe-narrow"], n_layers=3, n_experts=8, top_k=2, d_model=32, d_expert=16, n_heads=2, n_kv_heads=2
)


def drifting(seed: int, *shape: int) -> np.ndarray:  # [L, T, E] float32
    """Scores with some locality in time, as real ones have."""
    rng = np.random.default_rng(seed)
    steps = rng.standard_normal(shape, np.float32)
    for t in range(1, shape[1]):
        steps[:, t] = 0.8 * steps[:, t - 1] + 0.6 * steps[:, t]
    return steps


def recording(windows: int = 2, tokens: int = 12, n_layers: int = 3, n_experts: int = 8) -> Recording:
    routing = []
    for number in range(windows):
        scores = drifting(number, n_layers, tokens, n_experts)
        pregate = scores + np.float32(0.3) * drifting(100 + number, n_layers, tokens, n_experts)
        pregate[0] = 0
        routing.append(Routing(scores, pregate))
    return Recording(
        name="drifting",
        windows=tuple(routing),
        domains=tuple("ab"[number % 2] for number in range(windows)),
        tokens=tuple(np.arange(tokens) for _ in range(windows)),
        delta=np.full(n_layers, 3, np.float32),
        warm=np.tile(np.arange(n_experts), (n_layers, 1)),
        top_k=2,
    )


def tiny_subject() -> Subject:
    found = recording()
    weights = random_weights(TINY, "float32", "cpu")
    return Subject("tiny", "0", "cpu", weights, found.tokens, found.domains, (np.arange(5),), found)


def trace_file(path: Path, tokens: int = 10) -> Path:
    """Scores of a model of OLMoE's routing with three layers: two windows each of two domains."""
    scores = np.concatenate([drifting(seed, 3, tokens, 64) for seed in range(4)], 1)
    experts = np.argsort(-scores, axis=-1, kind="stable")[..., :8].astype(np.int16)
    save_trace(
        Trace(
            experts, 64, np.arange(3, dtype=np.int32), np.arange(0, 4 * tokens, tokens), ("a", "a", "b", "b"),
            path.stem, scores=scores, pregate=np.roll(scores, 1, 0) * 0.9, tokens=np.arange(4 * tokens),
            delta=np.full(3, 3, np.float32), warm=np.tile(np.arange(64), (3, 1)),
        ),
        path,
    )  # fmt: skip
    return path
