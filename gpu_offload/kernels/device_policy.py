"""`DevicePolicy`: launches Algorithm 1 on the device. Nothing here waits for the device or asks it anything."""

from dataclasses import dataclass
from typing import Any, Literal

import torch

from edgemoe.gpu_offload.kernels import layout, policy, steps
from edgemoe.gpu_offload.kernels.state import DevicePolicyState, DevicePrior
from edgemoe.policy import LogicalCache
from edgemoe.policy.state import NO_PREFETCH, PRE_GATE, TOKEN_PRIOR, view

Weights = Literal["softmax", "softmax-executed", "given", "given-executed"]
_WEIGHTS = {
    "softmax": policy.SOFTMAX.value,
    "softmax-executed": policy.SOFTMAX_OVER_EXECUTED.value,
    "given": policy.GIVEN.value,
    "given-executed": policy.GIVEN_OVER_EXECUTED.value,
}


@dataclass(frozen=True, eq=False)
class Decisions:
    """What was decided, on the device: a row per layer for a token, a row per token for a chunk of one layer.

    Only the first `counts` entries of a list are of this step. `demand` and `prefetch` are two parts of `copies`.
    """

    executed: torch.Tensor  # [L, k] int32, S by the router's own scores
    slots: torch.Tensor  # [L, k] int32, where they lie
    weights: torch.Tensor  # [L, k] float32
    own: torch.Tensor  # [L, k] int32, the router's own top-K
    copies: torch.Tensor  # [L, k + n, 2] int32, (expert, slot): all that part 2 and part 1 (n ≤ w) can ask for
    counts: torch.Tensor  # [L, 3] int32: executed, demand, prefetch

    @classmethod
    def empty(cls, rows: int, k: int, n: int, device: str | torch.device) -> "Decisions":
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        weights = zeros(rows, k, dtype=torch.float32)
        counts = zeros(rows, len(layout.COUNTS))
        return cls(zeros(rows, k), zeros(rows, k), weights, zeros(rows, k), zeros(rows, k + n, 2), counts)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.executed, self.slots, self.weights, self.own, self.copies, self.counts

    @property
    def demand(self) -> torch.Tensor:  # [L, k, 2]
        return self.copies[:, : self.executed.shape[1]]

    @property
    def prefetch(self) -> torch.Tensor:  # [L, n, 2]
        return self.copies[:, self.executed.shape[1] :]


