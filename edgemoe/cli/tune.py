"""`edgemoe tune`: the policy that copies least within a divergence budget, on one's own text."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgemoe.cli import eval_options as shared
from edgemoe.cli.eval_divergence import Passes
from edgemoe.cli.option_groups import spread
from edgemoe.cli.policy_options import CalibrationFile
from edgemoe.cli.stopping import interrupt_on_sigterm

if TYPE_CHECKING:
    from edgemoe.evaluation.tune import Limits
    from edgemoe.evaluation.tuning import Tuned
    from edgemoe.policy import Policy


@spread
def tune(
    model: shared.ModelOrFolder,
    files: Annotated[
        list[str],
        typer.Option(
            "-f",
            "--file",
            metavar="[DOMAIN=]FILE",
            help="A UTF-8 text like what the model will be used on: its first half calibrates, windows of the rest are"
            " measured. May be given again; texts count alike.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            "-o", "--out", metavar="POLICY.json", help="The policy file; its calibration lies beside it as .calib."
        ),
    ],
    passes: Passes,
    residency: Annotated[
        str,
        typer.Option(
            "--residency", metavar="AMOUNT", help="Experts held: a share (25%), slots per layer (16) or bytes."
        ),
    ] = "50%",
    max_kl: Annotated[
        float, typer.Option("--max-kl", metavar="NATS", help="Mean KL(exact to steered) at most.")
    ] = 0.02,
    max_ppl: Annotated[
        str, typer.Option("--max-ppl", metavar="SHARE", help="Perplexity above that of exact routing at most.")
    ] = "5%",
    lams: Annotated[
        str, typer.Option("--lambda", metavar="LIST", help="Bonuses of the coarse grid, separated by commas.")
    ] = "0.05,0.1,0.2,0.3",
    budgets: Annotated[
        str,
        typer.Option(
            "--budget", metavar="LIST", help="Prefetches per layer and token: 0 (none), 1, 2, ..., unbounded."
        ),
    ] = "0,1",
    widths: Annotated[
        str,
        typer.Option("--window", metavar="LIST", help="How many predicted experts are considered, up to the slots."),
    ] = "4,8",
    gates: Annotated[str, typer.Option("--gate", metavar="LIST", help="none, predicted or both.")] = "none,predicted",
    eviction: Annotated[str, typer.Option("--eviction", metavar="NAME", help="lru, lfu, static or score.")] = "score",
    calibration: CalibrationFile = None,
    windows: Annotated[int, typer.Option("--windows", metavar="N", help="Windows of each text.")] = 8,
    ctx: Annotated[int, typer.Option("--ctx", metavar="T", help="Tokens per window.")] = 256,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw copies against KL into this file.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing policy file.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Sweep steered policies on text and write the one with the fewest copies within a KL and a perplexity limit.

    Copies are counted as the engine makes them. Exact routing is always a candidate, so there is always an answer.
    run, chat, simulate, eval divergence and eval tasks take the file as --policy POLICY.json, with the calibration that
    it names (beside it, or what --calibration was) unless they are given another; they refuse it for another model.

    Interrupted, by Ctrl-C (exit code 130) or a kill, it keeps every finished window, and the same command goes on; so
    does one with other limits or another grid.
    """
    from edgemoe.cli.options import writable_file
    from edgemoe.evaluation.divergence import Extent
    from edgemoe.evaluation.subjects import Runs
    from edgemoe.evaluation.tune import Grid, Limits
    from edgemoe.evaluation.tuning import tune as tuned
    from edgemoe.progress import progress
    from edgemoe.tracing.texts import Source
    from edgemoe.units import Residency

    writable_file("-o", out, (".json",))
    writable_file("--plot", plot, (".png", ".svg", ".pdf"))
    limits = Limits(max_kl, _share(max_ppl))
    grid = Grid(
        tuple(_number("--lambda", part) for part in _parts("--lambda", lams)),
        tuple(_budget(part) for part in _parts("--budget", budgets)),
        tuple(int(_number("--window", part)) for part in _parts("--window", widths)),
        tuple(_parts("--gate", gates)),
        eviction,
    )
    interrupt_on_sigterm()
    try:
        found = tuned(
            model,
            [Source.parse(text) for text in files],
            out,
            watch=lambda what, total, unit: progress(what, total, unit, quiet=as_json),
            residency=Residency.parse(residency),
            limits=limits,
            grid=grid,
            calibration=calibration,
            engine=passes.engine,
            extent=Extent(windows, ctx),
            runs=Runs(ctx, passes.threads, passes.dtype, passes.device, passes.chunk, passes.batch),
            overwrite=overwrite,
        )
    except KeyboardInterrupt:
        print("edgemoe: interrupted: the same command goes on with what is finished", file=sys.stderr)  # noqa: T201
        raise typer.Exit(shared.INTERRUPTED) from None
    if plot:
        _draw(found, limits, plot)
    (_print_json if as_json else _print)(found, limits, out, plot)


