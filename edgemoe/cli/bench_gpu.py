"""`edgemoe bench gpu`: the RAM→VRAM tier beside its physical limits."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgemoe.cli.option_groups import spread
from edgemoe.cli.stopping import interrupt_on_sigterm

if TYPE_CHECKING:
    from edgemoe.bench.gpu.run import Report, Settings

_INTERRUPTED = 130


@dataclass(frozen=True)
class Subject:
    """What is decoded."""

    model: Annotated[
        Path | None,
        typer.Option(
            "--model",
            metavar="MODEL",
            help="A model of OLMoE's architecture: a GGUF file, a safetensors folder or a Hugging Face name. Default:"
            " random weights of --geometry, run by recorded routing.",
        ),
    ] = None
    geometry: Annotated[
        str | None,
        typer.Option(
            "--geometry", metavar="NAME", help="olmoe-1b-7b, or olmoe-narrow for a CPU. Default: olmoe-1b-7b."
        ),
    ] = None
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            metavar="FILE.npz",
            help="Recorded routing, of edgemoe trace --scores --pregate. Default: the demo model's on its texts, layers"
            " used again to fill the geometry.",
        ),
    ] = None
    file: Annotated[
        list[Path] | None,
        typer.Option("-f", "--file", metavar="FILE", help="With --model: texts to decode. Default: the demo's."),
    ] = None
    calibration: Annotated[
        Path | None,
        typer.Option("--calibration", metavar="FILE", help="With --model: its calibration, from edgemoe calibrate."),
    ] = None
    device: Annotated[str, typer.Option("--device", metavar="NAME", help="cuda, or cpu to see how it works.")] = "cuda"
    dtype: Annotated[str, typer.Option("--dtype", metavar="TYPE", help="bfloat16 or float32.")] = "bfloat16"


@dataclass(frozen=True)
class Rows:
    """Which rows, and how often."""

    policies: Annotated[
        str | None,
        typer.Option(
            "--policies",
            metavar="LIST",
            help="Presets, each with changes behind colons, like cache-prior:score:J1,psr:n2:w4; λ0.15 gives one a λ of"
            " its own. Default: exact-lru, cache-prior (LRU and score, J 0, 1, 2), psr, psr-gated, speculative.",
        ),
    ] = None
    lam: Annotated[str, typer.Option("--lambda", metavar="X,X,…", help="Bonus of resident experts, one or more.")] = (
        "0.2"
    )
    residency: Annotated[
        str, typer.Option("--residency", metavar="LIST", help="Experts held: shares, or slots per layer.")
    ] = "50%,25%"
    executors: Annotated[
        str | None,
        typer.Option(
            "--executors",
            metavar="LIST",
            help="device (one graph per token), host (a host in every layer, as in the paper), physical (that, routing"
            " on the experts whose copies are issued), throttled (host, prefetching what the link has room for), cpu."
            " Default: the device's.",
        ),
    ] = None
    rounds: Annotated[int, typer.Option("--rounds", metavar="N", min=1, help="Rounds of all rows in turns.")] = 3
    windows: Annotated[int, typer.Option("--windows", metavar="N", min=1, help="Windows in each round.")] = 4
    tokens: Annotated[int, typer.Option("--tokens", metavar="T", min=4, help="Tokens of each window at most.")] = 256
    generate: Annotated[
        int, typer.Option("--generate", metavar="N", min=0, help="Tokens of free generation; 0 leaves it out.")
    ] = 64
    prompt: Annotated[
        int | None,
        typer.Option(
            "--prompt",
            metavar="N",
            min=0,
            help="Tokens of the prompts that are timed; 0 leaves them out. Default: 512, on the CPU 64.",
        ),
    ] = None
    determinism: Annotated[
        int,
        typer.Option(
            "--determinism", metavar="N", min=0, help="Tokens decoded in every way of moving bytes; 0 leaves it out."
        ),
    ] = 48
    seconds: Annotated[
        float | None,
        typer.Option("--seconds", metavar="S", help="Begin no further round or part once this would be passed."),
    ] = None


@spread
def gpu(
    subject: Subject,
    rows: Rows,
    quality: Annotated[
        list[Path] | None,
        typer.Option(
            "--quality",
            metavar="RESULTS.json",
            help="Results of edgemoe eval divergence, or a folder of them: KL beside the rows of the same policy and"
            " slots. May be given again.",
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            metavar="llama.cpp",
            help="Also time llama.cpp with CUDA at equal expert memory, best of several splits.",
        ),
    ] = None,
    dir: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            metavar="DIR",
            help="With --against: where llama.cpp's model is written for a while. Default: this folder.",
        ),
    ] = None,
    pictures: Annotated[
        Path | None,
        typer.Option("--pictures", metavar="DIR", help="Draw latency, its frontier and the copies into this folder."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Measure decoding with experts in RAM and slots for some on the GPU, every row beside its physical limits.

    The PSR paper's protocol: teacher-forced windows through the decode path, rows in turns over several rounds; time
    per token and its tail, copies, the link's and the memory's time, and the least time that any scheduler could take
    for the same copies. Then free generation, and whether the way in which bytes are moved changes the text.

    Interrupted, it prints what was measured. Nothing else should run meanwhile.
    """
    from edgemoe.cli.options import writable_folder
    from edgemoe.errors import UserError
    from edgemoe.progress import progress

    try:
        from edgemoe.bench.gpu.against import check_llamacpp
        from edgemoe.bench.gpu.run import bench_gpu
    except ModuleNotFoundError as error:
        raise UserError(f"edgemoe bench gpu needs {error.name}: pip install edgemoe[gpu]") from None
    settings = _settings(subject, rows, quality)
    writable_folder("--pictures", pictures)
    if against is not None:
        if against != "llama.cpp":
            raise UserError(f"--against {against}: expected llama.cpp")
        writable_folder("--dir", dir)
        check_llamacpp()
    elif dir is not None:
        raise UserError("--dir is where --against llama.cpp writes its model: give both, or neither")
    interrupt_on_sigterm()
    report = bench_gpu(settings, lambda what, total, unit: progress(what, total, unit, quiet=as_json))
    if against is not None and not report.interrupted:
        _compare(settings, report, dir or Path(), as_json)
    _show(report, pictures, as_json)
    if report.interrupted:
        print("edgemoe: interrupted: what was measured until then is above", file=sys.stderr)  # noqa: T201
        raise typer.Exit(_INTERRUPTED)


