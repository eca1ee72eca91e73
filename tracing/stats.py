"""What a trace says about caching: reuse, working set, load, similarity, drift, pre-gate recall (arXiv 2608.18261, §4).

Every function takes one trace, treats it as one text, and returns a pandas DataFrame with a row per MoE layer (the
model's own layer ids) preceded by rows whose `layer` is "all". `split` turns files of several domains into such traces.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from edgemoe.errors import UserError
from edgemoe.policy._jit import kernel
from edgemoe.tracing.tracefile import Trace

ALL = "all"
COVERAGES = (0.90, 0.95, 0.99)
DEFAULT_LAGS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
PREFIX = 0.2
PINNED_SHARE = 0.25


def split(traces: Iterable[Trace], domains: Sequence[str] = ()) -> list[Trace]:
    """One trace per domain, in order, names unique; `domains` keeps only those (by domain, or by the trace's name).

    Raises `UserError` for a domain that no trace has.
    """
    parts: list[Trace] = []
    for trace in traces:
        single = len(set(trace.domains)) == 1
        parts += [trace] if single else [part for _, part in trace.by_domain()]
    if domains:
        known = {name for part in parts for name in (part.domains[0], part.name)}
        unknown = [domain for domain in domains if domain not in known]
        if unknown:
            there = ", ".join(dict.fromkeys(part.domains[0] for part in parts))
            raise UserError(f"no trace has a domain {unknown[0]!r}; the domains are {there}")
        parts = [part for part in parts if part.domains[0] in domains or part.name in domains]
    total, seen = Counter(part.name for part in parts), Counter[str]()
    for at, part in enumerate(parts):
        if total[part.name] > 1:
            seen[part.name] += 1
            parts[at] = replace(part, name=f"{part.name}#{seen[part.name]}")
    return parts


def layer_row(trace: Trace, layer: int) -> int:
    """Row of the model's layer `layer`; a `UserError` says which MoE layers there are."""
    found = np.flatnonzero(trace.layers == layer)
    if not len(found):
        first, last = int(trace.layers.min()), int(trace.layers.max())
        raise UserError(f"{trace.name}: no MoE layer {layer}; its {trace.n_layers} MoE layers are {first} to {last}")
    return int(found[0])


def expert_loads(trace: Trace) -> np.ndarray:  # [L, E] int64
    """How often each expert of each layer was executed."""
    return _count(trace.experts, trace.n_experts)


def _count(experts: np.ndarray, n_experts: int) -> np.ndarray:  # [L, T, k] → [L, E] int64
    # Shifted by one: the padding of layers with a smaller k fills a bin of its own, which is dropped.
    counts = [np.bincount(layer.ravel().astype(np.int32) + 1, minlength=n_experts + 1)[1:] for layer in experts]
    return np.stack(counts).astype(np.int64)


def reuse(trace: Trace, lags: Sequence[int] | None = None) -> pd.DataFrame:
    """P(an expert of one token is executed again `lag` tokens later), against chance (§4, Table 3).

    Columns: trace, layer, lag, reuse, chance, jaccard. Pairs of tokens never span two windows, since the model's own
    cache was cleared between them. `chance` is Σp²/Σp with p the share of tokens that execute an expert: what the same
    expert frequencies give without any memory. `jaccard` is the mean |A∩B|/|A∪B| of the two tokens' expert sets. The
    row "all" pools the loads of all layers. A lag longer than every window gives NaN; by default there are none.
    """
    bounds = np.append(trace.windows, trace.n_tokens)
    if lags is None:
        lags = [lag for lag in DEFAULT_LAGS if lag < np.diff(bounds).max()] or [1]
    if any(lag < 1 for lag in lags):
        raise UserError(f"a lag is a number of tokens, at least 1; found {min(lags)}")
    p = expert_loads(trace) / trace.n_tokens
    squares, sums = (p**2).sum(1), p.sum(1)
    frames = []
    for lag in dict.fromkeys(lags):
        # [L, 4]: loads of the earlier tokens, those loads executed again, pairs of tokens, sum of their Jaccard indices
        counts = np.array([_shared(layer, bounds, lag, trace.n_experts) for layer in trace.experts])
        loads, shared, pairs, jaccard = _with_total(counts).T
        frame = _by_layer(
            trace,
            reuse=_ratio(shared, loads),
            chance=_ratio(_with_total(squares), _with_total(sums)),
            jaccard=_ratio(jaccard, pairs),
        )
        frame.insert(2, "lag", lag)
        frames.append(frame)
    return _all_first(pd.concat(frames, ignore_index=True))


@kernel
def _shared(experts, bounds, lag, n_experts):  # type: ignore[no-untyped-def]
    """(loads, shared loads, pairs, summed Jaccard) of all pairs (t, t+lag) inside a window; experts [T, k]."""
    last = np.full(n_experts, -1, np.int64)  # the token that an expert was last marked for
    loads = shared = pairs = 0
    jaccard = 0.0
    for w in range(len(bounds) - 1):
        for t in range(bounds[w], bounds[w + 1] - lag):
            here = there = both = 0
            for j in range(experts.shape[1]):
                if experts[t, j] >= 0:
                    last[experts[t, j]] = t
                    here += 1
            for j in range(experts.shape[1]):
                if experts[t + lag, j] >= 0:
                    there += 1
                    both += last[experts[t + lag, j]] == t
            loads += here
            shared += both
            if here + there > 0:
                pairs += 1
                jaccard += both / (here + there - both)
    return float(loads), float(shared), float(pairs), jaccard


def working_set(trace: Trace, coverages: Sequence[float] = COVERAGES) -> pd.DataFrame:
    """The fewest experts that serve a share of the loads (§4, Table 3: 95%).

    Columns: trace, layer, coverage, experts, share. `share` is experts / E; the row "all" is the mean over layers.
    """
    loads = expert_loads(trace)
    frames = []
    for coverage in coverages:
        sizes = _set_sizes(loads, coverage)
        frame = _by_layer(trace, experts=_with_mean(sizes), share=_with_mean(sizes) / trace.n_experts)
        frame.insert(2, "coverage", coverage)
        frames.append(frame)
    return _all_first(pd.concat(frames, ignore_index=True))


def _set_sizes(loads: np.ndarray, coverage: float) -> np.ndarray:  # [L, E] → [L] float64
    if not 0 < coverage <= 1:
        raise UserError(f"a coverage is a share of the loads between 0 and 1; found {coverage}")
    running = np.cumsum(np.sort(loads, axis=1)[:, ::-1], axis=1)
    total = running[:, -1:]
    # Shares like 0.95 are not exact in binary: 19 of 20 loads must count as 95%.
    sizes = (running < coverage * total * (1 - 1e-12)).sum(1) + 1.0
    return np.where(total[:, 0] > 0, sizes, np.nan)


def load(trace: Trace) -> pd.DataFrame:
    """How evenly the experts of each layer are used.

    Columns: trace, layer, loads, entropy (bits), effective (2^entropy: as many experts used evenly would be as
    unpredictable), imbalance (busiest expert over the mean expert) and never (experts that were not executed at all).
    In the row "all", loads and never are sums over layers; the rest are means.
    """
    loads = expert_loads(trace)
    p = _ratio(loads, loads.sum(1, keepdims=True))
    logs = np.log2(p, out=np.zeros_like(p), where=p > 0)
    entropy = -(p * logs).sum(1) + 0.0
    return _by_layer(
        trace,
        loads=_with_total(loads.sum(1)),
        entropy=_with_mean(entropy),
        effective=_with_mean(2**entropy),
        imbalance=_with_mean(_ratio(loads.max(1), loads.mean(1))),
        never=_with_total((loads == 0).sum(1)),
    )


def drift(trace: Trace, prefix: float = PREFIX, share: float = PINNED_SHARE) -> pd.DataFrame:
    """How well the first `prefix` of the tokens tells which experts the rest will use.

    Columns: trace, layer, tokens (of the prefix), variation (total variation of the prefix's and the rest's load
    distributions: 0 the same, 1 disjoint), sampled (the same for as many tokens spread evenly over the trace: what
    sampling alone gives), capacity (round(share·E)), pinned (share of the rest's loads that hit when the prefix's most
    frequent experts are pinned), oracle (when the rest's own are pinned) and lost (oracle − pinned). The row "all" is
    the mean over layers. NaN where a trace is too short to have both parts.
    """
    if not (0 < prefix < 1 and 0 < share <= 1):
        raise UserError(f"prefix and share are between 0 and 1; found {prefix} and {share}")
    tokens = int(prefix * trace.n_tokens)
    capacity = max(round(share * trace.n_experts), 1)
    everything = expert_loads(trace)
    first = _count(trace.experts[:, :tokens], trace.n_experts)
    spread = np.linspace(0, trace.n_tokens, tokens, endpoint=False).astype(np.int64)
    sample = _count(trace.experts[:, spread], trace.n_experts)
    rest = everything - first
    total = rest.sum(1) if tokens else np.zeros(trace.n_layers)
    pinned = _ratio(np.take_along_axis(rest, _most_frequent(first, capacity), 1).sum(1), total)
    oracle = _ratio(np.take_along_axis(rest, _most_frequent(rest, capacity), 1).sum(1), total)
    return _by_layer(
        trace,
        tokens=tokens,
        variation=_with_mean(_variation(first, rest)),
        sampled=_with_mean(_variation(sample, everything - sample)),
        capacity=capacity,
        pinned=_with_mean(pinned),
        oracle=_with_mean(oracle),
        lost=_with_mean(oracle - pinned),
    )


def _most_frequent(loads: np.ndarray, count: int) -> np.ndarray:  # [L, E] → [L, count]
    """Most frequent first, ties to the lower index."""
    return np.argsort(-loads, axis=1, kind="stable")[:, :count]


def _variation(a: np.ndarray, b: np.ndarray) -> np.ndarray:  # [L, E] × 2 → [L]
    return np.abs(_ratio(a, a.sum(1, keepdims=True)) - _ratio(b, b.sum(1, keepdims=True))).sum(1) / 2


def pregate_recall(trace: Trace, widths: Sequence[int] | None = None) -> pd.DataFrame:
    """Share of the router's top-k found among the pre-gate's top `width` experts (PSR paper, §4.1).

    Columns: trace, layer, width, recall, frequent; `frequent` is what the trace's `width` most frequent experts of the
    layer would have served: a pre-gate worth its name beats it. Widths default to k and 2k. Only layers with a
    pre-gate have rows, and the row "all" pools their loads; empty if the trace has no pre-gate scores.
    """
    if widths is None:
        widths = [width for width in (trace.top_k, 2 * trace.top_k) if width <= trace.n_experts]
    gated = np.flatnonzero(trace.has_pregate)
    if trace.pregate is None or not len(gated):
        return pd.DataFrame(columns=["trace", "layer", "width", "recall", "frequent"])
    loads = np.sort(expert_loads(trace)[gated], axis=1)[:, ::-1]
    ranks = np.stack([_ranks(trace.experts[layer], trace.pregate[layer]) for layer in gated])  # [gated, E]
    total = _with_total(loads.sum(1))
    frames = []
    for width in dict.fromkeys(widths):
        if not 1 <= width <= trace.n_experts:
            raise UserError(f"a pre-gate width is between 1 and the {trace.n_experts} experts; found {width}")
        found, frequent = (_with_total(counts[:, :width].sum(1)) for counts in (ranks, loads))
        frame = _by_layer(trace, trace.layers[gated], recall=_ratio(found, total), frequent=_ratio(frequent, total))
        frame.insert(2, "width", width)
        frames.append(frame)
    return _all_first(pd.concat(frames, ignore_index=True))


@kernel
def _ranks(experts, gate):  # type: ignore[no-untyped-def]
    """How many executed experts had rank r in the gate's order, ties to the lower index; [T, k], [T, E] → [E]."""
    n_tokens, n_experts = gate.shape
    counts = np.zeros(n_experts, np.int64)
    for t in range(n_tokens):
        for j in range(experts.shape[1]):
            expert = experts[t, j]
            if expert >= 0:
                rank = 0
                for other in range(n_experts):
                    if gate[t, other] > gate[t, expert] or (gate[t, other] == gate[t, expert] and other < expert):
                        rank += 1
                counts[rank] += 1
    return counts


def comparable(a: Trace, b: Trace) -> bool:
    """Whether the two traces have the same experts: equal E and the same MoE layers."""
    return a.n_experts == b.n_experts and np.array_equal(a.layers, b.layers)


def similarity(traces: Sequence[Trace], measure: str = "cosine", coverage: float = 0.95) -> pd.DataFrame:
    """How alike the experts of each two traces are, as a square matrix named by trace (§4, Table 4).

    `measure` "cosine": of the load vectors over all (layer, expert) pairs, which is what Table 4 prints. "jaccard":
    |A∩B|/|A∪B| of the fewest experts that serve `coverage` of the loads, mean over layers. NaN where two traces
    have different experts or layers (see `comparable`).
    """
    if measure not in ("cosine", "jaccard"):
        raise UserError(f"similarity is measured by cosine or jaccard; found {measure!r}")
    loads = [expert_loads(trace) for trace in traces]
    if measure == "cosine":
        pair: Callable[[np.ndarray, np.ndarray], float] = _cosine
        features = [each.astype(np.float64) for each in loads]
    else:
        pair, features = _jaccard, [_covering(each, coverage) for each in loads]
    values = np.full((len(traces), len(traces)), np.nan)
    for i, a in enumerate(traces):
        for j, b in enumerate(traces):
            if comparable(a, b):
                values[i, j] = pair(features[i], features[j])
    names = [trace.name for trace in traces]
    return pd.DataFrame(values, index=names, columns=names)


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.clip((a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum()), 0.0, 1.0))


