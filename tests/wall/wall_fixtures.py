"""A small model, traces of it and walls of it, as values: no files."""

from collections.abc import Sequence

import numpy as np

from edgemoe.model.assemble import Facts, assemble
from edgemoe.model.geometry import ModelGeometry
from edgemoe.model.tensors import Part, Tensor
from edgemoe.tracing import Trace
from edgemoe.wall.hits import caching
from edgemoe.wall.rates import Machine, Speed
from edgemoe.wall.tiers import Wall

LAYERS, EXPERTS, TOP_K = 3, 16, 2
EXPERT_BYTES = (1000, 1000, 1500)  # the last layer has more bits
DENSE_BYTES, EMBEDDING, VOCABULARY = 3000, 6400, 64


def small_geometry() -> ModelGeometry:
    """Three MoE layers (ids 1–3) after a dense one; 8 bytes of cache per token."""
    tensors = [
        Tensor("token_embd.weight", "Q8_0", (VOCABULARY, 100), 0, 0, EMBEDDING, Part.EMBEDDING),
        Tensor("output.weight", "Q8_0", (VOCABULARY, 20), 0, 0, DENSE_BYTES, Part.OUTPUT),
        Tensor("blk.1.attn_k.weight", "F16", (2, 10), 0, 0, 40, Part.ATTENTION, 1),
        Tensor("blk.1.attn_v.weight", "F16", (2, 10), 0, 0, 40, Part.ATTENTION, 1),
    ]
    tensors += [
        Tensor(f"blk.{i + 1}.ffn_up_exps.weight", "Q8_0", (EXPERTS, 1), 0, 0, EXPERTS * size, Part.EXPERTS, i + 1, "up")
        for i, size in enumerate(EXPERT_BYTES)
    ]
    facts = Facts("small", "test", 4, EXPERTS, TOP_K, d_model=10, d_expert=5, n_ctx=1000, n_vocab=VOCABULARY)
    return assemble("small", facts, tensors, sum(t.nbytes for t in tensors))


def small_trace(tokens: int = 400, seed: int = 0, name: str = "text") -> Trace:
    """Loads with preferences and memory: a token keeps one of its predecessor's experts half of the time."""
    rng = np.random.default_rng(seed)
    weights = rng.dirichlet(np.full(EXPERTS, 0.5), LAYERS)
    experts = np.empty((LAYERS, tokens, TOP_K), dtype=np.int16)
    for layer in range(LAYERS):
        last = np.array([0, 1])
        for t in range(tokens):
            drawn = rng.choice(EXPERTS, TOP_K, replace=False, p=(weights[layer] + 1e-3) / (weights[layer] + 1e-3).sum())
            if rng.random() < 0.5 and last[0] not in drawn:
                drawn[0] = last[0]
            experts[layer, t] = last = drawn
    return Trace(experts, EXPERTS, np.arange(1, 4, dtype=np.int32), np.zeros(1, dtype=np.int64), (name,), name)


def machine(ram_bytes: int = 40_000, vram_bytes: int = 0, **rates: float | tuple[float, float]) -> Machine:
    """Rates by tier in bytes per second, one or (least, most)."""
    pairs = {tier: rate if isinstance(rate, tuple) else (rate, rate) for tier, rate in rates.items()}
    speeds = {tier: Speed(*pair, "given") for tier, pair in pairs.items()}
    return Machine(**speeds, ram_bytes=ram_bytes, vram_bytes=vram_bytes, ram_source="given", vram_source="given")


def wall_of(machine: Machine, texts: Sequence[Trace] = (), n_ctx: int = 10, rate: float | None = None) -> Wall:
    g = small_geometry()
    return Wall.of_one(g, machine, caching(g, list(texts), "lru", rate, (g.active_expert_bytes,) * 2), n_ctx)
