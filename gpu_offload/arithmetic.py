"""The operations of a model's layers, in torch, that executors share; each brings its own product."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from edgemoe.gpu_offload.arena import ExpertViews
from edgemoe.gpu_offload.shape import Shape
from edgemoe.gpu_offload.weights import Layer

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""x [T, in] · weight [out, in], transposed → [T, out] float32, in an executor's own arithmetic."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def rotations(n_ctx: int, d_head: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [n_ctx, d_head] float32 of NEOX rotation: angles of the first half, and again."""
    half = d_head // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.outer(torch.arange(n_ctx, dtype=torch.float64), frequencies).repeat(1, 2)
    return angles.cos().float(), angles.sin().float()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [..., T, d_head]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def projected(
    x: torch.Tensor, w: Layer, shape: Shape, cos: torch.Tensor, sin: torch.Tensor, multiply: Product
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries [H, T, d_head] and keys [Hkv, T, d_head], rotated by cos and sin [T, d_head], and values of T tokens."""
    qkv = multiply(rms_norm(x, w.attn_norm, shape.norm_eps), w.qkv)
    q, k, v = qkv.split([shape.d_query, shape.d_kv, shape.d_kv], dim=-1)
    q, k = rms_norm(q, w.q_norm, shape.norm_eps), rms_norm(k, w.k_norm, shape.norm_eps)
    if shape.clip_qkv is not None:
        q, k, v = (y.clamp(-shape.clip_qkv, shape.clip_qkv) for y in (q, k, v))
    q, k, v = (y.unflatten(-1, (-1, shape.d_head)).transpose(0, 1) for y in (q, k, v))
    return rotate(q, cos, sin), rotate(k, cos, sin), v


def mixing_weights(scores: torch.Tensor, executed: torch.Tensor, renormalised: bool) -> torch.Tensor:
    """[T, k, 1] for scores [T, E] of the unmodified router and executed [T, k] int64; zero for elided gates (−1)."""
    weights = scores.softmax(-1).gather(1, executed.clamp(min=0)) * (executed >= 0)
    if renormalised:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.unsqueeze(-1)


def run_expert(h: torch.Tensor, views: ExpertViews, multiply: Product) -> torch.Tensor:
    """SwiGLU of h [T, d]: [T, d]."""
    return multiply(F.silu(multiply(h, views.gate)) * multiply(h, views.up), views.down)
