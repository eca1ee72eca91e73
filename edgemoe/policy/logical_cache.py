"""`LogicalCache`: Algorithm 1 as an object, for hosts that drive the policy from Python."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from edgemoe.errors import UserError
from edgemoe.policy import algorithm1
from edgemoe.policy._jit import kernel
from edgemoe.policy.config import Policy
from edgemoe.policy.state import attach, new_block, view


class Copy(NamedTuple):
    """Bring this expert's weights into this slot of its layer."""

    expert: int
    slot: int


class Selection(NamedTuple):
    """What a layer executes for one token, by the router's own scores, and the copies it needs first, by index."""

    experts: list[int]
    copies: list[Copy]


class TokenRows(Protocol):
    """A token prior of whatever storage: `edgemoe.calibration.Calibration` is one."""

    def prior_row(self, token: int) -> np.ndarray:
        """π_l(token) of all layers, [L, E] float32."""


@kernel
def _reset(block: np.ndarray) -> None:
    c = attach(block)
    for layer in range(c.n_layers):
        algorithm1.reset(c, layer)


@kernel
def _begin_token(block: np.ndarray) -> None:
    c = attach(block)
    for layer in range(c.n_layers):
        algorithm1.freeze(c, layer)


@kernel
def _prefetch(block: np.ndarray, layer: int, g: np.ndarray) -> None:
    algorithm1.prefetch(attach(block), layer, g)


@kernel
def _select(block: np.ndarray, layer: int, z: np.ndarray) -> int:
    return algorithm1.select(attach(block), layer, z)


@kernel
def _observe(block: np.ndarray, layer: int, experts: np.ndarray) -> None:
    algorithm1.observe(attach(block), layer, experts)


