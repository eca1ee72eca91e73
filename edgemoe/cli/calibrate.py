"""`edgemoe calibrate`: what held-out text says of a model's routing, for the steered policies."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgemoe.cli import capture_options as given
from edgemoe.cli.option_groups import spread
from edgemoe.cli.stopping import interrupt_on_sigterm

if TYPE_CHECKING:
    from typing import Any

    from edgemoe.calibration import Calibration

INTERRUPTED = 130


@spread
def calibrate(
    model: given.MoePath,
    files: Annotated[
        list[str],
        typer.Option(
            "-f",
            "--file",
            metavar="[DOMAIN=]FILE",
            help="A UTF-8 text like those to be generated, but none that is evaluated. May be given again; every token"
            " counts alike.",
        ),
    ],
    out: Annotated[
        Path, typer.Option("-o", "--out", metavar="OUT", help="The calibration file to write, like model.calib.")
    ],
    windows: given.Windows,
    loading: given.Loading,
    overwrite: given.Overwrite = False,
    as_json: given.AsJson = False,
) -> None:
    """Estimate what steered routing takes from held-out text: warm set, bonus scale and token prior of every layer.
    The presets are then simulated on that text, so that a run can set its hit rate beside a predicted one.

    The file fits the model file that it was made with, and is refused for another. While it runs, the router's scores
    are spooled beside OUT: at most 16 bytes per token, MoE layer and expert. Of a folder nothing is simulated or
    spooled.

    Exit code 130 if Ctrl-C or SIGTERM ended it: then nothing is written.
    """
    from edgemoe.progress import progress
    from edgemoe.tracing.calibrate import calibrate
    from edgemoe.tracing.capture import Settings
    from edgemoe.tracing.texts import Source

    settings = Settings(
        n_ctx=windows.ctx,
        max_tokens=windows.max_tokens,
        n_gpu_layers=windows.n_gpu_layers,
        n_threads=windows.threads,
    )
    interrupt_on_sigterm()
    sources = [Source.parse(text) for text in files]
    try:
        if folder := loading.folder(model):
            from edgemoe.gpu_offload.harness.folder import calibrate_folder

            found = calibrate_folder(
                folder,
                sources,
                out,
                settings,
                watch=lambda total: progress("calibrating", total, quiet=as_json),
                overwrite=overwrite,
                **vars(loading),
            )
        else:
            found = calibrate(
                model,
                sources,
                out,
                settings,
                overwrite=overwrite,
                watch=lambda what, total, unit: progress(what, total, unit, quiet=as_json),
            )
    except KeyboardInterrupt:
        kept = f"{out} is as it was" if out.exists() else "nothing was written"
        print(f"edgemoe: interrupted: {kept}", file=sys.stderr)  # noqa: T201
        raise typer.Exit(INTERRUPTED) from None
    if as_json:
        _print_json(found, out)
    else:
        _print(found, out)


def _print_json(found: Calibration, out: Path) -> None:
    import json

    fields = {
        "path": str(out),
        "model": found.model,
        "tokens": found.n_tokens,
        "layers": found.layers.tolist(),
        "experts": found.n_experts,
        "delta": found.delta.tolist(),
        "warm": found.warm.tolist(),
        "prior": {
            "tokens": len(found.prior.tokens),
            "entries": len(found.prior.cells),
            "bytes": found.prior.nbytes,
            "dropped_tokens": found.dropped[0],
            "dropped_occurrences": found.dropped[1],
        },
        "hits": _hits(found),
        "texts": list(found.texts),
        "settings": found.settings,
    }
    print(json.dumps(fields, allow_nan=False))  # noqa: T201


def _hits(found: Calibration) -> dict[str, Any] | None:
    """The simulated hit rates, null where a preset is not defined."""
    if found.hits is None:
        return None
    rates = {
        name: [round(float(rate), 4) if rate == rate else None for rate in row]
        for name, row in zip(found.hits.policies, found.hits.rates, strict=True)
    }
    return {"tokens": found.hits.n_tokens, "capacities": found.hits.capacities.tolist(), "rates": rates}


def _print(found: Calibration, path: Path) -> None:
    from edgemoe.cli.output import console, say
    from edgemoe.units import format_bytes

    out, prior, (dropped, occurrences) = console(), found.prior, found.dropped
    say(
        out,
        f"{path}: {found.model}, {len(found.layers)} MoE layers of {found.n_experts} experts, from {found.n_tokens:,} "
        "tokens",
    )
    say(out, f"bonus scale: {found.delta.min():.3g} to {found.delta.max():.3g}, by layer")
    say(out, f"token prior: {len(prior.tokens):,} distinct tokens, {format_bytes(prior.nbytes)} in memory")
    if dropped:
        say(
            out,
            f"no room for {dropped:,} rarer tokens ({occurrences / found.n_tokens:.1%} of the text): their prior is "
            "zero, as for unseen ones",
        )
    if hits := found.hits:
        quarter = max(1, round(found.n_experts / 4))
        rates = {name: hits.at(policy, quarter) for name, policy in hits.policies.items()}
        said = ", ".join(f"{name} {rate:.1%}" for name, rate in rates.items() if rate is not None)
        if said:
            say(out, f"hit rate at 25% = {quarter} slots, simulated on {hits.n_tokens:,} of the tokens: {said}")
    say(out, f"next: edgemoe simulate TRACE --policy psr --calibration {path}")
