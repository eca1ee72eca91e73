"""Export of a trained model: GGUF for llama.cpp, safetensors for `OlmoeForCausalLM`, and from the first to the second.

Between formats, weights are float32 numpy arrays under their GGUF names. The GGUF is the one file that is shipped:
`python -m edgemoe.training.export MODEL.gguf DIRECTORY` makes the Hugging Face checkpoint from it.
"""

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from edgemoe.errors import UserError
from edgemoe.training.model import ModelConfig, MoEModel

END_OF_TEXT, PAD = "<|endoftext|>", "<|pad|>"
SPECIAL_TOKENS = (END_OF_TEXT, PAD)  # ids 0 and 1

Weights = dict[str, np.ndarray]

_HF_NAMES = {  # of a block; the experts are split below
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
}
_HF_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_HF_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def weights_of(model: MoEModel) -> Weights:
    """The model's weights under their GGUF names; experts as [E, out, in]."""
    state = {name: value.detach().float().cpu().numpy() for name, value in model.state_dict().items()}
    weights = {f"{ours}.weight": state[f"{theirs.removeprefix('model.')}.weight"] for ours, theirs in _HF_TOP.items()}
    for layer in range(model.config.n_layers):
        for ours, theirs in _HF_NAMES.items():
            source = f"layers.{layer}.{theirs}"
            weights[f"blk.{layer}.{ours}.weight"] = state[source if ours == "ffn_gate_inp" else f"{source}.weight"]
        gate_up = state[f"layers.{layer}.mlp.gate_up"].transpose(0, 2, 1)
        gate, up = np.split(gate_up, 2, axis=1)
        weights[f"blk.{layer}.ffn_gate_exps.weight"] = gate
        weights[f"blk.{layer}.ffn_up_exps.weight"] = up
        weights[f"blk.{layer}.ffn_down_exps.weight"] = state[f"layers.{layer}.mlp.down"].transpose(0, 2, 1)
    return weights


def model_of(config: ModelConfig, weights: Weights) -> MoEModel:
    """The model that has these weights: the inverse of `weights_of`."""
    state = {f"{theirs.removeprefix('model.')}.weight": weights[f"{ours}.weight"] for ours, theirs in _HF_TOP.items()}
    for layer in range(config.n_layers):
        for ours, theirs in _HF_NAMES.items():
            target = f"layers.{layer}.{theirs}"
            state[target if ours == "ffn_gate_inp" else f"{target}.weight"] = weights[f"blk.{layer}.{ours}.weight"]
        gate, up, down = (weights[f"blk.{layer}.{name}.weight"] for name in _HF_EXPERTS)
        state[f"layers.{layer}.mlp.gate_up"] = np.concatenate([gate, up], axis=1).transpose(0, 2, 1)
        state[f"layers.{layer}.mlp.down"] = down.transpose(0, 2, 1)
    model = MoEModel(config)
    model.load_state_dict({name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in state.items()})
    return model


def write_gguf(
    path: Path, config: ModelConfig, weights: Weights, tokenizer: Tokenizer, quantization: str = "Q8_0", **about: Any
) -> None:
    """Write an `olmoe` GGUF: matrices in `quantization` (Q8_0, F16 or F32), router and norms in F32.

    `about` is general metadata: name, description, license and so on, for gguf's `add_<key>`.
    """
    kind = gguf.GGMLQuantizationType[quantization]
    writer = gguf.GGUFWriter(path, "olmoe")
    for key, value in about.items():
        getattr(writer, f"add_{key}")(value)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{quantization}" if quantization != "F32" else "ALL_F32"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _add_geometry(writer, config)
    _add_tokenizer(writer, tokenizer)
    for name, value in weights.items():
        exact = value.ndim == 1 or "ffn_gate_inp" in name
        stored = gguf.GGMLQuantizationType.F32 if exact else kind
        data = gguf.quants.quantize(np.ascontiguousarray(value, dtype=np.float32), stored)
        writer.add_tensor(name, data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_geometry(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    writer.add_context_length(config.context)
    writer.add_embedding_length(config.d_model)
    writer.add_block_count(config.n_layers)
    writer.add_feed_forward_length(config.d_expert)
    writer.add_head_count(config.n_heads)
    writer.add_head_count_kv(config.n_heads)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_expert_count(config.n_experts)
    writer.add_expert_used_count(config.top_k)


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer) -> None:
    bpe = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(bpe["vocab"], key=bpe["vocab"].get)
    types = [gguf.TokenType.CONTROL if token in SPECIAL_TOKENS else gguf.TokenType.NORMAL for token in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(pair) if isinstance(pair, list) else pair for pair in bpe["merges"]])
    writer.add_bos_token_id(tokens.index(END_OF_TEXT))
    writer.add_eos_token_id(tokens.index(END_OF_TEXT))
    writer.add_pad_token_id(tokens.index(PAD))
    writer.add_add_bos_token(True)


