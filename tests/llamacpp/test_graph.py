"""Graphs that depart from the usual: built with ggml itself, as the architectures that depart build them."""

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest

from edgemoe.llamacpp.graph import Gate, Node, Reading, find_routers
from edgemoe.llamacpp.layout import TYPE_F32, TYPE_I32, Tensor
from edgemoe.llamacpp.libraries import ggml_base

E, K, D, T = 8, 2, 16, 3


class Builder:
    """ggml's graph builders by name; remembers every node in order."""

    def __init__(self) -> None:
        class Params(ctypes.Structure):
            _fields_ = (("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))

        self.library = ctypes.CDLL(ggml_base()._name)
        self.library.ggml_init.restype, self.library.ggml_init.argtypes = ctypes.c_void_p, [Params]
        self.context = self.library.ggml_init(Params(1 << 20, None, True))
        self.nodes: list[Node] = []

    def free(self) -> None:
        self.library.ggml_free(ctypes.c_void_p(self.context))

    def leaf(self, name: str, *ne: int, kind: int = TYPE_F32) -> int:
        function = self.library.ggml_new_tensor_4d
        function.restype, function.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_int, *[ctypes.c_int64] * 4]
        return self.named(function(self.context, kind, *ne, *(1,) * (4 - len(ne))), name)

    def node(self, operation: str, name: str, *arguments: Any) -> int:
        function = getattr(self.library, f"ggml_{operation}")
        function.restype, function.argtypes = ctypes.c_void_p, None
        wrapped = [
            ctypes.c_float(x) if isinstance(x, float) else ctypes.c_void_p(x) if x > 1000 else ctypes.c_int64(x)
            for x in arguments
        ]
        made = self.named(function(ctypes.c_void_p(self.context), *wrapped), name)
        self.nodes.append(Node(made))
        return made

    def named(self, tensor: int, name: str) -> int:
        Tensor.from_address(tensor).name = name.encode()
        return tensor

    def choice(self, scores: int, layer: int = 0) -> int:
        order = self.node("argsort", f"ffn_moe_argsort-{layer}", scores, 1)
        return self.node("view_2d", f"ffn_moe_topk-{layer}", order, K, T, E * 4, 0)

    def experts(self, fed: int, ids: int, layer: int = 0) -> int:
        weights = self.leaf(f"blk.{layer}.ffn_down_exps.weight", D, D, E)
        spread = self.node("reshape_3d", "", fed, D, 1, T)
        Tensor.from_address(spread).name = Node(fed).tensor.name + b" (reshaped)"
        return self.node("mul_mat_id", f"ffn_moe_down-{layer}", weights, spread, ids)


@pytest.fixture
def build() -> Iterator[Builder]:
    builder = Builder()
    yield builder
    builder.free()


def usual(build: Builder, layer: int = 0) -> tuple[int, int, int]:
    """MoE input, logits, ids of a softmax router."""
    fed = build.leaf(f"ffn_norm-{layer}", D, T)
    router = build.leaf(f"blk.{layer}.ffn_gate_inp.weight", D, E)
    logits = build.node("mul_mat", f"ffn_moe_logits-{layer}", router, fed)
    ids = build.choice(build.node("soft_max", f"ffn_moe_probs-{layer}", logits), layer)
    build.experts(fed, ids, layer)
    return fed, logits, ids


def test_the_usual_graph(build: Builder) -> None:
    usual(build)
    router = find_routers(build.nodes)[0]
    assert isinstance(router.scores, Reading) and router.scores.stem == "ffn_moe_logits"
    assert isinstance(router.gate, Gate) and router.gate.weight == "blk.0.ffn_gate_inp.weight"
    assert (router.n_experts, router.top_k, router.topk.span) == (E, K, E)


def test_a_second_choice_of_the_same_layer_does_not_count(build: Builder) -> None:
    """GroveMoE sends the same scores through its chunk experts under the same names."""
    fed, logits, _ = usual(build)
    build.experts(fed, build.choice(build.node("soft_max", "ffn_moe_probs-0", logits)))
    router = find_routers(build.nodes)[0]
    assert (router.topk.pick, router.topk.period) == (0, 2)
    assert isinstance(router.scores, Reading) and router.scores.period == 1


def test_hash_layers_have_experts_but_no_scores(build: Builder) -> None:
    table = build.leaf("blk.0.ffn_gate_tid2eid", K, 100, kind=TYPE_I32)
    ids = build.node("get_rows", "ffn_moe_topk-0", table, build.leaf("inp_tokens", T, kind=TYPE_I32))
    build.experts(build.leaf("ffn_norm-0", D, T), ids)
    usual(build, 1)
    hashed, scored = find_routers(build.nodes).values()
    assert hashed.top_k == K and hashed.topk.integer and hashed.n_experts == 0
    assert "GET_ROWS" in str(hashed.scores) and "GET_ROWS" in str(hashed.gate)
    assert isinstance(scored.gate, Gate)


def test_a_router_with_an_input_of_its_own_has_no_pregate(build: Builder) -> None:
    """SmallThinker routes by what came before the attention."""
    logits = build.node(
        "mul_mat", "ffn_moe_logits-0", build.leaf("blk.0.ffn_gate_inp.weight", D, E), build.leaf("x", D, T)
    )
    build.experts(build.leaf("ffn_norm-0", D, T), build.choice(build.node("soft_max", "ffn_moe_probs-0", logits)))
    router = find_routers(build.nodes)[0]
    assert isinstance(router.scores, Reading)
    assert "another input than its experts'" in str(router.gate)


def test_unknown_steps_end_the_walk(build: Builder) -> None:
    fed = build.leaf("ffn_norm-0", D, T)
    logits = build.node("mul_mat", "ffn_moe_logits-0", build.leaf("blk.0.ffn_gate_inp.weight", D, E), fed)
    scaled = build.node("scale", "ffn_moe_logits_scaled-0", logits, 2.0)
    build.experts(fed, build.choice(build.node("sigmoid", "ffn_moe_probs-0", scaled)))
    router = find_routers(build.nodes)[0]
    assert isinstance(router.scores, Reading) and router.scores.stem == "ffn_moe_probs"
    assert str(router.gate) == "ffn_moe_logits_scaled-0 is SCALE"
