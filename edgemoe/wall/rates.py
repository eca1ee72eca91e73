"""What a machine gives: a rate for each tier with where it came from, and how much memory may be used."""

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgemoe.errors import UserError
from edgemoe.model.geometry import ModelGeometry
from edgemoe.units import format_bytes, parse_bytes, shown

if TYPE_CHECKING:
    from edgemoe.machine.profile import Profile

# ggml's expert product reads 12 (Q4_0) to 20 GB/s (Q8_0) where plain loads reach 33: measured on one machine.
CPU_SHARE = (0.36, 0.61)
NO_PROFILE = "none"
NOT_GIVEN = "not given"
MOST_MEMORY = 10**15
FLAGS = {
    "ssd": "--ssd",
    "ram": "--ram-bandwidth",
    "cpu": "--cpu-experts",
    "pcie": "--pcie",
    "vram": "--vram-bandwidth",
}
# How the tiers are called in print.
NAMES = {"ssd": "SSD", "ram": "RAM", "cpu": "CPU", "pcie": "PCIe", "vram": "VRAM"}


@dataclass(frozen=True)
class Speed:
    """Bytes per second: the least and the most that the tier gives this workload, and who says so."""

    low: float
    high: float
    source: str

    def __str__(self) -> str:
        return f"{format_range(self.low, self.high)}/s"


@dataclass(frozen=True)
class Machine:
    """Speeds by tier (none: not known or not there) and the memory that may be used, in bytes.

    ssd: reads of experts. ram: weights that the CPU reads outside of experts. cpu: experts that the CPU executes from
    RAM. pcie: RAM to VRAM. vram: weights that the GPU reads.
    """

    ssd: Speed | None = None
    ram: Speed | None = None
    cpu: Speed | None = None
    pcie: Speed | None = None
    vram: Speed | None = None
    ram_bytes: int = 0
    vram_bytes: int = 0
    ram_source: str = NOT_GIVEN
    vram_source: str = NOT_GIVEN

    @property
    def weights(self) -> Speed | None:
        """Weights that the CPU reads outside of experts: at best plain loads, at worst ggml's rate for experts."""
        if self.ram is None or self.cpu is None:
            return self.ram
        low = min(self.cpu.low, self.ram.low)
        return Speed(low, self.ram.high, f"{self.ram.source}, down to the rate of experts")

    @property
    def speeds(self) -> dict[str, Speed]:
        found = {tier: getattr(self, tier) for tier in FLAGS}
        return {tier: speed for tier, speed in found.items() if speed is not None}


def format_range(low: float, high: float) -> str:
    """`2.4 GB`, or `2.1–2.4 GB` where the two print differently."""
    first, last = format_bytes(low), format_bytes(high)
    if first == last:
        return last
    (number, unit), (_, other) = first.split(" "), last.split(" ")
    return f"{number}–{last}" if unit == other else f"{first}–{last}"


def format_number(value: float) -> str:
    """Three significant digits, none after the point from 100 on."""
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.3g}" if value >= 0.01 else f"{value:.2g}"


def format_pair(low: float, high: float) -> str:
    """`9.68 to 18.9`, or one number where the two print alike."""
    first, last = format_number(low), format_number(high)
    return first if first == last else f"{first} to {last}"


def parse_rate(flag: str, text: str) -> float:
    """Bytes per second of `2.4GB/s`; a `UserError` names the flag for anything else, zero included."""
    match = re.fullmatch(r"\s*(.+?)\s*/\s*s\s*", text)
    if not match:
        raise UserError(f"{flag} {shown(text)}: not a rate: write it like 2.4GB/s (bytes per second, not bits)")
    if re.search(r"\d\s*([KMGTkmgt]i?)?b$", match[1]):
        raise UserError(f"{flag} {shown(text)}: a small b means bits: give bytes per second, like 2.4GB/s")
    try:
        rate = parse_bytes(match[1])
    except UserError:
        raise UserError(f"{flag} {shown(text)}: not a rate: write it like 2.4GB/s") from None
    if rate <= 0:
        raise UserError(f"{flag} {shown(text)}: a rate is more than nothing: write it like 2.4GB/s")
    return float(rate)


def parse_budget(flag: str, text: str) -> int:
    """Bytes of `18GB`; a `UserError` names the flag, for nothing at all and for more than any machine has too."""
    try:
        size = parse_bytes(text)
    except UserError:
        raise UserError(f"{flag} {shown(text)}: not a size: write it like 18GB or 16GiB") from None
    if not 0 < size <= MOST_MEMORY:
        raise UserError(f"{flag} {shown(text)}: expected more than nothing, and at most {format_bytes(MOST_MEMORY)}")
    return size


