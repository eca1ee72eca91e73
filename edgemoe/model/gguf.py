"""Geometry and tensors of a GGUF model, whole or split."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from edgemoe.errors import UserError
from edgemoe.llamacpp.header import Header, TensorEntry, read_header
from edgemoe.model.assemble import MAX_LAYERS, Facts
from edgemoe.model.tensors import Part, Tensor

_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
_EXPERTS = re.compile(r"ffn_(gate|up|down|gate_up)_exps\.(\w+)")

# gguf's numbering of gating functions, and what architectures that do not state theirs use in llama.cpp.
_GATING = {1: "softmax", 2: "sigmoid", 3: "softmax of the chosen", 4: "sqrt-softplus"}
_UNSTATED_GATING = {
    **dict.fromkeys(
        ("llama4", "step35", "afmoe", "cohere2moe", "laguna", "hy_v3", "glm4moe", "glm-dsa", "glm5-next"), 2
    ),
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe", "mimo2"), 2),
    "gpt-oss": 3,
}
# Sliding-window layers where the file gives no pattern: (period, whether the full layer comes first).
_UNSTATED_PATTERN = {
    "gpt-oss": (2, False),
    "gemma2": (2, False),
    "gemma3": (6, False),
    "llama4": (4, False),
    "cohere2": (4, False),
    "afmoe": (4, False),
    "exaone4": (4, False),
    "exaone-moe": (4, False),
    "mellum": (4, False),
    "muse-glimmer": (4, False),
    "gemma3n": (5, False),
    "cohere2moe": (4, True),
    "laguna": (4, True),
    "smallthinker": (4, True),
}


def read_gguf(path: Path) -> tuple[Facts, list[Tensor], list[Path]]:
    """Hyperparameters, classified tensors and files of a GGUF model; `path` may be any of its shards."""
    headers = _read_shards(path)
    if not any(header.tensors for header in headers):
        raise UserError(f"{path}: a GGUF file without weights (a vocabulary?): give the model's file")
    facts = _facts(headers[0])
    tensors = [_classify(entry, number, facts) for number, header in enumerate(headers) for entry in header.tensors]
    return facts, tensors, [header.path for header in headers]


def _read_shards(path: Path) -> list[Header]:
    header = read_header(path)
    count = _number(header, "split.count", 0)
    if count <= 1:
        return [header]
    name = _SHARD.fullmatch(path.name)
    if not name or int(name["count"]) != count:
        raise UserError(
            f"{path}: a shard of {count}, but not named like one: rename it to {path.stem}-NNNNN-of-{count:05d}.gguf"
        )
    paths = [path.with_name(f"{name['stem']}-{i + 1:05d}-of-{count:05d}.gguf") for i in range(count)]
    missing = [shard.name for shard in paths if not shard.exists()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(f"{path}: shard {missing[0]}{more} is missing: download it into {path.parent}")
    headers = [header if shard == path else read_header(shard) for shard in paths]
    for number, shard in enumerate(headers):
        if _number(shard, "split.no", -1) != number or _number(shard, "split.count", 0) != count:
            raise UserError(f"{shard.path}: says it is another shard than its name does: download it again")
    promised, found = _number(headers[0], "split.tensors.count", 0), sum(len(shard.tensors) for shard in headers)
    if promised and promised != found:
        raise UserError(f"{path}: its shards hold {found} tensors, expected {promised}: they are of different models")
    return headers


def _facts(header: Header) -> Facts:
    architecture = header.values.get("general.architecture")
    if not isinstance(architecture, str):
        raise UserError(f"{header.path}: a GGUF file without an architecture: not a model")

    def number(key: str, default: int = 0) -> int:
        return _number(header, f"{architecture}.{key}", default)

    blocks = number("block_count")
    n_layers = blocks - number("nextn_predict_layers")
    if not 0 < n_layers <= blocks <= MAX_LAYERS:
        raise UserError(f"{header.path}: says it has {n_layers} layers ({architecture}): not a language model")
    heads = _per_layer(header, f"{architecture}.attention.head_count", blocks)
    d_head = number("embedding_length") // max(heads[0], 1)
    stated = number("expert_gating_func") or _UNSTATED_GATING.get(architecture, 1)
    n_shared_kv = number("attention.shared_kv_layers")
    return Facts(
        name=str(header.values.get("general.name") or header.path.stem),
        architecture=architecture,
        n_layers=n_layers,
        n_experts=number("expert_count"),
        top_k=_per_layer(header, f"{architecture}.expert_used_count", blocks),
        n_shared_experts=number("expert_shared_count"),
        gating=_GATING.get(stated, f"function {stated}"),
        expert_groups=number("expert_group_count"),
        expert_groups_used=number("expert_group_used_count"),
        d_model=number("embedding_length"),
        d_expert=_expert_width(header),
        n_ctx=number("context_length"),
        n_vocab=header.lengths.get("tokenizer.ggml.tokens") or number("vocab_size"),
        window=number("attention.sliding_window"),
        windowed_layers=_windowed(header, architecture, n_layers),
        uncached_layers=frozenset(range(n_layers - n_shared_kv, n_layers)),
        kv_heads=_per_layer(header, f"{architecture}.attention.head_count_kv", blocks, heads),
        d_key=number("attention.key_length", d_head),
        d_value=number("attention.value_length", d_head),
        state_bytes=_state_bytes(number, heads[0]),
    )


def _state_bytes(number: Callable[[str], int], n_heads: int) -> int:
    """Float32 state of a recurrent layer for one sequence: llama.cpp's n_embd_r + n_embd_s (llama-hparams.cpp)."""
    convolved = max(number("ssm.conv_kernel") - 1, 0)
    if d_head := number("kda.head_dim"):
        return 4 * n_heads * d_head * (3 * (convolved or 3) + d_head)
    inner, state = number("ssm.inner_size"), number("ssm.state_size")
    return 4 * (convolved * (inner + 2 * number("ssm.group_count") * state) + inner * state)


