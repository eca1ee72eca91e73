"""What a layer computes besides its products with weights: norms, rotations, choices, gates, sums, and attention.

Each node costs the meeting of the threads, and a little per value. `Rest` counts both for a geometry as llama.cpp's
graphs have them (checked against a survey of its nodes); `add_rest` builds nodes of the same kinds, to be timed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt

from edgemoe.llamacpp.graph_run import CpuGraph

_EPSILON = 1e-6
_DESCENDING = 1
_PLAIN_ROTATION = 0


@dataclass(frozen=True)
class Rest:
    """Nodes, and values that they produce."""

    nodes: int
    values: int

    def __add__(self, other: "Rest") -> "Rest":
        return Rest(self.nodes + other.nodes, self.values + other.values)

    def __mul__(self, times: int) -> "Rest":
        return Rest(self.nodes * times, self.values * times)


def attention_rest(d_model: int, d_query: int, d_kv: int) -> Rest:
    """Norms (fused with their scale), rotations, storing in the cache, the residual sum: 8 nodes."""
    return Rest(8, 2 * d_model + 2 * d_query + 4 * d_kv)


def dense_rest(d_model: int, d_hidden: int) -> Rest:
    """Norm, gate, residual sum."""
    return Rest(3, 2 * d_model + d_hidden)


def moe_rest(d_model: int, d_expert: int, n_experts: int, top_k: int) -> Rest:
    """Norm; softmax, sort, and weights of the choice; gate; scaling and summing of the experts; the residual sum."""
    return Rest(9 + top_k, (2 * top_k + 2) * d_model + top_k * d_expert + 2 * n_experts)


@dataclass(frozen=True)
class LayerShape:
    """A MoE layer as far as its nodes without weights go."""

    d_model: int
    d_expert: int
    n_heads: int
    n_experts: int
    top_k: int


# Where a layer's products lie between those nodes: before attention, after it, the router, gate and up, down.
GAPS = 5


def add_rest(graph: CpuGraph, layers: int, shape: LayerShape, gap: Callable[[], object]) -> Rest:
    """Add the nodes of `layers` MoE layers to `graph`, calling `gap` wherever products come; returns what they are.

    They share their inputs, and add in place, since in a real graph the node before has just written them.
    """
    d_head = shape.d_model // shape.n_heads
    hidden, scale = (graph.input("F32", shape.d_model) for _ in range(2))
    heads, of_head, position = (
        graph.input("F32", d_head, shape.n_heads, 1),
        graph.input("F32", d_head),
        graph.input("I32", 1),
    )
    logits, gate = graph.input("F32", shape.n_experts, 1), graph.input("F32", shape.d_expert, shape.top_k)
    experts, weights = graph.input("F32", shape.d_model, shape.top_k), graph.input("F32", 1, shape.top_k)
    for _ in range(layers):
        graph.apply("mul", graph.apply("rms_norm", hidden, _EPSILON), scale)
        gap()
        graph.apply("mul", graph.apply("rms_norm", heads, _EPSILON), of_head)
        graph.apply("rope", heads, position, d_head, _PLAIN_ROTATION)
        gap()
        graph.apply("add_inplace", hidden, scale)
        graph.apply("mul", graph.apply("rms_norm", hidden, _EPSILON), scale)
        gap()
        graph.apply("argsort", graph.apply("soft_max", logits), _DESCENDING)
        gap()
        graph.apply("swiglu_split", gate, gate)
        gap()
        graph.apply("mul_inplace", experts, weights)
        for _ in range(shape.top_k):
            graph.apply("add_inplace", hidden, scale)
    values = (5 + 2 * shape.top_k) * shape.d_model + 2 * shape.n_experts + shape.top_k * shape.d_expert
    return Rest(9 + shape.top_k, values) * layers


def add_attention(graph: CpuGraph, cells: int, n_heads: int, n_kv_heads: int, d_head: int) -> int:
    """Add one query's attention over `cells` cached tokens; returns its multiplications (heads × cells × 2 widths)."""
    query = graph.input("F32", d_head, 1, n_heads)
    keys, values = (graph.input("F16", d_head, cells, n_kv_heads) for _ in range(2))
    graph.apply("flash_attn_ext", query, keys, values, None, 1 / sqrt(d_head), 0.0, 0.0)
    return n_heads * cells * 2 * d_head
