"""Algorithm 1 for an engine that a host drives: the policy's own kernels, and a record of what they decided.

A decode goes `part2(l)`, then `part1(l + 1)`, one layer early. A chunk goes through both parts for each token in turn,
layer by layer, each on that layer's state (`chunk`). Layers share nothing, so both orders decide alike.
"""

import numpy as np

from edgemoe.policy import LogicalCache, algorithm1
from edgemoe.policy._jit import kernel
from edgemoe.policy.logical_cache import TokenRows
from edgemoe.policy.state import PRE_GATE, TOKEN_PRIOR, Cache, attach

PART_1, PART_2, BOTH = 1, 2, 3
_ALL_THERE = np.zeros(0, np.bool_)


@kernel
def _note(c: Cache, part: int, counts: np.ndarray, copies: np.ndarray, places: np.ndarray) -> None:
    counts[part] = c.n_copies[0]
    for i in range(c.n_copies[0]):
        copies[part, i] = c.copy_expert[i]
        places[part, i] = c.copy_slot[i]


@kernel
def _select_without(c: Cache, layer: int, z: np.ndarray, absent: np.ndarray) -> int:
    """`algorithm1.select`, but routing takes the residents that are `absent` [E] for not resident."""
    k = c.top_k[layer]
    algorithm1.observe_range(c, layer, z)
    algorithm1.rank(z, z, k, c.own)
    for e in range(c.n_experts):
        if absent[e] and c.slot_of[layer, e] >= 0:
            c.slot_of[layer, e] = -2 - c.slot_of[layer, e]
    algorithm1.choose(c, layer, z, k)
    for e in range(c.n_experts):
        if c.slot_of[layer, e] <= -2:
            c.slot_of[layer, e] = -2 - c.slot_of[layer, e]
    algorithm1.order_by_router(c, z, k)
    m = algorithm1.elide(c, z, k)
    algorithm1.serve(c, layer, m)
    algorithm1.update(c, layer, m, k)
    return m


@kernel
def _decide(  # type: ignore[no-untyped-def]
    block, layer, parts, room, g, prior, z, absent, executed, counts, copies, places
):  # fmt: skip
    """These parts of a layer's step for each of T tokens in turn.

    room: prefetches of a token at most; z [T, E]; g and prior [T, E], or [0, E] without; absent [E] bool, or [0];
    out: executed [T, k], counts [T, 2], copies and places [T, 2, E].
    """
    c = attach(block)
    for t in range(len(z)):
        if parts & PART_1:
            if len(prior):
                c.prior[layer, :] = prior[t]
            algorithm1.freeze(c, layer)
            counts[t, 0] = 0
            if c.prefetch == TOKEN_PRIOR or (c.prefetch == PRE_GATE and len(g)):
                algorithm1.prefetch(c, layer, g[t] if len(g) else c.biased, room)
                _note(c, 0, counts[t], copies[t], places[t])
        if parts & PART_2:
            if len(absent):
                m = _select_without(c, layer, z[t], absent)
            else:
                m = algorithm1.select(c, layer, z[t])
            for i in range(executed.shape[1]):
                executed[t, i] = c.executed[i] if i < m else -1
            _note(c, 1, counts[t], copies[t], places[t])


class Decisions:
    """Drives a `LogicalCache` and keeps what it decided for the tokens of one step (a decode, or a chunk)."""

    def __init__(self, cache: LogicalCache, rows: int, prior: TokenRows | None = None) -> None:
        """`rows`: the most tokens of a step. `prior`: what gives the token prior's rows, where the policy uses one."""
        self.cache, self._prior = cache, prior
        state = cache.state
        n_layers, n_experts, k = state.n_layers, state.n_experts, int(state.top_k.max())
        self.has_pregate = np.array([cache.policy.needs_pregate and layer > 0 for layer in range(n_layers)])
        self.executed = np.zeros((n_layers, rows, k), np.int32)
        self.counts = np.zeros((n_layers, rows, 2), np.int32)
        """Copies of parts 1 and 2."""
        self.copies = np.zeros((n_layers, rows, 2, n_experts), np.int32)
        """Their experts, and below their slots, in order."""
        self.places = np.zeros((n_layers, rows, 2, n_experts), np.int32)
        self.scores = np.zeros((n_layers, rows, n_experts), np.float32)
        self.pregates = np.zeros((n_layers, rows, n_experts) if cache.policy.needs_pregate else (0, 0, 0), np.float32)
        self._priors = np.zeros((n_layers, rows if prior else 0, n_experts), np.float32)

    def begin(self, tokens: np.ndarray) -> None:
        """Before a step of these tokens."""
        for t, token in enumerate(tokens.tolist() if self._prior else []):
            self._priors[:, t] = self._prior.prior_row(token)  # type: ignore[union-attr]

    def part1(
        self, layer: int, pregate: np.ndarray | None = None, *, room: int = algorithm1.NO_LIMIT
    ) -> list[tuple[int, int]]:
        """Priorities and part 1 of a layer in a decode, by its pre-gate [E] if it has one: copies (expert, slot).

        room: how many at most, where what the link has room for throttles prefetch (PSR paper §6.1).
        """
        self._decide(layer, PART_1, 1, pregate, room=room)
        return self._pairs(layer, 0)

    def part2(self, layer: int, scores: np.ndarray, absent: np.ndarray = _ALL_THERE) -> list[tuple[int, int]]:
        """Part 2 of a layer in a decode, by the router's scores [E]: demand copies (expert, slot).

        absent [E] bool: residents that routing must not favour, where it reads the physical cache (PSR paper §3).
        """
        self.scores[layer, 0] = scores
        self._decide(layer, PART_2, 1, None, absent)
        return self._pairs(layer, 1)

    def chunk(self, layer: int, scores: np.ndarray, pregate: np.ndarray | None = None) -> np.ndarray:
        """Both parts of a layer for every token of a chunk, scores and pregate [T, E]: what each executes, [T, k]."""
        count = len(scores)
        self.scores[layer, :count] = scores
        self._decide(layer, BOTH, count, pregate)
        return self.executed[layer, :count]

    def _decide(
        self,
        layer: int,
        parts: int,
        count: int,
        pregate: np.ndarray | None,
        absent: np.ndarray = _ALL_THERE,
        room: int = algorithm1.NO_LIMIT,
    ) -> None:
        nothing = g = self.scores[layer, :0]
        if self.has_pregate[layer] and pregate is not None:
            g = self.pregates[layer, :count]
            g[:] = pregate
        _decide(
            self.cache.block,
            layer,
            parts,
            room,
            g,
            self._priors[layer, :count] if self._prior else nothing,
            self.scores[layer, :count],
            absent,
            self.executed[layer, :count],
            self.counts[layer, :count],
            self.copies[layer, :count],
            self.places[layer, :count],
        )

    def _pairs(self, layer: int, part: int) -> list[tuple[int, int]]:
        n = int(self.counts[layer, 0, part])
        return list(
            zip(self.copies[layer, 0, part, :n].tolist(), self.places[layer, 0, part, :n].tolist(), strict=True)
        )

    def record(self, count: int) -> dict[str, np.ndarray]:
        """What the last step of `count` tokens decided, and from what (copies): executed [L, T, k], −1 for an elided
        gate; counts [L, T, 2] and copies [L, T, 2, E] of parts 1 and 2; scores and, under a policy that has them,
        pregate [L, T, E]."""
        names = ("executed", "counts", "copies", "scores")
        out = {name: getattr(self, name)[:, :count].copy() for name in names}
        if self.pregates.size:
            out["pregate"] = self.pregates[:, :count].copy()
        return out