def _jaccard(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.nanmean(_ratio((a & b).sum(1), (a | b).sum(1))))


def _covering(loads: np.ndarray, coverage: float) -> np.ndarray:  # [L, E] int → [L, E] bool
    rank = np.argsort(_most_frequent(loads, loads.shape[1]), axis=1)
    return rank < _set_sizes(loads, coverage)[:, None]


def _ratio(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a / b, and NaN where there is nothing to divide."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.divide(a, b, out=np.full(np.broadcast_shapes(a.shape, b.shape), np.nan), where=b != 0)


def _with_total(values: np.ndarray) -> np.ndarray:  # [L, …] → [1 + L, …]
    return np.concatenate([values.sum(0, keepdims=True), values])


def _with_mean(values: np.ndarray) -> np.ndarray:  # [L] → [1 + L]
    known = values[~np.isnan(values)]
    return np.concatenate([[known.mean() if len(known) else np.nan], values])


def _by_layer(trace: Trace, layers: np.ndarray | None = None, **columns: np.ndarray | int) -> pd.DataFrame:
    """A frame of columns [1 + L], the first row being all layers."""
    ids = [ALL, *(int(layer) for layer in (trace.layers if layers is None else layers))]
    return pd.DataFrame({"trace": trace.name, "layer": pd.Series(ids, dtype=object), **columns})


def _all_first(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows over all layers before those of single layers, otherwise in order."""
    order = np.argsort((frame["layer"] != ALL).to_numpy(), kind="stable")
    return frame.iloc[order].reset_index(drop=True)
