"""`edgemoe probe`: how fast is each tier of this machine's memory?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from edgemoe.machine.ggml_probe import Products
    from edgemoe.machine.gpus import Gpu
    from edgemoe.machine.profile import GpuRates, Profile, RamRates, Ssd

# What `--quick` spends on measuring; starting, compiling and printing take the rest of its 20 seconds.
_QUICK_SECONDS = 16


def probe(
    dir: Annotated[
        Path | None,
        typer.Option("--dir", metavar="DIR", help="Where your models are: its disk is measured. Default: here."),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            "--model",
            metavar="FILE.gguf",
            help="Read this model's own bytes (of a split one, its largest file) instead of a temporary file: nothing"
            " is written to the disk.",
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer kinds of reads and rounds: under 20 seconds instead of minutes.")
    ] = False,
    profile: Annotated[
        Path | None,
        typer.Option(
            "--profile",
            metavar="FILE",
            help="Save the profile here. Default: this machine's, in the user's configuration directory.",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE.png", help="Draw the disk's rate over request size and depth."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Measure this machine: disk, RAM, ggml's expert products, GPUs; and save the profile that predictions stand on.

    The disk is read with O_DIRECT, past the page cache, in requests of 4 KiB to 16 MiB with 1 to 32 in flight, in order
    and at random: from a temporary file without a name, which is gone when the command ends, however it ends, or from a
    model's own bytes. A rate that is the page cache's is refused. RAM is loaded and copied by 1 thread to all.
    Everything is repeated until its median is stable, and said to be unstable if it is not. Nothing else should run.
    """
    from edgemoe.errors import UserError
    from edgemoe.machine.gpus import nvidia_gpus
    from edgemoe.machine.profile import Profile as MachineProfile
    from edgemoe.machine.profile import check_writable, profile_path, save_profile

    if dir and model:
        raise UserError("--dir and --model both say which disk to measure: give one")
    target = profile or profile_path()
    check_writable(target)
    if plot:
        check_writable(plot)
    from datetime import datetime, timezone
    from time import monotonic

    from edgemoe.machine.identity import this_host

    present, start = nvidia_gpus(), monotonic()
    disk, ram = _disk(dir or Path(), _largest_file(model), quick, as_json), _ram(quick, as_json)
    gpus, notes = _gpus(present, quick, as_json)
    products = _products(_QUICK_SECONDS - (monotonic() - start) if quick else None, as_json)
    measured = MachineProfile(
        host=this_host(),
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        ram=ram,
        ssd=disk,
        cpu_experts=products.experts,
        cpu_dense=products.dense,
        cpu_nodes=products.nodes,
        gpus=gpus,
        present_gpus=tuple(sorted(gpu.uuid for gpu in present)),
        quick=quick,
        notes=notes,
    )
    save_profile(measured, target)
    if plot:
        from edgemoe.machine.curve import draw

        draw(disk, plot)
    _print(measured, target, plot, as_json)


def _largest_file(model: Path | None) -> Path | None:
    """The model's file, after its header has been read: a file that is no model is refused."""
    if model is None:
        return None
    from edgemoe.model import read_model

    return max(read_model(model).files, key=lambda path: path.stat().st_size)


def _disk(directory: Path, model: Path | None, quick: bool, quiet: bool) -> Ssd:
    from edgemoe.machine import ssd_probe
    from edgemoe.progress import progress

    grid = ssd_probe.QUICK if quick else ssd_probe.FULL
    with progress("reading the disk", ssd_probe.n_rounds(grid, model), "rounds", quiet) as advance:
        return ssd_probe.probe_ssd(directory, model, grid, advance)


def _ram(quick: bool, quiet: bool) -> RamRates:
    from edgemoe.machine import ram_probe
    from edgemoe.progress import progress

    effort = ram_probe.QUICK if quick else ram_probe.FULL
    threads = ram_probe.quick_thread_counts() if quick else ram_probe.thread_counts()
    with progress("reading RAM", ram_probe.n_rounds(effort, threads), "rounds", quiet) as advance:
        return ram_probe.probe_ram(effort, threads, advance)


def _products(seconds: float | None, quiet: bool) -> Products:
    """ggml's products of every type, or what of a quick plan fits into so many seconds: a round of each at least."""
    from dataclasses import replace

    from edgemoe.machine import ggml_probe
    from edgemoe.progress import progress

    plan = ggml_probe.ProductPlan()
    if seconds is not None:
        plan = ggml_probe.quick_plan()
        # Writing the weights, and nodes without weights, take about as long as two rounds.
        left = min(max(seconds / 2, 0), plan.effort.seconds)
        plan = replace(plan, effort=replace(plan.effort, seconds=left))
    with progress("multiplying by experts", ggml_probe.n_rounds(plan), "rounds", quiet) as advance:
        return ggml_probe.probe_products(plan, advance)


def _gpus(present: list[Gpu], quick: bool, quiet: bool) -> tuple[tuple[GpuRates, ...], tuple[str, ...]]:
    """What was measured, and what to say of GPUs that could not be."""
    if not present:
        return (), ()
    from edgemoe.machine import gpu_probe
    from edgemoe.progress import progress

    with progress("copying to the GPU", gpu_probe.n_rounds(quick), "rounds", quiet) as advance:
        return gpu_probe.probe_gpus(quick, advance)


def _print(measured: Profile, target: Path, plot: Path | None, as_json: bool) -> None:
    if as_json:
        from json import dumps

        from edgemoe.machine.record import to_json

        typer.echo(dumps({"path": str(target), **to_json(measured)}, ensure_ascii=False))
        return
    from edgemoe.cli.probe_tables import show

    show(measured, target, plot)