def read_gguf(path: Path) -> tuple[ModelConfig, Weights, Tokenizer]:
    """Geometry, weights dequantised to float32, and tokenizer of a GGUF that `write_gguf` made."""
    reader = gguf.GGUFReader(path)

    def value(key: str) -> Any:
        field = reader.get_field(key)
        if field is None:
            raise UserError(f"{path}: no {key} in its header; only a GGUF exported here can be converted")
        return field.contents()

    config = ModelConfig(
        vocab_size=len(value("tokenizer.ggml.tokens")),
        d_model=value("olmoe.embedding_length"),
        n_layers=value("olmoe.block_count"),
        n_heads=value("olmoe.attention.head_count"),
        n_experts=value("olmoe.expert_count"),
        top_k=value("olmoe.expert_used_count"),
        d_expert=value("olmoe.feed_forward_length"),
        context=value("olmoe.context_length"),
        rope_theta=value("olmoe.rope.freq_base"),
        norm_eps=value("olmoe.attention.layer_norm_rms_epsilon"),
    )
    weights = {
        tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        for tensor in reader.tensors
    }
    return config, weights, build_tokenizer(value("tokenizer.ggml.tokens"), value("tokenizer.ggml.merges"))


def build_tokenizer(tokens: list[str], merges: list[str]) -> Tokenizer:
    """Byte-level BPE with GPT-2's splitting, which llama.cpp calls `gpt-2`; BOS opens every text."""
    vocab = {token: index for index, token in enumerate(tokens)}
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, vocab[END_OF_TEXT])]
    )
    return tokenizer


def write_hf(directory: Path, config: ModelConfig, weights: Weights, tokenizer: Tokenizer) -> None:
    """A checkpoint directory that `OlmoeForCausalLM.from_pretrained` and `AutoTokenizer` load."""
    from safetensors.numpy import save_file
    from transformers import OlmoeConfig, PreTrainedTokenizerFast

    directory.mkdir(parents=True, exist_ok=True)
    save_file(_hf_weights(config, weights), directory / "model.safetensors", metadata={"format": "pt"})
    OlmoeConfig(
        architectures=["OlmoeForCausalLM"],
        vocab_size=config.vocab_size,
        hidden_size=config.d_model,
        intermediate_size=config.d_expert,
        num_hidden_layers=config.n_layers,
        num_attention_heads=config.n_heads,
        num_key_value_heads=config.n_heads,
        num_experts=config.n_experts,
        num_experts_per_tok=config.top_k,
        norm_topk_prob=False,
        max_position_embeddings=config.context,
        rms_norm_eps=config.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=1,
        dtype="float32",
    ).save_pretrained(directory)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, pad_token=PAD
    ).save_pretrained(directory)


def _hf_weights(config: ModelConfig, weights: Weights) -> Weights:
    out = {f"{theirs}.weight": weights[f"{ours}.weight"] for ours, theirs in _HF_TOP.items()}
    for layer in range(config.n_layers):
        prefix = f"model.layers.{layer}"
        for ours, theirs in _HF_NAMES.items():
            out[f"{prefix}.{theirs}.weight"] = weights[f"blk.{layer}.{ours}.weight"]
        for ours, theirs in _HF_EXPERTS.items():
            for expert, matrix in enumerate(weights[f"blk.{layer}.{ours}.weight"]):
                out[f"{prefix}.mlp.experts.{expert}.{theirs}.weight"] = matrix
    return {name: np.ascontiguousarray(value) for name, value in out.items()}


def main() -> None:
    """`python -m edgemoe.training.export MODEL.gguf DIRECTORY`."""
    if len(sys.argv) != 3:
        sys.exit("usage: python -m edgemoe.training.export MODEL.gguf DIRECTORY")
    write_hf(Path(sys.argv[2]), *read_gguf(Path(sys.argv[1])))


if __name__ == "__main__":
    main()
