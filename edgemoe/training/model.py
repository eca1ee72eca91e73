"""OLMoE in plain torch: the architecture that llama.cpp, transformers and the GPU engine all run.

Pre-norm decoder, RMS-normalised queries and keys, rotary positions, SwiGLU experts chosen by softmax top-k without
renormalisation. Weights keep the names and layouts of the Hugging Face checkpoint, except that the experts of a layer
are one tensor, so that one grouped product computes them all.

Not here: KV cache and generation. Exported models are run by llama.cpp.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class ModelConfig:
    """Shape of an OLMoE-style model."""

    vocab_size: int = 8192
    d_model: int = 256
    n_layers: int = 8
    n_heads: int = 4
    n_experts: int = 64  # E
    top_k: int = 8
    d_expert: int = 64
    context: int = 1024
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.d_model % (2 * self.n_heads):
            raise ValueError(f"d_model {self.d_model} is not an even multiple of {self.n_heads} heads")
        if not 1 <= self.top_k <= self.n_experts:
            raise ValueError(f"top_k {self.top_k} is not between 1 and {self.n_experts} experts")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Routing:
    """What one layer's router did: the losses and the statistics of training read it."""

    probs: Tensor  # [T, E] float32 softmax
    experts: Tensor  # [T, k] int64


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight).to(x.dtype)


class _Permute(torch.autograd.Function):
    """`x[order]` for a permutation. Its gradient is the inverse gather, where autograd would scatter with atomics."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(order, inverse)
        return x[order]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        _, inverse = ctx.saved_tensors
        return grads[0][inverse], None, None


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        d = config.d_model
        self.n_heads = config.n_heads
        self.q_proj = nn.Linear(d, d, bias=False)
        self.k_proj = nn.Linear(d, d, bias=False)
        self.v_proj = nn.Linear(d, d, bias=False)
        self.o_proj = nn.Linear(d, d, bias=False)
        self.q_norm = RMSNorm(d, config.norm_eps)
        self.k_norm = RMSNorm(d, config.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.q_norm(self.q_proj(x)), self.k_norm(self.k_proj(x)), self.v_proj(x)
        q, k, v = (y.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(_rotate(q, cos, sin), _rotate(k, cos, sin), v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(-2))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


class MoE(nn.Module):
    """Router and experts. Scores are float32 whatever the experts' precision: near-ties decide which expert fires."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        d, f, n = config.d_model, config.d_expert, config.n_experts
        self.top_k = config.top_k
        self.gate = nn.Parameter(torch.empty(n, d))
        self.gate_up = nn.Parameter(torch.empty(n, d, 2 * f))
        self.down = nn.Parameter(torch.empty(n, f, d))

    def forward(self, x: Tensor) -> tuple[Tensor, Routing]:
        flat = x.flatten(0, -2)  # [T, d]
        with torch.autocast(x.device.type, enabled=False):
            probs = F.softmax(flat.float() @ self.gate.float().T, dim=-1)
        weights, experts = probs.topk(self.top_k, dim=-1)
        out = self._run_experts(flat, weights, experts)
        return out.view_as(x), Routing(probs, experts)

    def _run_experts(self, flat: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """Sort the (token, expert) pairs by expert, multiply each expert's block, and put the rows back."""
        owner = experts.flatten()
        order = owner.argsort(stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=order.device)
        ends = torch.zeros(len(self.gate), dtype=torch.int32, device=order.device)
        ends = ends.scatter_add(0, owner, torch.ones_like(owner, dtype=torch.int32)).cumsum(0, dtype=torch.int32)

        # Autocast does not know grouped_mm, whose fast path is bf16.
        kind = flat.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else flat.dtype
        rows = flat.to(dtype).unsqueeze(1).expand(-1, self.top_k, -1).flatten(0, 1)
        rows = _Permute.apply(rows, order, inverse)
        gate, up = F.grouped_mm(rows, self.gate_up.to(dtype), offs=ends).chunk(2, dim=-1)
        hidden = F.silu(gate) * up
        rows = F.grouped_mm(hidden, self.down.to(dtype), offs=ends)
        rows = _Permute.apply(rows, inverse, order).unflatten(0, (-1, self.top_k))
        return (rows * weights.unsqueeze(-1).to(dtype)).sum(1)


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.d_model, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.d_model, config.norm_eps)
        self.mlp = MoE(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Routing]:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        y, routing = self.mlp(self.post_attention_layernorm(x))
        return x + y, routing


class MoEModel(nn.Module):
    """Decoder language model; `forward` gives the last hidden states, so that a loss may chunk the vocabulary."""

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        half = config.d_model // config.n_heads // 2
        frequencies = config.rope_theta ** (-torch.arange(half) / half)
        angles = torch.outer(torch.arange(config.context), frequencies).repeat(1, 2)  # [context, head]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self._initialise(seed)

    def _initialise(self, seed: int) -> None:
        """Normal(0, 0.02), residual outputs divided by √(2L) so that depth does not grow the stream."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                std = 0.02
                if name.endswith(("o_proj.weight", "mlp.down")):
                    std /= (2 * self.config.n_layers) ** 0.5
                parameter.data.normal_(0.0, std, generator=generator)

    def forward(self, tokens: Tensor) -> tuple[Tensor, list[Routing]]:
        """`tokens` [B, S] int64, S ≤ context → hidden states [B, S, d] and each layer's routing."""
        x = self.embed_tokens(tokens)
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        routings = []
        for layer in self.layers:
            x, routing = layer(x, cos, sin)
            routings.append(routing)
        return self.norm(x), routings

    def logits(self, tokens: Tensor) -> Tensor:  # [B, S, V]
        return self.lm_head(self(tokens)[0])
