"""What a cache would make of a trace: eviction rules on plain loads (arXiv 2608.18261, Appendix E), and Algorithm 1.

An eviction rule replays the recorded loads from an empty cache and carries its state through the whole trace. A policy
preset replays Algorithm 1 (arXiv 2610.34721, §4.1) on the stored scores, reset to the warm set at each window: the very
decisions that a tier would make.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas as pd

from edgemoe import calibration as held_out
from edgemoe.errors import UserError
from edgemoe.policy import PRESETS, Policy, preset
from edgemoe.policy.eviction import RULES
from edgemoe.policy.replay import DEMAND, EXECUTED, PREFETCHED, REPLACED, UNUSED, replay_layer
from edgemoe.policy.state import Cache, new_block, view
from edgemoe.progress import Advance, no_progress
from edgemoe.tracing.stats import ALL, layer_row
from edgemoe.tracing.tracefile import Trace


@dataclass(frozen=True, eq=False)
class Calibration:
    """What Algorithm 1 takes from held-out text, for the layers of one trace.

    Raises `UserError` for a Δ̄ that is no range of scores: not a number, infinite or negative.
    """

    delta: np.ndarray | None = None  # [L] float32 Δ̄; None: a running scale is used
    warm: np.ndarray | None = None  # [L, m] experts, most frequent first; None: experts 0 … C − 1
    source: str = ""
    prior: Callable[[int, np.ndarray], np.ndarray] | None = None  # row of the trace, tokens [T] → π_l [T, E] float32

    def __post_init__(self) -> None:
        if self.delta is None:
            return
        wrong = self.delta[~(np.isfinite(self.delta) & (self.delta >= 0))]
        if wrong.size:
            raise UserError(
                f"{self.source or 'calibration'}: a mean range of scores of {wrong[0]}: trace the text again"
            )

    @classmethod
    def stored(cls, trace: Trace) -> "Calibration":
        """What the trace file itself holds."""
        return cls(trace.delta, trace.warm, trace.name)

    @classmethod
    def measured(cls, text: Trace, trace: Trace) -> "Calibration":
        """Estimate for `trace` on another trace of the same model: mean score range, experts by frequency.

        Raises `UserError` if it is of another model or lacks a layer.
        """
        rows = _rows_of(trace, text.name, text.layers, text.n_experts)
        warm = np.array([held_out.ranking(loads, text.n_experts) for loads in text.experts[rows]])
        delta = None
        if text.scores is not None:
            delta = np.array([held_out.mean_range(held_out.score_ranges(scores)) for scores in text.scores[rows]])
        return cls(delta, warm, text.name)

    @classmethod
    def loaded(cls, found: held_out.Calibration, trace: Trace, source: str) -> "Calibration":
        """What a calibration file, named `source`, says of the trace's layers; `UserError` if it is of another model.

        The token prior is left out where the trace has no token ids.
        """
        rows = _rows_of(trace, source, found.layers, found.n_experts)
        if "header_sha256" in trace.meta:
            held_out.check_fingerprint(
                source, found, str(trace.meta.get("model", trace.name)), trace.meta["header_sha256"]
            )

        def prior(row: int, tokens: np.ndarray) -> np.ndarray:
            return found.prior.rows(rows[row], tokens)

        return cls(found.delta[rows], found.warm[rows], source, None if trace.tokens is None else prior)


def _rows_of(trace: Trace, source: str, layers: np.ndarray, n_experts: int) -> list[int]:
    """Where the trace's layers are among those of what is to calibrate it."""
    where = {int(layer): at for at, layer in enumerate(layers)}
    missing = [int(layer) for layer in trace.layers if int(layer) not in where]
    if n_experts != trace.n_experts or missing:
        what = f"layer {missing[0]} is not in it" if missing else f"it has {n_experts} experts per layer"
        raise UserError(f"{source} cannot calibrate {trace.name} ({trace.n_experts} experts): {what}")
    return [where[int(layer)] for layer in trace.layers]


