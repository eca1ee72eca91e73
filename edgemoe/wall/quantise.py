"""Which type each tensor of a quantised GGUF file gets: llama-quantize's own rules, for files that nobody has yet.

Follows llama_tensor_get_type_impl and tensor_type_fallback (src/llama-quant.cpp) without an importance matrix, for
models of other than 8 experts. Community files often differ by a few percent: somebody chose other types by hand.
"""

from collections.abc import Callable
from math import prod

import gguf

# What a name stands for: the type that most matrices get.
SCHEMES = {
    "F16": "F16",
    "BF16": "BF16",
    "Q8_0": "Q8_0",
    "Q6_K": "Q6_K",
    "Q5_K_M": "Q5_K",
    "Q4_K_M": "Q4_K",
    "Q4_K_S": "Q4_K",
    "Q4_K": "Q4_K",  # --pure: every matrix, the output too
    "Q4_0": "Q4_0",
    "MXFP4": "Q8_0",
}
_SMALLER_BLOCKS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
_NEVER = ("_norm.weight", "ffn_gate_inp", "ssm_conv1d")


def scheme_type(
    scheme: str, name: str, ne: tuple[int, ...], layer: int, n_layers: int, attention: tuple[int, int]
) -> str:
    """The type of one tensor. ne: ggml's order, row length first. attention: (how many value projections came before
    this one, how many there are), which is what llama-quantize counts layers of attention by."""
    if len(ne) < 2 or not name.endswith("weight") or any(part in name for part in _NEVER):
        return "F32"
    kind = SCHEMES[scheme]
    rule = _RULES.get(scheme)
    if rule and name == "output.weight":
        kind = "Q6_K" if ne[0] % _block(kind) == 0 and kind != "Q8_0" else "Q8_0"
    elif rule:
        kind = rule(kind, name, ne, layer, n_layers, attention)
    if ne[0] % _block(kind):
        kind = _SMALLER_BLOCKS.get(kind, kind)
    return kind if ne[0] % _block(kind) == 0 else "F16"


def type_bytes(kind: str, ne: tuple[int, ...]) -> int:
    """Bytes of a tensor of that type."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return prod(ne) // block * size


def _block(kind: str) -> int:
    return int(gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0])


def _more_bits(layer: int, n_layers: int) -> bool:
    return layer < n_layers // 8 or layer >= 7 * n_layers // 8 or (layer - n_layers // 8) % 3 == 2


def _is_value(name: str) -> bool:
    return name.endswith(("attn_v.weight", "attn_qkv.weight", "attn_kv_b.weight"))


def _medium(kind: str, name: str, _ne: tuple[int, ...], layer: int, n_layers: int, attention: tuple[int, int]) -> str:
    more = _more_bits(*attention) if _is_value(name) else "ffn_down" in name and _more_bits(layer, n_layers)
    return "Q6_K" if more else kind


def _small(kind: str, name: str, _ne: tuple[int, ...], layer: int, n_layers: int, attention: tuple[int, int]) -> str:
    more = attention[0] < 4 if _is_value(name) else "ffn_down" in name and layer < n_layers // 8
    return "Q5_K" if more else kind


def _plain(kind: str, *_: object) -> str:
    return kind


def _mxfp4(kind: str, name: str, ne: tuple[int, ...], *_: object) -> str:
    return "MXFP4" if len(ne) > 2 and "_exps" in name else kind


_RULES: dict[str, Callable[..., str]] = {
    "Q4_K_M": _medium,
    "Q5_K_M": _medium,
    "Q4_K_S": _small,
    "Q4_0": _plain,
    "Q6_K": _plain,
    "Q8_0": _plain,
    "MXFP4": _mxfp4,
}
