"""Where a Hugging Face model routes, and what its router's numbers mean: one adapter per family.

In transformers 5 every MoE block is a `gate` (the router: logits, mixing weights, chosen experts) and `experts` that
run whatever ids and weights they are given. A family says what selection ranks (the scores) and what an executed expert
weighs; all of it in float32, whatever the model's own precision, because near-ties decide which expert runs.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from edgemoe.errors import UserError


class Family(Protocol):
    """What the routers of one architecture compute from their logits [N, E] float32."""

    ranks_logits: bool
    """Whether scores are logits, as τ-rerouting and gate elision assume."""
    needs: tuple[str, ...]
    """Attributes of the router that are read; one without them is another version's."""

    def scores(self, gate: nn.Module, logits: Tensor) -> Tensor:
        """What selection ranks, [N, E] float32; −∞ for experts that a group mask forbids."""

    def weights(self, gate: nn.Module, logits: Tensor, experts: Tensor, kept: Tensor) -> Tensor:
        """Mixing weights of `experts` [N, k], float32, from the unmodified router; zero where not `kept`."""


class Softmax:
    """Logits are ranked; weights are their softmax over all experts, renormalised where the model does so."""

    ranks_logits = True
    needs: tuple[str, ...] = ("weight", "top_k")

    def scores(self, gate: nn.Module, logits: Tensor) -> Tensor:  # noqa: ARG002
        return logits

    def weights(self, gate: nn.Module, logits: Tensor, experts: Tensor, kept: Tensor) -> Tensor:
        found = logits.softmax(-1).gather(1, experts) * kept
        # Routers without the switch (Mixtral, Qwen3.5) always renormalise.
        return found / found.sum(-1, keepdim=True) if getattr(gate, "norm_topk_prob", True) else found


class GroupedSigmoid:
    """DeepSeek-V3: sigmoid plus selection bias is ranked, inside the groups whose two best sum highest; weights are the
    sigmoids without the bias, renormalised and scaled."""

    ranks_logits = False
    needs: tuple[str, ...] = (
        "weight",
        "top_k",
        "e_score_correction_bias",
        "num_group",
        "topk_group",
        "routed_scaling_factor",
    )

    def scores(self, gate: nn.Module, logits: Tensor) -> Tensor:
        ranked = logits.sigmoid() + gate.e_score_correction_bias.float()
        grouped = ranked.unflatten(-1, (gate.num_group, -1))
        best = grouped.topk(2, dim=-1)[0].sum(-1).topk(gate.topk_group, dim=-1)[1]
        allowed = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(1, best, True)
        return grouped.masked_fill(~allowed[..., None], float("-inf")).flatten(1)

    def weights(self, gate: nn.Module, logits: Tensor, experts: Tensor, kept: Tensor) -> Tensor:
        found = logits.sigmoid().gather(1, experts) * kept
        if gate.norm_topk_prob:
            found = found / (found.sum(-1, keepdim=True) + 1e-20)
        return found * gate.routed_scaling_factor


_SOFTMAX, _GROUPED = Softmax(), GroupedSigmoid()
FAMILIES: dict[str, Family] = {
    "olmoe": _SOFTMAX,
    "mixtral": _SOFTMAX,
    "qwen2_moe": _SOFTMAX,
    "qwen3_moe": _SOFTMAX,
    "qwen3_next": _SOFTMAX,
    "qwen3_5_moe_text": _SOFTMAX,  # Qwen3.5 and Qwen3.6
    "deepseek_v3": _GROUPED,
    "glm4_moe": _GROUPED,
}
"""The adapter of each `model_type` of a text config."""


@dataclass(frozen=True, eq=False)
class Router:
    """One MoE layer's router."""

    layer: int  # the model's own id
    gate: nn.Module
    family: Family
    weight: Tensor  # [E, d] float32

    @property
    def n_experts(self) -> int:
        return int(self.weight.shape[0])

    @property
    def top_k(self) -> int:
        return int(self.gate.top_k)

    def logits(self, x: Tensor) -> Tensor:
        """[N, E] float32 of router inputs [N, d]."""
        return F.linear(x.to(self.weight), self.weight)

    def scores(self, x: Tensor) -> Tensor:
        """What this layer would rank for router inputs [N, d]: of the layer before, that is the pre-gate."""
        return self.family.scores(self.gate, self.logits(x))


def check_supported(config: Any) -> Family:
    """The family of a transformers config; `UserError` for a model whose experts the harness cannot choose."""
    text = config.get_text_config()
    family = FAMILIES.get(text.model_type)
    if family is None:
        raise UserError(
            f"a {config.model_type} model has no MoE block that the harness can steer; it can steer "
            f"{', '.join(name.removesuffix('_text') for name in FAMILIES)}"
        )
    return family


def find_routers(model: nn.Module) -> list[Router]:
    """The routers of a `PreTrainedModel`, by layer. Raises `UserError` where there are none that can be steered."""
    family = check_supported(model.config)
    decoder = _decoder(model)
    found = []
    for layer, block in enumerate(decoder.layers):
        gate = getattr(getattr(block, "mlp", None), "gate", None)
        if isinstance(gate, nn.Module) and hasattr(block.mlp, "experts"):
            missing = [name for name in family.needs if not hasattr(gate, name)]
            if missing:
                raise UserError(
                    f"layer {layer} of this {model.config.model_type} model has a {type(gate).__name__} without "
                    f"{missing[0]}: transformers {transformers.__version__} is too old for it, install 5.17 or newer"
                )
            found.append(Router(layer, gate, family, gate.weight.detach().float()))
    if not found:
        raise UserError(f"this {model.config.model_type} model has no MoE layer: there is nothing to steer")
    return found


def _decoder(model: nn.Module) -> nn.Module:
    """The module that holds the language model's `layers`."""
    decoder: Any = model.get_decoder() if hasattr(model, "get_decoder") else model
    for _ in range(3):
        if hasattr(decoder, "layers"):
            return decoder
        decoder = getattr(decoder, "language_model", getattr(decoder, "model", None))
    raise UserError(f"this {model.config.model_type} model shows no list of layers: the harness cannot steer it")
