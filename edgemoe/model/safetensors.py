"""Geometry and tensors of a Hugging Face directory: config.json and the headers of its safetensors files."""

import json
import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from edgemoe.errors import UserError
from edgemoe.model.assemble import MAX_LAYERS, Facts
from edgemoe.model.tensors import Part, Tensor
from edgemoe.units import format_bytes, shown

# What the format itself allows for a header.
_MAX_HEADER = 100_000_000
_BITS = {
    **dict.fromkeys(("F64", "I64", "U64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("BF16", "F16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
_LAYER = re.compile(r"(?:^|\.)layers\.(\d{1,9})\.(.+)")
# One expert per tensor (OLMoE, Qwen3-MoE, DeepSeek; Mixtral: w1, w2, w3) or all stacked (gpt-oss and others).
_ONE_EXPERT = re.compile(r"(?:.+\.)?experts\.(\d{1,9})\.(gate_proj|up_proj|down_proj|gate_up_proj|w[123])(?:\.(\w+))?")
_ALL_EXPERTS = re.compile(r"(?:.+\.)?experts\.(gate_up_proj|gate_proj|up_proj|down_proj)(?:[._](\w+))?")
_PROJECTIONS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "gate_up_proj": "gate_up"}
_PROJECTIONS |= {"w1": "gate", "w3": "up", "w2": "down"}  # Mixtral
_SIGMOID = (
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe",
    "glm4_moe_lite",
    "dots1",
    "minimax_m2",
    "llama4_text",
    "ernie4_5_moe",
)
_ATTENTION = ("self_attn.", "attention.", "linear_attn.", "mamba.", "conv.", "attn.")


def read_safetensors(directory: Path) -> tuple[Facts, list[Tensor], list[Path]]:
    """Hyperparameters, classified tensors and files of a directory with config.json and *.safetensors."""
    config = _config(directory)
    files = _files(directory)
    facts = _facts(directory, config)
    headers = [_header(file) for file in files]
    tensors = [
        _classify(name, entry, number, start, facts)
        for number, (start, header) in enumerate(headers)
        for name, entry in header.items()
    ]
    return facts, tensors, files


def _config(directory: Path) -> Mapping[str, Any]:
    path = directory / "config.json"
    if not path.exists():
        raise UserError(f"{directory}: no config.json there: give a GGUF file or a Hugging Face model directory")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: not readable JSON ({str(error).splitlines()[0]})") from None
    if not isinstance(config, dict):
        raise UserError(f"{path}: expected a JSON object")
    # Multimodal models keep the language model's numbers one level down.
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config


def _files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            raise UserError(f"{directory}: config.json but no *.safetensors there: download the weights")
        return files
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        if not all(isinstance(name, str) and Path(name).name == name for name in names):
            raise ValueError("the names of files are expected")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{index}: not a readable index of safetensors files: download it again") from None
    missing = [name for name in names if not (directory / name).exists()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(f"{directory}: {missing[0]}{more} is missing: download it into that directory")
    return [directory / name for name in names]


def _header(path: Path) -> tuple[int, dict[str, dict[str, Any]]]:
    """Where the data starts, and the entries by name, checked: types, shapes and ranges agree with the file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(_MAX_HEADER, size - 8):
                raise UserError(f"{path}: not a safetensors file, or truncated: download it again")
            entries = json.loads(file.read(length))
        entries.pop("__metadata__", None)
        end = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        for name, entry in entries.items():
            start, stop = entry["data_offsets"]
            if not all(type(size) is int and size >= 0 for size in entry["shape"]):
                raise ValueError("a shape is a list of sizes")
            if (stop - start) * 8 != prod(entry["shape"]) * _BITS[entry["dtype"]] or start < 0:
                raise UserError(f"{path}: {name}: its bytes do not match its shape: download it again")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise UserError(f"{path}: corrupt safetensors header ({type(error).__name__}): download it again") from None
    if end > size:
        raise UserError(
            f"{path}: truncated: {format_bytes(size)} of the {format_bytes(end)} that its header promises: "
            "download it again"
        )
    return 8 + length, entries


def _facts(directory: Path, config: Mapping[str, Any]) -> Facts:
    def number(*keys: str) -> int:
        for key in keys:
            value = config.get(key)
            if type(value) is int and value >= 0:  # true is no number
                return value
        return 0

    n_layers = number("num_hidden_layers", "n_layer", "num_layers")
    if not n_layers:
        raise UserError(f"{directory / 'config.json'}: no num_hidden_layers in it: not a language model's config")
    if n_layers > MAX_LAYERS:
        raise UserError(f"{directory / 'config.json'}: {n_layers:,} layers: not a language model's config")
    heads = number("num_attention_heads", "n_head")
    d_head = number("head_dim") or number("hidden_size") // max(heads, 1)
    kinds = config.get("layer_types") or []
    if not isinstance(kinds, list):
        raise UserError(f"{directory / 'config.json'}: layer_types is {shown(repr(kinds))}, expected a list of names")
    windowed = {i for i, kind in enumerate(kinds) if kind in ("sliding_attention", "chunked_attention")}
    return Facts(
        name=str(config.get("_name_or_path") or directory.resolve().name),
        architecture=str(config.get("model_type", "unknown")),
        n_layers=n_layers,
        n_experts=number("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"),
        top_k=number("num_experts_per_tok", "experts_per_token", "num_experts_per_token", "moe_k", "moe_topk"),
        n_shared_experts=number("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
        gating=_gating(config),
        expert_groups=number("n_group"),
        expert_groups_used=number("topk_group"),
        d_model=number("hidden_size", "n_embd"),
        d_expert=number("moe_intermediate_size", "intermediate_size"),
        n_ctx=number("max_position_embeddings"),
        n_vocab=number("vocab_size"),
        window=number("sliding_window", "attention_chunk_size"),
        windowed_layers=frozenset(windowed),
        kv_heads=[number("num_key_value_heads") or heads] * n_layers,
        d_key=d_head,
        d_value=d_head,
    )


def _gating(config: Mapping[str, Any]) -> str:
    stated = config.get("scoring_func")
    if isinstance(stated, str):
        return stated
    kind = str(config.get("model_type"))
    if kind == "gpt_oss":
        return "softmax of the chosen"
    return "sigmoid" if kind in _SIGMOID else "softmax"


def _classify(name: str, entry: Mapping[str, Any], file: int, start: int, facts: Facts) -> Tensor:
    begin, end = entry["data_offsets"]
    place = _LAYER.search(name)
    layer = int(place[1]) if place else None
    part, projection, expert = _part(name, place[2] if place else None)
    if name.startswith(("mtp.", "visual.", "vision_")) or ".vision_" in name or ".visual." in name:
        part = Part.UNUSED
    if layer is not None and layer >= facts.n_layers:
        part = Part.UNUSED
    if part is not Part.EXPERTS:
        projection, expert = None, None
    shape = tuple(entry["shape"])
    return Tensor(name, entry["dtype"], shape, file, start + begin, end - begin, part, layer, projection, expert)


def _part(name: str, inner: str | None) -> tuple[Part, str | None, int | None]:
    """What a tensor is for: `inner` is its name within its layer."""
    if inner is None:
        if "embed_tokens" in name or name.endswith(("wte.weight", "embeddings.weight")):
            return Part.EMBEDDING, None, None
        return (Part.OUTPUT if name.startswith(("lm_head", "output.")) else Part.NORMS), None, None
    if "shared_expert" in inner or "shared_mlp" in inner:
        return Part.SHARED, None, None
    if one := _ONE_EXPERT.fullmatch(inner):
        return Part.EXPERTS, _named(one[2], one[3]), int(one[1])
    if every := _ALL_EXPERTS.fullmatch(inner):
        return Part.EXPERTS, _named(every[1], every[2]), None
    if re.search(r"(?:^|\.)(?:router|gate)\.|e_score_correction_bias|expert_bias", inner):
        return Part.ROUTER, None, None
    if "norm" in inner:
        return Part.NORMS, None, None
    if inner.startswith(_ATTENTION):
        return Part.ATTENTION, None, None
    return (Part.DENSE if re.search(r"(?:^|\.)(?:mlp|feed_forward|ffn)\.", inner) else Part.NORMS), None, None


def _named(projection: str, suffix: str | None) -> str:
    """gate, up, down or gate_up; anything but the weight itself carries its suffix."""
    plain = _PROJECTIONS[projection]
    return plain if suffix in (None, "weight", "blocks") else f"{plain}.{suffix}"
