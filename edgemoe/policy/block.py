"""Algorithm 1 over blocks of positions, with one logical cache per row of a batch: one native call per layer.

Layers share no state, so deciding a block layer by layer, each over all of its positions in turn, decides what a token
at a time over all layers would decide from the same scores: prefill and decode cannot differ.
"""

from typing import NamedTuple

import numpy as np

from edgemoe.policy import algorithm1
from edgemoe.policy._jit import kernel
from edgemoe.policy.logical_cache import LogicalCache
from edgemoe.policy.replay import DEMAND, EXECUTED, PREFETCHED, REPLACED, UNUSED, member
from edgemoe.policy.state import PRE_GATE, TOKEN_PRIOR, attach


class Decisions(NamedTuple):
    """What one layer decided for B rows of S positions; ids are padded with −1."""

    executed: np.ndarray  # [B, S, k] int16, by the router's own scores
    own: np.ndarray  # [B, S, k] int16: the router's own top-K in its ranking
    copies: np.ndarray  # [B, S, n + k, 2] int16: (expert, slot), prefetch copies first, then demand copies
    counts: np.ndarray  # [B, S, 5] int16: executed, demand, prefetched, unused, replaced (`edgemoe.policy.replay`)


@kernel
def _decide(
    blocks: np.ndarray,  # [B, ≥ size] uint8
    size: int,
    layer: int,
    valid: np.ndarray,  # [B, S] bool
    scores: np.ndarray,  # [B, S, E] float32
    pregate: np.ndarray,  # [B, S, E] float32, or [B, 0, E] without one
    prior: np.ndarray,  # [B, S, E] float32, or [B, 0, E] without one
    executed: np.ndarray,
    own: np.ndarray,
    copies: np.ndarray,
    counts: np.ndarray,
) -> None:
    gated = pregate.shape[1] > 0
    for b in range(len(blocks)):
        c = attach(blocks[b][:size])
        k = c.top_k[layer]
        for s in range(valid.shape[1]):
            z = scores[b, s]
            if not valid[b, s]:
                algorithm1.rank(z, z, k, c.order)
                for i in range(k):
                    executed[b, s, i] = own[b, s, i] = c.order[i]
                continue
            if prior.shape[1] > 0:
                for e in range(c.n_experts):
                    c.prior[layer, e] = prior[b, s, e]
            algorithm1.freeze(c, layer)
            n = 0
            if c.prefetch == TOKEN_PRIOR or (c.prefetch == PRE_GATE and gated):
                algorithm1.prefetch(c, layer, pregate[b, s] if gated else c.biased)
                n = c.n_copies[0]
            for i in range(n):
                copies[b, s, i, 0], copies[b, s, i, 1] = c.copy_expert[i], c.copy_slot[i]
            m = algorithm1.select(c, layer, z)
            for i in range(c.n_copies[0]):
                copies[b, s, n + i, 0], copies[b, s, n + i, 1] = c.copy_expert[i], c.copy_slot[i]
            counts[b, s, EXECUTED], counts[b, s, DEMAND], counts[b, s, PREFETCHED] = m, c.n_copies[0], n
            for i in range(n):
                counts[b, s, UNUSED] += not member(c.executed, m, copies[b, s, i, 0])
            for i in range(m):
                executed[b, s, i] = c.executed[i]
                counts[b, s, REPLACED] += not member(c.own, k, c.executed[i])
            for i in range(k):
                own[b, s, i] = c.own[i]


class CacheRows:
    """The logical caches of a batch: B rows that start alike and share nothing."""

    def __init__(self, cache: LogicalCache) -> None:
        """`cache` says policy, geometry and calibration; its own state is not used after this."""
        self.policy = cache.policy
        self.n_layers, self.n_experts = cache.state.n_layers, cache.state.n_experts
        self._size = len(cache.block)
        self._width = int(cache.state.top_k.max())
        cache.reset()
        self._start = np.zeros(-(-self._size // 64) * 64, np.uint8)  # every row's words stay aligned
        self._start[: self._size] = cache.block
        self.blocks = np.empty((0, len(self._start)), np.uint8)

    def __len__(self) -> int:
        return len(self.blocks)

    def reset(self, rows: int) -> None:
        """Start `rows` sequences: each at the warm set, statistics zero."""
        self.blocks = np.tile(self._start, (rows, 1))

    def decide(
        self,
        layer: int,
        scores: np.ndarray,
        pregate: np.ndarray | None = None,
        prior: np.ndarray | None = None,
        valid: np.ndarray | None = None,
    ) -> Decisions:
        """For every row, each position in turn: freeze the priority, part 1, part 2.

        scores: [B, S, E] of the router. pregate: [B, S, E], or None where the layer has no pre-gate. prior: [B, S, E],
        π_l of each position's token, or None for zero. valid: [B, S] bool; a position that is not (padding) executes
        the router's own choice and changes no state.
        """
        rows, length, n_experts = scores.shape
        if rows != len(self) or n_experts != self.n_experts:
            raise ValueError(f"scores of {rows} rows of {n_experts} experts, the caches are {len(self)}")
        none = np.empty((rows, 0, n_experts), np.float32)
        g, p = (none if given is None else np.ascontiguousarray(given, np.float32) for given in (pregate, prior))
        for given in (g, p):
            if given.shape not in (none.shape, scores.shape):
                raise ValueError(f"expected pre-gate and prior of {scores.shape}, like the scores, not {given.shape}")
        if valid is None:
            valid = np.ones((rows, length), np.bool_)
        ids = (rows, length, self._width)
        out = Decisions(
            np.full(ids, -1, np.int16),
            np.full(ids, -1, np.int16),
            np.full((rows, length, self.policy.insertions + self._width, 2), -1, np.int16),
            np.zeros((rows, length, 5), np.int16),
        )
        z, mask = np.ascontiguousarray(scores, np.float32), np.ascontiguousarray(valid, np.bool_)
        _decide(self.blocks, self._size, layer, mask, z, g, p, out.executed, out.own, out.copies, out.counts)
        return out
