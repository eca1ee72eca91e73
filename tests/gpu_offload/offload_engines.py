"""Small models and engines that the tests of the RAM→VRAM tier share."""

import sys
from pathlib import Path

import numpy as np

from edgemoe.calibration import Calibration, TokenPrior
from edgemoe.gpu_offload.engine import OffloadEngine
from edgemoe.policy import PRESETS, preset
from edgemoe.units import Residency

# llama.cpp without rounding lives with the tests of the training code.
sys.path.append(str(Path(__file__).parents[1] / "training"))

TINY = {"n_layers": 4, "n_experts": 16, "top_k": 4, "d_model": 64, "d_expert": 32, "n_vocab": 512}
PROMPT = [int(token) for token in np.random.default_rng(7).integers(0, 500, 50)]
# Windows that fit a small cache.
POLICIES = {
    **{name: preset(name, **({"window": 6} if PRESETS[name].window else {})) for name in PRESETS},
    "speculative": preset("speculative", window=4),
    "tau": preset("exact-lru", routing="tau", tau=0.3),
    "exact-gated": preset("psr-gated", routing="exact", window=6),
    "token-prior": preset("exact-score", prefetch="token-prior", window=4, budget=2),
    "top-j": preset("cache-prior", top_j=1, eviction="lfu"),
    "elided": preset("psr", window=6, elide=0.1),
    "static": preset("exact-lru", eviction="static"),
}


def make(path, **more):
    options = {"residency": Residency.parse("8"), "n_ctx": 128, "n_threads": 1, "chunk": 24, "verify_slots": True}
    return OffloadEngine(path, **{**options, **more})


def generate(engine, prompt=PROMPT, steps=12):
    """Greedy: the logits of each step, and the tokens chosen."""
    logits = [engine.prefill(prompt)]
    for _ in range(steps):
        logits.append(engine.decode(int(logits[-1].argmax())))
    return np.stack(logits)


def joined(engine):
    """The records of all steps, one after the other along the tokens."""
    return {
        name: np.concatenate([record[name] for record in engine.records], axis=0 if name == "tokens" else 1)
        for name in engine.records[0]
    }


def made_up_calibration(n_vocab=512, layers=4, experts=16):
    rng = np.random.default_rng(3)
    entries = 12
    cells = [np.sort(rng.choice(layers * experts, entries, replace=False)) for _ in range(n_vocab)]
    prior = TokenPrior(
        (layers, experts),
        np.arange(n_vocab, dtype=np.int32),
        np.full(n_vocab, 9, np.uint32),
        np.arange(0, entries * n_vocab + 1, entries, dtype=np.int64),
        np.concatenate(cells).astype(np.uint32),
        rng.integers(1, 10, entries * n_vocab).astype(np.uint32),
    )
    warm = np.stack([rng.permutation(experts) for _ in range(layers)]).astype(np.int16)
    delta = rng.uniform(0.5, 2, layers).astype(np.float32)
    return Calibration(np.arange(layers, dtype=np.int32), experts, delta, warm, prior, "tiny", ("",))