def _settings(subject: Subject, rows: Rows, quality: list[Path] | None) -> Settings:
    from edgemoe.bench.gpu.choices import DEFAULT, parse_lambdas, parse_policies
    from edgemoe.bench.gpu.run import DEFAULT_GEOMETRY, Settings
    from edgemoe.errors import UserError

    if subject.model is None and (subject.file or subject.calibration):
        raise UserError("--file and --calibration belong to a real model: give --model with them")
    if subject.model is not None and subject.trace is not None:
        raise UserError("--trace is for random weights: a real model routes by itself, leave one out")
    if subject.model is not None and subject.geometry is not None:
        raise UserError("--geometry is of random weights: a real model has its own, leave one out")
    return Settings(
        model=subject.model,
        geometry=subject.geometry or DEFAULT_GEOMETRY,
        trace=subject.trace,
        texts=tuple(subject.file or ()),
        calibration=subject.calibration,
        device=subject.device,
        dtype=subject.dtype,
        policies=parse_policies(DEFAULT if rows.policies is None else rows.policies, parse_lambdas(rows.lam)),
        residencies=_list(rows.residency),
        executors=_list(rows.executors or ""),
        rounds=rows.rounds,
        windows=rows.windows,
        tokens=rows.tokens,
        generate=rows.generate,
        prompt=rows.prompt,
        determinism=rows.determinism,
        quality=tuple(quality or ()),
        seconds=rows.seconds,
    )


def _list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _compare(settings: Settings, report: Report, directory: Path, quiet: bool) -> None:
    from edgemoe.bench.gpu.against import compare
    from edgemoe.errors import UserError
    from edgemoe.progress import progress

    try:
        report.against = compare(
            settings.model,
            settings.geometry,
            {row.share: row.slots / report.n_experts for row in report.rows if row.slots < report.n_experts},
            directory=directory,
            position=report.window_tokens // 2,
            watch=lambda what, total, unit: progress(what, total, unit, quiet=quiet),
        )
    except KeyboardInterrupt:
        report.interrupted = True
    except UserError as error:  # what was measured before is worth more
        report.notes += (f"llama.cpp was not timed: {error}",)


def _show(report: Report, pictures: Path | None, as_json: bool) -> None:
    written = []
    if pictures is not None:
        from edgemoe.bench.gpu.pictures import draw

        written = draw(report, pictures)
    if as_json:
        import json

        from edgemoe.bench.gpu.report import as_json as figures

        typer.echo(json.dumps(figures(report), ensure_ascii=False, allow_nan=False))
        return
    from edgemoe.cli.bench_gpu_tables import show

    show(report, written)
