"""Losses of training: next-token cross-entropy and the router's auxiliary losses (bandwidth_wall, Appendix D)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from edgemoe.training.model import MoEModel, Routing


def objective(model: MoEModel, inputs: Tensor, targets: Tensor, balance: float) -> tuple[Tensor, Tensor, Tensor]:
    """What training minimises, CE + α·balance, and its two parts (the balance part averaged over layers)."""
    hidden, routings = model(inputs)
    ce = cross_entropy(model, hidden, targets)
    uneven = torch.stack([load_balance(routing) for routing in routings]).mean()
    return ce + balance * uneven, ce.detach(), uneven.detach()


def cross_entropy(model: MoEModel, hidden: Tensor, targets: Tensor) -> Tensor:
    """Mean next-token cross-entropy in nats; hidden [B, S, d], targets [B, S]."""
    return F.cross_entropy(model.lm_head(hidden).flatten(0, 1).float(), targets.flatten())


def load_balance(routing: Routing) -> Tensor:
    """Switch load balance of one layer, E·Σ fₑPₑ: 1 when even, E when one expert takes all (Appendix D)."""
    n_experts = routing.probs.shape[-1]
    return n_experts * (loads(routing) * routing.probs.mean(0)).sum()


def loads(routing: Routing) -> Tensor:  # [E] float32, sums to 1
    """Share of the expert loads that each expert of a layer takes."""
    n_experts = routing.probs.shape[-1]
    counts = torch.zeros(n_experts, device=routing.probs.device)
    ones = torch.ones(routing.experts.numel(), device=counts.device)
    return counts.scatter_add(0, routing.experts.flatten(), ones) / routing.experts.numel()
