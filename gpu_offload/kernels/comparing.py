"""Holds the device's decisions against the host's: every list, every count and the whole state after every step.

Used by the tests in Triton's interpreter, by those on a GPU, and by `selfcheck`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from edgemoe.gpu_offload.kernels import deciding
from edgemoe.gpu_offload.kernels.copy_state import CopyState
from edgemoe.gpu_offload.kernels.device_policy import Decisions, DevicePolicy, Weights
from edgemoe.gpu_offload.kernels.state import differences
from edgemoe.policy import PRESETS, LogicalCache, Policy, Selection, preset

VOCABULARY = 7


@dataclass(frozen=True, eq=False)
class Case:
    """Recorded inputs of T tokens through L layers, and what a cache is made of."""

    policy: Policy
    n_experts: int
    top_k: int
    capacity: int
    scores: np.ndarray  # [T, L, E] float32
    pregate: np.ndarray  # [T, L, E] float32
    tokens: np.ndarray  # [T] int64; one in eight is unknown to the prior
    prior: np.ndarray | None = None  # [L, V, E] float32
    delta: np.ndarray = field(default_factory=lambda: np.ones(2, dtype=np.float32))
    warm: np.ndarray | None = None

    def cache(self) -> LogicalCache:
        return LogicalCache(
            self.policy,
            n_layers=self.scores.shape[1],
            n_experts=self.n_experts,
            top_k=self.top_k,
            capacity=self.capacity,
            delta=self.delta,
            warm=self.warm,
            prior=self.prior,
        )


class Alone:
    """A policy whose decisions ask for copies that nobody makes: all have arrived when the next token begins."""

    def __init__(self, policy: DevicePolicy, capacity: int) -> None:
        self.policy, self.capacity, device = policy, capacity, policy.state.ints.device
        self.copies = CopyState(policy.n_layers, capacity, policy.width, policy.budget, device)
        self._stop = torch.zeros(1, dtype=torch.int64, device=device)

    def begin(self) -> None:
        """A token."""
        self.copies.queue.zero_()
        for record in (self.copies.claims, self.copies.done):
            record.fill_(1)

    def decide(self, layer: int | None, following: int | None, *given: torch.Tensor | None) -> None:
        """Arguments as `DevicePolicy.arguments` has them, in that order."""
        arguments, constants = self.policy.arguments(layer, following, *given)
        deciding.decide[(1,)](
            *arguments, self._stop, *self.copies.arguments, C=self.capacity, CHUNKS=1, EARLY=False, **constants
        )


KINDS = ("smooth", "ties", "masked", "equal", "zeros")


def random_case(
    policy: Policy,
    *,
    seed: int = 0,
    kind: str = "smooth",
    shape: tuple[int, int] = (5, 2),
    n_experts: int = 8,
    top_k: int = 2,
    capacity: int = 4,
) -> Case:
    """T tokens, L layers (`shape`). ties: whole numbers; masked: ties and −∞; equal: all alike; zeros: 0 and −0."""
    rng = np.random.default_rng(seed)
    full = (*shape, n_experts)
    scores = rng.normal(size=full).astype(np.float32)
    pregate = (scores + rng.normal(scale=0.5, size=full)).astype(np.float32)
    if kind != "smooth":
        scores, pregate = np.round(scores), np.round(pregate)
    if kind == "masked":
        scores[rng.random(full) < 0.5] = -np.inf
        pregate[rng.random(full) < 0.5] = -np.inf
    if kind == "equal":
        scores[:] = pregate[:] = 1
    if kind == "zeros":
        scores, pregate = scores * np.float32(0), pregate * np.float32(0)
    whole = kind != "smooth"
    delta = (rng.integers(1, 4, size=shape[1]) if whole else rng.uniform(0.1, 3, size=shape[1])).astype(np.float32)
    prior = None
    if policy.uses_prior and seed % 2:
        prior = rng.random((shape[1], VOCABULARY, n_experts)).astype(np.float32)
        prior[rng.random(prior.shape) < 0.6] = 0
    tokens = rng.integers(0, VOCABULARY, size=shape[0])
    tokens[rng.random(shape[0]) < 0.125] = -1
    warm = np.stack([rng.permutation(n_experts)[: seed % (n_experts + 1)] for _ in range(shape[1])])
    return Case(policy, n_experts, top_k, capacity, scores, pregate, tokens, prior, delta, warm)


def policies() -> Iterator[Policy]:
    """Every preset, and every rule that no preset has."""
    yield from PRESETS.values()
    for top_j in (0, 1, 2):
        for scale in ("fixed", "running"):
            yield preset("psr-gated", top_j=top_j, scale=scale, lam=0.5)
            yield Policy(routing="cache-prior", lam=1.0, top_j=top_j, scale=scale, eviction="lfu")
    yield Policy(routing="tau", tau=0.7, eviction="score")
    yield Policy(routing="tau", tau=0.2, eviction="static", prefetch="token-prior", window=3, budget=2)
    yield Policy(elide=0.2, eviction="lfu", prefetch="pre-gate", window=2, budget=1)
    yield preset("psr", elide=0.4, eviction="static")
    yield preset("speculative", gate="predicted", lam=0.3, elide=0.1, eviction="lru")
    yield Policy(eviction="score", prefetch="token-prior", window=4, budget=2)


def fitted(policy: Policy, top_k: int, capacity: int) -> Policy:
    """The policy with a window and a J that this geometry allows."""
    window = min(policy.window, capacity)
    return replace(policy, window=window, budget=min(policy.insertions, window), top_j=min(policy.top_j, top_k))


def compare(case: Case, device: str, chunk: int = 0, weights: Weights = "softmax") -> int:
    """Run the case on host and device; the number of decisions compared. AssertionError names what differs, and where.

    The first `chunk` tokens go layer by layer as a prompt, the others one by one.
    """
    host, other = case.cache(), DevicePolicy(case.cache(), weights=weights, device=device)
    alone = Alone(other, case.capacity)
    n_tokens, n_layers, _ = case.scores.shape
    scores, pregate = torch.from_numpy(case.scores).to(device), torch.from_numpy(case.pregate).to(device)
    tokens = torch.from_numpy(case.tokens.astype(np.int64)).to(device)
    compared = 0
    if chunk:
        expected: dict[tuple[int, int], tuple[list[Any], Selection, list[int]]] = {}
        for t in range(chunk):
            _begin(host, case, t)
            for layer in range(n_layers):
                expected[t, layer] = _decide(host, case, t, layer)
        for layer in range(n_layers):
            found = other.chunk(
                layer,
                scores[:chunk, layer].contiguous(),
                pregate[:chunk, layer].contiguous() if layer else None,
                tokens[:chunk],
                scores[:chunk, layer].contiguous(),
            )
            for t in range(chunk):
                _same(found, t, expected[t, layer], case.scores[t, layer], weights, f"chunk, token {t} layer {layer}")
                compared += 1
        _same_state(host, other, f"after a chunk of {chunk}", slice(None))
    for t in range(chunk, n_tokens):
        _begin(host, case, t)
        other.begin_token(tokens[t : t + 1])
        alone.begin()
        alone.decide(None, 0)
        for layer in range(n_layers):
            following = layer + 1 if layer + 1 < n_layers else None
            coming = None if following is None else pregate[t, following].contiguous()
            alone.decide(layer, following, scores[t, layer], coming, scores[t, layer])
            where = f"token {t} layer {layer}"
            _same(other.decisions, layer, _decide(host, case, t, layer), case.scores[t, layer], weights, where)
            # The next layer's part 1 is done on the device already.
            _same_state(host, other, where, slice(0, layer + 1))
            _same_tickets(alone, layer, where)
            compared += 1
    return compared


def _same_tickets(alone: Alone, layer: int, where: str) -> None:
    """A ticket is of the slot that an executed expert has; to wait for where it was copied for this token."""
    found, width, c = alone.policy.decisions, alone.policy.width, alone.capacity
    tickets = alone.copies.tickets[layer * width : (layer + 1) * width].tolist()
    executed, demand, _ = found.counts[layer].tolist()
    places = [ticket // 2 if ticket >= 0 else -1 - ticket for ticket in tickets[:executed]]
    if places != [layer * c + slot for slot in found.slots[layer, :executed].tolist()]:
        raise AssertionError(f"{where}: tickets {tickets} are not of the executed experts' slots")
    copied = {slot for _, slot in found.demand[layer, :demand].tolist()}
    waits = {place - layer * c for place, ticket in zip(places, tickets, strict=False) if ticket >= 0}
    if not copied <= waits or any(ticket > -(1 << 30) for ticket in tickets[executed:]):
        raise AssertionError(f"{where}: tickets {tickets}, with copies into the slots {copied}")


def _begin(host: LogicalCache, case: Case, t: int) -> None:
    token = int(case.tokens[t])
    host.begin_token(None if token < 0 else token)


def _decide(host: LogicalCache, case: Case, t: int, layer: int) -> tuple[list[Any], Selection, list[int]]:
    """The host's prefetch copies, selection and the router's own choice; the first layer has no pre-gate."""
    prefetched: list[Any] = []
    if layer or not host.policy.needs_pregate:
        prefetched = host.prefetch(layer, case.pregate[t, layer])
    selection = host.select(layer, case.scores[t, layer])
    return prefetched, selection, host.state.own[: case.top_k].tolist()


def _same(
    found: Decisions,
    row: int,
    expected: tuple[list[Any], Selection, list[int]],
    z: np.ndarray,
    kind: Weights,
    where: str,
) -> None:
    prefetched, selection, own = expected
    executed, demand, prefetch = found.counts[row].tolist()
    lists = {
        "executed": (found.executed[row, :executed].tolist(), selection.experts),
        "own": (found.own[row, : len(own)].tolist(), own),
        "demand": (found.demand[row, :demand].tolist(), [list(pair) for pair in selection.copies]),
        "prefetch": (found.prefetch[row, :prefetch].tolist(), [list(pair) for pair in prefetched]),
    }
    for name, (device, host) in lists.items():
        if device != host:
            raise AssertionError(f"{where}: {name} {device} on the device, {host} on the host")
    mixed = found.weights[row, :executed].cpu().numpy()
    if not np.allclose(mixed, mixing_weights(z, selection.experts, kind), rtol=1e-5, atol=1e-7, equal_nan=True):
        raise AssertionError(f"{where}: weights {mixed}, not {mixing_weights(z, selection.experts, kind)}")


def mixing_weights(z: np.ndarray, executed: list[int], kind: Weights) -> np.ndarray:
    """The weights that a model's own code would compute; `given` gates are the scores themselves here."""
    if kind.startswith("softmax"):
        top = z.max()
        gates = np.zeros(len(z)) if top == -np.inf else np.exp(z.astype(np.float64) - top)
    else:
        gates = z.astype(np.float64)
    over = gates[executed].sum() if kind.endswith("executed") else gates.sum() if kind == "softmax" else 1.0
    mixed: np.ndarray = gates[executed] / max(over, 1e-30)
    return mixed


def _same_state(host: LogicalCache, other: DevicePolicy, where: str, layers: slice) -> None:
    found = differences(host.block, other.state.to_block(), layers)
    # The host begins a token in all layers at once, the device in each when its turn comes: the prior is compared too.
    if found:
        raise AssertionError(f"{where}: the state differs in {', '.join(found)}")
    slots = other.decisions.slots
    for layer in range(host.state.n_layers)[layers]:
        executed = int(other.decisions.counts[layer, 0])
        experts = other.decisions.executed[layer, :executed].tolist()
        if slots[layer, :executed].tolist() != host.state.slot_of[layer, experts].tolist():
            raise AssertionError(f"{where}: executed experts lie in other slots than the device says")
