"""How long a token takes when everything is in RAM and the CPU does it all, as llama.cpp would.

Time = Σ over products with weights (a node + rows + bytes, by type and by how llama.cpp keeps the weight)
     + Σ over the other nodes (norms, gates, sums, …) + attention over the cached tokens.

Nothing overlaps: ggml computes one node after the other, each with all threads. The costs are the machine profile's,
the tensors the model's own.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from edgemoe.errors import UserError
from edgemoe.model import Model
from edgemoe.model.tensors import Part, Tensor
from edgemoe.wall.bytes import kv_read
from edgemoe.wall.cpu_costs import Costs, Kept

_DENSE_PARTS = (Part.ATTENTION, Part.SHARED, Part.DENSE, Part.ROUTER, Part.OUTPUT)


@dataclass(frozen=True)
class Charge:
    """One kind of work: bytes of weights or cache read per token, and seconds."""

    what: str
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class CpuDecode:
    """A prediction for one token at batch 1. `estimated`: types not measured → those that stood in for them."""

    charges: tuple[Charge, ...]
    threads: int
    estimated: dict[str, tuple[str, ...]]

    @property
    def seconds(self) -> float:
        return sum(charge.seconds for charge in self.charges)

    @property
    def tokens_per_s(self) -> float:
        return 1 / self.seconds

    @property
    def nbytes(self) -> int:
        return sum(charge.nbytes for charge in self.charges)


@dataclass(frozen=True)
class _Product:
    """One product with a weight, as decoding does it once per token."""

    part: Part
    kept: Kept
    nbytes: int
    rows: int


def predict_cpu_decode(model: Model, costs: Costs, n_ctx: int, repack: bool = True) -> CpuDecode:
    """Predict decoding with `n_ctx` tokens in the cache, everything resident.

    `repack`: weights are kept as llama.cpp keeps them by default (`use_extra_bufts`). Raises `UserError` for a model
    that is not GGUF, since how llama.cpp keeps a weight depends on its type there, and for types without a cost.
    """
    if model.format != "GGUF":
        raise UserError(f"{model.path}: llama.cpp runs GGUF files, this is {model.format}: convert it")
    seconds: dict[str, float] = {}
    nbytes: dict[str, int] = {}
    estimated: dict[str, tuple[str, ...]] = {}
    for product in _products(model, repack):
        cost, sources = costs.of(product.kept)
        if sources:
            estimated[product.kept.type] = sources
        name = product.part.value
        seconds[name] = seconds.get(name, 0.0) + cost.seconds(product.nbytes, product.rows)
        nbytes[name] = nbytes.get(name, 0) + product.nbytes
    charges = [Charge(name, nbytes[name], seconds[name]) for name in seconds]
    charges += [_attention(model, costs, n_ctx), _rest(model, costs)]
    return CpuDecode(tuple(charges), costs.threads, estimated)


def _products(model: Model, repack: bool) -> Iterator[_Product]:
    top_k = dict(zip(model.geometry.moe_layers, model.geometry.layer_top_k, strict=True))
    tied = model.geometry.tied_output
    for tensor in model.tensors:
        if len(tensor.shape) < 2 or not tensor.name.endswith(".weight"):
            continue
        if tensor.part is Part.EXPERTS and len(tensor.shape) == 3 and tensor.layer is not None:
            yield _expert_product(tensor, top_k[tensor.layer], repack)
        elif tensor.part in _DENSE_PARTS or (tied and tensor.part is Part.EMBEDDING):
            rows = tensor.n_values // tensor.shape[-1]
            kept = Kept(tensor.type, repack and _is_repacked(tensor, 0), expert=False)
            part = Part.OUTPUT if tensor.part is Part.EMBEDDING else tensor.part
            yield _Product(part, kept, tensor.nbytes, rows)


def _expert_product(tensor: Tensor, top_k: int, repack: bool) -> _Product:
    experts, rows, _ = tensor.shape
    kept = Kept(tensor.type, repack and _is_repacked(tensor, top_k), expert=True)
    return _Product(Part.EXPERTS, kept, tensor.nbytes // experts * top_k, rows * top_k)


def _is_repacked(tensor: Tensor, top_k: int) -> bool:
    """Would llama.cpp's loader choose another buffer than the plain one? Stacks outside of experts stay plain."""
    from edgemoe.llamacpp.weights import PLAIN, buffer_types

    if len(tensor.shape) == 3 and not top_k:
        return False
    return buffer_types(tensor.type, tensor.shape[::-1], top_k)[0] != PLAIN


@dataclass
class _Widths:
    """Values per token in one layer: queries, keys, what attention multiplies per cached token, dense gate."""

    query: int = 0
    key: int = 0
    attended: int = 0
    hidden: int = 0


def _widths(model: Model) -> list[_Widths]:
    """Of every layer, read off its tensors, which hold for every architecture alike."""
    layers = [_Widths() for _ in range(model.geometry.n_layers)]
    for tensor in model.tensors:
        if tensor.layer is None or not tensor.layer < len(layers):
            continue
        layer, stem = layers[tensor.layer], tensor.name.removesuffix(".weight").rpartition(".")[2]
        if stem == "attn_output":
            layer.query = tensor.shape[-1]
            layer.attended = max(layer.attended, layer.query)
        elif stem == "attn_k":
            layer.key = tensor.shape[0]
        elif stem == "attn_k_b":  # [heads, latent, head]: every head works on the whole latent
            layer.key = tensor.shape[1]
            layer.attended = tensor.shape[0] * tensor.shape[1]
        elif stem == "ffn_down":
            layer.hidden = tensor.shape[-1]
    return layers


def _attention(model: Model, costs: Costs, n_ctx: int) -> Charge:
    """Every query head against every cached token, twice: grouped heads share bytes, not work."""
    kv, nbytes = model.geometry.kv, kv_read(model.geometry, n_ctx)
    cells = (nbytes - kv.state) / kv.per_token if kv.per_token else 0.0
    multiplications = 2 * cells * sum(layer.attended for layer in _widths(model))
    return Charge("KV cache", nbytes, multiplications * costs.nodes.per_attention)


def _rest(model: Model, costs: Costs) -> Charge:
    """Nodes without weights, as counted in llama.cpp's graphs."""
    from edgemoe.llamacpp.layer_rest import Rest, attention_rest, dense_rest, moe_rest

    g = model.geometry
    rest = Rest(4, 2 * g.d_model)  # the embedding's row, the rows that want logits, the last norm
    top_k = dict(zip(g.moe_layers, g.layer_top_k, strict=True))
    for number, layer in enumerate(_widths(model)):
        rest += attention_rest(g.d_model, layer.query, layer.key)
        if number in top_k:
            rest += moe_rest(g.d_model, g.d_expert, g.n_experts, top_k[number])
        else:
            rest += dense_rest(g.d_model, layer.hidden)
    seconds = rest.nodes * costs.nodes.per_node + rest.values * costs.nodes.per_value
    return Charge("everything else", 0, seconds)
