"""`edgemoe eval divergence`: how far a policy moves a model's predictions from exact routing, on text."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgemoe.cli import eval_options as shared
from edgemoe.cli import policy_options as given
from edgemoe.cli.option_groups import spread
from edgemoe.cli.stopping import interrupt_on_sigterm

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from rich.console import Console
    from rich.table import Table

    from edgemoe.evaluation.divergence import Estimate, Summary
    from edgemoe.evaluation.results import Results

QUALITY = ("exact ppl", "ppl", "excess", "KL", "top-1")
COPIES = ("replaced", "demand", "prefetch", "unused")
Elide = Annotated[
    float | None,
    typer.Option(
        "--elide", metavar="X", help="Change --policy: do not execute experts of a smaller gate (not in llama.cpp)."
    ),
]


@dataclass(frozen=True)
class Changes:
    """What is changed in each policy that it means something to."""

    routing: given.Routing = None
    eviction: given.Eviction = None
    prefetch: given.Prefetch = None
    lam: given.Lambda = None
    top_j: given.TopJ = None
    scale: given.Scale = None
    tau: given.Tau = None
    elide: Elide = None
    budget: given.Budget = None
    window: given.Window = None
    gate: given.Gate = None

    def overrides(self) -> dict[str, Any]:
        from edgemoe.cli.options import budget_option

        fields = {**vars(self), "budget": budget_option(self.budget)}
        return {name: value for name, value in fields.items() if value is not None}


@dataclass(frozen=True)
class Passes:
    """How windows are run."""

    engine: Annotated[
        str | None,
        typer.Option(
            "--engine",
            metavar="NAME",
            help="llama.cpp (GGUF files; one token per decode, as generation routes), torch (Hugging Face folders;"
            " whole windows per pass, decisions as in decoding) or offload (the RAM-to-VRAM engine on the CPU, a token"
            " per decode). Default: llama.cpp for a file, torch for a folder.",
        ),
    ] = None
    threads: shared.Threads = None
    dtype: shared.DType = None
    device: shared.Device = None
    chunk: Annotated[
        int | None,
        typer.Option("--chunk", metavar="N", min=1, help="torch: positions per pass. Default: whole windows."),
    ] = None
    batch: Annotated[
        int | None, typer.Option("--batch", metavar="N", min=1, help="torch: windows per pass. Default: 1.")
    ] = None


@spread
def divergence(
    model: shared.ModelOrFolder,
    files: Annotated[
        list[str],
        typer.Option(
            "-f",
            "--file",
            metavar="[DOMAIN=]FILE",
            help="A UTF-8 text that calibrated nothing. May be given again: results are by domain.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            "-o", "--out", metavar="OUT.json", help="The result file; of several policies, OUT.NAME.json of each."
        ),
    ],
    changes: Changes,
    passes: Passes,
    policy: Annotated[
        str,
        typer.Option(
            "--policy",
            metavar="LIST",
            help="Presets, separated by commas: exact-lru, exact-score, exact-prefetch, cache-prior, psr, psr-gated,"
            " speculative; or policy files of edgemoe tune, with their calibration. Exact routing is run once for all;"
            " exact-lru alone makes a reference for eval compare.",
        ),
    ] = "psr-gated",
    residency: shared.Held = None,
    calibration: given.CalibrationFile = None,
    windows: Annotated[int, typer.Option("--windows", metavar="N", help="Windows of each domain.")] = 8,
    ctx: Annotated[int, typer.Option("--ctx", metavar="T", help="Tokens per window.")] = 256,
    selfgen: Annotated[
        int,
        typer.Option(
            "--selfgen",
            metavar="N",
            help="Also N windows that the exact model writes itself, at temperature 1: the excess there estimates KL.",
        ),
    ] = 0,
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Of the text that the model writes.")] = 0,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace existing results, once the new ones are whole.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Run text under exact and under steered routing: perplexity, KL, agreement, replaced experts and copies per token.

    Interrupted, by Ctrl-C (exit code 130) or a kill, it keeps every finished window, and the same command goes on.
    """
    from edgemoe.cli.options import writable_file
    from edgemoe.errors import UserError
    from edgemoe.evaluation.divergence import Extent, evaluate
    from edgemoe.evaluation.subjects import Runs
    from edgemoe.policy.config import presets
    from edgemoe.progress import progress
    from edgemoe.tracing.texts import Source

    names = [name.strip() for name in policy.split(",") if name.strip()]
    if not names or len(set(names)) < len(names):
        raise UserError(f"--policy {policy!r}: expected presets, each once, separated by commas")
    policies = presets(names, **changes.overrides())
    point = shared.point_of(names, model, residency, calibration)
    given.check_scale(changes.scale, policies.values(), point.calibration is not None)
    places = _places(names, out)
    for place in places.values():
        writable_file("-o", place)
        if place.exists() and not overwrite:
            raise UserError(f"{place}: exists already: choose another name, or give --overwrite")
    interrupt_on_sigterm()
    try:
        found = evaluate(
            model,
            [Source.parse(text) for text in files],
            policies,
            places,
            watch=lambda what, total, unit: progress(what, total, unit, quiet=as_json),
            residency=point.residency,
            calibration=point.calibration,
            engine=passes.engine,
            extent=Extent(windows, ctx, selfgen, seed),
            runs=Runs(ctx, passes.threads, passes.dtype, passes.device, passes.chunk, passes.batch),
            overwrite=overwrite,
        )
    except KeyboardInterrupt:
        print("edgemoe: interrupted: the same command goes on with what is finished", file=sys.stderr)  # noqa: T201
        raise typer.Exit(shared.INTERRUPTED) from None
    notes = point.notes(next(iter(found.values())).header.config["slots"])
    if as_json:
        _print_json(found, places, notes)
    else:
        _print(found, places, notes)


