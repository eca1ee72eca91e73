"""Where a model's routing is in its graph: read from the graph itself, so that no architecture needs code of its own.

llama.cpp's `build_moe_ffn` names its nodes (`ffn_moe_topk-3` is layer 3's choice). From the choice this module walks
backwards: the argsort it is a view of, what that ranks, through group masks, selection biases and gating functions to
the product of the router and its input. A step it does not know ends the walk, and with it the offer of a pre-gate.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from edgemoe.llamacpp.layout import TYPE_I32, Tensor, operation

TOPK = "ffn_moe_topk"
MASKED = "ffn_moe_probs_masked"
# Each is computed from the one before it; a model has the last ones only if it normalises or scales.
WEIGHTS = ("ffn_moe_weights", "ffn_moe_weights_softmax", "ffn_moe_weights_norm", "ffn_moe_weights_scaled")


class Node:
    """One tensor of a graph that still exists."""

    def __init__(self, pointer: int) -> None:
        self.pointer = pointer
        self.tensor = Tensor.from_address(pointer)

    @cached_property
    def name(self) -> str:
        """Its name without the prefix and suffix that copies between backends carry (`CUDA0#name#0`)."""
        name = self.tensor.name.decode(errors="replace")
        return name.split("#")[1] if "#" in name else name

    @property
    def stem(self) -> str:
        return self.name.rpartition("-")[0]

    @property
    def layer(self) -> int:
        """The layer id at the end of the name, −1 without one."""
        number = self.name.rpartition("-")[2]
        return int(number) if self.stem and number.isascii() and number.isdigit() else -1

    @cached_property
    def op(self) -> str:
        return operation(self.pointer)

    @property
    def ne(self) -> tuple[int, int, int, int]:
        n = self.tensor.ne
        return n[0], n[1], n[2], n[3]

    def source(self, index: int) -> "Node":
        pointer = self.tensor.src[index]
        if not pointer:
            raise Unrecognised(f"{self.name or self.op} has no source {index}")
        return Node(pointer)


class Unrecognised(Exception):
    """The graph departs from the pattern that the pre-gate needs; the text names the step."""


@dataclass(frozen=True)
class Reading:
    """A node to read: its name, which of the same-named nodes of a graph it is, and its row."""

    stem: str
    layer: int
    width: int  # elements per token
    span: int  # elements from one token's row to the next, in the tensor or its input, whichever is larger
    pick: int = 0
    period: int = 1
    integer: bool = False
    input_width: int = 0  # of src[1], where its rows are wanted


@dataclass(frozen=True)
class Groups:
    """Expert groups: only the `used` of `count` groups with the largest sum of their two best may be chosen."""

    count: int
    used: int
    of_softmax: bool  # the sums are of probabilities although the scores are logits


@dataclass(frozen=True)
class Gate:
    """How scores come from a router's input: a product with `weight`, then `steps` (operation, operand) in order."""

    weight: str  # tensor names, as in the model file
    product: Reading
    steps: tuple[tuple[str, str], ...]
    groups: Groups | None


@dataclass(frozen=True)
class Router:
    """One MoE layer's routing. `scores` and `gate` are a text where the graph departs from the pattern: why."""

    layer: int
    n_experts: int  # 0 if unknown: nothing is ranked
    top_k: int
    topk: Reading
    scores: Reading | str
    mask: Reading | None  # −inf where a group mask forbids the expert, if `scores` does not already say so
    weights: Reading | None
    gate: Gate | str


@dataclass(frozen=True)
class Stop:
    """The node that a layer's last product of experts multiplies, and the weight that it multiplies it by."""

    at: Reading
    weight: str


def find_routers(nodes: Sequence[Node]) -> dict[int, Router]:
    """The router of every MoE layer in a surveyed graph, by layer id.

    Where a layer chooses twice (shared chunks of experts, GroveMoE), the first choice is the one of its experts.
    """
    named = _by_name(nodes)
    return {
        layer: _router(layer, nodes, named) for stem, layer in sorted(named, key=lambda key: key[1]) if stem == TOPK
    }


def find_stops(nodes: Sequence[Node]) -> dict[int, Stop]:
    """By layer: where a callback can let all of its products of experts run but the last (`ffn_moe_down`), whose input
    it is. A layer of one product, or whose input has no name, has no such place."""
    named, stops = _by_name(nodes), {}
    products: dict[int, list[Node]] = {}
    for node in nodes:
        if node.op == "MUL_MAT_ID" and node.layer >= 0:
            products.setdefault(node.layer, []).append(node)
    for layer, found in products.items():
        weight, at = found[-1].source(0).name, found[-1].source(1)
        while at.layer < 0 and at.op in ("VIEW", "RESHAPE", "CONT"):
            at = at.source(0)
        others = {node.source(0).name for node in found[:-1]}
        if others and weight not in others and at.layer == layer and at.op != "MUL_MAT":
            try:
                stops[layer] = Stop(_reading(at, named), weight)
            except Unrecognised:
                continue
    return stops


