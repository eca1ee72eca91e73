"""What a policy decides on given scores, by the host's Algorithm 1: every executor decides this, bit for bit."""

from dataclasses import dataclass

import numpy as np

from edgemoe.gpu_offload.decisions import Decisions
from edgemoe.policy import LogicalCache


@dataclass(frozen=True)
class Routing:
    """The routers' output for one window of T tokens."""

    scores: np.ndarray  # [L, T, E] float32
    pregate: np.ndarray  # [L, T, E] float32: of layer l, from layer l − 1's MoE input; nothing in layer 0

    @property
    def tokens(self) -> int:
        return int(self.scores.shape[1])

    def first(self, tokens: int) -> "Routing":
        """Of the first tokens only."""
        return Routing(self.scores[:, :tokens].copy(), self.pregate[:, :tokens].copy())

    def packed(self) -> np.ndarray:  # [T, L, 2, E] float32
        """As executors replay it: each layer's scores, and the pre-gate of the next one."""
        n_layers, n_tokens, n_experts = self.scores.shape
        out = np.zeros((n_tokens, n_layers, 2, n_experts), np.float32)
        out[:, :, 0] = self.scores.transpose(1, 0, 2)
        out[:, :-1, 1] = self.pregate[1:].transpose(1, 0, 2)
        return out


@dataclass(frozen=True)
class Decided:
    """The decisions for one window, from the start of a sequence."""

    executed: np.ndarray  # [L, T, k] int32, −1 for an elided gate
    counts: np.ndarray  # [L, T, 2] int32: prefetch and demand copies
    copies: np.ndarray  # [L, T, 2, E] int32: their experts, in order
    places: np.ndarray  # [L, T, 2, E] int32: their slots
    replaced: int
    """Executed experts that the router itself would not have chosen."""
    resident: np.ndarray  # [L, E] bool: who has a slot after the last token

    @property
    def tokens(self) -> int:
        return int(self.executed.shape[1])

    @property
    def prefetch(self) -> int:
        return int(self.counts[..., 0].sum())

    @property
    def demand(self) -> int:
        return int(self.counts[..., 1].sum())


def decide(cache: LogicalCache, routing: Routing, tokens: np.ndarray) -> Decided:
    """Run a policy over one window. The cache is reset first. `tokens` [T] choose the token prior's rows, if any."""
    cache.reset()
    decisions = Decisions(cache, routing.tokens, cache.prior)  # type: ignore[arg-type]
    decisions.begin(tokens)
    for layer, scores in enumerate(routing.scores):
        decisions.chunk(layer, scores, routing.pregate[layer] if layer else None)
    return Decided(
        executed=decisions.executed,
        counts=decisions.counts,
        copies=decisions.copies,
        places=decisions.places,
        replaced=_replaced(decisions.executed, routing.scores),
        resident=cache.state.slot_of >= 0,
    )


def _replaced(executed: np.ndarray, scores: np.ndarray) -> int:
    k = executed.shape[-1]
    own = np.zeros(scores.shape, bool)
    np.put_along_axis(own, np.argsort(-scores, axis=-1, kind="stable")[..., :k], True, axis=-1)
    chosen = np.take_along_axis(own, np.maximum(executed, 0), axis=-1)
    return int(((executed >= 0) & ~chosen).sum())
