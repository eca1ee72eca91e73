"""The way back: which bandwidth, hit rate and capacity a wanted speed needs, and what to buy or lower for it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from edgemoe.units import format_bytes
from edgemoe.wall.hits import capacity_for
from edgemoe.wall.rates import NAMES
from edgemoe.wall.tiers import COPY, Leg, Path, Wall

# A link that many times as fast is not to be bought.
BELIEVABLE = 50
Pair = tuple[float | None, float | None]


def tokens_per_s(bytes_per_token: float, bytes_per_s: float) -> float:
    """The wall itself: bandwidth over bytes per token (arXiv 2608.18261, §3)."""
    return bytes_per_s / bytes_per_token if bytes_per_token else float("inf")


def bandwidth_for(bytes_per_token: float, target: float) -> float:
    """Bytes per second that `target` tokens per second need."""
    return bytes_per_token * target


def hit_rate_for(routed: float, bytes_per_s: float, target: float, other_seconds: float = 0.0) -> float | None:
    """The hit rate with which the misses of `routed` bytes per token leave `target` tokens per second over a link of
    `bytes_per_s`, beside `other_seconds` per token that nothing hides; None where no hit rate does."""
    left = 1 / target - other_seconds
    return None if left < 0 else max(0.0, 1 - bytes_per_s * left / routed)


@dataclass(frozen=True)
class Ceiling:
    """What `target` tokens per second need. Pairs are (if nothing overlaps, at least rates; if all does, at most)."""

    target: float
    bandwidth: float  # bytes/s to all of a token's bytes, without any cache
    path: str  # the path that the rest is about
    link: str  # the tier that misses cross; "" where the path has none
    reached: str  # yes, no or perhaps: within the range
    hit_rate: Pair
    capacity: tuple[int | None, int | None]  # slots per layer
    capacity_bytes: tuple[int | None, int | None]
    link_rate: Pair  # bytes/s at the present capacity
    advice: tuple[str, ...] = ()


def ceiling(wall: Wall, path: Path, target: float) -> Ceiling:
    """The ceiling of a possible path for a wanted speed."""
    low, high = path.tokens_per_s
    link = next(iter(path.copies), None)
    hits = wall.caching.pinned if path.name == "placed" else wall.caching.dynamic
    rates: Pair = (None, None)
    links: Pair = (None, None)
    slots: list[int | None] = [None, None]
    if link:
        rates, links = _needed(wall, path, link, target)
        slots = [
            None if rate is None else capacity_for(hits, wall.geometry, rate, worst)
            for rate, worst in zip(rates, (True, False), strict=True)
        ]
    sizes = [None if count is None else count * wall.geometry.slot_bytes for count in slots]
    found = Ceiling(
        target=target,
        bandwidth=bandwidth_for(wall.fixed + wall.routed[1], target),
        path=path.name,
        link=link.tier if link else "",
        reached="yes" if low >= target else "perhaps" if high >= target else "no",
        hit_rate=rates,
        capacity=(slots[0], slots[1]),
        capacity_bytes=(sizes[0], sizes[1]),
        link_rate=links,
    )
    return replace(found, advice=tuple(_advice(wall, path, link, found)))


def _needed(wall: Wall, path: Path, link: Leg, target: float) -> tuple[Pair, Pair]:
    """(hit rates, link rates) that the target needs, each (if nothing overlaps, if all does)."""
    slow = sum(leg.slow for leg in path.legs if leg is not link)
    # Copies that hide behind computing have the whole of a token's time, unless computing alone takes longer.
    late = path.computing > 1 / target
    best_rate = None if late else hit_rate_for(wall.routed[0], link.speed.high, target)
    rates = (hit_rate_for(wall.routed[1], link.speed.low, target, slow), best_rate)
    left = 1 / target - slow
    return rates, (link.bytes[1] / left if left > 0 else None, None if late else link.bytes[0] * target)


_ENDS = ("if nothing overlaps", "if copies hide behind computing")


def _advice(wall: Wall, path: Path, link: Leg | None, c: Ceiling) -> Iterator[str]:
    """Plain words, the most useful first."""
    if c.reached == "yes":
        yield f"{c.target:g} tok/s is within what this way gives ({path.name}): nothing to buy"
    elif link is None or c.hit_rate[1] is None:
        yield from _computing_is_too_slow(path, c.target)
    else:
        yield _hit_rate_words(path, c)
        yield from _buy_capacity(wall, path, link, c)
        for end, rate, now in zip(_ENDS, c.link_rate, (link.speed.low, link.speed.high), strict=True):
            if rate and now < rate < BELIEVABLE * now:
                yield f"or a faster {NAMES[link.tier]}: {format_bytes(rate)}/s {end}, {rate / now:.1f}× this one"
        yield _lower_bytes(link, c.target)


def _computing_is_too_slow(path: Path, target: float) -> Iterator[str]:
    computing = [leg for leg in path.legs if leg.stage != COPY]
    slow = [leg for leg in computing if leg.fast >= 0.1 * path.computing]
    names = " and ".join(dict.fromkeys(NAMES[leg.tier] for leg in slow))
    times = path.computing * target
    if times <= 1:
        yield f"only if everything goes at its best: {_ms(path.computing)} of {_ms(1 / target)} per token"
        times = path.slow * target
        yield f"to be sure of it: {names} {times:.1f}× as fast, or {1 / times:.0%} of the bytes (fewer bits per weight)"
        return
    yield (
        f"{names} {'bounds' if len(slow) == 1 else 'bound'} it whatever is cached: computing alone takes "
        f"{_ms(path.computing)} per token at best, {target:g} tok/s leave {_ms(1 / target)}"
    )
    yield f"buy bandwidth: {names} {times:.1f}× as fast"
    yield f"or fewer bytes, {1 / times:.0%} of these: fewer bits per weight, a smaller top-k, or a smaller model"


def _hit_rate_words(path: Path, c: Ceiling) -> str:
    slow, fast = c.hit_rate
    need = f"{fast:.1%} {_ENDS[1]}"
    need += f", {slow:.1%} {_ENDS[0]}" if slow is not None else f", no hit rate is enough {_ENDS[0]}"
    return f"hit rate needed: {need}; now {path.hit}"


def _buy_capacity(wall: Wall, path: Path, link: Leg, c: Ceiling) -> Iterator[str]:
    where = "RAM" if link.tier == "ssd" else "VRAM"
    budget = wall.machine.ram_bytes if where == "RAM" else wall.machine.vram_bytes
    held = sum(n * size for n, size in zip(path.slots, wall.geometry.expert_bytes, strict=True))
    for end, rate, slots, size in zip(_ENDS, c.hit_rate, c.capacity, c.capacity_bytes, strict=True):
        if rate is None:
            continue
        if slots is None or size is None:
            room = format_bytes(budget + wall.geometry.routed_bytes - held)
            yield f"more {where} reaches it {end} only with every expert in it: {room}"
        elif size > held:
            share = f"{slots} slots per layer, {slots / wall.geometry.n_experts:.0%} of the experts"
            room = format_bytes(budget + size - held)
            yield f"more {where} {end}: {room} instead of {format_bytes(budget)} ({share})"


def _lower_bytes(leg: Leg, target: float) -> str:
    share = leg.speed.high / target / leg.bytes[0] if leg.bytes[0] else 1.0
    if share >= 1:
        return f"or fewer bytes: at best {leg.what} fit already, so it is overlap that decides"
    return (
        f"or fewer bytes: {leg.what}, {format_bytes(leg.bytes[0])} per token at best, must shrink to {share:.0%} of "
        "that: fewer bits per weight, a smaller top-k, or a smaller model"
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms" if seconds >= 0.01 else f"{1e3 * seconds:.2g} ms"
