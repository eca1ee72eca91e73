"""How far a steered engine's next-token distributions are from exact routing's, on the same tokens (PSR paper §6.2).

Both engines are forced through the same windows of text, one token per decode, because that is how generation routes.
The exact engine's logits are the reference: KL(exact ‖ steered) is 0 to the last bit where nothing was steered.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from edgemoe.evaluation.token_metrics import WindowMetrics, compare_rows, counts_of
from edgemoe.generation.engine import Engine
from edgemoe.policy.config import Policy
from edgemoe.policy.replay import DEMAND, PREFETCHED, REPLACED, UNUSED
from edgemoe.progress import Advance, no_progress


@dataclass(frozen=True)
class Divergence:
    """N predicted tokens, in order; of several windows one after the other.

    `nll_exact` and `nll` [N] float64 are nats of the token that follows. `kl` [N]: KL(exact ‖ steered), nats. `agree`
    [N] bool: both rank the same token first. `replaced` [N]: executed experts that the router would not have chosen,
    over all layers; `demand` and `prefetch` [N]: copies into the logical cache; `unused` [N]: those of `prefetch` that
    their token did not execute. They are 0 for an engine without one.
    """

    nll_exact: np.ndarray
    nll: np.ndarray
    kl: np.ndarray
    agree: np.ndarray
    replaced: np.ndarray
    demand: np.ndarray
    prefetch: np.ndarray
    unused: np.ndarray

    @property
    def perplexity_exact(self) -> float:
        return float(np.exp(self.nll_exact.mean()))

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.nll.mean()))

    def as_json(self) -> dict[str, float]:
        """Means per token, and both perplexities."""
        means = {field.name: float(getattr(self, field.name).mean()) for field in fields(self)}
        return {"tokens": len(self.kl), **means, "perplexity_exact": self.perplexity_exact, "ppl": self.perplexity}


def window_logits(
    engine: Engine, tokens: Sequence[int] | np.ndarray, advance: Advance = no_progress
) -> np.ndarray:  # [T − 1, V] float32
    """Logits after each token of a window but the last, each decoded alone from a new sequence on."""
    engine.reset()
    rows = []
    for token in np.asarray(tokens[:-1]).tolist():
        rows.append(engine.decode(int(token)))
        advance(1)
    return np.stack(rows)


def forced(
    engine: Engine, tokens: np.ndarray, advance: Advance = no_progress
) -> tuple[np.ndarray, np.ndarray]:  # [T − 1, V] float32, [T − 1, 5] int64
    """`window_logits`, and what the engine's records say of each token; all zero where it keeps none."""
    records = getattr(engine, "records", None)
    if records is not None:
        records.clear()
    logits = window_logits(engine, tokens, advance)
    counts = counts_of(records or (), getattr(engine, "policy", Policy()))
    return logits, counts if len(counts) else np.zeros((len(logits), 5), np.int64)


def divergence(
    engine: Engine,
    windows: Sequence[np.ndarray],
    exact: Sequence[np.ndarray],
    advance: Advance = no_progress,
) -> Divergence:
    """Force `engine` through `windows` ([T] token ids each) and hold it against `exact`, which `window_logits` of the
    exact engine gave for the same windows.

    A streaming engine made with `record=True` also tells what it replaced and copied. `advance` is told tokens, T − 1
    of each window.
    """
    parts = [
        compare_rows(tokens, reference, *forced(engine, tokens, advance))
        for tokens, reference in zip(windows, exact, strict=True)
    ]
    counts = np.concatenate([part.counts for part in parts])
    columns = {"replaced": REPLACED, "demand": DEMAND, "prefetch": PREFETCHED, "unused": UNUSED}
    return Divergence(
        *(_joined(parts, name) for name in ("nll_exact", "nll", "kl", "agree")),
        **{name: counts[:, at] for name, at in columns.items()},
    )


def _joined(parts: Sequence[WindowMetrics], name: str) -> np.ndarray:
    return np.concatenate([getattr(part, name) for part in parts])
