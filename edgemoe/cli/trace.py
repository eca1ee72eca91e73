"""`edgemoe trace`: which experts a model's routers choose for a text, into a trace file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgemoe.cli import capture_options as given
from edgemoe.cli.option_groups import spread
from edgemoe.cli.stopping import interrupt_on_sigterm

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from edgemoe.progress import Advance
    from edgemoe.tracing.capture import Report, Settings

INTERRUPTED = 130
FAILED_CHECK = 1


@spread
def trace(
    model: given.MoePath,
    files: Annotated[
        list[str],
        typer.Option(
            "-f",
            "--file",
            metavar="[DOMAIN=]FILE",
            help="A UTF-8 text, and the domain that it stands for (its name, if none is given). May be given again.",
        ),
    ],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="OUT", help="The trace file to write, like code.npz.")],
    windows: given.Windows,
    loading: given.Loading,
    decode: Annotated[
        bool, typer.Option("--decode", help="One token at a time, as generation routes; slower than in batches.")
    ] = False,
    scores: Annotated[
        bool,
        typer.Option(
            "--scores",
            help="Also store the router's scores (float32: what selection ranks), so that policies can be replayed.",
        ),
    ] = False,
    weights: Annotated[bool, typer.Option("--weights", help="Also store the mixing weights (float32).")] = False,
    pregate: Annotated[
        bool,
        typer.Option("--pregate", help="Also store each router's scores one layer early: on the MoE input before it."),
    ] = False,
    layers: Annotated[
        str | None,
        typer.Option("--layers", metavar="N,N-N,...", help="Only these MoE layers, by the model's own numbering."),
    ] = None,
    overwrite: given.Overwrite = False,
    as_json: given.AsJson = False,
) -> None:
    """Record which experts fire: run texts through a model on llama.cpp, or a folder under transformers, and write a
    trace file.

    Exit code 0 for a whole, sound trace; 1 if the trace fails its self-check; 130 if Ctrl-C or SIGTERM ended it
    early. What was captured is kept in all three cases, and the file says which it is.
    """
    from edgemoe.progress import progress
    from edgemoe.tracing.capture import Settings, capture
    from edgemoe.tracing.texts import Source

    settings = Settings(
        n_ctx=windows.ctx,
        max_tokens=windows.max_tokens,
        decode=decode,
        scores=scores,
        weights=weights,
        pregate=pregate,
        layers=_layer_ids(layers),
        n_gpu_layers=windows.n_gpu_layers,
        n_threads=windows.threads,
    )
    interrupt_on_sigterm()
    sources = [Source.parse(text) for text in files]

    def watch(total: int) -> AbstractContextManager[Advance]:
        return progress("tracing", total, quiet=as_json)

    if folder := loading.folder(model):
        from edgemoe.gpu_offload.harness.folder import trace_folder

        report = trace_folder(folder, sources, out, settings, watch=watch, overwrite=overwrite, **vars(loading))
    else:
        report = capture(model, sources, out, settings, overwrite=overwrite, watch=watch)
    if as_json:
        _print_json(report)
    else:
        _print(report, settings)
    if report.failures:
        raise typer.Exit(FAILED_CHECK)
    if report.partial:
        raise typer.Exit(INTERRUPTED)


def _layer_ids(text: str | None) -> tuple[int, ...] | None:
    """`0,3-5` as (0, 3, 4, 5). A range goes no further than any model does; its ids are later held against this one."""
    from edgemoe.errors import UserError
    from edgemoe.llamacpp.session import MAX_LAYERS

    if text is None:
        return None
    ids: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not _is_number(first) or (dash and not _is_number(last)) or int(last or first) < int(first):
            raise UserError(f"--layers {text}: expected layer numbers and ranges, like 0,3-5")
        ids.update(range(int(first), min(int(last or first), max(int(first), MAX_LAYERS)) + 1))
    return tuple(sorted(ids))


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 20


def _print_json(report: Report) -> None:
    import json

    fields = {**vars(report), "path": report.path and str(report.path)}
    print(json.dumps(fields))  # noqa: T201


def _print(report: Report, settings: Settings) -> None:
    from edgemoe.cli.output import console as output

    console = output()
    console.soft_wrap = True
    if report.path is None:
        console.print("interrupted before the first token: nothing was captured, nothing is left", markup=False)
        return
    stored = ", ".join(report.members)
    how = "token by token" if settings.decode else "in batches"
    console.print(
        f"{report.path}: {report.n_tokens:,} tokens in {report.n_windows} windows {how}, {len(report.layers)} MoE "
        f"layers, top-{report.top_k} of {report.n_experts} experts ({stored})",
        markup=False,
    )
    if report.partial:
        console.print(f"PARTIAL: interrupted after {report.n_tokens:,} of {report.planned_tokens:,} tokens")
    for line in report.failures:
        console.print(f"SELF-CHECK FAILED: {line}", markup=False)
    if not report.failures:
        console.print(f"self-check passed; next: edgemoe stats {report.path}", markup=False)