def simulate(
    trace: Trace,
    capacities: Sequence[int],
    policies: Mapping[str, Policy | None] | Iterable[str],
    layer: int | str = ALL,
    calibration: Calibration | None = None,
    expert_bytes: Sequence[int] | None = None,
    advance: Advance = no_progress,
    pinned: Sequence[Sequence[int]] | None = None,
) -> pd.DataFrame:
    """Replay a trace through every policy at every capacity.

    capacities: slots per layer. policies: names of eviction rules and presets, or a mapping from a name to its `Policy`
    (None for the rule of that name). layer: a layer id of the model, or "all": one row, summed over layers.
    calibration: Δ̄, warm set and token prior, by default what the trace file holds. expert_bytes: [L], size of one
    expert, by layer. `advance` is told of each replayed layer: there are `n_replays` of them. pinned: of each layer of
    the trace, experts that a placement plan keeps resident in slots of their own besides the capacity's, as
    `edgemoe run --plan` does; loading them is nobody's miss.

    One row per capacity and policy: trace, layer, policy, capacity, share, hit_rate, misses_per_token and, where it
    is known, bytes_per_token (of demand and prefetch copies). Algorithm 1 adds demand_per_token (its misses),
    prefetch_per_token, unused_per_token (prefetched, not executed by that layer for that token) and replaced_per_token
    (executed, not in the router's own top-K); these are NaN for eviction rules.

    Raises `UserError` for an unknown layer or policy, a policy that the capacity does not allow, and a trace that
    lacks the scores a policy needs.
    """
    for capacity in capacities:
        if not 1 <= capacity <= trace.n_experts:
            raise UserError(f"{trace.name}: {capacity} slots per layer; expected 1 to its {trace.n_experts} experts")
    rows = _layer_rows(trace, layer)
    known = calibration or Calibration.stored(trace)
    there = known.delta is not None, known.prior is not None
    named = {name: policy and policy.completed(*there) for name, policy in _resolve(policies).items()}
    for name, policy in named.items():
        if policy:
            _check_policy(trace, name, policy, capacities)
    out = []
    for capacity in capacities:
        for name, policy in named.items():
            counts = np.zeros((len(rows), 5), dtype=np.int64)
            if policy:
                replay = partial(_replay_policy, trace, policy, _cache(trace, policy, capacity, known, pinned), known)
            else:
                replay = partial(_replay_rule, trace, name, capacity, pinned)
            for i, row in enumerate(rows):
                counts[i] = replay(row)
                advance(1)
            sizes = None if expert_bytes is None else np.asarray(expert_bytes)[rows]
            out.append(_row(trace, layer, name, policy, capacity, counts, sizes))
    return pd.DataFrame(out)


def n_replays(trace: Trace, capacities: Sequence[int], policies: Sequence[str], layer: int | str = ALL) -> int:
    """How often `simulate` calls its `advance`."""
    return len(capacities) * len(policies) * len(_layer_rows(trace, layer))


def _resolve(policies: Mapping[str, Policy | None] | Iterable[str]) -> dict[str, Policy | None]:
    if not isinstance(policies, Mapping):
        policies = {name: None if name in RULES else preset(name) for name in _known(policies)}
    _known(name for name, policy in policies.items() if policy is None)
    return dict(policies)


def _known(names: Iterable[str]) -> list[str]:
    names = list(names)
    for name in names:
        if name not in RULES and name not in PRESETS:
            raise UserError(
                f"no policy {name!r}: eviction rules are {', '.join(RULES)}; presets are {', '.join(PRESETS)}"
            )
    return names


def _layer_rows(trace: Trace, layer: int | str) -> list[int]:
    """Rows of the trace's arrays for a layer id, or for all."""
    return list(range(trace.n_layers)) if isinstance(layer, str) else [layer_row(trace, layer)]


