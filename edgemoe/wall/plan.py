"""Path-Mapped Serving (arXiv 2608.18261, §5): which experts to keep in VRAM, in RAM and on SSD, by their heat.

The plan is a JSON file that the serving tiers read. Heat is how often a trace executed an expert: the hottest experts
of all layers go to the fastest memory, as many as its budget holds, so that a layer whose load is concentrated gets
fewer slots than one whose load is spread.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edgemoe.errors import UserError
from edgemoe.files import read_json, write_json
from edgemoe.model.geometry import ModelGeometry
from edgemoe.wall.hits import TraceHits, slots_for

if TYPE_CHECKING:
    from edgemoe.tracing import Trace

VERSION = 1
KIND = "edgemoe placement plan"
_AGAIN = "write it again with `edgemoe wall MODEL --trace T --plan FILE`"


@dataclass(frozen=True)
class LayerPlan:
    """The experts of one MoE layer by tier, hottest first. Every expert is in exactly one tier."""

    layer: int  # the model's own id
    vram: tuple[int, ...]
    ram: tuple[int, ...]
    ssd: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """A placement, and what it was made for and from. Sizes in bytes; `loads` is the share of loads that each tier
    serves on the texts that it was made from."""

    model: str
    architecture: str
    n_experts: int
    header_sha256: tuple[str, ...]  # of the GGUF files; empty for a preset or safetensors
    vram_bytes: int  # budgets for experts alone
    ram_bytes: int
    texts: tuple[str, ...]
    loads: dict[str, float]
    layers: tuple[LayerPlan, ...]

    @property
    def pinned(self) -> tuple[tuple[int, ...], ...]:  # [L]
        """The experts of each layer that are kept out of the SSD, hottest first: what `edgemoe run --plan` pins."""
        return tuple((*layer.vram, *layer.ram) for layer in self.layers)

    def tier_of(self) -> np.ndarray:  # [L, E] int8: 0 VRAM, 1 RAM, 2 SSD
        """The tier of every expert."""
        tiers = np.full((len(self.layers), self.n_experts), 2, dtype=np.int8)
        for at, layer in enumerate(self.layers):
            tiers[at, list(layer.vram)] = 0
            tiers[at, list(layer.ram)] = 1
        return tiers


def heat_map(texts: Sequence["Trace"]) -> np.ndarray:  # [L, E] float64
    """Share of a layer's loads that each expert has, texts weighted alike."""
    from edgemoe.tracing.stats import expert_loads

    shares = []
    for text in texts:
        loads = expert_loads(text)
        shares.append(loads / np.maximum(loads.sum(axis=1, keepdims=True), 1))
    return np.mean(shares, axis=0)


def place(heat: np.ndarray, sizes: Sequence[int], budgets: Sequence[int]) -> np.ndarray:  # [L, E] int8
    """The tier of every expert: 0 and 1 within the budgets, in bytes, 2 for the rest.

    heat: [L, E], share of its layer's loads; sizes: [L], bytes of one expert. An expert costs its bytes and saves its
    loads times its bytes, so that heat alone decides; ties go to the lower layer, then the lower expert.
    """
    order = np.argsort(-heat, axis=None, kind="stable")
    tiers = np.full(heat.size, len(budgets), dtype=np.int8)
    size = np.repeat(np.asarray(sizes, dtype=np.int64), heat.shape[1])[order]
    start = 0
    for tier, budget in enumerate(budgets):
        held = np.cumsum(size[start:])
        count = int(np.searchsorted(held, budget, side="right"))
        tiers[order[start : start + count]] = tier
        start += count
    return tiers.reshape(heat.shape)


