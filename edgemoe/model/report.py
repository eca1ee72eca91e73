"""A model's geometry as one JSON object: the numbers of `edgemoe info --json`. Sizes are bytes."""

from dataclasses import asdict
from typing import Any

from edgemoe.model import Model
from edgemoe.model.memory import DEFAULT_CONTEXT, memory_needs


def model_report(model: Model, n_ctx: int = DEFAULT_CONTEXT) -> dict[str, Any]:
    """Everything that is known of a model from its headers; memory needs are at a context of `n_ctx` tokens."""
    g = model.geometry
    return {
        "path": str(model.path),
        "format": model.format,
        "files": [str(file) for file in model.files],
        "name": g.name,
        "architecture": g.architecture,
        "parameters": g.parameters,
        "active_parameters": g.active_parameters,
        "layers": g.n_layers,
        "moe_layers": list(g.moe_layers),
        "dense_layers": [layer for layer in range(g.n_layers) if layer not in set(g.moe_layers)],
        "experts": g.n_experts,
        "top_k": g.top_k,
        "top_k_by_layer": list(g.layer_top_k),
        "shared_experts": g.n_shared_experts,
        "gating": g.gating,
        "selection_bias": g.selection_bias,
        "expert_groups": g.expert_groups,
        "expert_groups_used": g.expert_groups_used,
        "merged_gate_up": g.merged_gate_up,
        "d_model": g.d_model,
        "d_expert": g.d_expert,
        "context": g.n_ctx,
        "vocabulary": g.n_vocab,
        "tied_output": g.tied_output,
        "bytes": {
            "file": g.file_bytes,
            "parts": {part.name.lower(): size for part, size in g.part_bytes.items()},
            "types": dict(g.type_bytes),
            "expert_types": dict(g.expert_types),
            "expert_by_layer": list(g.expert_bytes),
            "slot_in_every_layer": g.slot_bytes,
            "routed": g.routed_bytes,
            "non_expert": g.non_expert_bytes,
            "always_read_per_token": g.always_read_bytes,
            "active_experts_per_token": g.active_expert_bytes,
            "active_per_token": g.active_bytes,
        },
        "kv": {**asdict(g.kv), "per_token": g.kv.per_token, "at_context": g.kv.at(n_ctx)},
        "memory": {"context": n_ctx, "ways": [asdict(need) for need in memory_needs(g, n_ctx)]},
    }
