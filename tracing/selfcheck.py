"""Is this a router's trace at all? Checks that every capture passes or fails loudly (arXiv 2608.18261, §4).

The paper's false start: `ffn_moe_topk` is a strided view, and a flat read of it gives whole argsort rows, that is
every expert exactly k times, and less reuse from token to token than chance. Nothing else about it looks wrong.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

STANDARD_ERRORS = 4.0
MIN_PAIRS = 8  # fewer neighbouring tokens say nothing about reuse
_PIECE = 1 << 12  # pairs compared at once, so that memory does not grow with the trace


@dataclass
class _Sums:
    """Reuse against chance, summed over layers."""

    excess: float = 0.0
    variance: float = 0.0
    evenness: float = 0.0
    freedom: int = 0


def failures(
    layers: Iterable[np.ndarray],
    n_experts: int,
    windows: np.ndarray,
    layer_ids: Sequence[int] | None = None,
    tokens: np.ndarray | None = None,
) -> list[str]:
    """One line per check that fails; empty for a sound trace.

    `layers` yields each layer's experts [T, k] (−1 pads), `windows` are first tokens, and `tokens` [T] are their ids in
    the text, where known: a text that repeats itself is no independent sample. Checked: ids in range, distinct within
    a token, counts not more even than random choice makes them, and reuse of the previous token's experts not more
    than four standard errors below chance (over all layers; random routers exist, and are at chance).
    """
    found: list[str] = []
    sums = _Sums()
    for row, padded in enumerate(layers):
        layer = layer_ids[row] if layer_ids is not None else row
        experts = np.asarray(padded)[:, : _width(padded)]
        line = _impossible(experts, n_experts)
        if line:
            found.append(f"layer {layer}: {line}")
        elif experts.shape[1] < n_experts:
            _add(sums, experts, n_experts, windows, np.arange(len(experts)) if tokens is None else tokens)
    if found:
        return found
    if sums.freedom and _far_below(sums.evenness, sums.freedom):
        found.append(
            "expert counts are uniform: χ² "
            f"{sums.evenness:.1f} at {sums.freedom} degrees of freedom, evener than random choice"
        )
    if sums.variance > 0 and sums.excess < -STANDARD_ERRORS * sums.variance**0.5:
        found.append(
            "neighbouring tokens share fewer experts than chance: "
            f"{-sums.excess / sums.variance**0.5:.1f} standard errors below it"
        )
    return found


def _width(padded: np.ndarray) -> int:
    """k of the layer: columns before those that are padding throughout."""
    used = np.flatnonzero((np.asarray(padded) != -1).any(axis=0))
    return int(used[-1]) + 1 if len(used) else 0


def _impossible(experts: np.ndarray, n_experts: int) -> str:
    if not experts.size:
        return "no experts at all"
    low, high = int(experts.min()), int(experts.max())
    if low < 0 or high >= n_experts:
        return f"expert ids from {low} to {high}, expected 0 to {n_experts - 1}"
    ordered = np.sort(experts, axis=1)
    repeated = np.flatnonzero((ordered[:, 1:] == ordered[:, :-1]).any(axis=1))
    if len(repeated):
        return f"token {repeated[0]} chooses an expert twice ({len(repeated)} such tokens)"
    return ""


def _add(sums: _Sums, experts: np.ndarray, n_experts: int, windows: np.ndarray, tokens: np.ndarray) -> None:
    n_tokens, k = experts.shape
    counts = np.bincount(experts.ravel(), minlength=n_experts)
    share = k / n_experts
    # Choosing k of E without replacement, an expert's count has variance T·p(1−p), and E−1 of them are free.
    sums.evenness += float(((counts - n_tokens * share) ** 2).sum()) / (
        n_tokens * share * (1 - share) * n_experts / (n_experts - 1)
    )
    sums.freedom += n_experts - 1
    later = _later(n_tokens, windows)
    later = later[tokens[later] != tokens[later - 1]]
    # What the same two tokens share in another place is no new evidence.
    distinct = len(np.unique(np.stack([tokens[later - 1], tokens[later]]), axis=1).T)
    if distinct < MIN_PAIRS:
        return
    before = later - 1
    pieces = [slice(at, at + _PIECE) for at in range(0, len(later), _PIECE)]
    # [pairs]: experts of a token that the previous token also chose
    shared = np.concatenate(
        [(experts[later[p]][:, :, None] == experts[before[p]][:, None, :]).sum(axis=(1, 2)) for p in pieces]
    )
    chance = _chance(experts, n_experts, tokens, before, later)
    sums.excess += float(shared.mean()) - chance
    sums.variance += max(float(shared.var()), chance * (1 - chance / k)) / distinct


def _later(n_tokens: int, windows: np.ndarray) -> np.ndarray:
    """Tokens compared with the one before: not the first two of a window.

    The first has none before it in the model's cache. The second follows BOS, which is the same token at the start of
    every window and routes unlike any other: it is neither a neighbour nor a sample of chance.
    """
    compared = np.ones(n_tokens, dtype=bool)
    compared[windows] = False
    compared[np.minimum(windows + 1, n_tokens - 1)] = False
    return np.flatnonzero(compared)


def _chance(experts: np.ndarray, n_experts: int, tokens: np.ndarray, before: np.ndarray, later: np.ndarray) -> float:
    """Experts that a token of `before` and a different one of `later` share on average, wherever they are.

    Equal tokens tend to choose the same experts, but in no text does each follow itself.
    """
    ids = np.unique(tokens, return_inverse=True)[1]
    first, second = (np.bincount(experts[at].ravel(), minlength=n_experts).astype(float) for at in (before, later))
    pairs_of_equals = _common(ids[before], ids[later])
    shared_by_equals = _common(*(ids[at][:, None] * n_experts + experts[at] for at in (before, later)))
    return (float(first @ second) - shared_by_equals) / (len(before) * len(later) - pairs_of_equals)


def _common(first: np.ndarray, second: np.ndarray) -> float:
    """Pairs of equal values, one of each."""
    (values, counts), (others, more) = (np.unique(side, return_counts=True) for side in (first, second))
    _, here, there = np.intersect1d(values, others, assume_unique=True, return_indices=True)
    return float(counts[here].astype(float) @ more[there])


def _far_below(chi_squared: float, freedom: int) -> bool:
    """Wilson and Hilferty's normal approximation of χ², lower tail."""
    spread = 2 / (9 * freedom)
    return ((chi_squared / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5 < -STANDARD_ERRORS
