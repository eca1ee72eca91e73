"""`edgemoe run --device` on whole, sound models of architectures that the GPU tier does not run."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the GPU tier needs torch (pip install edgemoe[gpu])")

from safetensors.numpy import save_file

from edgemoe.cli import commands
from edgemoe.errors import UserError
from edgemoe.model import read_model
from edgemoe.model.synthetic import write_synthetic

# As transformers writes them, sizes aside.
COMMON: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_cache": True,
    "vocab_size": 300,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "head_dim": 16,
        "mlp_bias": False,
        "pretraining_tp": 1,
    },
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_experts_per_tok": 2,
        "num_local_experts": 4,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.02,
        "router_jitter_noise": 0.0,
        "sliding_window": None,
    },
}


def _tensors(experts: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (300, 64),
        "model.norm.weight": (64,),
        "lm_head.weight": (300, 64),
    }
    matrices = {"gate_proj": (96, 64), "up_proj": (96, 64), "down_proj": (64, 96)}
    for layer in range(2):
        at = f"model.layers.{layer}."
        shapes |= {f"{at}{norm}.weight": (64,) for norm in ("input_layernorm", "post_attention_layernorm")}
        widths = {"q_proj": 64, "k_proj": 32, "v_proj": 32, "o_proj": 64}
        shapes |= {f"{at}self_attn.{name}.weight": (width, 64) for name, width in widths.items()}
        if not experts:
            shapes |= {f"{at}mlp.{name}.weight": shape for name, shape in matrices.items()}
            continue
        shapes[f"{at}block_sparse_moe.gate.weight"] = (experts, 64)
        for expert in range(experts):
            for name, shape in zip(("w1", "w3", "w2"), matrices.values(), strict=True):
                shapes[f"{at}block_sparse_moe.experts.{expert}.{name}.weight"] = shape
    return shapes


@pytest.fixture(params=CONFIGS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A Hugging Face folder with everything in it that a model of this architecture has."""
    config = {**COMMON, **CONFIGS[request.param]}
    (tmp_path / "config.json").write_text(json.dumps(config, indent=2))
    rng = np.random.default_rng(0)
    shapes = _tensors(config.get("num_local_experts", 0))
    tensors = {name: rng.normal(0, 0.02, shape).astype(np.float32) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path


@pytest.fixture(autouse=True)
def no_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command takes SIGTERM for itself; this process is the tests'."""
    monkeypatch.setattr("edgemoe.cli.run.interrupt_on_sigterm", lambda: None)


def check_refusal(model: Path, architecture: str) -> None:
    with pytest.raises(UserError) as caught:
        commands.run(["run", str(model), "--device", "cpu", "--residency", "50%", "-p", "x", "-n", "1"])
    assert str(caught.value) == (
        f"{model}: architecture {architecture}: the GPU tier runs OLMoE's architecture: use edgemoe run without "
        "--device, on a GGUF file"
    )


def test_a_whole_folder_is_refused_by_name(folder: Path) -> None:
    model = read_model(folder)
    assert model.geometry.is_moe == (model.geometry.architecture == "mixtral") and model.tensors
    check_refusal(folder, model.geometry.architecture)


@pytest.mark.parametrize("architecture", ["llama", "qwen3moe", "gpt-oss", "deepseek2"])
def test_a_whole_gguf_is_refused_by_name(architecture: str, tmp_path: Path) -> None:
    [path, *_] = write_synthetic(tmp_path / "m.gguf", arch=architecture)
    check_refusal(path, architecture)
