"""The dependency timeline: the least time that any scheduler could take for the copies that a policy decided.

Replayed: a layer's demand copies can be asked for when its router has spoken, and so can the prefetches of the next
layer, whose pre-gate is known then. One link carries one copy at a time at its measured rate. What a layer waits for
goes first, whatever is under way (nothing is lost by the change); prefetches follow in order, and one whose slot is
given to another expert is dropped. The layer's experts are computed one after the other, those whose bytes are there
first. Nothing else takes time: no launch, no decision, no wait between a copy's arrival and its use.
"""

from dataclasses import dataclass

import numpy as np

from edgemoe.bench.gpu.replay import Decided
from edgemoe.policy._jit import kernel


@dataclass(frozen=True)
class Compute:
    """Seconds of a token with everything resident: of a layer until its router has spoken, of its k experts, and after
    the last layer. Layers are alike."""

    attention: float
    experts: float
    output: float

    def token(self, n_layers: int) -> float:
        return n_layers * (self.attention + self.experts) + self.output


def timeline(decided: Decided, copy_s: float, compute: Compute) -> np.ndarray:  # [T] float64
    """Seconds of each token of one sequence. copy_s: of one expert's bytes over the link."""
    return _replay(
        decided.executed,
        decided.counts,
        decided.copies,
        decided.places,
        copy_s,
        compute.attention,
        compute.experts,
        compute.output,
    )


@kernel
def _replay(
    executed: np.ndarray,  # [L, T, k] int32, −1 for an elided gate
    counts: np.ndarray,  # [L, T, 2] int32: prefetch and demand copies
    copies: np.ndarray,  # [L, T, 2, E] int32: their experts
    places: np.ndarray,  # [L, T, 2, E] int32: their slots
    copy_s: float,
    attention: float,
    experts: float,
    output: float,
) -> np.ndarray:
    n_layers, n_tokens, k = executed.shape
    n_experts = copies.shape[3]
    left = np.zeros((n_layers, n_experts))  # seconds of link that an expert's prefetch still needs; 0: nothing waits
    ticket = np.zeros((n_layers, n_experts), np.int64)  # of its place in the queue
    holder = np.full((n_layers, n_experts), -1, np.int64)  # by slot: whose bytes were last asked for
    queue = np.empty((n_layers * n_tokens * n_experts + 1, 2), np.int64)
    head, tail = 0, 0
    waits = np.empty(n_experts)
    times = np.empty(n_tokens)
    now = link = 0.0  # the token's clock, and until when the link's work has been followed
    for t in range(n_tokens):
        began = now
        for layer in range(-1, n_layers):
            # Before the first layer: a prefetch of layer 0, which needs no router.
            if layer >= 0:
                now += attention
                # The link worked on prefetches until now.
                while head < tail and link < now:
                    at, expert = queue[head]
                    if left[at, expert] == 0.0 or ticket[at, expert] != head:
                        head += 1
                        continue
                    step = min(left[at, expert], now - link)
                    left[at, expert] -= step
                    link += step
                    if left[at, expert] <= 1e-12:
                        left[at, expert] = 0.0
                        head += 1
                link = max(link, now)
                n = 0
                for i in range(counts[layer, t, 1]):
                    expert, slot = copies[layer, t, 1, i], places[layer, t, 1, i]
                    if holder[layer, slot] >= 0:
                        left[layer, holder[layer, slot]] = 0.0
                    holder[layer, slot] = expert
                    left[layer, expert] = 0.0
                    waits[n] = copy_s
                    n += 1
                m = 0
                for i in range(k):
                    expert = executed[layer, t, i]
                    if expert >= 0:
                        m += 1
                        if left[layer, expert] > 0.0:
                            waits[n] = left[layer, expert]
                            left[layer, expert] = 0.0
                            n += 1
            if layer + 1 < n_layers:
                for i in range(counts[layer + 1, t, 0]):
                    expert, slot = copies[layer + 1, t, 0, i], places[layer + 1, t, 0, i]
                    if holder[layer + 1, slot] >= 0:
                        left[layer + 1, holder[layer + 1, slot]] = 0.0
                    holder[layer + 1, slot] = expert
                    left[layer + 1, expert] = copy_s
                    ticket[layer + 1, expert] = tail
                    queue[tail, 0], queue[tail, 1] = layer + 1, expert
                    tail += 1
            if layer >= 0 and m > 0:
                # The shortest first: every expert is then there as early as it can be.
                waiting = np.sort(waits[:n])
                share = experts / k
                now += share * (m - n)
                for i in range(n):
                    link += waiting[i]
                    now = max(now, link) + share
        now += output
        times[t] = now - began
    return times
