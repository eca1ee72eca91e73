"""The hit rate that a cache of each size would have on the text of a calibration, for every preset of the policy.

Algorithm 1 replayed (`edgemoe.policy.replay`) on scores that were captured, reset to the warm set at each window. The
token prior is taken without the token at hand: counted in, a token that occurs once would foretell itself. The warm set
and the bonus scale are the calibration's own, a few numbers from many tokens.
"""

import zipfile
from collections.abc import Iterator

import numpy as np

from edgemoe.calibration import Calibration, HitRates
from edgemoe.policy import PRESETS, Policy
from edgemoe.policy.replay import DEMAND, EXECUTED, replay_layer
from edgemoe.policy.state import new_block, view
from edgemoe.progress import Advance, no_progress
from edgemoe.tracing.members import blocks, layers, member

MAX_TOKENS = 2048
"""Tokens that are replayed at most: whole windows, spread over the text."""
SHARES = (1 / 16, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8, 1)


def predict(archive: zipfile.ZipFile, known: Calibration, advance: Advance = no_progress) -> HitRates:
    """Hit rates [P, C] by preset and capacity, from a trace file with scores; NaN where a preset is not defined.

    Presets that prefetch by the pre-gate are left out where the trace has none. `advance` is told of each layer.
    """
    tokens, windows = member(archive, "tokens"), member(archive, "windows")
    chosen, starts = _sample(windows, len(tokens))
    names = archive.namelist()
    policies = {name: policy for name, policy in PRESETS.items() if "pregate.npy" in names or not policy.needs_pregate}
    experts = [layer[chosen] for layer in layers(archive, "experts")]
    capacities = sorted({max(1, round(share * known.n_experts)) for share in SHARES})
    counts = np.zeros((len(policies), len(capacities), 2), np.int64)  # executed, demand
    gates = blocks(archive, "pregate") if "pregate.npy" in names else None
    for row, scores in enumerate(blocks(archive, "scores")):
        gate = _rows(next(gates), chosen) if gates else np.zeros((0, known.n_experts), np.float32)
        gated = row > 0 and known.layers[row] == known.layers[row - 1] + 1
        layer = _Layer(known, row, _rows(scores, chosen), gate if gated else gate[:0], experts[row])
        prior = _others(known, row, tokens[chosen], experts[row])
        for p, policy in enumerate(policies.values()):
            for c, capacity in enumerate(capacities):
                if capacity >= max(layer.top_k, policy.window):
                    counts[p, c] += layer.replay(policy, capacity, starts, prior)
        advance(1)
    with np.errstate(invalid="ignore"):
        rates = 1 - counts[:, :, 1] / counts[:, :, 0]
    hashes = {name: policy.hash for name, policy in policies.items()}
    return HitRates(hashes, np.array(capacities, np.int32), rates.astype(np.float32), len(chosen))


def _sample(windows: np.ndarray, n_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens to replay, and which of them start a window: every window, or some at even distances (at least one)."""
    lengths = np.diff(np.append(windows, n_tokens))
    wanted = max(1, int(len(windows) * min(1.0, MAX_TOKENS / n_tokens)))
    picked = np.unique(np.linspace(0, len(windows) - 1, wanted).astype(int))
    index = [np.arange(windows[w], windows[w] + lengths[w]) for w in picked]
    starts = [np.arange(lengths[w]) == 0 for w in picked]
    return np.concatenate(index)[:MAX_TOKENS], np.concatenate(starts)[:MAX_TOKENS]


def _rows(parts: Iterator[np.ndarray], chosen: np.ndarray) -> np.ndarray:
    """The chosen rows (ascending) of a layer that comes in blocks."""
    found, at = [], 0
    for part in parts:
        here = chosen[(chosen >= at) & (chosen < at + len(part))]
        found.append(part[here - at])
        at += len(part)
    return np.concatenate(found)


def _others(known: Calibration, row: int, tokens: np.ndarray, experts: np.ndarray) -> np.ndarray:  # [T, E] float32
    """πₗ of each token from its other occurrences; zero for one that occurs once."""
    prior = known.prior
    at = np.minimum(np.searchsorted(prior.tokens, tokens), max(len(prior.tokens) - 1, 0))
    totals = np.where(prior.tokens[at] == tokens, prior.totals[at], 0) if len(prior.tokens) else np.zeros(len(tokens))
    counts = prior.rows(row, tokens) * totals[:, None]
    t, i = np.nonzero((experts >= 0) & (totals[:, None] > 0))
    counts[t, experts[t, i]] -= 1
    return (counts / np.maximum(totals - 1, 1)[:, None]).astype(np.float32)


class _Layer:
    """One layer's scores, pre-gate and router's choices, to be replayed."""

    def __init__(
        self, known: Calibration, row: int, scores: np.ndarray, pregate: np.ndarray, experts: np.ndarray
    ) -> None:
        self.top_k = int((experts >= 0).sum(axis=1).max())
        self.delta, self.warm = known.delta[row : row + 1], known.warm[row : row + 1]
        self.scores, self.pregate = scores, pregate
        self.experts = np.ascontiguousarray(experts[:, : self.top_k])

    def replay(self, policy: Policy, capacity: int, starts: np.ndarray, prior: np.ndarray) -> np.ndarray:
        """Executed experts and demand copies, [2]."""
        top_k = np.array([self.top_k])
        cache = view(new_block(policy, top_k, self.scores.shape[1], capacity, self.delta, self.warm))
        recorded = self.experts[:0] if policy.needs_scores else self.experts
        used = prior if policy.uses_prior else prior[:0]
        counts = replay_layer(cache, 0, starts, self.scores, self.pregate, recorded, used)
        found: np.ndarray = counts[[EXECUTED, DEMAND]]
        return found