def _check_policy(trace: Trace, name: str, policy: Policy, capacities: Sequence[int]) -> None:
    if trace.scores is None and policy.needs_scores:
        raise UserError(f"{name} needs the router's scores, which {trace.name} lacks: trace it with --scores")
    if trace.pregate is None and policy.needs_pregate:
        raise UserError(f"{name} prefetches by the pre-gate, which {trace.name} lacks: trace it with --pregate")
    for capacity in capacities:
        try:
            policy.check(trace.n_experts, trace.top_k, capacity)
        except UserError as refusal:
            raise UserError(f"{name}: {refusal}") from None


def _top_k(trace: Trace) -> np.ndarray:  # [L]
    return (trace.experts >= 0).sum(axis=2).max(axis=1)


def _cache(
    trace: Trace, policy: Policy, capacity: int, known: Calibration, pinned: Sequence[Sequence[int]] | None
) -> Cache:
    delta = known.delta if known.delta is not None else np.zeros(trace.n_layers, dtype=np.float32)
    warm = known.warm if known.warm is not None else np.zeros((trace.n_layers, 0), dtype=np.int64)
    return view(new_block(policy, _top_k(trace), trace.n_experts, capacity, delta, warm, pinned))


def _replay_rule(
    trace: Trace, name: str, capacity: int, pinned: Sequence[Sequence[int]] | None, row: int
) -> np.ndarray:
    """Counts [5] of one layer under an eviction rule: every load is executed, every miss is a demand copy. The rule
    does not see loads of pinned experts."""
    counts, loads = np.zeros(5, dtype=np.int64), np.ascontiguousarray(trace.experts[row])
    counts[EXECUTED] = (loads >= 0).sum()
    if pinned is not None:
        loads = np.where(np.isin(loads, np.array(pinned[row], dtype=np.int64)), np.int16(-1), loads)
    counts[DEMAND] = RULES[name](loads, trace.n_experts, capacity)
    return counts


def _replay_policy(trace: Trace, policy: Policy, cache: Cache, known: Calibration, row: int) -> np.ndarray:
    """Counts [5] of one layer under Algorithm 1; exact routing executes what the trace recorded if that is enough."""
    starts = np.zeros(trace.n_tokens, dtype=np.bool_)
    starts[trace.windows] = True
    none = np.zeros((0, trace.n_experts), dtype=np.float32)
    recorded = np.ascontiguousarray(trace.experts[row])
    if policy.needs_scores:
        recorded = recorded[:0]
    elif (recorded[:, : (recorded >= 0).sum(axis=1).max()] < 0).any():
        raise UserError(f"{trace.name}: in layer {trace.layers[row]} some tokens have fewer experts than others")
    scores = none if trace.scores is None else np.ascontiguousarray(trace.scores[row])
    gated = trace.pregate is not None and bool(trace.has_pregate[row])
    pregate = np.ascontiguousarray(trace.pregate[row]) if trace.pregate is not None and gated else none
    prior = none
    if policy.uses_prior and known.prior is not None and trace.tokens is not None:
        prior = known.prior(row, trace.tokens)
    return replay_layer(cache, row, starts, scores, pregate, recorded, prior)


def _row(
    trace: Trace,
    layer: int | str,
    name: str,
    policy: Policy | None,
    capacity: int,
    counts: np.ndarray,  # [layers, 5]
    sizes: np.ndarray | None,  # [layers]
) -> dict[str, object]:
    total, tokens = counts.sum(axis=0), trace.n_tokens
    loads = total[EXECUTED]  # with gate elision fewer than were recorded
    row: dict[str, object] = {
        "trace": trace.name,
        "layer": layer,
        "policy": name,
        "capacity": capacity,
        "share": capacity / trace.n_experts,
        "hit_rate": 1 - total[DEMAND] / loads if loads else float("nan"),
        "misses_per_token": total[DEMAND] / tokens,
    }
    if sizes is not None:
        row["bytes_per_token"] = float(((counts[:, DEMAND] + counts[:, PREFETCHED]) * sizes).sum() / tokens)
    if policy is not None:
        for column, count in (("demand", DEMAND), ("prefetch", PREFETCHED), ("unused", UNUSED), ("replaced", REPLACED)):
            row[f"{column}_per_token"] = total[count] / tokens
    return row
