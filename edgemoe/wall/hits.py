"""How many loads a cache of experts catches: by replaying a trace at the capacity that a budget buys, or, without one,
a default band that the published traces span.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from edgemoe.errors import UserError
from edgemoe.model.geometry import ModelGeometry

if TYPE_CHECKING:
    from edgemoe.tracing import Trace

# Share of a layer's experts that is resident → least and greatest hit rate over all layers of eight published traces
# of models not trained for locality: qwen3-30b-a3b (code, general, math, medical), sticky-a-main-s1 (code, math, prose)
# and olmoe-shaped-16x64. `scripts/reproduce_wall` recomputes them.
LRU_BAND = {
    0.0: (0.0, 0.0),
    0.0625: (0.053, 0.372),
    0.125: (0.225, 0.637),
    0.1875: (0.359, 0.764),
    0.25: (0.443, 0.840),
    0.375: (0.600, 0.922),
    0.5: (0.726, 0.965),
    0.625: (0.831, 0.987),
    0.75: (0.908, 0.995),
    0.875: (0.965, 0.998),
    1.0: (1.0, 1.0),
}
# The same with experts pinned: least by what the first 20% of a text teach, greatest with hindsight.
STATIC_BAND = {
    0.0: (0.0, 0.0),
    0.0625: (0.074, 0.434),
    0.125: (0.146, 0.634),
    0.1875: (0.213, 0.742),
    0.25: (0.283, 0.811),
    0.375: (0.405, 0.895),
    0.5: (0.534, 0.955),
    0.625: (0.650, 0.986),
    0.75: (0.773, 0.997),
    0.875: (0.891, 1.000),
    1.0: (1.0, 1.0),
}
PINNED = ("static-prefix", "static-oracle")


@dataclass(frozen=True)
class Hit:
    """What a cache catches: hit rates are shares of loads; `copied` is bytes per step that must come from below it,
    (least, most). With a prefetching policy they include what was prefetched in vain."""

    low: float
    high: float
    copied: tuple[float, float]
    why: str

    def __str__(self) -> str:
        low, high = f"{self.low:.1%}", f"{self.high:.1%}"
        return low if low == high else f"{low}–{high}"


class Hits(Protocol):
    """Anything that knows hit rates by capacity."""

    @property
    def label(self) -> str: ...

    def at(self, capacities: Sequence[int]) -> Hit:
        """Hit rates with so many slots in each MoE layer."""


@dataclass(frozen=True)
class BandHits:
    """The default band: what published traces span at the share of experts that is resident.

    `routed`: expert bytes per step, (least, most). With several streams a cache may catch as little as its share.
    """

    n_experts: int
    routed: tuple[float, float]
    pinned: bool = False
    streams: int = 1

    @property
    def label(self) -> str:
        what = "pinned experts" if self.pinned else "LRU"
        return f"default band ({what} on eight published traces; trace the model to narrow it)"

    def at(self, capacities: Sequence[int]) -> Hit:
        share = float(np.mean([min(c, self.n_experts) / self.n_experts for c in capacities]))
        band = STATIC_BAND if self.pinned else LRU_BAND
        low, high = (float(np.interp(share, list(band), [pair[i] for pair in band.values()])) for i in (0, 1))
        if self.streams > 1:
            low = min(low, share)
        least, most = self.routed
        return Hit(low, high, (least * (1 - high), most * (1 - low)), f"{self.label}, {share:.1%} of the experts")


@dataclass(frozen=True)
class GivenHits:
    """A hit rate that the person gives, whatever the capacity."""

    n_experts: int
    routed: tuple[float, float]
    rate: float
    label: str = "given: --hit-rate"

    def at(self, capacities: Sequence[int]) -> Hit:
        rate = 1.0 if all(c >= self.n_experts for c in capacities) else self.rate
        if not any(capacities):
            rate = 0.0
        least, most = (size * (1 - rate) for size in self.routed)
        return Hit(rate, rate, (least, most), self.label)


@dataclass(frozen=True, eq=False)
class TraceHits:
    """Replays of traces of this very model, each text on its own; the range is over texts and policies."""

    geometry: ModelGeometry
    texts: list["Trace"]
    policies: tuple[str, ...] = ("lru",)
    _known: dict[tuple[str, int, int, int], int] = field(default_factory=dict)

    @property
    def label(self) -> str:
        from edgemoe.tracing.summary import short_names

        names = ", ".join(short_names([text.name for text in self.texts]))
        many = f"{len(self.texts)} {'text' if len(self.texts) == 1 else 'texts'}"
        return f"{' to '.join(self.policies)} replayed on {many} ({names})"

    def at(self, capacities: Sequence[int]) -> Hit:
        from edgemoe.policy.eviction import RULES

        each = [
            (self._rule if policy in RULES else self._preset)(policy, at, capacities)
            for policy in self.policies
            for at in range(len(self.texts))
        ]
        rates, copied = [rate for rate, _ in each], [size for _, size in each]
        slots = sorted(set(capacities))
        said = f"{slots[0]} slots per layer" if len(slots) == 1 else f"{slots[0]}–{slots[-1]} slots per layer"
        return Hit(min(rates), max(rates), (min(copied), max(copied)), f"{self.label}, {said}")

    def _rule(self, policy: str, at: int, capacities: Sequence[int]) -> tuple[float, float]:
        """Hit rate, and bytes per step of misses. Where all experts fit they are loaded once, which is no token's."""
        text, g = self.texts[at], self.geometry
        misses = np.array([self._misses(policy, at, layer, c) for layer, c in enumerate(capacities)])
        loads = int((text.experts >= 0).sum())
        return 1 - int(misses.sum()) / loads, float((misses * g.expert_bytes).sum() / text.n_tokens)

    def _misses(self, policy: str, at: int, layer: int, capacity: int) -> int:
        from edgemoe.policy.eviction import RULES

        text = self.texts[at]
        if capacity >= text.n_experts:
            return 0
        loads = text.experts[layer]
        if capacity < 1:
            return int((loads >= 0).sum())
        key = (policy, at, layer, capacity)
        if key not in self._known:
            self._known[key] = RULES[policy](np.ascontiguousarray(loads), text.n_experts, capacity)
        return self._known[key]

    def _preset(self, policy: str, at: int, capacities: Sequence[int]) -> tuple[float, float]:
        """Algorithm 1 has one capacity for all layers: the least of them."""
        from edgemoe.tracing.simulate import simulate

        if min(capacities) >= self.geometry.n_experts:
            return 1.0, 0.0
        row = simulate(self.texts[at], [min(capacities)], [policy], expert_bytes=self.geometry.expert_bytes)
        return float(row["hit_rate"].iloc[0]), float(row["bytes_per_token"].iloc[0])


