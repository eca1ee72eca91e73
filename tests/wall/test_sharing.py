"""The shared store, against a plain reading of it: a logical cache for each stream, sets for the store."""

from dataclasses import replace

import numpy as np
import pytest
from wall_fixtures import EXPERTS, LAYERS, TOP_K, small_geometry, small_trace

from edgemoe.policy import LogicalCache, preset
from edgemoe.wall.sharing import StoreHits, replayed, replayed_misses


def plainly(trace, streams: int, slots: int, first: int, count: int) -> tuple[list[int], list[int]]:
    length = trace.n_tokens // streams
    caches = [
        LogicalCache(preset("exact-lru"), n_layers=LAYERS, n_experts=EXPERTS, top_k=TOP_K, capacity=slots)
        for _ in range(streams)
    ]
    held: list[set[int]] = [set() for _ in range(LAYERS)]
    ran = np.full((LAYERS, EXPERTS), -1)
    missed, executed = [0] * LAYERS, [0] * LAYERS
    for step in range(first + count):
        for cache in caches:
            cache.begin_token()
        for layer in range(LAYERS):
            needed: set[int] = set()
            for stream, cache in enumerate(caches):
                loads = trace.experts[layer, stream * length + step % length]
                cache.observe(layer, loads)
                needed |= set(loads.tolist())
            if step >= first:
                missed[layer] += len(needed - held[layer])
                executed[layer] += len(needed)
            ran[layer, list(needed)] = step
            holders = [sum(e in cache.resident(layer) for cache in caches) for e in range(EXPERTS)]
            best = sorted(range(EXPERTS), key=lambda e, h=holders, r=ran[layer]: (h[e], r[e], e), reverse=True)
            others = [e for e in best if e in held[layer] - needed]
            if len(needed) <= slots:
                held[layer] = needed | set(others[: slots - len(needed)])
                continue
            room = max(min(streams * TOP_K, EXPERTS), slots) - len(needed)
            held[layer] = set([e for e in best if e in needed | set(others[:room])][:slots])
    return missed, executed


@pytest.mark.parametrize(("streams", "slots"), [(1, 3), (4, 5), (9, 2), (6, 16)])
def test_it_reads_what_logical_caches_and_sets_say(streams: int, slots: int) -> None:
    trace = small_trace(tokens=360)
    for first, count in ((0, 40), (7, 45)):  # beyond the last token: from the start again
        missed, executed = replayed(trace, streams, [slots] * LAYERS, first, count)
        assert (missed.tolist(), executed.tolist()) == plainly(trace, streams, slots, first, count)


def test_means_and_layers_of_their_own() -> None:
    trace = small_trace()
    missed, executed = replayed(trace, 4, (3, 8, 5), 0, 100)
    for layer, slots in enumerate((3, 8, 5)):
        assert missed[layer] == replayed(trace, 4, [slots] * LAYERS, 0, 100)[0][layer]
    alike = replayed(trace, 4, [5] * LAYERS, 10, 50)
    assert replayed_misses(trace, 4, 5, 10, 50) == pytest.approx([part.sum() / 150 for part in alike])
    padded = np.concatenate([trace.experts, np.full((LAYERS, trace.n_tokens, 1), -1, np.int16)], axis=2)
    again = replayed(replace(trace, experts=padded), 4, (3, 8, 5), 0, 100)
    assert again[1].tolist() == executed.tolist()


def test_a_store_of_all_experts_misses_nothing() -> None:
    hit = StoreHits(small_geometry(), [small_trace()], 5).at([EXPERTS] * LAYERS)
    assert (hit.low, hit.high, hit.copied) == (1, 1, (0, 0)) and "16 slots per layer" in hit.why