def make_plan(
    g: ModelGeometry, files: Sequence[Path], texts: Sequence["Trace"], vram_bytes: int, ram_bytes: int
) -> Plan:
    """The plan for budgets that are for experts alone. files: the model's, for its fingerprint."""
    from edgemoe.llamacpp.header import header_fingerprint

    heat = heat_map(texts)
    tiers = place(heat, g.expert_bytes, (max(vram_bytes, 0), max(ram_bytes, 0)))
    hottest = np.argsort(-heat, axis=1, kind="stable")
    layers = []
    for at, layer in enumerate(g.moe_layers):
        experts = [[int(e) for e in hottest[at] if tiers[at, e] == tier] for tier in range(3)]
        layers.append(LayerPlan(layer, *(tuple(ids) for ids in experts)))
    share = {name: float(heat[tiers == tier].sum() / len(heat)) for tier, name in enumerate(("vram", "ram", "ssd"))}
    return Plan(
        model=g.name,
        architecture=g.architecture,
        n_experts=g.n_experts,
        header_sha256=tuple(header_fingerprint(file) for file in files if file.suffix == ".gguf"),
        vram_bytes=max(vram_bytes, 0),
        ram_bytes=max(ram_bytes, 0),
        texts=tuple(text.name for text in texts),
        loads=share,
        layers=tuple(layers),
    )


def save_plan(plan: Plan, path: Path) -> Path:
    """Write it; the file appears whole or not at all. A `UserError` where it cannot be written."""
    write_json(path, {"kind": KIND, "version": VERSION, **asdict(plan)})
    return path


def load_plan(path: Path, g: ModelGeometry | None = None, files: Sequence[Path] = ()) -> Plan:
    """Read a plan, and check that it is whole and, where a geometry is given, of this model (by layers, experts and,
    where both are known, header fingerprint of `files`). Raises `UserError`, one line."""
    data = read_json(path, "placement plan", _AGAIN)
    if not isinstance(data, dict) or data.get("kind") != KIND:
        raise UserError(f"{path}: not a placement plan: {_AGAIN}")
    if data.get("version") != VERSION:
        raise UserError(f"{path}: plan version {data.get('version')!r}, this edgemoe reads {VERSION}: {_AGAIN}")
    try:
        plan = _parsed(data)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: damaged placement plan ({error}): {_AGAIN}") from None
    if g is not None:
        _check_model(path, plan, g, files)
    return plan


def _parsed(data: dict[str, Any]) -> Plan:
    layers = tuple(
        LayerPlan(int(entry["layer"]), *(tuple(map(int, entry[tier])) for tier in ("vram", "ram", "ssd")))
        for entry in data["layers"]
    )
    n_experts = int(data["n_experts"])
    for layer in layers:
        if sorted((*layer.vram, *layer.ram, *layer.ssd)) != list(range(n_experts)):
            raise ValueError(f"layer {layer.layer} does not place each of {n_experts} experts once")
    return Plan(
        model=str(data["model"]),
        architecture=str(data["architecture"]),
        n_experts=n_experts,
        header_sha256=tuple(map(str, data["header_sha256"])),
        vram_bytes=int(data["vram_bytes"]),
        ram_bytes=int(data["ram_bytes"]),
        texts=tuple(map(str, data["texts"])),
        loads={str(tier): float(share) for tier, share in data["loads"].items()},
        layers=layers,
    )


def _check_model(path: Path, plan: Plan, g: ModelGeometry, files: Sequence[Path]) -> None:
    from edgemoe.llamacpp.header import header_fingerprint

    layers = tuple(layer.layer for layer in plan.layers)
    if (plan.n_experts, layers) != (g.n_experts, g.moe_layers):
        raise UserError(
            f"{path}: a plan for {plan.model} ({len(layers)} MoE layers of {plan.n_experts} experts), not for {g.name} "
            f"({g.n_moe_layers} of {g.n_experts}): {_AGAIN}"
        )
    present = tuple(header_fingerprint(file) for file in files if file.suffix == ".gguf")
    if present and plan.header_sha256 and present != plan.header_sha256:
        raise UserError(f"{path}: a plan for another file of {plan.model} (header fingerprints differ): {_AGAIN}")