class DevicePolicy:
    """One policy over the layers of one model, launched on the current stream.

    Per token: `begin_token`, then `deciding.decide` with the `arguments` of (None, 0), by which the first layer is
    frozen and, by token prior, prefetched; then for each layer l those of (l, l + 1, scores, pregate), the last one
    with None in the place of l + 1. A layer whose pre-gate is None is only frozen. Everything may be captured in a CUDA
    graph: no address and no argument changes.
    """

    def __init__(
        self,
        cache: LogicalCache,
        *,
        weights: Weights = "softmax",
        factor: float = 1.0,
        device: str | torch.device = "cuda",
    ) -> None:
        """Take over the cache's policy, state and token prior.

        weights: of which softmax, or of gates that every step is given (sigmoid routers); `-executed` renormalises over
        the executed experts. factor: multiplies all weights (a model's routed scaling factor).
        """
        c = view(cache.block)
        if c.n_experts > layout.MOST_EXPERTS:
            raise ValueError(f"the device's policy packs an expert into 9 bits: {c.n_experts} experts are too many")
        if int(c.top_k.max()) > layout.MOST_EXECUTED:
            raise ValueError(f"a turn packs its place into 8 bits: {int(c.top_k.max())} executed experts are too many")
        self.state = DevicePolicyState.from_cache(cache, device)
        self.prior = None if cache.prior is None else DevicePrior.from_prior(cache.prior, device)  # type: ignore[arg-type]
        self.top_k = [int(k) for k in c.top_k]
        self.n_layers, self.n_experts, self.padded = int(c.n_layers), int(c.n_experts), layout.padded(c.n_experts)
        self.width, self.budget, self.window = max(self.top_k), int(c.budget), int(c.window)
        self.decisions = Decisions.empty(self.n_layers, self.width, self.budget, device)
        self._prefetch, self._needs_gates = int(c.prefetch), weights in ("given", "given-executed")
        self._rules = tuple(float(x) for x in c.rules)
        self._factor = float(factor)
        self._constants: dict[str, Any] = {
            "E": self.n_experts,
            "EP": self.padded,
            "WIDTH": self.width,
            "BUDGET": self.budget,
            "ROUTING": int(c.routing),
            "EVICTION": int(c.eviction),
            "PREFETCH": int(c.prefetch),
            "GATED": bool(c.gated),
            "RUNNING": bool(c.running),
            "ELIDED": self._rules[2] > float("-inf"),
            "WEIGHTS": _WEIGHTS[weights],
            "J": int(c.top_j),
            "W": self.window,
            **steps.OPTIONS,
        }

    def reset(self) -> None:
        self.state.reset()

    def begin_token(self, token: torch.Tensor) -> None:
        """Unpack the prior's row of `token` [1] int64, on the device; without a prior nothing is to be done.

        Below zero is a token of which nothing is known. One small kernel for all layers, off the layers' own path.
        """
        if self.prior is None:
            return
        at = layout.REALS.index("prior") * self.padded
        self._unpack(token, self.state.reals.view(-1)[at:], len(layout.REALS) * self.padded, 0, self.n_layers)

    def arguments(
        self,
        layer: int | None,
        following: int | None,
        scores: torch.Tensor | None = None,
        pregate: torch.Tensor | None = None,
        gates: torch.Tensor | None = None,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What `deciding.decide` is launched with for part 2 of `layer` on its scores [E] float32, then part 1 of
        `following` on its pre-gate [E]: in order up to `stop`, and by name. gates [E]: of `layer`, where the weights
        are given. Results lie in `decisions`.
        """
        if layer is not None:
            self._check(scores, "scores", (self.n_experts,))
            if self._needs_gates:
                self._check(gates, "gates", (self.n_experts,))
        prefetches = following is not None and self._prefetches(pregate)
        if prefetches and self._prefetch == PRE_GATE:
            self._check(pregate, "pregate", (self.n_experts,))
        nothing = self.state.reals
        k = 1 if layer is None else self.top_k[layer]
        k_next = 1 if following is None else self.top_k[following]
        arguments = (
            *self.state.tensors,
            nothing if scores is None else scores,
            nothing if gates is None else gates,
            nothing if pregate is None else pregate,
            *self.decisions.tensors,
            layer or 0,
            following or 0,
            *self._rules,
            self._factor,
        )
        constants = {
            "SELECTS": layer is not None,
            "FREEZES": following is not None,
            "PREFETCHES": prefetches,
            "K": k,
            "K_NEXT": k_next,
            "ROUNDS": self._rounds(k_next),
            **self._constants,
        }
        return arguments, constants

    @property
    def uses_pregate(self) -> bool:
        return self._prefetch == PRE_GATE

    def chunk(
        self,
        layer: int,
        scores: torch.Tensor,
        pregate: torch.Tensor | None = None,
        tokens: torch.Tensor | None = None,
        gates: torch.Tensor | None = None,
        out: Decisions | None = None,
    ) -> Decisions:
        """Both parts of one layer for T tokens in order: scores [T, E], pregate [T, E] or None, tokens [T] int64.

        Leaves the state as T tokens through `deciding.decide` would, and returns a row of decisions per token (in `out`
        if given).
        """
        n_tokens = scores.shape[0]
        shape = (n_tokens, self.n_experts)
        self._check(scores, "scores", shape)
        if self._needs_gates:
            self._check(gates, "gates", shape)
        prefetches = self._prefetches(pregate)
        if prefetches and self._prefetch == PRE_GATE:
            self._check(pregate, "pregate", shape)
        out = out or Decisions.empty(n_tokens, self.width, self.budget, scores.device)
        priors = self.state.reals
        if self.prior is not None:
            if tokens is None:
                raise ValueError("with a token prior, a chunk needs its tokens")
            priors = torch.empty((n_tokens, self.padded), dtype=torch.float32, device=scores.device)
            self._unpack(tokens, priors, self.padded, layer, 1)
        k = self.top_k[layer]
        steps.chunk[(1,)](
            *self.state.tensors,
            scores,
            scores if gates is None else gates,
            scores if pregate is None else pregate,
            priors,
            *out.tensors,
            layer,
            n_tokens,
            *self._rules,
            self._factor,
            PREFETCHES=prefetches,
            K=k,
            ROUNDS=self._rounds(k),
            HAS_PRIOR=self.prior is not None,
            **self._constants,
        )
        return out

    def _unpack(self, tokens: torch.Tensor, out: torch.Tensor, stride: int, first: int, n_layers: int) -> None:
        assert self.prior is not None
        steps.prior_rows[(len(tokens), n_layers)](
            tokens, self.prior.row_of, self.prior.starts, self.prior.experts, self.prior.shares, out, stride, first,
            len(self.prior.row_of), N_LAYERS=self.n_layers, EP=self.padded, **steps.OPTIONS,
        )  # fmt: skip

    def _prefetches(self, pregate: torch.Tensor | None) -> bool:
        return self._prefetch == TOKEN_PRIOR or (self._prefetch == PRE_GATE and pregate is not None)

    def _rounds(self, k: int) -> int:
        if self._prefetch == NO_PREFETCH:
            return 0
        return self.window if self._prefetch == TOKEN_PRIOR else max(self.window, k)

    def _check(self, values: torch.Tensor | None, name: str, shape: tuple[int, ...]) -> None:
        """Kernels trust what they are given."""
        found = None if values is None else (tuple(values.shape), values.dtype, values.is_contiguous())
        if found != (shape, torch.float32, True):
            raise ValueError(f"{name} must be contiguous float32 of shape {shape}, not {found}")
