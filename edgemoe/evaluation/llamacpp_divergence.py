"""How far a steered engine's next-token distributions are from exact routing's, on the same tokens (PSR paper §6.2).

Both engines are forced through the same windows of text, one token per decode, because that is how generation routes.
The exact engine's logits are the reference: KL(exact ‖ steered) is 0 to the last bit where nothing was steered.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from edgemoe.generation.engine import Engine
from edgemoe.policy.config import Policy
from edgemoe.progress import Advance, no_progress

if TYPE_CHECKING:
    from edgemoe.streaming.engine import StreamingEngine


@dataclass(frozen=True)
class Divergence:
    """N predicted tokens, in order; of several windows one after the other.

    `nll_exact` and `nll` [N] float64 are nats of the token that follows. `kl` [N]: KL(exact ‖ steered), nats. `agree`
    [N] bool: both rank the same token first. `replaced` [N]: executed experts that the router would not have chosen,
    over all layers; `demand` and `prefetch` [N]: copies into the logical cache. They are 0 for an engine without one.
    """

    nll_exact: np.ndarray
    nll: np.ndarray
    kl: np.ndarray
    agree: np.ndarray
    replaced: np.ndarray
    demand: np.ndarray
    prefetch: np.ndarray

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
    parts = []
    for tokens, reference in zip(windows, exact, strict=True):
        records = getattr(engine, "records", None)
        if records is not None:
            records.clear()
        logits = window_logits(engine, tokens, advance)
        decisions = _decisions(records, _policy(engine)) if records else {}
        parts.append(_compare(np.asarray(tokens), reference, logits, decisions))
    return Divergence(
        **{field.name: np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(Divergence)}
    )


def _policy(engine: Engine) -> Policy:
    policy: Policy = getattr(engine, "policy", Policy())
    return policy


def _compare(
    tokens: np.ndarray, exact: np.ndarray, steered: np.ndarray, decisions: Mapping[str, np.ndarray]
) -> Divergence:
    log_p, log_q = _log_softmax(exact), _log_softmax(steered)
    following = (np.arange(len(tokens) - 1), tokens[1:])
    none = np.zeros(len(tokens) - 1, np.int64)
    return Divergence(
        nll_exact=-log_p[following],
        nll=-log_q[following],
        kl=(np.exp(log_p) * (log_p - log_q)).sum(axis=1),
        agree=exact.argmax(axis=1) == steered.argmax(axis=1),
        replaced=decisions.get("replaced", none),
        demand=decisions.get("demand", none),
        prefetch=decisions.get("prefetch", none),
    )


def _log_softmax(logits: np.ndarray) -> np.ndarray:  # [T, V] float64
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def _decisions(records: "Sequence[dict[str, np.ndarray]]", policy: Policy) -> dict[str, np.ndarray]:
    """Per token [T], from a streaming engine's records of single tokens: replaced slots, demand and prefetch copies."""
    counts = np.stack([record["counts"][:, 0].sum(axis=0) for record in records])  # [T, 2]
    replaced = np.zeros(len(records), np.int64)
    if policy.routing != "exact":
        for t, record in enumerate(records):
            executed, scores = record["executed"][:, 0], record["scores"][:, 0]
            own = np.argsort(-scores, axis=1, kind="stable")[:, : executed.shape[1]]
            replaced[t] = sum(
                len(set(ran.tolist()) - set(would.tolist())) for ran, would in zip(executed, own, strict=True)
            )
    return {"replaced": replaced, "prefetch": counts[:, 0], "demand": counts[:, 1]}


def recorded_engine(path: "str", **settings: object) -> "StreamingEngine":
    """A streaming engine for `divergence`: one token per decode, decisions recorded."""
    from edgemoe.streaming.engine import StreamingEngine

    engine: StreamingEngine = StreamingEngine(path, record=True, chunk=1, **settings)  # type: ignore[arg-type]
    return engine
