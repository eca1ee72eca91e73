"""The four tiers, SSD → RAM → PCIe → VRAM, and the CPU that executes experts in RAM: time per token along each path.

A path is a list of legs, each so many bytes over one tier. Its slow end takes the legs one after the other, at each
tier's least rate and on the text that a cache catches least of. Its fast end takes the greatest rates and the best
text, lets copies hide behind computing, and lets devices that execute experts of one layer work side by side; what
depends on the step before still waits for it. Nothing but bytes is counted: arithmetic, launches and sampling come on
top, so that the fast end is a ceiling and not a promise. Where a profile knows the cost of each of ggml's products, the
slow end of what the CPU does alone includes it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from edgemoe.model.geometry import ModelGeometry
from edgemoe.units import format_bytes
from edgemoe.wall.bytes import TokenBytes, token_bytes
from edgemoe.wall.hits import Caching, Hit
from edgemoe.wall.rates import FLAGS, NAMES, NOT_GIVEN, Machine, Speed, format_pair

# When a leg happens within a token: what all of it waits for, its experts, or at any time (copies issued early).
BEFORE, EXPERTS, COPY = 0, 1, 2


@dataclass(frozen=True)
class Leg:
    """Bytes per step over one tier: (at best, at worst)."""

    tier: str
    what: str
    bytes: tuple[float, float]
    speed: Speed
    stage: int = BEFORE

    @property
    def slow(self) -> float:
        """Seconds per step at worst."""
        return self.bytes[1] / self.speed.low

    @property
    def fast(self) -> float:
        return self.bytes[0] / self.speed.high


@dataclass(frozen=True)
class Path:
    """One way of running the model. `missing` says why there is no answer: memory that lacks, or a rate."""

    name: str
    how: str
    legs: tuple[Leg, ...] = ()
    streams: int = 1
    slots: tuple[int, ...] = ()  # in each MoE layer, of the tier that misses are copied into
    vram_need: int = 0  # the least that this way needs
    ram_need: int = 0
    hit: Hit | None = None
    missing: str = ""
    reasons: tuple[str, ...] = ()
    extra: float = 0.0  # seconds per step at worst that are not bytes

    @property
    def possible(self) -> bool:
        return not self.missing

    @property
    def slow(self) -> float:
        """Seconds per step: every leg after the other."""
        return sum(leg.slow for leg in self.legs) + self.extra

    @property
    def fast(self) -> float:
        """Seconds per step: computing, or the copies where they take longer."""
        return max(self.computing, sum(leg.fast for leg in self.copies))

    @property
    def copies(self) -> tuple[Leg, ...]:
        return tuple(leg for leg in self.legs if leg.stage == COPY)

    @property
    def computing(self) -> float:
        """Seconds per step at best that nothing can hide."""
        stages = ([leg.fast for leg in self.legs if leg.stage == stage] for stage in (BEFORE, EXPERTS))
        return sum(max(stage, default=0.0) for stage in stages)

    @property
    def tokens_per_s(self) -> tuple[float, float]:
        """(least, most), all streams together."""
        return self.streams / self.slow, self.streams / self.fast

    @property
    def in_turn(self) -> tuple[float, float]:
        """(least, most) tok/s where copies and computing take turns, as under exact routing without prediction: a
        layer's copies cannot begin before its router has spoken."""
        return self.streams / self.slow, self.streams / (self.computing + sum(leg.fast for leg in self.copies))

    @property
    def overlapped(self) -> tuple[float, float]:
        """(least, most) tok/s where every copy is issued a layer early: the longer of copies and computing."""
        copied = sum(leg.slow for leg in self.copies)
        return self.streams / max(copied, self.slow - copied), self.streams / self.fast

    @property
    def bound(self) -> str:
        """The tier that takes most of the time; two where the ends of the range differ."""
        at_worst, at_best = self.times(slow=True), self.times(slow=False)
        copied = sum(leg.fast for leg in self.copies)
        in_question = [leg.tier for leg in self.legs if (leg.stage == COPY) == (copied > self.computing)]
        ends = (max(at_worst, key=lambda tier: at_worst[tier]), max(in_question, key=lambda tier: at_best[tier]))
        return " or ".join(NAMES[tier] for tier in dict.fromkeys(ends))

    def times(self, slow: bool = True) -> dict[str, float]:
        """Seconds per step by tier."""
        spent: dict[str, float] = {}
        for leg in self.legs:
            spent[leg.tier] = spent.get(leg.tier, 0.0) + (leg.slow if slow else leg.fast)
        return spent

    def shares(self, slow: bool = True) -> dict[str, float]:
        """Share of the time at each tier when nothing overlaps."""
        spent = self.times(slow)
        total = sum(spent.values())
        return {tier: seconds / total for tier, seconds in spent.items()}


