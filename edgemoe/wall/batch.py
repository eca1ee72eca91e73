"""Several streams at once: the union of the experts that they need is read once for all (arXiv 2608.18261, §3).

The union comes from a real trace, B windows of it that start at equal distances, because experts are not drawn
independently: the formula E·(1 − (1 − k/E)^B) is given beside it, and is too high wherever streams agree.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from edgemoe.errors import UserError
from edgemoe.units import shown
from edgemoe.wall.hits import caching
from edgemoe.wall.paths import paths
from edgemoe.wall.sharing import StoreHits
from edgemoe.wall.tiers import Path, Wall, best

if TYPE_CHECKING:
    from edgemoe.tracing import Trace

MIN_STEPS = 16  # steps that every stream must have for a mean to mean anything


@dataclass(frozen=True)
class Batch:
    """What `streams` concurrent streams need and give together."""

    streams: int
    union: tuple[float, float]  # distinct experts per layer and step, mean over layers: (least, most) over texts
    independent: float  # the same if every stream drew its experts on its own, evenly
    step_bytes: tuple[float, float]  # everything that one step reads
    path: Path | None  # the best one that is possible with so many streams
    source: str


def interleave(trace: "Trace", streams: int) -> "Trace":
    """`streams` windows of a trace as one trace whose tokens are steps: the distinct experts of each step, by index.

    Stream i starts at token i·⌊T/B⌋, so that no two overlap. Raises `UserError` where the trace is too short.
    """
    steps = trace.n_tokens // streams
    if steps < MIN_STEPS:
        raise UserError(
            f"{trace.name}: {trace.n_tokens:,} tokens are too few for {streams} streams of {MIN_STEPS} or more: "
            "trace more text, or ask for a smaller batch"
        )
    if streams == 1:
        return trace
    width = min(trace.top_k * streams, trace.n_experts)
    experts = np.full((trace.n_layers, steps, width), -1, dtype=np.int16)
    at = np.arange(steps)[:, None]
    for layer, loads in enumerate(trace.experts):
        needed = np.zeros((steps, trace.n_experts + 1), dtype=bool)
        for stream in range(streams):
            # −1, the padding of layers with a smaller k, marks the last column, which is dropped.
            needed[at, loads[stream * steps : (stream + 1) * steps]] = True
        step, expert = np.nonzero(needed[:, :-1])
        rank = np.arange(len(step)) - np.searchsorted(step, step)
        experts[layer, step, rank] = expert
    return replace(
        trace,
        experts=experts,
        windows=np.zeros(1, dtype=np.int64),
        domains=trace.domains[:1],
        tokens=None,
        scores=None,
        pregate=None,
        weights=None,
    )


def union(trace: "Trace", streams: int) -> np.ndarray:  # [L] float64
    """Mean number of distinct experts that `streams` windows of a trace need per step, by layer."""
    return (interleave(trace, streams).experts >= 0).sum(axis=2).mean(axis=1)


def independent_union(n_experts: int, top_k: int, streams: int) -> float:
    """E·(1 − (1 − k/E)^B)."""
    return n_experts * (1 - (1 - top_k / n_experts) ** streams)


def batch(wall: Wall, streams: int) -> Batch:
    """`streams` of them along the best path that is possible then (`many`).

    Without texts the union lies between all streams agreeing and all being independent.
    """
    g, texts = wall.geometry, wall.caching.texts
    alone = [independent_union(g.n_experts, k, streams) for k in g.layer_top_k]
    unions = _unions(wall, streams)
    source = "no trace: from all streams alike to all independent"
    if texts:
        source = f"{len(texts)} {'text' if len(texts) == 1 else 'texts'}, {streams} windows of each"
    means = [float(counts.mean()) if g.is_moe else 0.0 for counts in unions]
    shared = many(wall, streams)
    steps = (shared.fixed + shared.routed[0], shared.fixed + shared.routed[1])
    independent = float(np.mean(alone)) if g.is_moe else 0.0
    return Batch(streams, (min(means), max(means)), independent, steps, best(paths(shared)), source)


def many(wall: Wall, streams: int) -> Wall:
    """The wall of so many streams. What they share is replayed: the SSD tier's store with a cache for each stream, and
    one cache for all in VRAM, whose order is open. Presets of Algorithm 1 steer one stream, so there LRU stands in."""
    c = wall.caching
    sizes = [float((counts * wall.geometry.expert_bytes).sum()) for counts in _unions(wall, streams)]
    routed = (min(sizes), max(sizes))
    policy = c.policy if streams == 1 or _is_rule(c.policy) else "lru"
    shared = caching(wall.geometry, [interleave(t, streams) for t in c.texts], policy, c.rate, routed, streams)
    if c.texts and streams > 1 and policy == "lru":
        shared = replace(shared, store=StoreHits(wall.geometry, c.texts, streams))
    return replace(wall, caching=shared, routed=routed, streams=streams)


def _unions(wall: Wall, streams: int) -> list[np.ndarray]:  # [L] each
    """Distinct experts per step, by layer: of each text, or if all streams are alike and if all are independent."""
    top_k, texts = wall.geometry.layer_top_k, wall.caching.texts
    if texts:
        return [union(text, streams) for text in texts]
    alone = [independent_union(wall.geometry.n_experts, k, streams) for k in top_k]
    return [np.array(top_k, dtype=float), np.array(alone)]


def _is_rule(policy: str) -> bool:
    from edgemoe.policy.eviction import RULES

    return policy in RULES


def parse_batches(text: str, flag: str = "--batch") -> list[int]:
    """Numbers of streams, separated by commas; a `UserError`, with the flag, for anything but whole numbers from 1."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) < 5 and 1 <= int(part) <= 4096 for part in parts):
        raise UserError(f"{flag} {shown(text)}: expected numbers of streams like 1,8,32")
    return list(dict.fromkeys(int(part) for part in parts))
