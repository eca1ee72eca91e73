"""Random weights of a real model's geometry: what a token costs does not depend on what the weights are."""

from dataclasses import replace

import torch

from edgemoe.errors import UserError
from edgemoe.gpu_offload.arena import Arena
from edgemoe.gpu_offload.shape import Shape
from edgemoe.gpu_offload.weights import DTYPES, Layer, Weights

_OLMOE = Shape(
    n_layers=16,
    d_model=2048,
    n_heads=16,
    n_kv_heads=16,
    d_head=128,
    n_experts=64,
    top_k=8,
    d_expert=1024,
    n_vocab=50_304,
    n_ctx=4096,
    rope_theta=10_000.0,
    norm_eps=1e-5,
    norm_topk=False,
    clip_qkv=None,
    tied_output=False,
)
GEOMETRIES: dict[str, Shape] = {
    "olmoe-1b-7b": _OLMOE,
    # Narrow enough for a CPU: to see that everything works, and what the policies decide.
    "olmoe-narrow": replace(_OLMOE, d_model=64, n_heads=4, n_kv_heads=4, d_head=16, d_expert=32, n_vocab=512),
}
_ROUTER_GAIN = 3.0  # spreads random scores about as wide as a trained router's


def geometry(name: str) -> Shape:
    if name not in GEOMETRIES:
        raise UserError(f"--geometry {name}: expected one of {', '.join(GEOMETRIES)}")
    return GEOMETRIES[name]


@torch.inference_mode()
def random_weights(shape: Shape, dtype: str, device: str, seed: int = 0) -> Weights:
    """Weights that keep activations of order one. No two experts of a layer hold the same bytes; layers hold the same
    ones, turned by a place each. The arena is page-locked for a GPU. Raises `UserError` where memory is refused."""
    kind, where = DTYPES[dtype], torch.device(device)
    generator = torch.Generator(where).manual_seed(seed)

    def drawn(*size: int, scale: float | None = None, of: torch.dtype = kind) -> torch.Tensor:
        values = torch.randn(size, generator=generator, device=where, dtype=torch.float32)
        return values.mul_(scale or size[-1] ** -0.5).to(of)

    def ones(width: int) -> torch.Tensor:
        return torch.ones(width, device=where)

    arena = Arena(shape, kind, pinned=where.type == "cuda")
    try:
        for expert in range(shape.n_experts):
            row = drawn(shape.expert_values, scale=shape.d_model**-0.5).view(torch.uint8)
            arena.bytes[0, expert].copy_(row)
        for layer in range(1, shape.n_layers):
            turn = layer % shape.n_experts
            arena.bytes[layer, turn:].copy_(arena.bytes[0, : shape.n_experts - turn])
            arena.bytes[layer, :turn].copy_(arena.bytes[0, shape.n_experts - turn :])
        d, q, kv = shape.d_model, shape.d_query, shape.d_kv
        layers = tuple(
            Layer(ones(d), drawn(q + 2 * kv, d), ones(q), ones(kv), drawn(d, q), ones(d)) for _ in range(shape.n_layers)
        )
        gain = _ROUTER_GAIN * d**-0.5
        return Weights(
            shape=shape,
            dtype=kind,
            embedding=drawn(shape.n_vocab, d, scale=1.0),
            norm=ones(d),
            output=drawn(shape.n_vocab, d),
            routers=drawn(shape.n_layers, shape.n_experts, d, scale=gain, of=torch.float32),
            layers=layers,
            arena=arena,
        )
    except BaseException:
        arena.close()
        raise


def dense_bytes(weights: Weights) -> int:
    """What one token reads of attention, routers and norms, all layers together. Once each: the routers' second use, as
    pre-gates, may come from a cache."""
    tensors = [weights.norm, weights.routers]
    for layer in weights.layers:
        tensors += [layer.attn_norm, layer.qkv, layer.q_norm, layer.k_norm, layer.o, layer.ffn_norm]
    return sum(tensor.nbytes for tensor in tensors)


def expert_bytes(weights: Weights) -> int:
    """What one token reads of experts."""
    return weights.shape.n_layers * weights.shape.top_k * weights.arena.expert_bytes


def context_bytes(weights: Weights, position: int) -> int:
    """Keys and values that a token at `position` reads."""
    shape = weights.shape
    return 2 * shape.n_layers * shape.d_kv * weights.dtype.itemsize * (position + 1)


def active_bytes(weights: Weights, position: float) -> float:
    """Everything that one token must read of the device's memory."""
    vocabulary = weights.output.nbytes + weights.shape.d_model * weights.dtype.itemsize
    return dense_bytes(weights) + expert_bytes(weights) + vocabulary + context_bytes(weights, round(position))
