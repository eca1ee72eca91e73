"""Models as they were published, so that one can ask before downloading: `qwen3-235b-a22b:Q4_K_M`.

The numbers are those of each model's config.json on Hugging Face (the repository is named with it); types follow
llama-quantize (`edgemoe.wall.quantise`). The tensors are laid out as llama.cpp names and shapes them, and go through
`edgemoe.model.assemble`: a preset is the very geometry that `edgemoe info` would read from the file.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from edgemoe.errors import UserError
from edgemoe.model.assemble import Facts, assemble
from edgemoe.model.geometry import ModelGeometry
from edgemoe.model.tensors import Part, Tensor
from edgemoe.wall.quantise import SCHEMES, scheme_type, type_bytes


@dataclass(frozen=True)
class Published:
    """A published architecture. Fields that an architecture does not have stay at their defaults."""

    source: str  # where config.json is
    architecture: str  # llama.cpp's name
    n_layers: int
    n_experts: int
    top_k: int
    d_model: int
    d_expert: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    n_vocab: int
    n_ctx: int
    quantisation: str = "Q4_K_M"  # unless another is asked for
    gating: str = "softmax"
    leading_dense: int = 0
    d_dense: int = 0
    n_shared: int = 0
    d_shared: int = 0  # hidden width of all shared experts together
    shared_gate: bool = False
    groups: tuple[int, int] = (0, 0)  # (expert groups, groups used)
    selection_bias: bool = False
    biases: bool = False  # of attention, router and experts (gpt-oss)
    qk_norm: str = ""  # "head": one vector per head size; "all": one over all heads
    window: int = 0  # every other layer, the first one included
    q_rank: int = 0  # latent attention
    kv_rank: int = 0
    d_rope: int = 0
    d_value: int = 0
    linear_heads: tuple[int, int] = (0, 0)  # (keys, values) of gated DeltaNet
    d_linear: int = 0
    d_conv: int = 0
    full_every: int = 1  # every n-th layer attends in full, the others are gated DeltaNet

    def linear(self, layer: int) -> bool:
        return (layer + 1) % self.full_every != 0


PUBLISHED: dict[str, Published] = {
    "qwen3-235b-a22b": Published(
        source="Qwen/Qwen3-235B-A22B", architecture="qwen3moe", n_layers=94, n_experts=128, top_k=8, d_model=4096,
        d_expert=1536, n_heads=64, n_kv_heads=4, d_head=128, n_vocab=151_936, n_ctx=40_960, qk_norm="head",
    ),
    "qwen3-30b-a3b": Published(
        source="Qwen/Qwen3-30B-A3B", architecture="qwen3moe", n_layers=48, n_experts=128, top_k=8, d_model=2048,
        d_expert=768, n_heads=32, n_kv_heads=4, d_head=128, n_vocab=151_936, n_ctx=40_960, qk_norm="head",
    ),
    "olmoe-1b-7b": Published(
        source="allenai/OLMoE-1B-7B-0924", architecture="olmoe", n_layers=16, n_experts=64, top_k=8, d_model=2048,
        d_expert=1024, n_heads=16, n_kv_heads=16, d_head=128, n_vocab=50_304, n_ctx=4096, qk_norm="all",
    ),
    "moonlight-16b-a3b": Published(
        source="moonshotai/Moonlight-16B-A3B", architecture="deepseek2", gating="sigmoid", selection_bias=True,
        n_layers=27, n_experts=64, top_k=6, d_model=2048, d_expert=1408, n_heads=16, n_kv_heads=16, d_head=128,
        n_vocab=163_840, n_ctx=8192, leading_dense=1, d_dense=11_264, n_shared=2, d_shared=2816, kv_rank=512,
        d_rope=64, d_value=128,
    ),
    "qwen3.6-35b-a3b": Published(
        source="Qwen/Qwen3.6-35B-A3B", architecture="qwen35moe", n_layers=40, n_experts=256, top_k=8, d_model=2048,
        d_expert=512, n_heads=16, n_kv_heads=2, d_head=256, n_vocab=248_320, n_ctx=262_144, n_shared=1, d_shared=512,
        shared_gate=True, qk_norm="head", linear_heads=(16, 32), d_linear=128, d_conv=4, full_every=4,
    ),
    "gpt-oss-120b": Published(
        source="openai/gpt-oss-120b", architecture="gpt-oss", n_layers=36, n_experts=128, top_k=4, d_model=2880,
        d_expert=2880, n_heads=64, n_kv_heads=8, d_head=64, n_vocab=201_088, n_ctx=131_072, quantisation="MXFP4",
        gating="softmax of the chosen", biases=True, window=128,
    ),
    "deepseek-v3": Published(
        source="deepseek-ai/DeepSeek-V3", architecture="deepseek2", gating="sigmoid", selection_bias=True,
        n_layers=61, n_experts=256, top_k=8, d_model=7168, d_expert=2048, n_heads=128, n_kv_heads=128, d_head=128,
        n_vocab=129_280, n_ctx=163_840, leading_dense=3, d_dense=18_432, n_shared=1, d_shared=2048, groups=(8, 4),
        q_rank=1536, kv_rank=512, d_rope=64, d_value=128,
    ),
}  # fmt: skip


def is_preset(text: str) -> bool:
    """Whether `text` names a preset, with or without a quantisation."""
    return text.partition(":")[0].lower() in PUBLISHED


def preset_geometry(text: str) -> ModelGeometry:
    """The geometry of `name` or `name:QUANTISATION`; a `UserError` lists what there is."""
    name, _, scheme = text.partition(":")
    found = PUBLISHED.get(name.lower())
    if found is None:
        raise UserError(f"no preset {name!r}: there are {', '.join(PUBLISHED)}")
    scheme = (scheme or found.quantisation).upper()
    if scheme not in SCHEMES:
        raise UserError(f"no quantisation {scheme!r}: presets come in {', '.join(SCHEMES)}")
    facts = _facts(f"{name.lower()}:{scheme}", found)
    tensors = list(_typed(found, scheme))
    return assemble(text, facts, tensors, sum(tensor.nbytes for tensor in tensors))


def _facts(name: str, m: Published) -> Facts:
    inner = m.linear_heads[1] * m.d_linear
    convolved = inner + 2 * m.linear_heads[0] * m.d_linear
    return Facts(
        name=name,
        architecture=m.architecture,
        n_layers=m.n_layers,
        n_experts=m.n_experts,
        top_k=m.top_k,
        n_shared_experts=m.n_shared,
        gating=m.gating,
        expert_groups=m.groups[0],
        expert_groups_used=m.groups[1],
        d_model=m.d_model,
        d_expert=m.d_expert,
        n_ctx=m.n_ctx,
        n_vocab=m.n_vocab,
        window=m.window,
        windowed_layers=frozenset(range(0, m.n_layers, 2)) if m.window else frozenset(),
        kv_heads=[0 if m.linear(layer) else m.n_kv_heads for layer in range(m.n_layers)],
        d_key=m.d_head,
        d_value=m.d_head,
        state_bytes=4 * (max(m.d_conv - 1, 0) * convolved + inner * m.d_linear),
    )


@dataclass(frozen=True)
class _Shape:
    """A tensor before it has a type; ne in ggml's order, row length first."""

    name: str
    ne: tuple[int, ...]
    part: Part
    layer: int | None = None
    projection: str | None = None


