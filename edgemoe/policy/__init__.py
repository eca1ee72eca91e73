"""The policy core: one logical cache that every tier, the simulator and the quality harness share.

To understand PSR, read in this order: `config` (what can be chosen), `algorithm1` (the paper's listing, line by line),
`logical_cache` (the same as an object). `state` is its memory, `replay` runs it over a trace, `eviction` replays plain
loads. Imports numpy and numba only.

    cache = LogicalCache(preset("psr"), n_layers=16, n_experts=64, top_k=8, capacity=32, delta=delta, warm=warm)
    cache.begin_token(token)
    copies = cache.prefetch(layer, pregate)
    experts, demand = cache.select(layer, scores)
"""

from edgemoe.policy.config import PRESETS, Policy, preset, presets
from edgemoe.policy.logical_cache import Copy, LogicalCache, Selection

__all__ = ["PRESETS", "Copy", "LogicalCache", "Policy", "Selection", "preset", "presets"]
