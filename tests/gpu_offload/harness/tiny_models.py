"""A tiny random model of every family, wide enough in its scores that steering has something to do."""

import numpy as np
import torch
import transformers

from edgemoe.calibration import Calibration
from edgemoe.gpu_offload.harness.calibrate import calibrate_model

VOCABULARY = 97
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 1,
}
_EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 16}
_SHARED = {**_EXPERTS, "shared_expert_intermediate_size": 16, "head_dim": 16}
_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
}

CONFIGS = {
    "olmoe": lambda: transformers.OlmoeConfig(**_SHAPE, num_experts=16, num_experts_per_tok=4, intermediate_size=16),
    "mixtral": lambda: transformers.MixtralConfig(
        **_SHAPE, num_local_experts=8, num_experts_per_tok=2, intermediate_size=16
    ),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
        **_SHAPE, **_EXPERTS, intermediate_size=32, shared_expert_intermediate_size=16
    ),
    # Layer 1 is dense: neither layer 0 nor layer 2 has a pre-gate.
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **_SHAPE, **_EXPERTS, head_dim=8, intermediate_size=32, norm_topk_prob=True, mlp_only_layers=[1]
    ),
    "qwen3_next": lambda: transformers.Qwen3NextConfig(**_SHAPE, **_SHARED, **_LINEAR, norm_topk_prob=True),
    "qwen3_5_moe": lambda: transformers.Qwen3_5MoeTextConfig(**_SHAPE, **_SHARED, **_LINEAR),
    # Four groups of four, two of which a token may use; layer 0 is dense.
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **{**_SHAPE, "num_key_value_heads": 4},
        n_routed_experts=16,
        num_experts_per_tok=4,
        n_shared_experts=1,
        n_group=4,
        topk_group=2,
        moe_intermediate_size=16,
        intermediate_size=32,
        first_k_dense_replace=1,
        q_lora_rank=None,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        routed_scaling_factor=2.5,
    ),
    "glm4_moe": lambda: transformers.Glm4MoeConfig(
        **_SHAPE,
        head_dim=8,
        n_routed_experts=16,
        num_experts_per_tok=4,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=16,
        intermediate_size=32,
        first_k_dense_replace=1,
    ),
}
FAMILIES = list(CONFIGS)
MOE_LAYERS = {"qwen3_moe": [0, 2, 3], "deepseek_v3": [1, 2, 3], "glm4_moe": [1, 2, 3]}


def tiny(family: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> "transformers.PreTrainedModel":
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[family]())
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.rand_like(buffer) * 0.2)
    return model.to(dtype).eval()


def windows(count: int = 4, length: int = 24, seed: int = 0) -> list[np.ndarray]:
    """Random token ids without pad and end-of-text, a few of them often."""
    rng = np.random.default_rng(seed)
    chances = 1 / np.arange(2, VOCABULARY)
    return list(rng.choice(np.arange(2, VOCABULARY), size=(count, length), p=chances / chances.sum()))


def calibrated(model: "transformers.PreTrainedModel") -> Calibration:
    return calibrate_model(model, windows(4, 32, seed=99), batch=4)