def _typed(m: Published, scheme: str) -> Iterator[Tensor]:
    shapes = list(_shapes(m))
    values = [s.name for s in shapes if s.name.endswith(("attn_v.weight", "attn_qkv.weight"))]
    order = {name: at for at, name in enumerate(values)}
    for s in shapes:
        attention = (order.get(s.name, 0), len(values))
        kind = scheme_type(scheme, s.name, s.ne, s.layer or 0, m.n_layers, attention)
        yield Tensor(s.name, kind, s.ne[::-1], 0, 0, type_bytes(kind, s.ne), s.part, s.layer, s.projection)


def _shapes(m: Published) -> Iterator[_Shape]:
    yield _Shape("token_embd.weight", (m.d_model, m.n_vocab), Part.EMBEDDING)
    yield _Shape("output_norm.weight", (m.d_model,), Part.NORMS)
    yield _Shape("output.weight", (m.d_model, m.n_vocab), Part.OUTPUT)
    for layer in range(m.n_layers):
        parts = [_norms, _latent if m.kv_rank else _delta if m.linear(layer) else _attention]
        parts += [_dense] if layer < m.leading_dense else [_router, _experts, _shared]
        for part in parts:
            for s in part(m):
                yield _Shape(f"blk.{layer}.{s.name}", s.ne, s.part, layer, s.projection)


def _norms(m: Published) -> Iterator[_Shape]:
    yield _Shape("attn_norm.weight", (m.d_model,), Part.NORMS)
    yield _Shape("ffn_norm.weight", (m.d_model,), Part.NORMS)


