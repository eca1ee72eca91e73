"""`edgemoe bench`: what the tiers reach, beside what the machine could do."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgemoe.cli.bench_gpu import gpu
from edgemoe.cli.groups import group
from edgemoe.cli.stopping import interrupt_on_sigterm

if TYPE_CHECKING:
    from collections.abc import Iterator

    from edgemoe.progress import Advance

bench = group("bench", "Measure the tiers beside their physical limits and beside what people run instead.")


@bench.command()
def ssd(
    dir: Annotated[
        Path,
        typer.Option("--dir", metavar="DIR", help="Where the model is written: its disk is measured."),
    ] = Path(),
    size: Annotated[
        str,
        typer.Option("--size", metavar="SIZE", help="Bytes of the synthetic model: Qwen3-30B-A3B with fewer layers."),
    ] = "4GB",
    ram: Annotated[
        str | None,
        typer.Option("--ram", metavar="SIZE", help="Memory for each side. Default: the model's size / 2.5."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            metavar="FILE.npz",
            help="Recorded routing to replay, layer by layer. Default: the demo model's on its texts.",
        ),
    ] = None,
    streams: Annotated[
        str, typer.Option("--streams", metavar="N,N,…", help="Numbers of streams on the recorded routing.")
    ] = "1,8,32",
    threads: Annotated[
        int | None, typer.Option("--threads", metavar="N", min=1, max=512, help="CPU threads. Default: cores.")
    ] = None,
    readers: Annotated[int, typer.Option("--readers", metavar="N", min=1, max=128, help="Reads in flight.")] = 8,
    profile: Annotated[
        Path | None,
        typer.Option(
            "--profile",
            metavar="FILE",
            help="Take RAM's and ggml's rates from this profile. The disk is always measured in the run.",
        ),
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep/--remove", help="Keep the model for another run, or remove it at the end.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Short rounds: to see that it works, not to quote.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Measure the SSD tier: against llama.cpp with mmap in the same memory, the disk, and the wall's prediction.

    Writes a synthetic model, runs the tier and mmap in turns within memory control groups of one size (as root; mmap is
    left out elsewhere, with the reason), replays the tier's reads without inference, decodes several streams on
    recorded routing, and prices each policy on the demo model. Nothing else should run meanwhile.

    Whatever ends it, nothing is left behind but what --keep keeps.
    """
    from edgemoe.bench.report import as_json as figures
    from edgemoe.bench.ssd import Settings, bench_ssd
    from edgemoe.llamacpp.session import default_threads
    from edgemoe.machine.profile import load_profile
    from edgemoe.progress import progress
    from edgemoe.wall.batch import parse_batches
    from edgemoe.wall.rates import parse_budget

    settings = Settings(
        directory=dir,
        size=parse_budget("--size", size),
        ram=parse_budget("--ram", ram) if ram else None,
        trace=trace,
        profile=load_profile(profile) if profile else None,
        keep=keep,
        quick=quick,
        streams=tuple(parse_batches(streams, "--streams")),
        threads=threads or default_threads(),
        readers=readers,
    )
    interrupt_on_sigterm()

    @contextmanager
    def watch(what: str, total: int, unit: str) -> Iterator[Advance]:
        with progress(what, total, unit, quiet=as_json) as advance:
            yield advance

    report = bench_ssd(settings, watch)
    if as_json:
        import json

        typer.echo(json.dumps(figures(report), ensure_ascii=False, allow_nan=False))
        return
    from edgemoe.cli.bench_tables import show

    show(report)


bench.command()(gpu)
