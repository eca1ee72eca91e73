"""Sizes and residencies as people write them: `18GB`, `512MiB`, `25%`, `32`."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from edgemoe.errors import UserError

_FACTORS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_DECIMAL = ("B", "kB", "MB", "GB", "TB")
_LIMIT = 10**18  # counts and sizes above it fit no 64-bit integer, or nothing that exists
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b", re.IGNORECASE)


def parse_count(text: str) -> int | None:
    """A whole number from 0 to 10¹⁸, or None for anything else, however long."""
    text = text.strip()
    if not text.isdecimal() or len(text) > len(str(_LIMIT)) or int(text) > _LIMIT:
        return None
    return int(text)


def shown(text: str) -> str:
    """The text as an error repeats it: no longer than half a line."""
    return text if len(text) <= 40 else f"{text[:37]}..."


def parse_bytes(text: str) -> int:
    """Bytes of `18GB` (decimal), `512MiB` (binary) or `4096B`; anything else, or above 10¹⁸, is a `UserError`."""
    match = _BYTES.fullmatch(text.strip())
    size = float(match[1]) * _FACTORS[(match[2] or "").upper()] if match else float("inf")
    if size > _LIMIT:
        raise UserError(f"{shown(text)!r} is not a size: write it like 18GB, 512MiB or 4096B")
    return round(size)


def format_bytes(count: float) -> str:
    """`12.6 MB`: three significant digits, decimal units."""
    power = 0
    while power < len(_DECIMAL) - 1 and abs(count) >= 999.5:
        count, power = count / 1000, power + 1
    unit = _DECIMAL[power]
    if unit == "B":
        return f"{count:.0f} B" if float(count).is_integer() else f"{count:.3g} B"
    return f"{count:.{0 if abs(count) >= 99.95 else 1 if abs(count) >= 9.995 else 2}f} {unit}"


def format_ranges(ids: Iterable[int], most: int | None = None) -> str:
    """`1-3, 5` of 1, 2, 3, 5, as `--layers` takes it; of more than `most` ranges only the first ones, and `…`."""
    runs: list[list[int]] = []
    for number in ids:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    text = ["-".join(map(str, run)) for run in runs]
    return ", ".join([*text[:most], *(["…"] if most is not None and len(text) > most else [])])


@dataclass(frozen=True)
class Residency:
    """How much of the experts may be resident, as given: a share of E, a count of slots per layer, or bytes in all."""

    text: str
    share: float | None = None
    count: int | None = None
    total_bytes: int | None = None

    @classmethod
    def parse(cls, text: str) -> "Residency":
        """`50%`, `32` or `6GB`; anything else is a `UserError`."""
        text = text.strip()
        if re.fullmatch(r"\d+(?:\.\d+)?%", text) and 0 < float(text[:-1]) <= 100:
            return cls(text, share=float(text[:-1]) / 100)
        if count := parse_count(text):
            return cls(text, count=count)
        if _BYTES.fullmatch(text):
            return cls(text, total_bytes=parse_bytes(text))
        raise UserError(f"{shown(text)!r} is not a residency: write a share (50%), slots per layer (32) or bytes (6GB)")

    @classmethod
    def of(cls, value: object) -> "Residency":
        """A `Residency`, or the text of one; a number is a `UserError`, since it could be a share or a count."""
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            return cls.parse(value)
        raise UserError(
            f"residency {shown(repr(value))} is no text: write a share ('50%'), slots per layer ('32') or bytes ('6GB')"
        )

    def slots(self, n_experts: int, layer_expert_bytes: int | None = None) -> int:
        """Slots per layer C: `round(share·E)`, the count itself, or what the bytes buy.

        `layer_expert_bytes` is the size of one expert summed over all MoE layers. Raises `UserError` for no slot at
        all, for more slots than experts, or for bytes without a known expert size.
        """
        if self.count is not None:
            slots = self.count
        elif self.share is not None:
            slots = round(self.share * n_experts)
        elif layer_expert_bytes is None:
            raise UserError(f"a residency in bytes ({self.text}) needs the size of an expert: give --model")
        else:
            slots = min(int(self.total_bytes or 0) // layer_expert_bytes, n_experts)
        if not 1 <= slots <= n_experts:
            raise UserError(f"residency {self.text} is {slots} slots per layer; this model has {n_experts} experts")
        return slots
