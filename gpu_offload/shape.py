"""What a model of OLMoE's architecture is, in numbers: all that an executor needs besides the weights.

Pre-norm decoder; queries and keys RMS-normalised over their whole width, then rotated (NEOX halves: llama.cpp and
Hugging Face keep OLMoE's q and k in the same order, so nothing is permuted); SwiGLU experts chosen by softmax top-k.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgemoe.errors import UserError
from edgemoe.model import Model

ARCHITECTURE = "olmoe"
_NOT_HERE = "the GPU tier runs OLMoE's architecture: use edgemoe run without --device, on a GGUF file"


@dataclass(frozen=True)
class Shape:
    """Sizes and constants of one model. Every layer is a MoE layer."""

    n_layers: int  # L
    d_model: int  # d
    n_heads: int  # H
    n_kv_heads: int  # fewer than H with grouped queries
    d_head: int
    n_experts: int  # E
    top_k: int  # k
    d_expert: int  # f
    n_vocab: int  # V
    n_ctx: int  # trained context
    rope_theta: float
    norm_eps: float
    norm_topk: bool  # mixing weights renormalised over the executed experts
    clip_qkv: float | None  # queries, keys and values clamped to ± this, after the norms
    tied_output: bool

    @property
    def d_query(self) -> int:
        return self.n_heads * self.d_head

    @property
    def d_kv(self) -> int:
        return self.n_kv_heads * self.d_head

    @property
    def expert_values(self) -> int:
        """Weights of one expert: gate [f, d], up [f, d], down [d, f]."""
        return 3 * self.d_expert * self.d_model


def read_shape(model: Model) -> Shape:
    """The shape of a GGUF or safetensors model. Raises `UserError`, one line, for another architecture or a variant of
    attention, rotation or routing that is not implemented."""
    geometry = model.geometry
    if geometry.architecture != ARCHITECTURE:
        raise UserError(f"{model.path}: architecture {geometry.architecture}: {_NOT_HERE}")
    if geometry.moe_layers != tuple(range(geometry.n_layers)):
        raise UserError(f"{model.path}: not every layer has experts: {_NOT_HERE}")
    facts = _from_gguf(model) if model.format == "GGUF" else _from_config(model)
    shape = Shape(
        n_layers=geometry.n_layers,
        d_model=geometry.d_model,
        n_experts=geometry.n_experts,
        top_k=geometry.top_k,
        d_expert=geometry.d_expert,
        n_vocab=geometry.n_vocab,
        n_ctx=geometry.n_ctx,
        tied_output=geometry.tied_output,
        **facts,
    )
    _check(model, shape)
    return shape


def _from_gguf(model: Model) -> dict[str, Any]:
    from edgemoe.llamacpp.header import read_header

    values = read_header(model.files[0]).values

    def value(key: str, default: Any = None) -> Any:
        found = values.get(f"{ARCHITECTURE}.{key}", default)
        return found[0] if isinstance(found, list) and len(set(found)) == 1 else found

    heads = value("attention.head_count")
    eps = value("attention.layer_norm_rms_epsilon")
    if not isinstance(heads, int) or not heads or not isinstance(eps, float):
        raise UserError(f"{model.path}: no head count or norm epsilon in its header: convert the model again")
    d_head = value("attention.key_length", model.geometry.d_model // heads)
    _refuse(
        model,
        {
            "values of another width than keys": value("attention.value_length", d_head) != d_head,
            "a partial rotation": value("rope.dimension_count", d_head) != d_head,
            "a scaled rotation": value("rope.scaling.type", "none") != "none",
            "a sliding window": bool(value("attention.sliding_window", 0)),
            "a gating function other than softmax": model.geometry.gating != "softmax",
        },
    )
    return {
        "n_heads": heads,
        "n_kv_heads": value("attention.head_count_kv", heads),
        "d_head": d_head,
        "rope_theta": float(value("rope.freq_base", 10_000.0)),
        "norm_eps": eps,
        "norm_topk": bool(value("expert_weights_norm", False)),
        "clip_qkv": value("attention.clamp_kqv") or None,
    }


def _from_config(model: Model) -> dict[str, Any]:
    config = json.loads((model.path / "config.json").read_text(encoding="utf-8"))
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, Mapping) else str(rope)
    theta = rope.get("rope_theta") if isinstance(rope, Mapping) else None
    heads = config.get("num_attention_heads")
    if not isinstance(heads, int) or heads < 1:
        raise UserError(f"{model.path / 'config.json'}: no num_attention_heads in it: download it again")
    _refuse(
        model,
        {
            f"a rotation of type {kind}": kind != "default",
            "biases in its attention": bool(config.get("attention_bias")),
            f"activation {config.get('hidden_act')}": config.get("hidden_act", "silu") != "silu",
            "a sliding window": bool(config.get("sliding_window")),
        },
    )
    return {
        "n_heads": heads,
        "n_kv_heads": config.get("num_key_value_heads") or heads,
        "d_head": config.get("head_dim") or model.geometry.d_model // heads,
        "rope_theta": float(theta or config.get("rope_theta") or 10_000.0),
        "norm_eps": float(config.get("rms_norm_eps", 1e-5)),
        "norm_topk": bool(config.get("norm_topk_prob", False)),
        "clip_qkv": config.get("clip_qkv"),
    }


def _refuse(model: Model, found: Mapping[str, bool]) -> None:
    for variant, there in found.items():
        if there:
            raise UserError(f"{model.path}: {variant} is not implemented here: {_NOT_HERE}")


def _check(model: Model, shape: Shape) -> None:
    whole = shape.n_kv_heads >= 1 and shape.n_heads % shape.n_kv_heads == 0 and shape.d_head % 2 == 0
    if not whole or min(shape.d_head, shape.d_model, shape.d_expert, shape.n_vocab) < 1:
        raise UserError(
            f"{model.path}: {shape.n_heads} heads, {shape.n_kv_heads} for keys, of width {shape.d_head}: its header "
            "contradicts itself: download or convert the model again"
        )
