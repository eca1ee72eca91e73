"""What a model, a policy and a budget come to, found out before anything is compiled or loaded."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edgemoe.errors import UserError
from edgemoe.llamacpp.resident import DEFAULT_CTX, KV_TYPES
from edgemoe.llamacpp.session import MAX_SEQUENCES, check_gpu
from edgemoe.model import Model, read_model
from edgemoe.policy import Policy
from edgemoe.streaming.budget import Budget, budget_of_streams, expert_pages
from edgemoe.streaming.pins import Pins, pinned_bytes, pins_of
from edgemoe.streaming.skeleton import is_streamed
from edgemoe.units import Residency

if TYPE_CHECKING:
    from edgemoe.wall.plan import Plan

DEFAULT_CHUNK = 128


@dataclass(frozen=True)
class Fitting:
    """What a tier will be. `pinned`: bytes of the pinned experts."""

    model: Model
    policy: Policy
    n_ctx: int
    chunk: int
    pins: Pins
    pinned: int
    budget: Budget


def fit(
    path: str | Path,
    *,
    policy: Policy | None = None,
    calibrated: bool = False,
    plan: "Plan | str | Path | None" = None,
    ram: int | None = None,
    residency: Residency | None = None,
    n_ctx: int | None = None,
    chunk: int = DEFAULT_CHUNK,
    kv_type: str = "f16",
    n_gpu_layers: int = 0,
    streams: int = 1,
) -> Fitting:
    """How a model fits; arguments are those of `edgemoe.streaming.tier.Tier`. Raises its `UserError`s, but for what
    only the model's graph can tell."""
    if sys.platform != "linux":
        raise UserError("streaming needs Linux: keep the model in RAM here")
    if kv_type not in KV_TYPES:
        raise UserError(f"KV type {kv_type!r} is not one of {', '.join(KV_TYPES)}")
    check_gpu(n_gpu_layers)
    if not 1 <= chunk <= 512:
        raise UserError(f"a chunk of {chunk} tokens: expected 1 to 512")
    if not 1 <= streams <= MAX_SEQUENCES:
        raise UserError(f"{streams} streams: expected 1 to {MAX_SEQUENCES}")
    model = streamable(read_model(path))
    geometry = model.geometry
    n_ctx = n_ctx or min(DEFAULT_CTX, geometry.n_ctx or DEFAULT_CTX)
    chunk = min(chunk, n_ctx)
    policy = (policy or Policy()).completed(calibrated)
    sizes = expert_pages(model)
    pins: Pins = pins_of(plan, model) if plan is not None else ((),) * geometry.n_moe_layers
    pinned = pinned_bytes(pins, sizes)
    budget = budget_of_streams(
        model,
        policy,
        streams,
        n_ctx=n_ctx,
        kv_type=kv_type,
        expert_bytes=sizes,
        chunk=chunk,
        ram=ram,
        slots=residency.slots(geometry.n_experts, sum(sizes)) if residency else None,
        pinned=pinned,
    )
    policy.check(geometry.n_experts, geometry.top_k, budget.slots)
    return Fitting(model, policy, n_ctx, chunk, pins, pinned, budget)


def streamable(model: Model) -> Model:
    """The model, or a `UserError` for one whose experts cannot be streamed, with what works instead."""
    geometry = model.geometry
    if model.format != "GGUF":
        raise UserError(f"{model.path}: streaming needs a GGUF file, this is {model.format}: convert it")
    if not geometry.is_moe:
        raise UserError(f"{model.path}: a dense model, without experts to stream: run it without --ram")
    for layer in geometry.moe_layers:
        found = [t for t in model.expert_tensors(layer) if is_streamed(t)]
        if not found or any(t.nbytes % geometry.n_experts or t.shape[0] != geometry.n_experts for t in found):
            raise UserError(
                f"{model.path}: the experts of layer {layer} are not stacked in tensors of {geometry.n_experts}: "
                "convert the model again, or run it without --ram"
            )
    return model
