"""What a benchmark holds a tier to."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Bar:
    """Something that the tier is held to. `holds` is None where it could not be measured, or does not apply; `why` says
    why not, or what a miss is owed to."""

    what: str
    value: float | None
    bar: str
    holds: bool | None
    why: str = ""
