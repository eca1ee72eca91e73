"""Options of the commands that hold some of a model's experts: how many, and which policy chooses them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from edgemoe.policy import Policy

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
        help="How many experts to hold: a share (50%), slots per layer (32) or bytes (6GB). With --device, on it;"
        " else in RAM, instead of --ram or within it.",
    ),
]
PolicyName = Annotated[
    str | None,
    typer.Option(
        "--policy",
        metavar="NAME",
        help="With --ram, --residency or --device: exact-lru (the default), exact-score, exact-prefetch, or one that"
        " steers the router towards the experts that are held and so changes the text a little: cache-prior, psr,"
        " psr-gated, speculative; or the POLICY.json of edgemoe tune.",
    ),
]
Routing = Annotated[
    str | None, typer.Option("--routing", metavar="NAME", help="Change --policy: exact, cache-prior, speculative, tau.")
]
Eviction = Annotated[
    str | None, typer.Option("--eviction", metavar="NAME", help="Change --policy: lru, lfu, static or score.")
]
Prefetch = Annotated[
    str | None,
    typer.Option(
        "--prefetch",
        metavar="NAME",
        help="Change --policy: none, pre-gate or token-prior, which needs a calibration.",
    ),
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
PlanFile = Annotated[
    Path | None,
    typer.Option(
        "--plan",
        metavar="FILE",
        help="With --ram: keep the experts that this plan, from edgemoe wall --plan, puts into RAM or VRAM, besides the"
        " slots of the policy and within --ram.",
    ),
]
Readers = Annotated[
    int | None,
    typer.Option(
        "--readers",
        metavar="N",
        min=1,
        help="With --ram: reads in flight at once. Default: as many as edgemoe probe found this disk to want, or 8.",
    ),
]
Chunk = Annotated[
    int | None,
    typer.Option(
        "--chunk",
        metavar="N",
        min=1,
        help="With --ram or --device: tokens of a prompt that are read at once; fewer need less memory and read more.",
    ),
]
VerifyReads = Annotated[
    bool, typer.Option("--verify-reads", help="With --ram: read everything twice and compare, to distrust a disk.")
]


TopJ = Annotated[
    int | None,
    typer.Option("--top-j", metavar="J", help="Change --policy: the router's best J get the bonus anyway."),
]
Scale = Annotated[
    str | None,
    typer.Option(
        "--scale",
        metavar="fixed|running",
        help="Change --policy: where the bonus's mean range comes from; fixed needs a calibration.",
    ),
]
Tau = Annotated[
    float | None, typer.Option("--tau", metavar="X", help="Change --policy: tolerance of --routing tau, 0 to 1.")
]
Elide = Annotated[
    float | None, typer.Option("--elide", metavar="X", hidden=True, help="Not in llama.cpp: see edgemoe simulate.")
]


@dataclass(frozen=True)
class Streaming:
    """Experts on disk: how many are held, by which policy, and how they are read."""

    ram: Ram = None
    residency: ExpertsHeld = None
    policy: PolicyName = None
    routing: Routing = None
    eviction: Eviction = None
    prefetch: Prefetch = None
    lam: Lambda = None
    top_j: TopJ = None
    scale: Scale = None
    tau: Tau = None
    elide: Elide = None
    budget: Budget = None
    window: Window = None
    gate: Gate = None
    calibration: CalibrationFile = None
    plan: PlanFile = None
    readers: Readers = None
    chunk: Chunk = None
    verify_reads: VerifyReads = False

    def settings(self) -> dict[str, Any]:
        """What `edgemoe.generation.load` is given; empty where neither --ram nor --residency is.

        Raises `UserError` for a value that is out of range, and for any of the others without one of those two.
        """
        from edgemoe.errors import UserError
        from edgemoe.units import Residency, parse_bytes

        if self.ram is None and self.residency is None:
            self._refuse_without_streaming(self.overrides())
            return {}
        if self.elide is not None:
            raise UserError(
                "--elide: llama.cpp always executes the model's k experts: leave it out (edgemoe simulate has it)"
            )
        settings: dict[str, Any] = {
            "ram": None if self.ram is None else parse_bytes(self.ram),
            "residency": None if self.residency is None else Residency.parse(self.residency),
            **self.decided_by(),
            "plan": self.plan,
            "readers": self.readers,
            "chunk": self.chunk,
            "verify_reads": self.verify_reads or None,
        }
        return {name: value for name, value in settings.items() if value is not None}

    def decided_by(self) -> dict[str, Any]:
        """The policy, and the calibration that it runs with, if any; `UserError` for one that needs it and has none."""
        from edgemoe.policy import preset
        from edgemoe.policy.policy_file import calibration_beside

        policy = preset(self.policy or "exact-lru", **self.overrides())
        calibration = self.calibration or calibration_beside(self.policy)
        check_scale(self.scale, [policy], calibration is not None)
        policy.completed(calibration is not None)
        return {"policy": policy, "calibration": calibration}

    def check_model(self, model: Path) -> None:
        """Raise `UserError` for a policy file that was tuned for another model."""
        from edgemoe.generation.tuned import check_policy_file

        check_policy_file(self.policy, model)

    def overrides(self) -> dict[str, Any]:
        """The fields of the policy that were given."""
        from edgemoe.cli.options import budget_option

        given = {name: getattr(self, name) for name in _OVERRIDES} | {"budget": budget_option(self.budget)}
        return {name: value for name, value in given.items() if value is not None}

    def _refuse_without_streaming(self, overrides: dict[str, Any]) -> None:
        from edgemoe.errors import UserError

        others = {name: getattr(self, name) for name in ("policy", "calibration", "plan", "readers", "chunk", "elide")}
        given = [name for name, value in {**others, **overrides}.items() if value is not None]
        given += ["verify_reads"] * self.verify_reads
        if given:
            name = "lambda" if given[0] == "lam" else given[0].replace("_", "-")
            raise UserError(f"--{name} is about experts on disk: give --ram or --residency with it")


_OVERRIDES = ("routing", "eviction", "prefetch", "lam", "top_j", "scale", "tau", "window", "gate")


def check_scale(scale: str | None, policies: Iterable[Policy], known: bool) -> None:
    """Raise `UserError` if --scale fixed was given and nothing says the scale of a policy that needs it.

    Without the option such a policy runs with a running scale, and a note says so; who asks for a fixed one wants that.
    """
    from edgemoe.errors import UserError

    if scale == "fixed" and not known and any(policy.needs_scale for policy in policies):
        raise UserError(
            "--scale fixed needs the bonus scale of a calibration: give --calibration, from edgemoe calibrate, or leave"
            " --scale out"
        )
