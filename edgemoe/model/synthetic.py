"""Models with random weights that stock llama.cpp loads and decodes: for tests, self-tests and bandwidth work.

Every architecture has the parts that make routing hard to read: OLMoE and Qwen3-MoE (softmax routers), DeepSeek
(leading dense layers, latent attention, sigmoid gating with a selection bias, expert groups, shared experts, merged
gate and up projections), gpt-oss (biases of routers and experts, softmax over the chosen, sliding windows) and a dense
Llama to be refused. Files are streamed: 10 GB need little memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from edgemoe.model.byte_bpe import ByteBpe, byte_bpe
from edgemoe.model.synthetic_weights import SyntheticTensor, blocks
from edgemoe.progress import Advance, no_progress

ARCHITECTURES = ("olmoe", "qwen3moe", "gpt-oss", "deepseek2", "llama")
_GATING = {"softmax": gguf.ExpertGatingFuncType.SOFTMAX, "sigmoid": gguf.ExpertGatingFuncType.SIGMOID}

# The geometry of a model that people really run, with the types of its usual four-bit file.
QWEN3_30B_A3B: dict[str, Any] = {
    "arch": "qwen3moe",
    "n_layers": 48,
    "n_experts": 128,
    "top_k": 8,
    "d_model": 2048,
    "d_expert": 768,
    "d_dense": 6144,
    "n_heads": 32,
    "n_kv_heads": 4,
    "head_dim": 128,
    "n_vocab": 151_936,
    "n_ctx": 40_960,
    "expert_type": "Q4_K",
    "dense_type": "Q8_0",
}


@dataclass(frozen=True)
class Synthetic:
    """What to write. `leading_dense` … `merged_gate_up` are DeepSeek's; `llama` is dense and ignores the experts."""

    arch: str = "olmoe"
    n_layers: int = 4
    n_experts: int = 16
    top_k: int = 4
    d_model: int = 64
    d_expert: int = 32
    d_dense: int = 128  # of dense layers
    n_heads: int = 4
    n_kv_heads: int | None = None  # all, unless given
    head_dim: int | None = None  # d_model / n_heads, unless given
    n_vocab: int = 512
    n_ctx: int = 4096
    expert_type: str = "F32"
    dense_type: str = "F32"
    leading_dense: int = 0
    shared_experts: int = 0
    gating: str = "sigmoid"
    selection_bias: bool = True
    expert_groups: int = 0
    expert_groups_used: int = 0
    merged_gate_up: bool = False
    window: int = 128  # of gpt-oss's sliding-window layers
    add_bos: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        deepseek_only = self.leading_dense or self.shared_experts or self.expert_groups or self.merged_gate_up
        checks = {
            f"arch {self.arch!r} is none of {', '.join(ARCHITECTURES)}": self.arch in ARCHITECTURES,
            "top_k exceeds n_experts": self.top_k <= self.n_experts,
            f"{self.arch} has no leading dense layers, shared experts, groups or merged projections": (
                self.arch == "deepseek2" or not deepseek_only
            ),
            "expert_groups does not divide n_experts": not self.expert_groups
            or not self.n_experts % self.expert_groups,
            "the head dimension must be even (rotary pairs)": self.d_head % 2 == 0,
        }
        for complaint, fine in checks.items():
            if not fine:
                raise ValueError(complaint)

    @property
    def d_head(self) -> int:
        return self.head_dim or self.d_model // self.n_heads

    @property
    def kv_heads(self) -> int:
        return self.n_kv_heads or self.n_heads

    @property
    def n_shared(self) -> int:  # llama.cpp's DeepSeek cannot be without a shared expert
        return max(self.shared_experts, int(self.arch == "deepseek2"))

    @property
    def kv_rank(self) -> int:  # DeepSeek's latent attention
        return max(32, self.d_model // 4 // 32 * 32)

    @property
    def d_rope(self) -> int:
        return self.d_head // 4 * 2 or 2 if self.arch == "deepseek2" else self.d_head


def write_synthetic(
    path: str | Path,
    arch: str = "olmoe",
    *,
    shards: int = 1,
    hole: bool = False,
    advance: Advance = no_progress,
    **fields: Any,
) -> list[Path]:
    """Write a random model of the given shape (`Synthetic`'s fields) and return its files; load the first.

    `shards` > 1 splits it as llama.cpp names it: `x-00001-of-00003.gguf`. `hole` leaves the tensor data a hole of the
    right size: the header of a huge model in no disk space. `advance` takes bytes of tensor data written. The weights
    depend on `seed` and names only, so the same model in two types, or split, differs by rounding alone.
    """
    model = Synthetic(arch=arch, **fields)
    tensors = list(_tensors(model))
    path = Path(path)
    names = [path]
    if shards > 1:
        stem = path.name.removesuffix(".gguf")
        names = [path.with_name(gguf.SHARD_NAME_FORMAT.format(stem, i + 1, shards)) for i in range(shards)]
    for number, (name, index) in enumerate(zip(names, np.array_split(np.arange(len(tensors)), shards), strict=True)):
        writer = gguf.GGUFWriter(name, arch)
        if number == 0:
            _metadata(writer, model)
        if shards > 1:
            writer.add_uint16(gguf.Keys.Split.LLM_KV_SPLIT_NO, number)
            writer.add_uint16(gguf.Keys.Split.LLM_KV_SPLIT_COUNT, shards)
            writer.add_int32(gguf.Keys.Split.LLM_KV_SPLIT_TENSORS_COUNT, len(tensors))
        _write(writer, [tensors[i] for i in index], model.seed, hole, advance)
    return names


def tensor_bytes(arch: str = "olmoe", **fields: Any) -> int:
    """Bytes of tensor data that `write_synthetic` would write for this shape."""
    return sum(tensor.nbytes for tensor in _tensors(Synthetic(arch=arch, **fields)))


def _write(writer: Any, tensors: list[SyntheticTensor], seed: int, hole: bool, advance: Advance) -> None:
    for tensor in tensors:
        writer.add_tensor_info(tensor.name, tensor.ne[::-1], np.dtype(np.float32), tensor.nbytes, tensor.type)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        file = writer.fout[0]
        writer.write_padding(file, file.tell())
        for tensor in tensors:
            if hole:
                file.seek(tensor.nbytes, 1)
                file.truncate()
            else:
                for piece in blocks(tensor, seed):
                    file.write(piece.data)
                    advance(piece.nbytes)
            writer.write_padding(file, tensor.nbytes)
    finally:
        writer.close()


def _metadata(writer: Any, model: Synthetic) -> None:
    writer.add_name(f"synthetic {model.arch}")
    writer.add_vocab_size(model.n_vocab)
    writer.add_context_length(model.n_ctx)
    writer.add_embedding_length(model.d_model)
    writer.add_block_count(model.n_layers)
    writer.add_head_count(model.n_heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(model.d_rope)
    if model.arch == "deepseek2":
        _latent_attention(writer, model)
    else:
        writer.add_head_count_kv(model.kv_heads)
        writer.add_key_length(model.d_head)
        writer.add_value_length(model.d_head)
    # OLMoE reads its expert width from the dense key.
    writer.add_feed_forward_length(model.d_expert if model.arch == "olmoe" else model.d_dense)
    if model.arch != "llama":
        writer.add_expert_count(model.n_experts)
        writer.add_expert_used_count(model.top_k)
    if model.arch == "gpt-oss":
        writer.add_sliding_window(model.window)
    if model.arch in ("qwen3moe", "gpt-oss", "deepseek2"):
        writer.add_expert_feed_forward_length(model.d_expert)
    if model.arch == "deepseek2":
        writer.add_leading_dense_block_count(model.leading_dense)
        writer.add_expert_shared_count(model.n_shared)
        writer.add_expert_weights_scale(1.0)
        writer.add_expert_weights_norm(True)
        writer.add_expert_gating_func(_GATING[model.gating])
        if model.expert_groups:
            writer.add_expert_group_count(model.expert_groups)
            writer.add_expert_group_used_count(model.expert_groups_used or model.expert_groups // 2)
    _tokenizer(writer, byte_bpe(model.n_vocab), model.add_bos)


def _latent_attention(writer: Any, model: Synthetic) -> None:
    """llama.cpp caches one latent head of rank + rotary dimensions, and knows the real head sizes by the MLA keys."""
    writer.add_head_count_kv(1)
    writer.add_q_lora_rank(model.kv_rank)
    writer.add_kv_lora_rank(model.kv_rank)
    writer.add_key_length(model.kv_rank + model.d_rope)
    writer.add_value_length(model.kv_rank)
    writer.add_key_length_mla(model.d_head)
    writer.add_value_length_mla(model.d_head)


def _tokenizer(writer: Any, vocabulary: ByteBpe, add_bos: bool) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    writer.add_token_merges(vocabulary.merges)
    writer.add_bos_token_id(vocabulary.end_of_text)
    writer.add_eos_token_id(vocabulary.end_of_text)
    writer.add_add_bos_token(add_bos)


def _tensors(model: Synthetic) -> Iterator[SyntheticTensor]:
    """Every tensor in file order, as llama.cpp's loader of the architecture expects it."""
    f32 = gguf.GGMLQuantizationType.F32
    yield _dense(model, "token_embd", (model.d_model, model.n_vocab), "embedding")
    yield SyntheticTensor("output_norm.weight", (model.d_model,), f32, "ones")
    yield _dense(model, "output", (model.d_model, model.n_vocab))
    for layer in range(model.n_layers):
        block = f"blk.{layer}."
        yield SyntheticTensor(f"{block}attn_norm.weight", (model.d_model,), f32, "ones")
        yield from _latent(model, block) if model.arch == "deepseek2" else _attention(model, block)
        after_attention = "post_attention_norm" if model.arch == "gpt-oss" else "ffn_norm"
        yield SyntheticTensor(f"{block}{after_attention}.weight", (model.d_model,), f32, "ones")
        if model.arch == "llama" or layer < model.leading_dense:
            yield from _ffn(model, block, "", model.d_dense)
        else:
            yield from _experts(model, block)


def _dense(model: Synthetic, name: str, ne: tuple[int, ...], fill: Any = "matrix") -> SyntheticTensor:
    """A non-expert weight: F16 where its rows do not divide into the type's blocks, as llama-quantize does."""
    kind = gguf.GGMLQuantizationType[model.dense_type]
    if ne[0] % gguf.GGML_QUANT_SIZES[kind][0]:
        kind = gguf.GGMLQuantizationType.F16
    return SyntheticTensor(f"{name}.weight", ne, kind, fill)


def _attention(model: Synthetic, block: str) -> Iterator[SyntheticTensor]:
    d_query, d_kv = model.n_heads * model.d_head, model.kv_heads * model.d_head
    for name, ne in (("q", (model.d_model, d_query)), ("k", (model.d_model, d_kv)), ("v", (model.d_model, d_kv))):
        yield _dense(model, f"{block}attn_{name}", ne)
    yield _dense(model, f"{block}attn_output", (d_query, model.d_model))
    norms = {"olmoe": (d_query, d_kv), "qwen3moe": (model.d_head, model.d_head)}.get(model.arch, ())
    if model.arch == "gpt-oss":
        biases = {"q": d_query, "k": d_kv, "v": d_kv, "output": model.d_model}
        yield from (_bias(f"{block}attn_{name}.bias", width) for name, width in biases.items())
        yield _bias(f"{block}attn_sinks.weight", model.n_heads)
    for name, width in zip("qk", norms, strict=False):
        yield SyntheticTensor(f"{block}attn_{name}_norm.weight", (width,), gguf.GGMLQuantizationType.F32, "ones")


def _bias(name: str, *ne: int) -> SyntheticTensor:
    return SyntheticTensor(name, ne, gguf.GGMLQuantizationType.F32, "bias")


def _latent(model: Synthetic, block: str) -> Iterator[SyntheticTensor]:
    rank, d_nope = model.kv_rank, model.d_head - model.d_rope
    f32 = gguf.GGMLQuantizationType.F32
    yield SyntheticTensor(f"{block}attn_q_a_norm.weight", (rank,), f32, "ones")
    yield SyntheticTensor(f"{block}attn_kv_a_norm.weight", (rank,), f32, "ones")
    yield _dense(model, f"{block}attn_q_a", (model.d_model, rank))
    yield _dense(model, f"{block}attn_q_b", (rank, model.n_heads * model.d_head))
    yield _dense(model, f"{block}attn_kv_a_mqa", (model.d_model, rank + model.d_rope))
    yield _dense(model, f"{block}attn_k_b", (d_nope, rank, model.n_heads))
    yield _dense(model, f"{block}attn_v_b", (rank, model.d_head, model.n_heads))
    yield _dense(model, f"{block}attn_output", (model.n_heads * model.d_head, model.d_model))


def _ffn(model: Synthetic, block: str, suffix: str, width: int) -> Iterator[SyntheticTensor]:
    yield _dense(model, f"{block}ffn_gate{suffix}", (model.d_model, width))
    yield _dense(model, f"{block}ffn_up{suffix}", (model.d_model, width))
    yield _dense(model, f"{block}ffn_down{suffix}", (width, model.d_model))


def _experts(model: Synthetic, block: str) -> Iterator[SyntheticTensor]:
    f32, kind = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType[model.expert_type]
    experts, up = model.n_experts, (model.d_model, model.d_expert, model.n_experts)
    yield SyntheticTensor(f"{block}ffn_gate_inp.weight", (model.d_model, experts), f32, "router")
    if model.arch == "deepseek2" and model.selection_bias:
        yield _bias(f"{block}exp_probs_b.bias", experts)
    if model.arch == "gpt-oss":
        yield _bias(f"{block}ffn_gate_inp.bias", experts)
        widths = {"gate": model.d_expert, "up": model.d_expert, "down": model.d_model}
        yield from (_bias(f"{block}ffn_{name}_exps.bias", width, experts) for name, width in widths.items())
    if model.merged_gate_up:
        yield SyntheticTensor(f"{block}ffn_gate_up_exps.weight", (up[0], 2 * up[1], experts), kind)
    else:
        yield SyntheticTensor(f"{block}ffn_gate_exps.weight", up, kind)
        yield SyntheticTensor(f"{block}ffn_up_exps.weight", up, kind)
    yield SyntheticTensor(f"{block}ffn_down_exps.weight", (model.d_expert, model.d_model, experts), kind)
    if model.arch == "deepseek2":
        yield from _ffn(model, block, "_shexp", model.d_expert * model.n_shared)