def _by_name(nodes: Sequence[Node]) -> dict[tuple[str, int], list[Node]]:
    named: dict[tuple[str, int], list[Node]] = {}
    for node in nodes:
        if node.layer >= 0:
            named.setdefault((node.stem, node.layer), []).append(node)
    return named


def _reading(node: Node, named: dict[tuple[str, int], list[Node]], width: int | None = None) -> Reading:
    same = named.get((node.stem, node.layer), [])
    pick = next((i for i, other in enumerate(same) if other.pointer == node.pointer), None)
    if pick is None:
        raise Unrecognised(f"{node.name or node.op} is not a named node of the graph")
    input_width = Tensor.from_address(node.tensor.src[1]).ne[0] if node.op == "MUL_MAT" else 0
    width = width or node.ne[0]
    return Reading(
        stem=node.stem,
        layer=node.layer,
        width=width,
        span=max(width, node.tensor.nb[1 if node.ne[0] == width else 2] // 4, input_width),
        pick=pick,
        period=len(same),
        integer=node.tensor.type == TYPE_I32,
        input_width=input_width,
    )


def _router(layer: int, nodes: Sequence[Node], named: dict[tuple[str, int], list[Node]]) -> Router:
    topk = named[TOPK, layer][0]
    weights = [named[stem, layer][0] for stem in WEIGHTS if (stem, layer) in named]
    n_experts, mask = 0, None
    scores: Reading | str
    gate: Gate | str
    try:
        ranked = _ranked(topk)
        n_experts = ranked.ne[0]
        base, groups = _unmask(ranked) if ranked.stem == MASKED else (ranked, None)
        # Softmax keeps the order, and its logits keep the distances that a bonus is measured in.
        scored = base.source(0) if base.op == "SOFT_MAX" else ranked
        scores = _reading(scored, named)
        mask = _reading(ranked, named) if groups and scored is not ranked else None
    except Unrecognised as departure:
        scores = gate = str(departure)
    else:
        try:
            gate = _gate(base, groups, nodes, named, topk)
        except Unrecognised as departure:
            gate = str(departure)
    return Router(
        layer=layer,
        n_experts=n_experts,
        top_k=topk.ne[0],
        topk=_reading(topk, named),
        scores=scores,
        mask=mask,
        weights=_reading(weights[-1], named, topk.ne[0]) if weights else None,
        gate=gate,
    )


def _ranked(topk: Node) -> Node:
    """What the choice is the head of a sort of; layers that look experts up by token (hash routing) rank nothing."""
    order = topk.source(0) if topk.op == "VIEW" else topk
    if order.op != "ARGSORT":
        raise Unrecognised(f"{topk.name} is not the head of a sort but {order.op}")
    return order.source(0)


def _unmask(masked: Node) -> tuple[Node, Groups]:
    """What was ranked before the group mask: reshape(set_rows(−inf, get_rows(groups of it, best groups)))."""
    kept = masked.source(0).source(0)
    split, best = kept.source(0), kept.source(1)
    if masked.source(0).op != "SET_ROWS" or kept.op != "GET_ROWS" or split.op != "RESHAPE":
        raise Unrecognised(f"{masked.name} is no mask of expert groups")
    ranked = split.source(0)
    return ranked, Groups(count=split.ne[1], used=best.ne[0], of_softmax=ranked.op == "SOFT_MAX")


def _gate(
    base: Node, groups: Groups | None, nodes: Sequence[Node], named: dict[tuple[str, int], list[Node]], topk: Node
) -> Gate:
    steps: list[tuple[str, str]] = []
    node = base.source(0) if base.op == "SOFT_MAX" else base
    while node.op != "MUL_MAT":
        operand = ""
        if node.op == "ADD":
            operand = node.source(1).name
            if node.source(1).op != "NONE":
                raise Unrecognised(f"{node.name} adds {node.source(1).op}, not a bias of the model")
        elif node.op == "SOFT_MAX":
            if node.tensor.src[1] or struct.pack("i", node.tensor.op_params[0]) != struct.pack("f", 1.0):
                raise Unrecognised(f"{node.name} is a masked or scaled softmax")
        elif node.op not in ("SIGMOID", "SOFTPLUS", "SQRT"):
            raise Unrecognised(f"{node.name} is {node.op}")
        steps.append((node.op, operand))
        node = node.source(0)
    if node.source(0).op != "NONE":
        raise Unrecognised(f"the router of {node.name} is not a weight but {node.source(0).op}")
    fed = {
        _origin(other.source(1)) for other in nodes if other.op == "MUL_MAT_ID" and other.source(2).name == topk.name
    }
    if _origin(node.source(1)) not in fed:
        raise Unrecognised(f"{node.name} routes by another input than its experts'")
    return Gate(node.source(0).name, _reading(node, named), tuple(reversed(steps)), groups)


def _origin(node: Node) -> str:
    """The name of a tensor, or of the tensor that it reshapes."""
    while node.op == "RESHAPE":
        node = node.source(0)
    return node.name.removesuffix(" (reshaped)")
