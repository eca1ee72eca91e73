"""Options of the commands that run a model whose experts are on disk: how much RAM, and which policy uses it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from typing import Any

Ram = Annotated[
    str | None,
    typer.Option(
        "--ram",
        metavar="SIZE",
        help="Hold no more RAM than this, like 6GB, context included: experts are read from disk when they are used."
        " Default: llama.cpp holds the whole model.",
    ),
]
ExpertsHeld = Annotated[
    str | None,
    typer.Option(
        "--residency",
        metavar="AMOUNT",
        help="How many experts to hold, instead of or within --ram: a share (50%), slots per layer (32) or bytes"
        " (6GB).",
    ),
]
PolicyName = Annotated[
    str | None,
    typer.Option(
        "--policy",
        metavar="NAME",
        help="With --ram or --residency: exact-lru (the default), exact-score, exact-prefetch, or one that steers the"
        " router towards what is in RAM and so changes the text a little: cache-prior, psr, psr-gated, speculative.",
    ),
]
Routing = Annotated[
    str | None, typer.Option("--routing", metavar="NAME", help="Change --policy: exact, cache-prior, speculative, tau.")
]
Eviction = Annotated[
    str | None, typer.Option("--eviction", metavar="NAME", help="Change --policy: lru, lfu, static or score.")
]
Prefetch = Annotated[
    str | None, typer.Option("--prefetch", metavar="NAME", help="Change --policy: none, pre-gate or token-prior.")
]
Lambda = Annotated[
    float | None, typer.Option("--lambda", metavar="X", help="Change --policy: bonus of resident experts.")
]
Budget = Annotated[
    str | None,
    typer.Option("--budget", metavar="N|unbounded", help="Change --policy: prefetches per layer and token at most."),
]
Window = Annotated[
    int | None, typer.Option("--window", metavar="W", help="Change --policy: predicted experts that are considered.")
]
Gate = Annotated[
    str | None,
    typer.Option("--gate", metavar="NAME", help="Change --policy: none, or predicted: only if it would run."),
]
CalibrationFile = Annotated[
    Path | None,
    typer.Option(
        "--calibration",
        metavar="FILE",
        help="Warm set, bonus scale and token prior of this model, from edgemoe calibrate. Default: experts 0, 1, 2,"
        " ..., a running scale and no prior.",
    ),
]
Readers = Annotated[
    int | None, typer.Option("--readers", metavar="N", min=1, help="With --ram: reads in flight at once.")
]
Chunk = Annotated[
    int | None,
    typer.Option(
        "--chunk",
        metavar="N",
        min=1,
        help="With --ram: tokens of a prompt that are read at once; fewer need less RAM and read more.",
    ),
]
VerifyReads = Annotated[
    bool, typer.Option("--verify-reads", help="With --ram: read everything twice and compare, to distrust a disk.")
]


def streaming(
    ram: str | None,
    residency: str | None,
    policy: str | None,
    routing: str | None,
    eviction: str | None,
    prefetch: str | None,
    lam: float | None,
    budget: str | None,
    window: int | None,
    gate: str | None,
    calibration: Path | None,
    readers: int | None,
    chunk: int | None,
    verify_reads: bool,
) -> dict[str, Any]:
    """What `edgemoe.generation.load` is given; empty where neither --ram nor --residency is.

    Raises `UserError` for a value that is out of range, and for any of the others without one of those two.
    """
    from edgemoe.cli.options import count_option
    from edgemoe.errors import UserError
    from edgemoe.policy import preset
    from edgemoe.units import Residency, parse_bytes

    overrides = {
        "routing": routing,
        "eviction": eviction,
        "prefetch": prefetch,
        "lam": lam,
        "budget": budget,
        "window": window,
        "gate": gate,
    }
    overrides = {name: value for name, value in overrides.items() if value is not None}
    others = {"policy": policy, "calibration": calibration, "readers": readers, "chunk": chunk, **overrides}
    if ram is None and residency is None:
        given = [name for name, value in others.items() if value is not None] + ["verify-reads"] * verify_reads
        if given:
            name = "lambda" if given[0] == "lam" else given[0]
            raise UserError(f"--{name} is about experts on disk: give --ram or --residency with it")
        return {}
    if budget is not None and budget != "unbounded":
        overrides["budget"] = count_option("--budget", budget, "a number of prefetches or unbounded")
    settings: dict[str, Any] = {
        "ram": None if ram is None else parse_bytes(ram),
        "residency": None if residency is None else Residency.parse(residency),
        "policy": preset(policy or "exact-lru", **overrides),
        "calibration": calibration,
        "readers": readers,
        "chunk": chunk,
        "verify_reads": verify_reads or None,
    }
    return {name: value for name, value in settings.items() if value is not None}