class Room(Protocol):
    """What a program makes of RAM for slots: `edgemoe run` holds its process, too, and all that a layer executes."""

    def least(self, streams: int) -> int:
        """Bytes of RAM that so many streams need."""

    def slots(self, streams: int, ram: int) -> int:
        """Slots in every MoE layer, of RAM that is at least that."""

    def for_pins(self, ram: int) -> int:
        """Bytes of experts that a plan may pin beside what one stream needs."""


@dataclass(frozen=True)
class Wall:
    """Everything that the paths are made of. A step decodes one token of each stream.

    token: bytes of one token of one stream. routed: bytes of the distinct experts that a step needs, (least, most) over
    texts; for one stream simply `token.routed`. room: how RAM becomes slots; none: weights, cache and work buffers, the
    rest is slots.
    """

    geometry: ModelGeometry
    machine: Machine
    caching: Caching
    token: TokenBytes
    n_ctx: int
    routed: tuple[float, float]
    streams: int = 1
    cpu_extra: float = 0.0  # seconds per step of a CPU that does it all which are not bytes
    room: Room | None = None

    @classmethod
    def of_one(cls, geometry: ModelGeometry, machine: Machine, caching: Caching, n_ctx: int) -> "Wall":
        """The wall of a single stream whose context holds `n_ctx` tokens."""
        token = token_bytes(geometry, n_ctx)
        return cls(geometry, machine, caching, token, n_ctx, (token.routed, token.routed))

    @cached_property
    def fixed(self) -> float:
        """Bytes of a step besides routed experts: weights once, the cache of every stream."""
        return self.token.always + self.streams * self.token.kv

    def leg(self, tier: str, what: str, size: float | tuple[float, float], stage: int = BEFORE) -> Leg | str:
        """A leg, or the flag that would tell the rate of its tier."""
        speed = self.machine.weights if tier == "ram" else getattr(self.machine, tier)
        pair = size if isinstance(size, tuple) else (size, size)
        return Leg(tier, what, pair, speed, stage) if speed else FLAGS[tier]

    def path(
        self,
        name: str,
        how: str,
        legs: Sequence[Leg | str],
        needs: tuple[int, int],
        overlap: str = "",
        slots: Sequence[int] = (),
        hit: Hit | None = None,
        why: Sequence[str] = (),
        extra: float = 0.0,
    ) -> Path:
        """The path, or what it lacks: memory first (needs: VRAM, RAM), then rates. overlap: why legs that are no copies
        may overlap."""
        known = tuple(leg for leg in legs if isinstance(leg, Leg) and max(leg.bytes) > 0)
        flags = [leg for leg in legs if isinstance(leg, str)]
        reasons = [*why, *_reasons(known, overlap)]
        if extra:
            reasons.append(f"at worst {1e3 * extra:,.3g} ms that are not bytes (profile: the cost of every product)")
        missing = self._lacking(*needs, flags)
        path = Path(name, how, known, self.streams, tuple(slots), *needs, hit, missing, tuple(reasons), extra)
        return replace(path, reasons=(*path.reasons, *_two_figures(path)))

    def _lacking(self, vram: int, ram: int, flags: Sequence[str]) -> str:
        m = self.machine
        for what, need, there, who in (
            ("VRAM", vram, m.vram_bytes, m.vram_source),
            ("RAM", ram, m.ram_bytes, m.ram_source),
        ):
            if need > there:
                known = there or who != NOT_GIVEN
                has = (
                    f"there is {format_bytes(there) if there else 'none'}"
                    if known
                    else f"--{what.lower()} is not given"
                )
                return f"needs {format_bytes(need)} of {what}, {has}"
        return f"rate not known: give {' and '.join(dict.fromkeys(flags))}" if flags else ""


def _reasons(legs: Sequence[Leg], overlap: str) -> Iterator[str]:
    seen = set()
    for leg in legs:
        if leg.speed.low != leg.speed.high and leg.tier not in seen:
            seen.add(leg.tier)
            yield f"{NAMES[leg.tier]} {leg.speed} ({leg.speed.source})"
    if overlap:
        yield f"from nothing overlapped to all: {overlap}"


def _two_figures(path: Path) -> Iterator[str]:
    """What the order of copies and computing decides, in words."""
    if path.missing or not path.copies:
        return
    copied = "reads" if path.copies[0].tier == "ssd" else "copies"
    yield (
        f"{format_pair(*path.in_turn)} tok/s = {copied} + computing: exact routing without prediction, a layer's "
        f"{copied} cannot begin before its router has spoken"
    )
    yield f"{format_pair(*path.overlapped)} tok/s = max({copied}, computing): everything predicted a layer early"


def best(ways: Sequence[Path]) -> Path | None:
    """The possible path whose slow end is fastest; None if none is possible."""
    return min((path for path in ways if path.possible), key=lambda path: path.slow, default=None)
