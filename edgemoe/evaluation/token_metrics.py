"""The one place where logits become negative log-likelihoods, KL and agreement, whichever engine they came from.

`edgemoe.gpu_offload.harness.divergence` does the same where the logits lie, in torch; a test holds the two equal.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from edgemoe.errors import UserError
from edgemoe.policy import Policy
from edgemoe.policy.replay import DEMAND, EXECUTED, PREFETCHED, REPLACED, UNUSED

_BLOCK = 64  # rows in float64 at a time: a vocabulary may have 250,000 entries
METRICS = ("nll", "nll_exact", "kl", "top1", "loads", "replaced", "demand", "prefetch", "unused")
"""What every window of a divergence result holds: means per predicted token; counts are sums over the layers."""


@dataclass(frozen=True, eq=False)
class WindowMetrics:
    """One window of T tokens, so T − 1 predictions, under one policy."""

    nll_exact: np.ndarray  # [T − 1], nats of the token that follows
    nll: np.ndarray  # [T − 1], steered
    kl: np.ndarray  # [T − 1]: KL(exact ‖ steered) of the next-token distribution, nats
    agree: np.ndarray  # [T − 1] bool: both rank the same token first
    counts: np.ndarray  # [T − 1, 5] summed over layers, by the names in `edgemoe.policy.replay`
    copies: np.ndarray | None = None  # [L]: prefetch and demand copies of all T − 1 tokens, by layer, where known

    def means(self) -> dict[str, float]:
        """By the names in `METRICS`."""
        counts = self.counts.mean(axis=0)
        named = {"loads": EXECUTED, "replaced": REPLACED, "demand": DEMAND, "prefetch": PREFETCHED, "unused": UNUSED}
        return {
            "nll": float(self.nll.mean(dtype=np.float64)),
            "nll_exact": float(self.nll_exact.mean(dtype=np.float64)),
            "kl": float(self.kl.mean(dtype=np.float64)),
            "top1": float(self.agree.mean()),
            **{name: float(counts[at]) for name, at in named.items()},
        }


def compare_rows(tokens: np.ndarray, exact: np.ndarray, steered: np.ndarray, counts: np.ndarray) -> WindowMetrics:
    """Hold logits [T − 1, V] of a window [T] against those of exact routing. counts: [T − 1, 5].

    Raises `UserError` for logits that are not numbers.
    """
    following = np.asarray(tokens[1:], np.int64)
    nll_exact, nll, kl = np.empty((3, len(following)))
    for at in range(0, len(following), _BLOCK):
        part = slice(at, at + _BLOCK)
        log_p, log_q = log_softmax(exact[part]), log_softmax(steered[part])
        rows = np.arange(len(log_p))
        nll_exact[part], nll[part] = -log_p[rows, following[part]], -log_q[rows, following[part]]
        kl[part] = (np.exp(log_p) * (log_p - log_q)).sum(axis=1)
    if not (np.isfinite(nll_exact).all() and np.isfinite(nll).all() and np.isfinite(kl).all()):
        raise UserError("the model gives logits that are not numbers: is the file damaged?")
    return WindowMetrics(nll_exact, nll, kl, exact.argmax(axis=1) == steered.argmax(axis=1), counts)


def log_softmax(logits: np.ndarray) -> np.ndarray:  # [T, V] float64
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    found: np.ndarray = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return found


def counts_of(records: Sequence[Mapping[str, np.ndarray]], policy: Policy) -> np.ndarray:  # [T, 5] int64
    """What an engine's `records` of consecutive steps say of each token, summed over layers.

    A record holds executed [L, S, k], counts [L, S, 2] and copies [L, S, 2, E] of parts 1 and 2 and, where experts may
    be replaced, scores [L, S, E]. An engine without a logical cache has no records: then pass none, and get none.
    """
    return np.concatenate([_step(record, policy) for record in records]) if records else np.zeros((0, 5), np.int64)


def copies_of(records: Sequence[Mapping[str, np.ndarray]]) -> np.ndarray | None:  # [L] int64
    """Copies by layer, summed over consecutive steps; None for an engine without records."""
    if not records:
        return None
    found: np.ndarray = np.sum([record["counts"].sum(axis=(1, 2), dtype=np.int64) for record in records], axis=0)
    return found


def _step(record: Mapping[str, np.ndarray], policy: Policy) -> np.ndarray:
    executed, copied = record["executed"].astype(np.int64), record["counts"].astype(np.int64)
    prefetched = record["copies"][:, :, 0].astype(np.int64)  # [L, S, E]: the first counts[…, 0] mean something
    ran = _members(executed, executed >= 0, prefetched.shape[-1])
    fetched = np.arange(prefetched.shape[-1]) < copied[..., :1]
    used = np.take_along_axis(ran, np.where(fetched, prefetched, 0), axis=-1) & fetched
    found = np.zeros((executed.shape[1], 5), np.int64)
    found[:, EXECUTED] = ran.sum(axis=(0, 2))
    found[:, PREFETCHED], found[:, DEMAND] = copied[..., 0].sum(axis=0), copied[..., 1].sum(axis=0)
    found[:, UNUSED] = found[:, PREFETCHED] - used.sum(axis=(0, 2))
    if policy.routing != "exact":
        # A layer may have a smaller K than others; an elided gate leaves a gap, too, but its expert was chosen.
        width = np.full(executed.shape[:2], executed.shape[2]) if policy.elide else (executed >= 0).sum(axis=2)
        own = np.argsort(-record["scores"], axis=2, kind="stable")[..., : executed.shape[2]]
        would = _members(own, np.arange(own.shape[2]) < width[..., None], ran.shape[-1])
        found[:, REPLACED] = (ran & ~would).sum(axis=(0, 2))
    return found


def _members(experts: np.ndarray, kept: np.ndarray, n_experts: int) -> np.ndarray:  # [L, S, E] bool
    found = np.zeros((*experts.shape[:2], n_experts + 1), np.bool_)
    np.put_along_axis(found, np.where(kept, experts, n_experts), True, axis=-1)
    return found[..., :n_experts]
