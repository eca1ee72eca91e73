"""Geometry from what a file's readers found: hyperparameters by name, and tensors with their parts."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from edgemoe.errors import UserError
from edgemoe.model.geometry import KvCache, ModelGeometry
from edgemoe.model.tensors import Part, Tensor, group, slice_expert

MAX_LAYERS = 4096  # llama.cpp takes 512
MAX_EXPERTS = 1 << 15  # of one layer; a trace's ids are int16

_PACKED = {"U8": 2}  # packed four-bit values in safetensors: two to a byte


@dataclass(frozen=True)
class Facts:
    """Hyperparameters as the file states them; what can be seen in the tensors is not asked for."""

    name: str
    architecture: str
    n_layers: int
    n_experts: int = 0
    top_k: int | Sequence[int] = 0  # one number, or one per layer
    n_shared_experts: int = 0
    gating: str = "softmax"
    expert_groups: int = 0
    expert_groups_used: int = 0
    d_model: int = 0
    d_expert: int = 0
    n_ctx: int = 0
    n_vocab: int = 0
    window: int = 0
    windowed_layers: frozenset[int] = field(default_factory=frozenset)
    uncached_layers: frozenset[int] = field(default_factory=frozenset)  # they share another layer's cache
    kv_heads: Sequence[int] = ()  # per layer; used where queries, keys and values share one tensor
    d_key: int = 0
    d_value: int = 0
    state_bytes: int = 0  # per recurrent layer


def assemble(where: str, facts: Facts, tensors: Sequence[Tensor], file_bytes: int) -> ModelGeometry:
    """The geometry; a `UserError` where experts and hyperparameters contradict each other."""
    experts = [tensor for tensor in tensors if tensor.part is Part.EXPERTS]
    moe_layers = tuple(sorted({tensor.layer for tensor in experts if tensor.layer is not None}))
    _check(where, facts, experts)
    top_k = tuple(facts.top_k if isinstance(facts.top_k, int) else facts.top_k[layer] for layer in moe_layers)
    routers = [tensor for tensor in tensors if tensor.part is Part.ROUTER]
    return ModelGeometry(
        name=facts.name,
        architecture=facts.architecture,
        n_layers=facts.n_layers,
        moe_layers=moe_layers,
        n_experts=facts.n_experts if moe_layers else 0,
        top_k=max(top_k, default=0),
        layer_top_k=top_k,
        n_shared_experts=_shared(facts, tensors) if moe_layers else 0,
        gating=facts.gating if moe_layers else "",
        selection_bias=any("exp_probs_b" in t.name or "e_score_correction_bias" in t.name for t in routers),
        expert_groups=facts.expert_groups if facts.expert_groups > 1 and moe_layers else 0,
        expert_groups_used=facts.expert_groups_used if facts.expert_groups > 1 and moe_layers else 0,
        d_model=facts.d_model,
        d_expert=facts.d_expert if moe_layers else 0,
        n_ctx=facts.n_ctx,
        n_vocab=facts.n_vocab,
        merged_gate_up=any((t.projection or "").startswith("gate_up") for t in experts),
        tied_output=not any(t.part is Part.OUTPUT for t in tensors),
        expert_bytes=_expert_bytes(where, facts.n_experts, moe_layers, experts),
        part_bytes={part: sum(t.nbytes for t in tensors if t.part is part) for part in Part},
        type_bytes={str(kind): size for kind, size in group(tensors, lambda t: t.type).items()},
        expert_types={str(kind): size for kind, size in group(experts, lambda t: t.type).items()},
        file_bytes=file_bytes,
        parameters=sum(_parameters(t) for t in tensors if t.part is not Part.UNUSED),
        expert_parameters=sum(_parameters(t) for t in experts),
        kv=_kv_cache(facts, tensors),
    )


def _check(where: str, facts: Facts, experts: Sequence[Tensor]) -> None:
    if not experts:
        return
    top_k = [facts.top_k] if isinstance(facts.top_k, int) else list(facts.top_k)
    if not 1 <= facts.n_experts <= MAX_EXPERTS or not all(0 <= k <= facts.n_experts for k in top_k) or max(top_k) < 1:
        raise UserError(
            f"{where}: it has tensors of experts, but says {facts.n_experts} experts and top-k {max(top_k)}: "
            "convert the model again"
        )
    for tensor in experts:
        rows = tensor.nbytes // facts.n_experts * facts.n_experts if tensor.expert is None else tensor.nbytes
        if rows != tensor.nbytes or (tensor.expert or 0) >= facts.n_experts:
            raise UserError(f"{where}: {tensor.name} does not fit {facts.n_experts} experts: convert the model again")


def _expert_bytes(where: str, n_experts: int, moe_layers: Sequence[int], experts: Sequence[Tensor]) -> tuple[int, ...]:
    """Bytes of one expert per MoE layer. All experts of a layer have one size, or the file is inconsistent."""
    sizes = {layer: [0] * n_experts for layer in moe_layers}
    for tensor in experts:
        if tensor.layer is None:
            continue
        if tensor.expert is not None:
            sizes[tensor.layer][tensor.expert] += tensor.nbytes
        else:
            share = slice_expert(tensor, 0, n_experts)
            sizes[tensor.layer] = [size + (share.length if share else 0) for size in sizes[tensor.layer]]
    for layer, bytes_of in sizes.items():
        if min(bytes_of) != max(bytes_of):
            odd = bytes_of.index(min(bytes_of))
            raise UserError(f"{where}: layer {layer}: tensors of expert {odd} are missing: download the model again")
    return tuple(sizes[layer][0] for layer in moe_layers)


def _shared(facts: Facts, tensors: Sequence[Tensor]) -> int:
    """As stated; one where tensors show a shared expert and no number says how many it stands for."""
    return facts.n_shared_experts or int(any(t.part is Part.SHARED for t in tensors))


def _parameters(tensor: Tensor) -> int:
    if tensor.name.endswith(("scale", "scales", "scale_inv")):
        return 0
    return tensor.n_values * _PACKED.get(tensor.type, 1)


def _kv_cache(facts: Facts, tensors: Sequence[Tensor]) -> KvCache:
    """Cache widths are read off the projections that fill it, which holds for every architecture alike."""
    fills: dict[int, dict[str, int]] = {}  # layer → projection → values per token
    # Gated DeltaNet calls its input projection attn_qkv too, but keeps a state instead of a cache.
    stateful = {tensor.layer for tensor in tensors if ".ssm_" in tensor.name or ".linear_attn." in tensor.name}
    for tensor in tensors:
        if tensor.part is Part.ATTENTION and tensor.layer is not None:
            projection = _cached_projection(tensor.name)
            if projection == "qkv" and tensor.layer in stateful:
                projection = ""
            fills.setdefault(tensor.layer, {}).update({projection: tensor.shape[0]} if projection else {})
    width = {layer: _cache_width(facts, layer, fill) for layer, fill in fills.items() if fill}
    cached = {layer: 2 * size for layer, size in width.items() if layer not in facts.uncached_layers}
    windowed = facts.windowed_layers if facts.window else frozenset()
    recurrent = len(fills) - len(width)
    return KvCache(
        full=sum(size for layer, size in cached.items() if layer not in windowed),
        windowed=sum(size for layer, size in cached.items() if layer in windowed),
        window=facts.window if windowed else 0,
        latent=any("latent" in fill and "expanded" not in fill for fill in fills.values()),
        recurrent_layers=recurrent,
        state=recurrent * facts.state_bytes,
    )


def _cache_width(facts: Facts, layer: int, fill: dict[str, int]) -> int:
    if "qkv" in fill or "expanded" in fill:
        return (facts.kv_heads[layer] if layer < len(facts.kv_heads) else 0) * (facts.d_key + facts.d_value)
    if "latent" in fill:
        return fill["latent"]
    keys = fill.get("k", 0)
    return keys + fill.get("v", keys)  # without a projection of their own, values are the keys


_CACHED = {
    "latent": ("attn_kv_a_mqa", "kv_a_proj_with_mqa"),
    "expanded": ("attn_kv_b",),  # files from before llama.cpp cached the latent
    "k": ("attn_k", "k_proj"),
    "v": ("attn_v", "v_proj"),
    "qkv": ("attn_qkv", "qkv_proj", "query_key_value"),
}


def _cached_projection(name: str) -> str:
    """Which input of the cache a weight computes; "" if none."""
    stem, _, suffix = name.rpartition(".")
    stem = stem.rpartition(".")[2]
    return next((kind for kind, stems in _CACHED.items() if suffix == "weight" and stem in stems), "")
