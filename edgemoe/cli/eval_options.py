"""Options that the commands which measure quality share: the model, how much of it is held, and how it is computed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edgemoe.units import Residency

INTERRUPTED = 130

ModelOrFolder = Annotated[
    Path, typer.Argument(metavar="MODEL", help="A Mixture-of-Experts GGUF file, or a Hugging Face model folder.")
]
Held = Annotated[
    str | None,
    typer.Option(
        "--residency",
        metavar="AMOUNT",
        help="Experts held: a share (50%), slots per layer (32) or bytes. Default: what a tuned policy file was made"
        " for, otherwise 50%.",
    ),
]
Threads = Annotated[
    int | None, typer.Option("--threads", metavar="N", min=1, help="CPU threads. Default: the physical cores.")
]
DType = Annotated[
    str | None,
    typer.Option("--dtype", metavar="NAME", help="torch, offload: weights as bfloat16 (the default) or float32."),
]
Device = Annotated[
    str | None, typer.Option("--device", metavar="NAME", help="torch: cpu (the default), cuda, cuda:1, ... or auto.")
]


@dataclass(frozen=True)
class Point:
    """At what residency policies run, and with which calibration."""

    residency: Residency
    calibration: Path | None
    tuned: dict[str, int]
    """Slots per layer that each policy file among them was tuned for."""

    def notes(self, slots: int) -> list[str]:
        """What to know about a run on so many slots per layer."""
        return [
            f"{name} was tuned for {count} slots per layer, here are {slots}: its measurements are of another point"
            for name, count in self.tuned.items()
            if count != slots
        ]


def point_of(policies: Sequence[str], model: Path, residency: str | None, calibration: Path | None) -> Point:
    """What these values of --policy, presets and policy files, run with unless the command says otherwise.

    Raises `UserError` for a policy file that was tuned for another model, and for files that want different
    calibrations or residencies where none is given.
    """
    from edgemoe.errors import UserError
    from edgemoe.generation.tuned import check_policy_file
    from edgemoe.policy.policy_file import calibration_beside, is_policy_file, load_policy_file
    from edgemoe.units import Residency

    for name in policies:
        check_policy_file(name, model)
    files = {name: load_policy_file(name) for name in policies if is_policy_file(name)}
    wanted = list(dict.fromkeys(file.residency for file in files.values())) or ["50%"]
    if residency is None and len(wanted) > 1:
        raise UserError(f"--policy: files tuned for {' and '.join(wanted)}: give the --residency to run them at")
    return Point(
        Residency.parse(residency or wanted[0]),
        calibration or calibration_beside(*policies),
        {name: file.slots for name, file in files.items()},
    )
