"""Small graphs compute what llama.cpp computes, from weights in whichever buffer it would keep them."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from edgemoe.errors import UserError
from edgemoe.llamacpp.graph_run import CpuGraph, Weights
from edgemoe.llamacpp.hub import Hub
from edgemoe.llamacpp.layer_rest import (
    GAPS,
    LayerShape,
    Rest,
    add_attention,
    add_rest,
    attention_rest,
    moe_rest,
)
from edgemoe.llamacpp.session import Session
from edgemoe.llamacpp.weights import PLAIN, block_length, buffer_types, random_rows, row_bytes
from edgemoe.model.synthetic import write_synthetic

MB = 1 << 20


@pytest.mark.parametrize("kind", ["F32", "F16"])
def test_a_product_with_ones_is_the_sum_of_each_row(kind: str) -> None:
    with Weights(kind, 2 * MB) as weights, CpuGraph(4) as graph:
        first, second = (graph.product(weights.part(512, 48)) for _ in range(2))
        graph.allocate()
        graph.compute(2)
        found = np.concatenate((graph.values(first), graph.values(second)))
    values = random_rows(kind, 64, 4096).view(np.float32 if kind == "F32" else np.float16).astype(np.float32)
    expected = values.reshape(-1, 512)[:96].sum(axis=1)
    assert np.allclose(found, expected, atol=0.02)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q8_0", "Q6_K", "MXFP4"])
def test_repacked_weights_give_the_same_products(kind: str) -> None:
    """The same values wherever they lie, as far as shape and buffer allow: rows are repacked in groups of eight."""
    results = []
    for buffer in buffer_types(kind, (4096, 64, 2), 1):
        with Weights(kind, MB, buffer) as weights, CpuGraph(4) as graph:
            dense = graph.product(weights.part(4096, 64))
            experts = graph.expert_product(weights.part(4096, 16, 4), 2, shared_input=True)
            graph.allocate()
            graph.choose([np.array([3, 1])])
            graph.compute(1)
            results.append(np.concatenate((graph.values(dense), graph.values(experts))))
    for other in results[1:]:
        assert np.allclose(results[0], other, rtol=1e-3, atol=0.05)
    assert np.abs(results[0]).max() > 0.1


def test_the_chosen_experts_are_multiplied() -> None:
    with Weights("F32", 4 * MB) as weights, CpuGraph(8) as graph:
        stacked = weights.part(256, 32, 16)
        chosen = [graph.expert_product(stacked, 2, shared) for shared in (True, False)]
        graph.allocate()
        graph.choose([np.array([5, 0]), np.array([2, 15])])
        assert graph.compute(2) > 0
        found = [graph.values(node).reshape(2, 32) for node in chosen]
    sums = np.resize(random_rows("F32", 64, 4096).view(np.float32), (16 * 32, 256)).sum(axis=1).reshape(16, 32)
    assert np.allclose(found[0], sums[[5, 0]], atol=1e-3)
    assert np.allclose(found[1], sums[[2, 15]], atol=1e-3)


def test_parts_lie_one_after_the_other_and_begin_again() -> None:
    with Weights("F32", MB) as weights, CpuGraph(32) as graph:
        nodes = [graph.product(weights.part(4096, 24)) for _ in range(3)]
        graph.allocate()
        graph.compute(1)
        first, second, again = (graph.values(node) for node in nodes)
    assert not np.allclose(first, second)
    assert np.array_equal(first, again), "64 rows hold 24 twice, and no third time"
    with Weights("F32", MB) as weights, pytest.raises(ValueError, match="of 1048576"):
        weights.part(4096, 65)


def test_llama_cpp_repacks_only_what_it_has_kernels_for() -> None:
    assert buffer_types("F16", (2048, 64)) == (PLAIN,)
    assert buffer_types("Q4_0", (2048, 64))[-1] == PLAIN
    assert buffer_types("Q4_0", (2048, 63)) == (PLAIN,), "rows are repacked in groups"


def test_blocks_and_types() -> None:
    assert (block_length("Q8_0"), block_length("Q4_K"), block_length("F16")) == (32, 256, 1)
    assert row_bytes("Q4_K", 512) == 288
    with pytest.raises(ValueError, match="blocks of 256"):
        row_bytes("Q4_K", 128)
    with pytest.raises(UserError, match=r"Q9_9 is no type of this llama.cpp build: it has F32, F16"):
        row_bytes("Q9_9", 256)


def survey(path: Path) -> Counter[str]:
    hub = Hub()
    with Session(path, n_ctx=64, n_threads=1, hub=hub) as session:
        with hub.survey():
            session.decode([300])
        return Counter(node.op for node in hub.nodes())


@pytest.mark.parametrize("top_k", [2, 5])
def test_nodes_are_counted_as_llama_cpp_has_them(top_k: int, tmp_path: Path) -> None:
    layers = 3
    [path] = write_synthetic(tmp_path / "m.gguf", "qwen3moe", n_layers=layers, n_experts=8, top_k=top_k, n_vocab=512)
    found = survey(path)
    views = ("VIEW", "RESHAPE", "PERMUTE", "NONE", "MUL_MAT", "MUL_MAT_ID", "FLASH_ATTN_EXT")
    # A norm and its scale are computed as one.
    computed = sum(count for op, count in found.items() if op not in views) - found["RMS_NORM"]
    rest = (attention_rest(64, 64, 64) + moe_rest(64, 32, 8, top_k)) * layers + Rest(4, 128)
    assert abs(rest.nodes - computed) <= layers, found


def test_the_rest_of_a_layer_can_be_run_with_products_between() -> None:
    shape = LayerShape(64, 32, 4, 16, 2)
    calls: list[int] = []
    with Weights("Q8_0", MB) as weights, CpuGraph(200) as graph:

        def gap() -> None:
            calls.append(graph.product(weights.part(64, 64)))

        rest = add_rest(graph, 2, shape, gap)
        assert len(calls) == 2 * GAPS
        assert rest.nodes == 2 * (9 + 2)
        assert add_attention(graph, 32, 4, 2, 16) == 4 * 32 * 2 * 16
        graph.allocate()
        assert graph.compute(2) > 0
        assert np.isfinite(graph.values(calls[-1])).all()


def test_graphs_and_sessions_share_a_process() -> None:
    """Each declares some of libggml-base's functions its own way, whichever comes first."""
    script = """
from edgemoe.llamacpp.graph_run import CpuGraph, Weights
from edgemoe.llamacpp.layout import layout_mismatches
for _ in range(2):
    with Weights("Q8_0", 1 << 20) as weights, CpuGraph(2) as graph:
        graph.product(weights.part(256, 16))
        graph.allocate()
        graph.compute(1)
    assert layout_mismatches() == []
print("fine")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "fine", done.stderr
    assert done.stderr == "", "repacking and loading are announced to nobody"
