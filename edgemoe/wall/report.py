"""The whole answer of `edgemoe wall` as one value, and as one JSON object. Sizes are bytes, rates bytes per second."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from edgemoe.wall.batch import Batch
from edgemoe.wall.ceiling import Ceiling
from edgemoe.wall.plan import Plan, Residency
from edgemoe.wall.tiers import Path, Wall

if TYPE_CHECKING:
    from edgemoe.machine.profile import Profile
    from edgemoe.model import Model
    from edgemoe.wall.verify import Verified


@dataclass(frozen=True)
class Answer:
    """What was asked and what came out; the parts that were not asked for are empty."""

    wall: Wall
    ways: tuple[Path, ...]
    best: Path | None
    ceiling: Ceiling | None = None
    batches: tuple[Batch, ...] = ()
    residency: tuple[Residency, ...] = ()
    plan: Plan | None = None
    notes: tuple[str, ...] = ()
    model: "Model | None" = None  # none of a preset
    profile: "Profile | None" = None
    verified: "Verified | None" = None


def as_json(answer: Answer) -> dict[str, Any]:
    """Plain values only. Pairs are (least, most), of a leg's bytes and seconds (at best, at worst)."""
    wall, g = answer.wall, answer.wall.geometry
    token = wall.token
    machine = wall.machine
    return {
        "model": {
            "name": g.name,
            "architecture": g.architecture,
            "layers": g.n_layers,
            "moe_layers": g.n_moe_layers,
            "experts": g.n_experts,
            "top_k": g.top_k,
            "bytes": g.used_bytes,
            "expert_bytes": {"least": min(g.expert_bytes, default=0), "most": max(g.expert_bytes, default=0)},
            "slot_in_every_layer": g.slot_bytes,
        },
        "context": wall.n_ctx,
        "bytes_per_token": {**asdict(token), "always": token.always, "total": token.total},
        "machine": {
            "rates": {tier: asdict(speed) for tier, speed in machine.speeds.items()},
            "ram": {"bytes": machine.ram_bytes, "source": machine.ram_source},
            "vram": {"bytes": machine.vram_bytes, "source": machine.vram_source},
        },
        "hit_rates": wall.caching.dynamic.label,
        "ways": [_way(path) for path in answer.ways],
        "best": answer.best.name if answer.best else None,
        "target": asdict(answer.ceiling) if answer.ceiling else None,
        "batches": [_batch(row) for row in answer.batches],
        "residency": [asdict(row) for row in answer.residency],
        "plan": _plan(answer.plan) if answer.plan else None,
        "verified": _verified(answer.verified) if answer.verified else None,
        "notes": list(answer.notes),
    }


def _way(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": path.name,
        "how": path.how,
        "possible": path.possible,
        "missing": path.missing or None,
        "needs": {"vram": path.vram_need, "ram": path.ram_need},
    }
    if not path.possible:
        return found
    return found | {
        "tokens_per_s": list(path.tokens_per_s),
        **_orders(path),
        "seconds_per_step": [path.fast, path.slow],
        "bound": path.bound,
        "time_shares": {"slow": path.shares(slow=True), "fast": path.shares(slow=False)},
        "legs": [
            {"tier": leg.tier, "what": leg.what, "bytes": list(leg.bytes), "seconds": [leg.fast, leg.slow]}
            for leg in path.legs
        ],
        "slots": list(path.slots),
        "hit_rate": [path.hit.low, path.hit.high] if path.hit else None,
        "reasons": list(path.reasons),
    }


def _orders(path: Path) -> dict[str, Any]:
    """Tok/s by the order of copies and computing; the same where nothing is copied."""
    return {"copies_plus_computing": list(path.in_turn), "longer_of_both": list(path.overlapped)}


def _batch(row: Batch) -> dict[str, Any]:
    return {
        "streams": row.streams,
        "union": list(row.union),
        "independent": row.independent,
        "step_bytes": list(row.step_bytes),
        "way": row.path.name if row.path else None,
        "tokens_per_s": list(row.path.tokens_per_s) if row.path else None,
        **(_orders(row.path) if row.path else {}),
        "slots": list(row.path.slots) if row.path else None,
        "hit_rate": [row.path.hit.low, row.path.hit.high] if row.path and row.path.hit else None,
        "source": row.source,
    }


def _plan(plan: Plan) -> dict[str, Any]:
    counts = {tier: _span([len(getattr(layer, tier)) for layer in plan.layers]) for tier in ("vram", "ram", "ssd")}
    return {"vram_bytes": plan.vram_bytes, "ram_bytes": plan.ram_bytes, "loads": plan.loads, "per_layer": counts}


def _verified(verified: "Verified") -> dict[str, Any]:
    return {
        "predicted_tokens_per_s": verified.predicted.tokens_per_s,
        "measured_tokens_per_s": verified.measured.median,
        "spread": verified.measured.spread,
        "rounds": verified.measured.rounds,
        "stable": verified.measured.stable,
        "error": verified.error,
        "drift": verified.drift,
        "drift_of": verified.reference,
        "error_now": verified.error_now,
        "bytes_per_token": verified.predicted.nbytes,
        "bytes_per_s": verified.bytes_per_s,
        "threads": verified.threads,
        "context": verified.context,
        "estimated_types": {name: list(sources) for name, sources in verified.predicted.estimated.items()},
    }


def _span(counts: Sequence[int]) -> list[int]:
    return [min(counts), max(counts)]
