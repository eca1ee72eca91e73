"""One line of a diagnosis."""

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fix"]


@dataclass(frozen=True)
class Check:
    """What was looked at, what was found, and the command that mends it (or advice, where no command does).

    `warn`: something optional is missing or short. `fix`: edgemoe does not work as it should until it is mended.
    """

    name: str
    status: Status
    found: str
    fix: str = ""


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or ["no reason given"])[0]