class LogicalCache:
    """The logical residency of L layers under one policy: a deterministic function of the token history.

    Per token: `begin_token`, then for each layer `prefetch` (where it has candidates) and `select`. Hosts mirror the
    returned copies; what they do with them, and when, changes no decision. `block` is the whole state: native code
    works on its address (`edgemoe.policy.state.attach_address`), and a copy of it is a snapshot.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        n_layers: int,
        n_experts: int,
        top_k: int | Sequence[int],
        capacity: int,
        delta: np.ndarray | None = None,
        warm: np.ndarray | None = None,
        prior: np.ndarray | TokenRows | None = None,
        pinned: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Make the cache and reset it.

        top_k: one for all layers, or one per layer. delta: [L] float32, Δ̄ on held-out text. warm: [L, m] experts on
        held-out text, most frequent first; the first C are the warm set, padded by lowest index. prior: [L, V, E]
        float32, how often layer l routes token x to each expert on held-out text, or what gives its rows. pinned: per
        layer, experts that are resident and never evicted, in slots of their own before the C that the policy works
        with (a layer has no more slots than experts). Without them this is Algorithm 1 as the paper has it.

        Raises `UserError` where the policy, the model and the capacity do not fit, or a needed Δ̄ is missing.
        """
        ks = np.broadcast_to(np.asarray(top_k, dtype=np.int64), (n_layers,))
        policy.check(n_experts, int(ks.max()), capacity)
        if delta is None and policy.needs_scale and policy.lam > 0:
            raise UserError("a fixed bonus scale needs Δ̄ of every layer: give it, or use a running scale")
        if pinned is not None:
            _check_pinned(pinned, n_layers, n_experts)
        self.policy = policy
        self.prior = prior
        if delta is None:
            delta = np.zeros(n_layers, dtype=np.float32)
        if warm is None:
            warm = np.zeros((n_layers, 0), dtype=np.int64)
        scale = np.asarray(delta, dtype=np.float32)
        self.block = new_block(policy, ks, n_experts, capacity, scale, np.asarray(warm), pinned)
        self.state = view(self.block)
        self.reset()

    def reset(self) -> None:
        """Start a sequence: the warm set is resident, statistics are zero."""
        _reset(self.block)

    def begin_token(self, token: int | None = None) -> None:
        """Freeze the priorities of all layers for this token, whose id selects the row of the token prior, if any.

        Of a token without an id nothing is known: its prior is zero.
        """
        if self.prior is not None:
            self.state.prior[:] = 0 if token is None else self._prior_row(token)
        _begin_token(self.block)

    def _prior_row(self, token: int) -> np.ndarray:  # [L, E] float32
        assert self.prior is not None
        row: np.ndarray = self.prior[:, token] if isinstance(self.prior, np.ndarray) else self.prior.prior_row(token)
        if row.shape != self.state.prior.shape:
            raise ValueError(f"the token prior is of {row.shape} layers and experts, not {self.state.prior.shape}")
        return row

    def prefetch(self, layer: int, pregate: np.ndarray | None = None) -> list[Copy]:
        """Part 1 of Algorithm 1: insert experts that the pre-gate's scores [E] predict. Copies in order, at most n.

        A layer without a pre-gate skips this call. Prefetch by token prior needs no scores; without prefetch there is
        nothing to do.
        """
        self._check_frozen(layer)
        if self.policy.prefetch == "none":
            return []
        if pregate is None and self.policy.needs_pregate:
            raise ValueError(f"layer {layer} prefetches by the pre-gate: give its scores, or skip the call")
        _prefetch(self.block, layer, self.state.biased if pregate is None else self._scores(pregate))
        return self._copies()

    def select(self, layer: int, scores: np.ndarray) -> Selection:
        """Part 2 of Algorithm 1: choose the experts by the router's scores [E], insert them, update the statistics."""
        self._check_frozen(layer)
        m = _select(self.block, layer, self._scores(scores))
        return Selection(self.state.executed[:m].tolist(), self._copies())

    def observe(self, layer: int, experts: Sequence[int] | np.ndarray) -> list[Copy]:
        """Part 2 for exact routing where the router's own choice [k], in its own ranking, is already made.

        Raises ValueError for a policy that `needs_scores`: it would run other experts, or lose its running Δ̄.
        """
        if self.policy.needs_scores:
            raise ValueError(f"exact routing without a running scale can do without scores, not {self.policy}: select")
        self._check_frozen(layer)
        chosen = np.ascontiguousarray(experts, dtype=np.int16)
        k, n_experts = int(self.state.top_k[layer]), self.state.n_experts
        if chosen.shape != (k,) or chosen.min() < 0 or chosen.max() >= n_experts:
            raise ValueError(f"layer {layer} executes {k} of {n_experts} experts, not {experts}")
        _observe(self.block, layer, chosen)
        return self._copies()

    def resident(self, layer: int) -> list[int]:
        """The experts of R_l by slot."""
        slots = self.state.slot_of[layer]
        (experts,) = np.nonzero(slots >= 0)
        return experts[np.argsort(slots[experts])].tolist()

    def _scores(self, values: np.ndarray) -> np.ndarray:
        """As the kernels take them; they trust the length."""
        scores = np.ascontiguousarray(values, dtype=np.float32)
        if scores.shape != (self.state.n_experts,):
            raise ValueError(f"expected {self.state.n_experts} scores, one per expert, not shape {scores.shape}")
        return scores

    def _copies(self) -> list[Copy]:
        n = int(self.state.n_copies[0])
        pairs = zip(self.state.copy_expert[:n].tolist(), self.state.copy_slot[:n].tolist(), strict=True)
        return [Copy(expert, slot) for expert, slot in pairs]

    def _check_frozen(self, layer: int) -> None:
        if not self.state.frozen[layer]:
            raise RuntimeError(f"layer {layer} has already selected for this token: call begin_token first")


def _check_pinned(pinned: Sequence[Sequence[int]], n_layers: int, n_experts: int) -> None:
    if len(pinned) != n_layers:
        raise UserError(f"experts are pinned in {len(pinned)} layers, the model has {n_layers}: give each its own")
    for layer, experts in enumerate(pinned):
        if len(set(experts)) != len(experts) or any(not 0 <= e < n_experts for e in experts):
            raise UserError(f"layer {layer} pins experts {list(experts)}: expected each of 0 to {n_experts - 1} once")
