"""Bytes per token: classes add up to what the geometry says, the cache is read up to its window."""

from dataclasses import replace

import pytest
from wall_fixtures import small_geometry

from edgemoe.model.geometry import KvCache
from edgemoe.wall.bytes import kv_read, token_bytes
from edgemoe.wall.presets import PUBLISHED, preset_geometry


@pytest.mark.parametrize("name", PUBLISHED)
def test_weights_add_up_to_the_active_bytes(name: str) -> None:
    g = preset_geometry(name)
    token = token_bytes(g, 4096)
    assert token.total - token.kv == g.active_bytes
    assert token.always == g.always_read_bytes and token.routed == g.active_expert_bytes


def test_classes_of_a_small_model() -> None:
    token = token_bytes(small_geometry(), 10)
    assert (token.routed, token.attention, token.output, token.embedding) == (2 * 3500, 80, 3000, 100)
    assert token.kv == 10 * 8 and token.total == 7000 + 80 + 3000 + 100 + 80


def test_the_window_and_the_state_bound_what_is_read() -> None:
    g = replace(small_geometry(), kv=KvCache(full=10, windowed=100, window=128, state=7))
    assert kv_read(g, 100) == 100 * 110 + 7
    assert kv_read(g, 1000) == 1000 * 10 + 128 * 100 + 7


def test_paper_class_of_model() -> None:
    """Qwen3-235B-A22B in pure Q4_K: the ≈12 GB per token and ≈10.6 MB per expert of the bandwidth-wall paper."""
    g = preset_geometry("qwen3-235b-a22b:Q4_K")
    assert g.active_bytes / 1e9 == pytest.approx(12.3, abs=0.05)
    assert g.expert_bytes == (4096 * 1536 * 3 * 144 // 256,) * 94
