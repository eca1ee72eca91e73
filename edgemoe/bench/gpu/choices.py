"""Which policies are the rows: presets by name, with what changes behind colons."""

from collections.abc import Sequence
from typing import Any

from edgemoe.errors import UserError
from edgemoe.policy import Policy, preset
from edgemoe.units import parse_count

DEFAULT = (
    "exact-lru,cache-prior,cache-prior:J1,cache-prior:J2,cache-prior:score,cache-prior:score:J1,cache-prior:score:J2,"
    "psr,psr-gated,speculative"
)
LAMBDA = 0.2
_WORDS: dict[str, tuple[str, Any]] = {
    "lru": ("eviction", "lru"),
    "score": ("eviction", "score"),
    "running": ("scale", "running"),
    "unbounded": ("budget", "unbounded"),
}
_LAMBDA = "λ"
_COUNTS = {"J": "top_j", "n": "budget", "w": "window"}


def parse_policies(text: str, lambdas: Sequence[float] = (LAMBDA,)) -> dict[str, Policy]:
    """`cache-prior:score:J1,psr:n2` by name, at each λ where λ means something: `psr:n2 λ0.2` where there are several.

    Behind a colon: `lru` or `score` (eviction), `running` (bonus scale), `J1`, `n2`, `w4` or `unbounded`; `λ0.15` gives
    one λ of its own. Raises `UserError` for what is no preset, no change, or changes what means nothing to it.
    """
    found: dict[str, Policy] = {}
    for item in (part.strip() for part in text.split(",")):
        name, *changes = item.split(":")
        fields = dict(_change(item, change) for change in changes)
        plain = preset(name, **fields)
        if "lam" in fields:
            shown = ":".join([name, *(change for change in changes if not change.startswith(_LAMBDA))])
            found[f"{shown} λ{fields['lam']:g}"] = plain
            continue
        if not plain.uses_bonus:
            found[item] = plain
            continue
        for lam in lambdas:
            label = f"{item} λ{lam:g}" if len(lambdas) > 1 else item
            found[label] = preset(name, **fields, lam=lam)
    return found


def _change(item: str, change: str) -> tuple[str, Any]:
    if change in _WORDS:
        return _WORDS[change]
    if change.startswith(_LAMBDA):
        return "lam", parse_lambdas(change.removeprefix(_LAMBDA), f"--policies {item}")[0]
    count = parse_count(change[1:])
    if change[:1] in _COUNTS and count is not None:
        return _COUNTS[change[0]], count
    known = f"{', '.join(_WORDS)}, J1, n2, w4 or λ0.15"
    raise UserError(f"--policies {item}: {change!r} changes nothing: {known} are understood")


def parse_lambdas(text: str, given: str = "") -> tuple[float, ...]:
    """`0.1,0.2,0.3`. Raises `UserError` for anything else; given: the option and its value, as they are to be named."""
    given = given or f"--lambda {text}"
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"{given}: expected numbers, separated by commas, for λ") from None
    if not all(0 < lam <= 1e6 for lam in found) or len(set(found)) < len(found):
        raise UserError(f"{given}: expected numbers above 0 for λ, each once")
    return found