def _places(names: Sequence[str], out: Path) -> dict[str, Path]:
    """Where each policy's result goes: OUT, or OUT.NAME where there are several."""
    from edgemoe.errors import UserError

    if len(names) == 1:
        return {names[0]: out}
    short = {name: Path(name).name.removesuffix(".json") for name in names}
    twice = next((name for at, name in enumerate(short.values()) if name in list(short.values())[:at]), None)
    if twice:
        raise UserError(f"--policy: two of them are called {twice}, and so would their results be: rename a file")
    return {name: out.with_name(f"{out.stem}.{short[name]}{out.suffix}") for name in names}


def _print_json(found: Mapping[str, Results], places: Mapping[str, Path], notes: Sequence[str]) -> None:
    import json

    from edgemoe.evaluation.divergence import summarise

    runs = [
        {
            "policy": name,
            "path": str(places[name]),
            "config": results.header.config,
            "config_hash": results.header.config_hash,
            "summary": [line.as_json() for line in summarise(results)],
        }
        for name, results in found.items()
    ]
    model = next(iter(found.values())).header.model.name
    typer.echo(json.dumps({"model": model, "runs": runs, "notes": notes}, allow_nan=False))


def _print(found: Mapping[str, Results], places: Mapping[str, Path], notes: Sequence[str]) -> None:
    from rich.text import Text

    from edgemoe.cli.output import console, say, say_notes
    from edgemoe.evaluation.divergence import summarise
    from edgemoe.policy import Policy

    out = console()
    for name, results in found.items():
        config = results.header.config
        how = f"{config['engine']}, {config['slots']} slots per layer, {Policy(**config['policy'])}"
        say(out, Text.assemble((name, "bold"), f" on {results.header.model.name}: {how}"))
        for filled in _tables(out, summarise(results)):
            out.print(filled)
            out.print()
    header = next(iter(found.values())).header
    length = header.config["window"]
    counts = ", ".join(f"{task.items} of {domain}" for domain, task in header.tasks.items())
    say(out, f"Windows of {length:,} tokens ({counts}), ± 95% over windows. Excess is the paired difference in ppl.")
    say(out, "KL(exact ‖ steered) in nats; replaced experts and copies are per token, over all layers.")
    say_notes(out, notes, places.values())


def _tables(out: Console, lines: Sequence[Summary]) -> list[Table]:
    """One table where it fits, otherwise one of the quality and one of the copies."""
    from rich.measure import Measurement

    whole = _table((*QUALITY, *COPIES), lines)
    if Measurement.get(out, out.options.update(max_width=10**6), whole).maximum <= out.width:
        return [whole]
    return [_table(QUALITY, lines), _table(COPIES, lines)]


def _table(names: Sequence[str], lines: Sequence[Summary]) -> Table:
    from rich.text import Text

    from edgemoe.cli.output import table

    filled = table("text", *names)
    for line in lines:
        cells = dict(zip((*QUALITY, *COPIES), _cells(line), strict=True))
        filled.add_row(Text(line.domain), *(cells[name] for name in names))
    return filled


def _cells(line: Summary) -> list[str]:
    import math

    low, high = (math.expm1(line.excess_nll.mean + sign * line.excess_nll.half_width) for sign in (-1, 1))
    return [
        f"{line.perplexity_exact:.2f}",
        f"{line.perplexity:.2f}",
        f"{100 * line.excess_perplexity:+.2f} ± {100 * (high - low) / 2:.2f}%",
        _plus_minus(line.kl, 4),
        f"{100 * line.top1.mean:.1f} ± {100 * line.top1.half_width:.1f}%",
        *(f"{estimate.mean:.2f}" for estimate in (line.replaced, line.demand, line.prefetch, line.unused)),
    ]


def _plus_minus(estimate: Estimate, decimals: int) -> str:
    return f"{estimate.mean:.{decimals}f} ± {estimate.half_width:.{decimals}f}"