def parse_share(flag: str, text: str) -> float:
    """A share of `65.9%`, from 0% to 100%."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", text)
    if not match or not 0 <= float(match[1]) <= 100:
        raise UserError(f"{flag} {shown(text)}: not a share: write it like 65.9%")
    return float(match[1]) / 100


def machine_from(
    g: ModelGeometry,
    profile: "Profile | None",
    overrides: dict[str, str],
    ram: str | None = None,
    vram: str | None = None,
) -> Machine:
    """The machine of a profile (none: nothing is known of it) with what the person says in its place.

    overrides: rates by tier as they were written. Raises `UserError` for a malformed one, for a budget beyond what the
    profiled machine has, and where nothing at all is known.
    """
    if profile is None and not overrides:
        raise UserError(
            "nothing is known of the machine: run `edgemoe probe`, or say what it has, "
            "like --ssd 2.4GB/s --ram-bandwidth 50GB/s"
        )
    machine = measured(g, profile) if profile else Machine()
    for tier, text in overrides.items():
        rate = parse_rate(FLAGS[tier], text)
        change: dict[str, Any] = {tier: Speed(rate, rate, f"given: {FLAGS[tier]}")}
        machine = replace(machine, **change)
    if "ram" in overrides and "cpu" not in overrides and machine.ram:
        low, high = (share * machine.ram.low for share in CPU_SHARE)
        said = f"default: {CPU_SHARE[0]:.0%}–{CPU_SHARE[1]:.0%} of {FLAGS['ram']}, as one machine's ggml reached"
        machine = replace(machine, cpu=Speed(low, high, said))
    for tier, budget in (("ram", ram), ("vram", vram)):
        if budget is not None:
            machine = replace(machine, **_budget(tier, budget, profile))
    return machine


def _budget(tier: str, text: str, profile: "Profile | None") -> dict[str, Any]:
    flag = f"--{tier}"
    size = parse_budget(flag, text)
    if profile:
        there = profile.host.ram_bytes if tier == "ram" else sum(gpu.vram_bytes for gpu in profile.gpus[:1])
        if size > there:
            raise UserError(
                f"{flag} {shown(text)}: the profiled machine has {format_bytes(there)}: "
                f"ask about another machine with --profile {NO_PROFILE} and its rates"
            )
    return {f"{tier}_bytes": size, f"{tier}_source": f"given: {flag}"}


def measured(g: ModelGeometry, profile: "Profile") -> Machine:
    """Rates that a profile gives for a model of this geometry: requests as large as its expert's matrices."""
    from edgemoe.machine.memory import ram

    piece = max((max(g.expert_bytes, default=0)) // (2 if g.merged_gate_up else 3), 1)
    now = ram()
    machine = Machine(
        ram=_speed(profile.ram.best_load.median, profile.ram.best_load.median, "profile: RAM loads", profile),
        cpu=_cpu(g, profile),
        ram_bytes=now.available,
        ram_source="free now" + (" within this control group" if now.limited else ""),
    )
    if profile.ssd:
        reads = profile.ssd.random_expert(piece)
        said = f"profile: {profile.ssd.label}, random {format_bytes(piece)} to sequential"
        machine = replace(machine, ssd=_speed(reads, float(profile.ssd.sequential), said, profile))
    if not profile.gpus:
        return replace(machine, vram_source="profile: no GPU")
    gpu = profile.gpus[0]
    bulk, vram = max(float(point.bytes_per_s) for point in gpu.h2d_pinned), float(gpu.vram_read)
    link = f"profile: {gpu.name}, pinned, {format_bytes(piece)} pieces to bulk"
    return replace(
        machine,
        pcie=_speed(gpu.h2d(piece), bulk, link, profile),
        vram=_speed(vram, vram, f"profile: {gpu.name}, reads", profile),
        vram_bytes=gpu.vram_bytes,
        vram_source=f"profile: {gpu.name}",
    )


def _cpu(g: ModelGeometry, profile: "Profile") -> Speed | None:
    """ggml's expert product: of the model's own type, or else of whatever types were measured."""
    kinds = {kind.upper() for kind in g.expert_types}
    best: dict[tuple[str, bool], float] = {}
    for point in profile.cpu_experts:
        key = (point.type.upper(), point.repacked)
        best[key] = max(best.get(key, 0.0), float(point.bytes_per_s))
    own = {key: rate for key, rate in best.items() if key[0] in kinds}
    rates = list((own or best).values())
    if not rates:
        return None
    types = ", ".join(dict.fromkeys(key[0] for key in (own or best)))
    said = f"profile: ggml's expert product, {types}"
    if not own:
        said += f" (nothing measured for {g.expert_type or 'this type'})"
    return _speed(min(rates), max(rates), said, profile)


def _speed(low: float, high: float, source: str, profile: "Profile") -> Speed:
    if not (math.isfinite(low) and math.isfinite(high)):
        raise UserError("the machine profile has a rate that is not a number: run `edgemoe probe` again")
    return Speed(min(low, high), max(low, high), source + (", quick" if profile.quick else ""))


def find_profile(path: str | None, overrides: dict[str, str], model: Path | None = None) -> "Profile | None":
    """The profile to use: the file that is named, none on request, else this machine's own.

    Where there is none, that is an error unless rates are given instead. A profile of another machine is refused, and
    one of another disk than the model's unless the disk's rate is given.
    """
    from edgemoe.machine.profile import load_profile, profile_path

    if path == NO_PROFILE:
        return None
    if path is None and overrides and not profile_path().exists():
        return None
    try:
        return load_profile(Path(path) if path else None, None if "ssd" in overrides else model)
    except UserError as error:
        if path is None and not profile_path().exists():
            raise UserError(
                f"{str(error).rstrip('.')}; or say what the machine has, like --ssd 2.4GB/s --ram-bandwidth 50GB/s"
            ) from None
        raise