def slots_for(g: ModelGeometry, budget: int) -> tuple[int, ...]:
    """Slots in each MoE layer that `budget` bytes buy: as even as possible, one more in the first layers where the rest
    allows."""
    even = min(max(budget, 0) // max(g.slot_bytes, 1), g.n_experts)
    slots, left = [even] * g.n_moe_layers, budget - even * g.slot_bytes
    for layer, size in enumerate(g.expert_bytes):
        if size <= left and slots[layer] < g.n_experts:
            slots[layer] += 1
            left -= size
    return tuple(slots)


@dataclass(frozen=True)
class Caching:
    """Hit rates of both ways to fill a tier: as the policy evicts, and with experts pinned by their heat.

    store: what the SSD tier's one store catches where several streams share it (`edgemoe.wall.sharing`); without it,
    what `dynamic` says.
    """

    dynamic: Hits
    pinned: Hits
    texts: list["Trace"]
    policy: str
    rate: float | None = None
    store: Hits | None = None


def load_hits(
    g: ModelGeometry,
    files: Sequence[Path],
    traces: Sequence[str | Path],
    policy: str = "lru",
    rate: float | None = None,
) -> Caching:
    """Hit rates from traces, from the person, or the default band.

    files: the model's own, to compare fingerprints. Raises `UserError` for a trace of another model, an unknown policy,
    and a policy that needs scores which the trace lacks.
    """
    from edgemoe.policy import PRESETS
    from edgemoe.policy.eviction import RULES

    if policy not in RULES and policy not in PRESETS:
        raise UserError(
            f"no policy {policy!r}: eviction rules are {', '.join(RULES)}; presets are {', '.join(PRESETS)}"
        )
    if rate is not None and traces:
        raise UserError("--hit-rate and --trace both say what the cache catches: give one")
    if policy != "lru" and not traces:
        raise UserError(f"--policy {policy} needs a --trace to replay")
    return caching(g, load_texts(g, files, traces), policy, rate, (g.active_expert_bytes,) * 2)


def caching(
    g: ModelGeometry,
    texts: list["Trace"],
    policy: str,
    rate: float | None,
    routed: tuple[float, float],
    streams: int = 1,
) -> Caching:
    """The hit rates of so many streams. texts: already interleaved; routed: expert bytes per step, (least, most)."""
    if texts:
        # Which order a layer serves several streams in is open: LRU by index is the worst, Belady the best case.
        policies = (policy,) if streams == 1 else dict.fromkeys((policy, "belady"))
        return Caching(TraceHits(g, texts, tuple(policies)), TraceHits(g, texts, PINNED), texts, policy)
    if rate is not None:
        given = GivenHits(g.n_experts, routed, rate)
        return Caching(given, given, [], policy, rate)
    dynamic, pinned = (BandHits(g.n_experts, routed, by_heat, streams) for by_heat in (False, True))
    return Caching(dynamic, pinned, [], policy)


def load_texts(g: ModelGeometry, files: Sequence[Path], paths: Sequence[str | Path]) -> list["Trace"]:
    """The texts of some trace files, one per domain, checked to be of this model (`UserError`)."""
    from edgemoe.tracing import load_trace, stats

    loaded = [load_trace(path) for path in paths]
    for path, trace in zip(paths, loaded, strict=True):
        check_trace(g, files, trace, path)
    return stats.split(loaded)


def check_trace(g: ModelGeometry, files: Sequence[Path], trace: "Trace", path: str | Path) -> None:
    """Refuse a trace of another model: by experts and layers, and by header fingerprint where both have one."""
    from edgemoe.llamacpp.header import header_fingerprint

    if trace.n_experts != g.n_experts:
        raise UserError(f"{path} is not a trace of {g.name}: it has {trace.n_experts} experts, the model {g.n_experts}")
    if tuple(trace.layers.tolist()) != g.moe_layers:
        raise UserError(
            f"{path} is not a trace of {g.name}: it has {trace.n_layers} MoE layers, the model {g.n_moe_layers}"
            + ("" if trace.n_layers != g.n_moe_layers else ", but others")
        )
    if trace.top_k != g.top_k:
        raise UserError(f"{path} is not a trace of {g.name}: its top-k is {trace.top_k}, the model's {g.top_k}")
    recorded = trace.meta.get("header_sha256")
    ggufs = [file for file in files if file.suffix == ".gguf"]
    if recorded and ggufs and list(recorded) != [header_fingerprint(file) for file in ggufs]:
        raise UserError(
            f"{path} was traced on another file than {ggufs[0].name} (header fingerprints differ): trace it"
        )


def capacity_for(hits: Hits, g: ModelGeometry, rate: float, worst: bool = False) -> int | None:
    """The fewest slots per layer with which the hit rate reaches `rate`; None where only all experts would.

    worst: on the text that caches least, rather than the one that caches best.
    """

    def reached(capacity: int) -> bool:
        hit = hits.at([capacity] * g.n_moe_layers)
        return (hit.low if worst else hit.high) >= rate

    if isinstance(hits, GivenHits):
        return None
    presets = isinstance(hits, TraceHits) and any(_is_preset(policy) for policy in hits.policies)
    low, high = g.top_k if presets else 1, g.n_experts
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if reached(middle) else (middle + 1, high)
    return high if high < g.n_experts else None


def _is_preset(policy: str) -> bool:
    from edgemoe.policy import PRESETS

    return policy in PRESETS