def _attention(m: Published) -> Iterator[_Shape]:
    query, kv = m.n_heads * m.d_head, m.n_kv_heads * m.d_head
    gated = 2 if m.full_every > 1 else 1  # Qwen3.5 and later: the query projection also makes the output gate
    widths = {"attn_q": (m.d_model, gated * query), "attn_k": (m.d_model, kv), "attn_v": (m.d_model, kv)}
    for name, ne in {**widths, "attn_output": (query, m.d_model)}.items():
        yield _Shape(f"{name}.weight", ne, Part.ATTENTION)
        if m.biases:
            yield _Shape(f"{name}.bias", ne[1:], Part.ATTENTION)
    if m.biases:
        yield _Shape("attn_sinks.weight", (m.n_heads,), Part.ATTENTION)
    norms = {"head": (m.d_head, m.d_head), "all": (query, kv)}.get(m.qk_norm, ())
    for name, width in zip("qk", norms, strict=False):
        yield _Shape(f"attn_{name}_norm.weight", (width,), Part.NORMS)


def _latent(m: Published) -> Iterator[_Shape]:
    query = m.n_heads * (m.d_head + m.d_rope)
    if m.q_rank:
        yield _Shape("attn_q_a.weight", (m.d_model, m.q_rank), Part.ATTENTION)
        yield _Shape("attn_q_a_norm.weight", (m.q_rank,), Part.NORMS)
        yield _Shape("attn_q_b.weight", (m.q_rank, query), Part.ATTENTION)
    else:
        yield _Shape("attn_q.weight", (m.d_model, query), Part.ATTENTION)
    yield _Shape("attn_kv_a_mqa.weight", (m.d_model, m.kv_rank + m.d_rope), Part.ATTENTION)
    yield _Shape("attn_kv_a_norm.weight", (m.kv_rank,), Part.NORMS)
    yield _Shape("attn_k_b.weight", (m.d_head, m.kv_rank, m.n_heads), Part.ATTENTION)
    yield _Shape("attn_v_b.weight", (m.kv_rank, m.d_value, m.n_heads), Part.ATTENTION)
    yield _Shape("attn_output.weight", (m.n_heads * m.d_value, m.d_model), Part.ATTENTION)


def _delta(m: Published) -> Iterator[_Shape]:
    keys, values = (heads * m.d_linear for heads in m.linear_heads)
    yield _Shape("attn_qkv.weight", (m.d_model, 2 * keys + values), Part.ATTENTION)
    yield _Shape("attn_gate.weight", (m.d_model, values), Part.ATTENTION)
    yield _Shape("ssm_conv1d.weight", (m.d_conv, 2 * keys + values), Part.ATTENTION)
    yield _Shape("ssm_dt.bias", (m.linear_heads[1],), Part.ATTENTION)
    yield _Shape("ssm_a", (m.linear_heads[1],), Part.ATTENTION)
    yield _Shape("ssm_beta.weight", (m.d_model, m.linear_heads[1]), Part.ATTENTION)
    yield _Shape("ssm_alpha.weight", (m.d_model, m.linear_heads[1]), Part.ATTENTION)
    yield _Shape("ssm_norm.weight", (m.d_linear,), Part.NORMS)
    yield _Shape("ssm_out.weight", (values, m.d_model), Part.ATTENTION)


def _dense(m: Published) -> Iterator[_Shape]:
    yield from _ffn(m, "", m.d_dense, Part.DENSE)


def _ffn(m: Published, suffix: str, width: int, part: Part) -> Iterator[_Shape]:
    yield _Shape(f"ffn_gate{suffix}.weight", (m.d_model, width), part)
    yield _Shape(f"ffn_up{suffix}.weight", (m.d_model, width), part)
    yield _Shape(f"ffn_down{suffix}.weight", (width, m.d_model), part)


def _router(m: Published) -> Iterator[_Shape]:
    yield _Shape("ffn_gate_inp.weight", (m.d_model, m.n_experts), Part.ROUTER)
    if m.selection_bias:
        yield _Shape("exp_probs_b.bias", (m.n_experts,), Part.ROUTER)
    if m.biases:
        yield _Shape("ffn_gate_inp.bias", (m.n_experts,), Part.ROUTER)


def _experts(m: Published) -> Iterator[_Shape]:
    matrices = {"gate": (m.d_model, m.d_expert), "up": (m.d_model, m.d_expert), "down": (m.d_expert, m.d_model)}
    for name, ne in matrices.items():
        yield _Shape(f"ffn_{name}_exps.weight", (*ne, m.n_experts), Part.EXPERTS, projection=name)
        if m.biases:
            yield _Shape(f"ffn_{name}_exps.bias", (ne[1], m.n_experts), Part.EXPERTS, projection=f"{name}.bias")


def _shared(m: Published) -> Iterator[_Shape]:
    if not m.n_shared:
        return
    yield from _ffn(m, "_shexp", m.d_shared, Part.SHARED)
    if m.shared_gate:
        yield _Shape("ffn_gate_inp_shexp.weight", (m.d_model,), Part.SHARED)
