"""Is this a router's trace at all? Checks that every capture passes or fails loudly (arXiv 2608.18261, §4).

The paper's false start: `ffn_moe_topk` is a strided view, and a flat read of it gives whole argsort rows, that is
every expert exactly k times, and less reuse from token to token than chance. Nothing else about it looks wrong.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

STANDARD_ERRORS = 4.0
MIN_PAIRS = 8  # fewer neighbouring tokens say nothing about reuse


@dataclass
class _Sums:
    """Reuse against chance, summed over layers."""

    excess: float = 0.0
    variance: float = 0.0
    evenness: float = 0.0
    freedom: int = 0


def failures(
    layers: Iterable[np.ndarray], n_experts: int, windows: np.ndarray, layer_ids: Sequence[int] | None = None
) -> list[str]:
    """One line per check that fails; empty for a sound trace.

    `layers` yields each layer's experts [T, k] (−1 pads), `windows` are first tokens. Checked: ids in range, distinct
    within a token, counts not more even than random choice makes them, and reuse of the previous token's experts not
    more than four standard errors below chance (over all layers; random routers exist, and are at chance).
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
            _add(sums, experts, n_experts, windows)
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


def _add(sums: _Sums, experts: np.ndarray, n_experts: int, windows: np.ndarray) -> None:
    n_tokens, k = experts.shape
    counts = np.bincount(experts.ravel(), minlength=n_experts)
    share = k / n_experts
    # Choosing k of E without replacement, an expert's count has variance T·p(1−p), and E−1 of them are free.
    sums.evenness += float(((counts - n_tokens * share) ** 2).sum()) / (
        n_tokens * share * (1 - share) * n_experts / (n_experts - 1)
    )
    sums.freedom += n_experts - 1
    follows = np.ones(n_tokens, dtype=bool)
    follows[windows] = False
    later = np.flatnonzero(follows)
    if len(later) < MIN_PAIRS:
        return
    # [pairs]: experts of a token that the previous token also chose, less what independent tokens would share
    shared = (experts[later][:, :, None] == experts[later - 1][:, None, :]).sum(axis=(1, 2), dtype=np.int64)
    # Two different tokens: squaring estimated frequencies would count each token as its own neighbour.
    chance = float((counts * (counts - 1.0)).sum()) / (n_tokens * (n_tokens - 1))
    sums.excess += float(shared.mean()) - chance
    sums.variance += max(float(shared.var()), chance * (1 - chance / k)) / len(later)


def _far_below(chi_squared: float, freedom: int) -> bool:
    """Wilson and Hilferty's normal approximation of χ², lower tail."""
    spread = 2 / (9 * freedom)
    return ((chi_squared / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5 < -STANDARD_ERRORS
