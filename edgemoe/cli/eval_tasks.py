"""`edgemoe eval tasks`: benchmarks of lm-evaluation-harness, answered by a model under a policy."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgemoe.cli import eval_options as shared
from edgemoe.cli import policy_options as given
from edgemoe.cli.eval_divergence import Changes
from edgemoe.cli.option_groups import spread
from edgemoe.cli.stopping import interrupt_on_sigterm

if TYPE_CHECKING:
    from edgemoe.evaluation.tasks import Report


@dataclass(frozen=True)
class Running:
    """How questions are answered."""

    engine: Annotated[
        str | None,
        typer.Option(
            "--engine",
            metavar="NAME",
            help="llama.cpp (GGUF files), offload (the RAM-to-VRAM engine on the CPU) or torch (Hugging Face folders)."
            " The first two read prompts in chunks and write one token per decode, torch takes prompts, and the"
            " continuations to score, in one pass. Default: llama.cpp for a file, torch for a folder.",
        ),
    ] = None
    ctx: Annotated[
        int | None,
        typer.Option(
            "--ctx",
            metavar="T",
            min=8,
            help="Most tokens of a question; a longer one loses its beginning. Default: 2048, or what the model holds.",
        ),
    ] = None
    threads: shared.Threads = None
    chunk: Annotated[
        int | None,
        typer.Option("--chunk", metavar="N", min=1, help="llama.cpp, offload: tokens of a prompt per pass."),
    ] = None
    dtype: shared.DType = None
    device: shared.Device = None
    batch: Annotated[
        int | None, typer.Option("--batch", metavar="N", min=1, help="torch: requests per pass. Default: 1.")
    ] = None


@dataclass(frozen=True)
class Asking:
    """Which questions, and how they are put."""

    limit: Annotated[
        int | None, typer.Option("--limit", metavar="N", help="The first N questions of each task only.")
    ] = None
    num_fewshot: Annotated[
        int | None,
        typer.Option("--num-fewshot", metavar="N", help="Examples before each question. Default: as the task says."),
    ] = None
    metric: Annotated[
        str | None,
        typer.Option("--metric", metavar="NAME", help="What eval compare takes. Default: the first of each task."),
    ] = None
    chat: Annotated[
        bool, typer.Option("--chat", help="Write prompts, examples as turns, by the model's chat template.")
    ] = False
    seed: Annotated[
        int, typer.Option("--seed", metavar="N", help="Of the examples, and of texts that a task has sampled.")
    ] = 1234


@spread
def tasks(
    model: shared.ModelOrFolder,
    names: Annotated[
        str,
        typer.Option(
            "--tasks",
            metavar="LIST",
            help="Tasks of lm-eval, separated by commas: names (arc_easy), YAML files, or folders of them. Data files"
            " that a YAML names may lie beside it; others are downloaded.",
        ),
    ],
    out: Annotated[
        Path, typer.Option("-o", "--out", metavar="OUT.json", help="The result file, question by question.")
    ],
    asking: Asking,
    changes: Changes,
    running: Running,
    policy: Annotated[
        str,
        typer.Option(
            "--policy",
            metavar="NAME",
            help="exact-lru, exact-score, exact-prefetch, cache-prior, psr, psr-gated or speculative; or a policy file"
            " of edgemoe tune, with its calibration. One per run.",
        ),
    ] = "psr-gated",
    residency: shared.Held = None,
    calibration: given.CalibrationFile = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing result, once the new one is whole.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Answer benchmarks of lm-evaluation-harness under a policy; eval compare then tests two runs question by question.

    The logical cache starts afresh with every request. Interrupted, by Ctrl-C (exit code 130) or a kill, it keeps every
    finished question, and the same command goes on.
    """
    from edgemoe.cli.options import writable_file
    from edgemoe.errors import UserError
    from edgemoe.evaluation.answering import Setup
    from edgemoe.evaluation.tasks import Asked, evaluate_tasks
    from edgemoe.policy import preset
    from edgemoe.progress import progress

    chosen = preset(policy, **changes.overrides())
    point = shared.point_of([policy], model, residency, calibration)
    given.check_scale(changes.scale, [chosen], point.calibration is not None)
    asked = Asked(asking.limit, asking.num_fewshot, asking.metric, asking.chat, asking.seed)
    writable_file("-o", out)
    if out.exists() and not overwrite:
        raise UserError(f"{out}: exists already: choose another name, or give --overwrite")
    interrupt_on_sigterm()
    try:
        report = evaluate_tasks(
            model,
            [name.strip() for name in names.split(",")],
            chosen,
            out,
            watch=lambda what, total, unit: progress(what, total, unit, quiet=as_json),
            residency=point.residency,
            calibration=point.calibration,
            engine=running.engine,
            asked=asked,
            setup=Setup(running.ctx, running.threads, running.chunk, running.dtype, running.device, running.batch),
            overwrite=overwrite,
        )
    except KeyboardInterrupt:
        print("edgemoe: interrupted: the same command goes on with what is finished", file=sys.stderr)  # noqa: T201
        raise typer.Exit(shared.INTERRUPTED) from None
    report = replace(report, notes=(*report.notes, *point.notes(report.results.header.config["slots"])))
    if as_json:
        _print_json(report, out)
    else:
        _print(report, out)


def _print_json(report: Report, out: Path) -> None:
    import json

    from edgemoe.evaluation.tasks import as_json

    typer.echo(json.dumps(as_json(report, out), allow_nan=False))


def _print(report: Report, out: Path) -> None:
    from rich.text import Text

    from edgemoe.cli.output import console, say, say_notes, table
    from edgemoe.policy import Policy

    header, to = report.results.header, console()
    config = header.config
    how = f"{config['engine']}, {config['slots']} slots per layer, {Policy(**config['policy'])}"
    say(to, Text.assemble((header.model.name, "bold"), f": {how}"))
    filtered = len({score.filter for score in report.table}) > 1
    columns = ["task", "metric", *(["filter"] if filtered else []), "questions", "value", "± s.e."]
    filled = table(*columns, left=("metric", "filter"))
    for score in report.table:
        chosen = [Text(score.filter)] if filtered else []
        error = "–" if score.stderr is None else f"{score.stderr:.4f}"
        filled.add_row(
            Text(score.task),
            Text(score.metric),
            *chosen,
            f"{score.items:,}" if score.items else "–",
            f"{score.value:.4f}",
            error,
        )
    to.print(filled)
    notes = list(report.notes)
    if report.resumed:
        notes.append(f"{report.resumed:,} questions had been answered by a run that was interrupted")
    if report.truncated:
        notes.append(
            f"{report.truncated:,} requests were longer than the context of {config['n_ctx']:,} tokens and lost their"
            " beginning: --ctx makes it larger"
        )
    say_notes(to, notes, [out])