def _expert_width(header: Header) -> int:
    """Read off the down projection, whose rows are as long as an expert is wide: files state it in different keys."""
    return next((entry.ne[0] for entry in header.tensors if "ffn_down_exps.weight" in entry.name), 0)


def _windowed(header: Header, architecture: str, n_layers: int) -> frozenset[int]:
    key = f"{architecture}.attention.sliding_window_pattern"
    stated = header.values.get(key)
    if isinstance(stated, list):
        return frozenset(layer for layer, flag in enumerate(stated[:n_layers]) if flag)
    period, full_first = _UNSTATED_PATTERN.get(architecture, (1, False))
    period = _number(header, key, period)
    full = 0 if full_first else period - 1
    return frozenset(layer for layer in range(n_layers) if not period or layer % period != full)


def _classify(entry: TensorEntry, file: int, facts: Facts) -> Tensor:
    part, layer, projection = Part.NORMS, None, None
    block = _BLOCK.fullmatch(entry.name)
    if block:
        layer = int(block[1])
        part, projection = _block_part(block[2], entry, facts)
        if layer >= facts.n_layers:
            part, projection = Part.UNUSED, None
    elif entry.name.startswith(("token_embd.", "per_layer_token_embd.", "position_embd.", "token_types.")):
        part = Part.EMBEDDING
    elif entry.name.startswith("output."):
        part = Part.OUTPUT
    elif entry.name.startswith(("v.", "mm.", "a.", "nextn.", "mtp.")):
        part = Part.UNUSED
    shape = entry.ne[::-1]
    return Tensor(entry.name, entry.type, shape, file, entry.offset, entry.nbytes, part, layer, projection)


def _block_part(name: str, entry: TensorEntry, facts: Facts) -> tuple[Part, str | None]:
    experts = _EXPERTS.fullmatch(name)
    if experts:
        projection, kind = experts.groups()
        if kind == "weight":
            return Part.EXPERTS, projection
        if entry.ne[-1] == facts.n_experts:
            return Part.EXPERTS, f"{projection}.{kind}"
    stem = name.split(".")[0]
    if name.startswith("nextn."):
        return Part.UNUSED, None
    if "shexp" in stem or "chexp" in stem:
        return Part.SHARED, None
    if stem.startswith(("ffn_gate_inp", "exp_probs_b", "ffn_gate_tid2eid")):
        return Part.ROUTER, None
    if "norm" in stem or stem.endswith("_exps"):
        return Part.NORMS, None
    if stem.startswith("ffn_"):
        return Part.DENSE, None
    if stem.startswith(("attn_", "ssm_", "shortconv", "indexer", "time_mix", "kda_")):
        return Part.ATTENTION, None
    return Part.NORMS, None


def _number(header: Header, key: str, default: int) -> int:
    """A count in the header, the largest where it is given per layer; a `UserError` where something else is there."""
    value = header.values.get(key, default)
    if isinstance(value, list):
        value = max(value, default=default)
    if not isinstance(value, int) or value < min(default, 0):
        raise UserError(f"{header.path}: {key} is {value!r}, expected a count: convert the model again")
    return int(value)


def _per_layer(header: Header, key: str, n_layers: int, default: Sequence[int] = ()) -> list[int]:
    """A value that files give once or per layer, as one per layer."""
    value = header.values.get(key)
    if value is None and default:
        return list(default)
    if not isinstance(value, list):
        return [_number(header, key, 0)] * n_layers
    if len(value) < n_layers or not all(isinstance(v, int) and v >= 0 for v in value):
        raise UserError(f"{header.path}: {key} is not a count for each of {n_layers} layers: convert the model again")
    return [int(v) for v in value]