def pinned_in(path: Path, trace: "Trace") -> list[tuple[int, ...]]:  # [L]
    """What a plan pins in each layer of a trace. Raises `UserError` for a plan of another model than was traced: by
    experts, layers and, where both know it, header fingerprint."""
    plan = load_plan(path)
    pins = dict(zip((layer.layer for layer in plan.layers), plan.pinned, strict=True))
    missing = [layer for layer in trace.layers.tolist() if layer not in pins]
    if plan.n_experts != trace.n_experts or missing:
        what = f"no layer {missing[0]}" if missing else f"{plan.n_experts} experts per layer"
        raise UserError(f"{path}: a plan for {plan.model}, which has {what}, not for what {trace.name} was traced on")
    recorded = trace.meta.get("header_sha256")
    if recorded and plan.header_sha256 and tuple(recorded) != plan.header_sha256:
        raise UserError(f"{path}: a plan for another file than {trace.name} was traced on (header fingerprints differ)")
    return [pins[layer] for layer in trace.layers.tolist()]


@dataclass(frozen=True)
class Residency:
    """One way to choose what is resident, and the loads that it served: (least, most) over texts."""

    name: str
    hit_rate: tuple[float, float]
    how: str


def compare(g: ModelGeometry, texts: Sequence["Trace"], experts_bytes: int) -> list[Residency]:
    """Static against dynamic residency in the same bytes, each judged on the second half of every text.

    Placed by the heat of the first half of that text, of the first halves of the other texts, and (with hindsight) of
    the second half itself; and LRU and score eviction, which start it with what the first half left behind.
    """
    halves = [_halves(text) for text in texts]
    learnt = [first for first, _ in halves]
    rows = [
        ("placed", [_placed(g, [a], b, experts_bytes) for a, b in halves], "by the heat of this text's first half"),
        ("placed, hindsight", [_placed(g, [b], b, experts_bytes) for _, b in halves], "by the very loads it serves"),
    ]
    if len(texts) > 1:
        others = [
            _placed(g, [a for at, a in enumerate(learnt) if at != mine], b, experts_bytes)
            for mine, (_, b) in enumerate(halves)
        ]
        rows.insert(1, ("placed, other texts", others, "by the heat of the other texts' first halves"))
    slots = slots_for(g, experts_bytes)
    for rule in ("lru", "score"):
        rates = [_evicted(g, rule, text, first, slots) for text, (first, _) in zip(texts, halves, strict=True)]
        rows.append((rule, rates, "evicts as it goes, slots even over layers"))
    return [Residency(name, (min(rates), max(rates)), how) for name, rates, how in rows]


def _halves(text: "Trace") -> tuple["Trace", "Trace"]:
    middle = text.n_tokens // 2
    if not middle:
        raise UserError(f"{text.name}: one token is too few to learn a placement from: trace more text")
    return _part(text, slice(0, middle)), _part(text, slice(middle, None))


def _part(text: "Trace", tokens: slice) -> "Trace":
    return replace(
        text,
        experts=text.experts[:, tokens],
        windows=np.zeros(1, dtype=np.int64),
        domains=text.domains[:1],
        tokens=None,
        scores=None,
        pregate=None,
        weights=None,
    )


def _placed(g: ModelGeometry, learnt: Sequence["Trace"], text: "Trace", budget: int) -> float:
    resident = place(heat_map(learnt), g.expert_bytes, (budget,)) == 0
    return float(heat_map([text])[resident].sum() / len(resident))


def _evicted(g: ModelGeometry, rule: str, text: "Trace", first: "Trace", slots: Sequence[int]) -> float:
    """Hit rate of the second half alone: misses of the whole less misses of the first half."""
    whole, start = (TraceHits(g, [part], (rule,)).at(slots).low for part in (text, first))
    loads, early = ((part.experts >= 0).sum() for part in (text, first))
    return float((whole * loads - start * early) / (loads - early))
