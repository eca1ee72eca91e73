"""How the context may be stored: every type that is offered runs, and the RAM formula counts its bytes as ggml does."""

from pathlib import Path

import pytest

from edgemoe.generation import load
from edgemoe.llamacpp.resident import KV_TYPES
from edgemoe.llamacpp.weights import row_bytes, type_ids
from edgemoe.streaming.budget import KV_SCALE

DEMO = Path(__file__).parents[2] / "edgemoe" / "data" / "demo-moe-32m-q8_0.gguf"


def test_each_has_ggmls_number_and_its_bytes_are_counted() -> None:
    assert set(KV_TYPES) == set(KV_SCALE)
    for name, number in KV_TYPES.items():
        assert type_ids()[name.upper()] == number
        assert row_bytes(name.upper(), 32) / 64 == KV_SCALE[name]


@pytest.mark.parametrize("name", KV_TYPES)
def test_each_generates(name: str) -> None:
    with load(DEMO, n_ctx=64, n_threads=1, kv_type=name) as writer:  # type: ignore[arg-type]
        assert len(writer.write("In the beginning", n=8, temperature=0.0)) > 8
