"""Safetensors directories: real ones that transformers writes, and the names of models that others publish."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.numpy import save_file

from edgemoe.errors import UserError
from edgemoe.model import Part, read_model

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
}


@pytest.mark.parametrize(
    ("config", "experts"),
    [
        (transformers.OlmoeConfig(**SMALL, num_experts=8), 8),
        (transformers.Qwen3MoeConfig(**SMALL, num_experts=8, moe_intermediate_size=32, head_dim=16), 8),
        (transformers.MixtralConfig(**SMALL, num_local_experts=8), 8),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_what_transformers_saves_is_read(tmp_path: Path, config: transformers.PretrainedConfig, experts: int) -> None:
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    found = read_model(tmp_path)
    g = found.geometry
    assert len(found.files) > 1 and found.format == "safetensors"
    assert (g.n_layers, g.moe_layers, g.n_experts, g.top_k, g.d_expert) == (2, (0, 1), experts, 2, 32)
    assert (g.gating, g.n_vocab, g.n_ctx, g.n_shared_experts) == ("softmax", 300, 128, 0)
    assert g.parameters == sum(p.numel() for p in model.parameters())
    assert g.expert_bytes == (3 * 64 * 32 * 2,) * 2 and g.expert_types == {"BF16": 2 * 8 * g.expert_bytes[0]}
    assert g.kv.per_token == 2 * 2 * (2 * 16) * 2
    assert sum(g.part_bytes.values()) == sum(t.nbytes for t in found.tensors)
    assert g.part_bytes[Part.ROUTER] == 2 * 8 * 64 * 2 and g.part_bytes[Part.DENSE] == 0
    for piece in found.expert_slices(1, 5):
        with safe_open(found.files[piece.file], "pt") as weights:
            whole = weights.get_tensor(piece.tensor)
        expert = whole if whole.numel() * 2 == piece.length else whole[5]
        with found.files[piece.file].open("rb") as file:
            file.seek(piece.offset)
            assert file.read(piece.length) == expert.contiguous().view(torch.uint8).numpy().tobytes()


def write(directory: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory


def zeros(*shape: int, dtype: Any = np.float16) -> np.ndarray:
    return np.zeros(shape, dtype=dtype)


def test_deepseek_names(tmp_path: Path) -> None:
    """Leading dense layer, latent attention, selection bias, groups, shared experts, a layer for prediction."""
    tensors = {"model.embed_tokens.weight": zeros(32, 8), "lm_head.weight": zeros(32, 8)}
    for layer in range(4):
        block = f"model.layers.{layer}."
        tensors[f"{block}self_attn.kv_a_proj_with_mqa.weight"] = zeros(12, 8)
        tensors[f"{block}self_attn.kv_b_proj.weight"] = zeros(40, 8)
        if layer == 0:
            tensors |= {f"{block}mlp.{name}_proj.weight": zeros(10, 8) for name in ("gate", "up", "down")}
            continue
        tensors |= {f"{block}mlp.gate.weight": zeros(4, 8), f"{block}mlp.gate.e_score_correction_bias": zeros(4)}
        for name in ("gate", "up", "down"):
            tensors[f"{block}mlp.shared_experts.{name}_proj.weight"] = zeros(6, 8)
            for expert in range(4):
                tensors[f"{block}mlp.experts.{expert}.{name}_proj.weight"] = zeros(6, 8)
                tensors[f"{block}mlp.experts.{expert}.{name}_proj.weight_scale_inv"] = zeros(1, 1, dtype=np.float32)
    config = {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 3,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "scoring_func": "sigmoid",
        "moe_intermediate_size": 6,
        "intermediate_size": 10,
        "hidden_size": 8,
    }
    model = read_model(write(tmp_path / "m", config, tensors))
    g = model.geometry
    assert (g.moe_layers, g.gating, g.selection_bias) == ((1, 2), "sigmoid", True)
    assert (g.expert_groups, g.expert_groups_used, g.n_shared_experts, g.d_expert) == (2, 1, 1, 6)
    assert g.expert_bytes == (3 * (6 * 8 * 2 + 4),) * 2
    assert g.kv.latent and g.kv.per_token == 3 * 12 * 2
    assert g.part_bytes[Part.DENSE] == 3 * 10 * 8 * 2
    assert g.part_bytes[Part.SHARED] == 2 * 3 * 6 * 8 * 2
    assert g.part_bytes[Part.UNUSED] == sum(t.nbytes for t in model.tensors if ".layers.3." in t.name) > 0
    assert {s.projection for s in model.expert_slices(1, 3)} >= {"gate", "up.weight_scale_inv"}


def test_gpt_oss_names(tmp_path: Path) -> None:
    """Packed, stacked experts with scales and biases; two of four layers within a window."""
    tensors = {"model.embed_tokens.weight": zeros(32, 8), "lm_head.weight": zeros(32, 8)}
    for layer in range(4):
        block = f"model.layers.{layer}."
        tensors |= {f"{block}self_attn.{name}_proj.weight": zeros(16, 8) for name in ("k", "v")}
        tensors |= {f"{block}mlp.router.weight": zeros(4, 8), f"{block}mlp.router.bias": zeros(4)}
        for name, rows in (("gate_up", 12), ("down", 8)):
            tensors[f"{block}mlp.experts.{name}_proj_blocks"] = zeros(4, rows, 1, 16, dtype=np.uint8)
            tensors[f"{block}mlp.experts.{name}_proj_scales"] = zeros(4, rows, 1, dtype=np.uint8)
            tensors[f"{block}mlp.experts.{name}_proj_bias"] = zeros(4, rows)
    config = {
        "model_type": "gpt_oss",
        "num_hidden_layers": 4,
        "num_local_experts": 4,
        "experts_per_token": 2,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "intermediate_size": 6,
    }
    model = read_model(write(tmp_path / "m", config, tensors))
    g = model.geometry
    assert (g.n_experts, g.top_k, g.merged_gate_up, g.gating) == (4, 2, True, "softmax of the chosen")
    assert g.expert_bytes == ((12 + 8) * (16 + 1 + 2),) * 4
    assert (g.kv.full, g.kv.windowed, g.kv.window) == (2 * 2 * 32, 2 * 2 * 32, 128)
    assert g.expert_parameters == 4 * 4 * (12 + 8) * (32 + 1)
    slices = model.expert_slices(2, 1)
    assert {s.projection for s in slices} == {
        f"{p}{suffix}" for p in ("gate_up", "down") for suffix in ("", ".scales", ".bias")
    }


def test_numbers_of_multimodal_models_are_found(tmp_path: Path) -> None:
    experts = {f"model.language_model.layers.0.mlp.experts.{i}.w1.weight": zeros(2, 4) for i in range(3)}
    vision = {"model.visual.blocks.0.mlp.gate_proj.weight": zeros(8, 8)}
    config = {"model_type": "x", "text_config": {"num_hidden_layers": 1, "num_experts": 3, "num_experts_per_tok": 1}}
    g = read_model(write(tmp_path / "m", config, experts | vision)).geometry
    assert g.n_experts == 3 and g.expert_bytes == (16,) and g.part_bytes[Part.UNUSED] == 128


def test_an_expert_that_is_missing_is_named(tmp_path: Path) -> None:
    experts = {f"model.layers.0.mlp.experts.{i}.up_proj.weight": zeros(2, 4) for i in (0, 2)}
    config = {"num_hidden_layers": 1, "num_experts": 3, "num_experts_per_tok": 1}
    with pytest.raises(UserError, match="layer 0: tensors of expert 1 are missing"):
        read_model(write(tmp_path / "m", config, experts))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    directory = write(tmp_path / "m", {"num_hidden_layers": 1}, {"lm_head.weight": zeros(2, 2)})
    index = {"weight_map": {"lm_head.weight": "model.safetensors", "other": "model-2.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"model-2\.safetensors is missing"):
        read_model(directory)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "config.json").unlink(), "no config.json there"),
        (lambda d: (d / "config.json").write_text("{"), "not readable JSON"),
        (lambda d: (d / "config.json").write_text("[]"), "expected a JSON object"),
        (lambda d: (d / "config.json").write_text("{}"), "no num_hidden_layers"),
        (lambda d: (d / "model.safetensors").unlink(), r"no \*\.safetensors there"),
        (lambda d: (d / "model.safetensors").write_bytes(b"\x02"), "not a safetensors file"),
        (lambda d: (d / "model.safetensors").write_bytes(b"\xff" * 64), "not a safetensors file"),
        (lambda d: (d / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"[]"), "corrupt safetensors header"),
        (lambda d: (d / "model.safetensors.index.json").write_text('{"weight_map": 3}'), "not a readable index"),
        (lambda d: index(d, {"x": 5}), "not a readable index"),
        (lambda d: index(d, {"x": "../model.safetensors"}), "not a readable index"),
        (lambda d: configure(d, num_hidden_layers=10**12), "1,000,000,000,000 layers"),
        (lambda d: configure(d, num_hidden_layers=True), "no num_hidden_layers"),
        (lambda d: configure(d, layer_types=7), "layer_types is 7, expected a list"),
        (lambda d: experts(d, num_experts=10**12, num_experts_per_tok=1), "says 1000000000000 experts"),
        (lambda d: swap(d / "model.safetensors", b"[2,2]", b"[4.]"), "corrupt safetensors header"),
        (lambda d: cut(d / "model.safetensors", 10), "truncated: .* that its header promises"),
        (lambda d: swap(d / "model.safetensors", b"[2,2]", b"[2,3]"), "do not match its shape"),
        (lambda d: swap(d / "model.safetensors", b'"F16"', b'"X16"'), "corrupt safetensors header"),
    ],
)
def test_damage_is_one_line(tmp_path: Path, damage: Any, message: str) -> None:
    directory = write(tmp_path / "m", {"num_hidden_layers": 1}, {"lm_head.weight": zeros(2, 2), "x": zeros(64)})
    read_model(directory)
    damage(directory)
    with pytest.raises(UserError, match=message) as error:
        read_model(directory)
    assert "\n" not in str(error.value)


def index(directory: Path, files: dict[str, Any]) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def configure(directory: Path, **config: Any) -> None:
    (directory / "config.json").write_text(json.dumps({"num_hidden_layers": 1, **config}))


def experts(directory: Path, **config: Any) -> None:
    configure(directory, **config)
    save_file({"model.layers.0.mlp.experts.0.up_proj.weight": zeros(2, 4)}, directory / "model.safetensors")


def test_a_layer_of_a_thousand_digits_is_no_layer(tmp_path: Path) -> None:
    tensors = {f"model.layers.{'9' * 5000}.mlp.experts.{'9' * 5000}.up_proj.weight": zeros(2, 2)}
    assert not read_model(write(tmp_path / "m", {"num_hidden_layers": 1}, tensors)).geometry.is_moe


def cut(path: Path, count: int) -> None:
    path.write_bytes(path.read_bytes()[:-count])


def swap(path: Path, old: bytes, new: bytes) -> None:
    assert old in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(old, new))