def _parts(option: str, text: str) -> list[str]:
    from edgemoe.errors import UserError

    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise UserError(f"{option} {text!r}: expected values separated by commas")
    return parts


def _number(option: str, text: str) -> float:
    from edgemoe.errors import UserError

    try:
        return int(text) if option == "--window" else float(text)
    except ValueError:
        raise UserError(f"{option} {text}: expected numbers separated by commas") from None


def _budget(text: str) -> int | str:
    from edgemoe.cli.options import budget_option

    found = budget_option(text)
    return 0 if found is None else found


def _share(text: str) -> float:
    from edgemoe.errors import UserError

    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise UserError(f"--max-ppl {text}: expected a share of the exact perplexity, like 5%") from None
    if share >= 1 and not text.endswith("%"):
        raise UserError(f"--max-ppl {text}: that is {100 * share:g}% of the exact perplexity: write {text}%, or 0.05")
    return share


def _print_json(found: Tuned, limits: Limits, out: Path, plot: Path | None) -> None:
    import json
    from dataclasses import asdict

    points = [
        {
            "policy": asdict(point.policy),
            **point.measured(),
            "within": point.within(limits),
            "chosen": point is found.chosen,
        }
        for point in found.points
    ]
    said = {
        "path": str(out),
        "plot": str(plot) if plot else None,
        "slots": found.file.slots,
        "policy": asdict(found.chosen.policy),
        "measured": found.file.measured,
        "calibrating": dict(found.calibrating),
        "points": points,
        "resumed": found.resumed,
        "notes": list(found.notes),
    }
    typer.echo(json.dumps(said, allow_nan=False))


def _print(found: Tuned, limits: Limits, out: Path, plot: Path | None) -> None:
    from rich.text import Text

    from edgemoe.cli.output import console, say, say_notes, table
    from edgemoe.evaluation.tune import frontier
    from edgemoe.units import format_bytes

    screen, best = console(), frontier(found.points)
    filled = table("policy", "KL", "ppl", "excess", "copies", "demand", "bytes/token", "")
    for point in sorted(found.points, key=lambda p: p.kl.mean):
        marks = ["frontier"] * (point in best) + ["over"] * (not point.within(limits))
        filled.add_row(
            Text(_called(point.policy)),
            f"{point.kl.mean:.4f} ± {point.kl.half_width:.4f}",
            f"{point.perplexity:.2f}",
            f"{100 * point.excess:+.2f}%",
            f"{point.copies:.2f}",
            f"{point.demand:.2f}",
            format_bytes(point.copied_bytes),
            "chosen" if point is found.chosen else ", ".join(marks),
        )
    screen.print(filled)
    chosen = found.chosen
    kl, excess = f"{chosen.kl.mean:.4f} ± {chosen.kl.half_width:.4f}", f"{100 * chosen.excess:+.2f}%"
    say(
        screen,
        f"{found.file.model['name']}, {found.file.slots} slots per layer: {_called(chosen.policy)} makes "
        f"{chosen.copies:.2f} copies per token at a KL of {kl} (at most {limits.max_kl:g}) and {excess} perplexity "
        f"(at most {100 * limits.max_excess:+g}%).",
    )
    halves = ", ".join(f"the first {format_bytes(cut)} of {name}" for name, cut in found.calibrating.items())
    on = f"Calibrated on {halves}; measured on {found.windows} windows of the rest."
    say(screen, on if halves else f"Calibrated by the given file; measured on {found.windows} windows.")
    beside = [] if not found.calibrating else [out.with_suffix(".calib")]
    notes = list(found.notes)
    if found.resumed:
        notes.append(f"{found.resumed:,} windows of policies had been measured by a run that was interrupted")
    say_notes(screen, notes, [out, *beside, *([plot] if plot else [])])


def _called(policy: Policy) -> str:
    """`psr λ=0.15 n=1 w=8, gated`: what the grid varies."""
    if not policy.uses_bonus:
        return f"exact, {policy.eviction}"
    if policy.prefetch == "none":
        return f"cache-prior λ={policy.lam:g}"
    gated = "" if policy.gate == "none" else ", gated"
    return f"psr λ={policy.lam:g} n={policy.insertions} w={policy.window}{gated}"


def _draw(found: Tuned, limits: Limits, path: Path) -> None:
    from edgemoe.evaluation.tune_picture import draw

    draw(found.points, found.chosen, limits, path)
