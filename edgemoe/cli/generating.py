"""What `run` and `chat` share: loading with progress, the words on the screen, and one generation from start to end."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from edgemoe.cli.status_line import StatusLine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any

    from edgemoe.cli.recording import Records
    from edgemoe.generation import Options, Step, Writer
    from edgemoe.generation.chat import Message
    from edgemoe.generation.summary import Meter, Summary
    from edgemoe.gpu_offload.engine import OffloadEngine
    from edgemoe.streaming.engine import StreamingEngine

_REDRAW_S = 0.2
_NOTICED_S = 1.0
_COMPILING_S = 3.0  # a busy machine needs some of it to load what was compiled before


@contextmanager
def loaded(model: Path, quiet: bool, streaming: dict[str, Any], records: Records, **settings: Any) -> Iterator[Writer]:
    """A writer on the model, loaded under a progress bar, watched by the trace of `records`, closed at the end."""
    from edgemoe.cli.output import errors, say_notes
    from edgemoe.generation import load
    from edgemoe.generation.loading import check_fit, load_steps
    from edgemoe.progress import progress

    device = streaming.get("device")
    total, nbytes = load_steps(model, streamed=bool(streaming), device=device)
    if streaming and device is None:
        check_fit(model, **streaming, **settings)
        make_ready(quiet)
    megabytes = max(1, round(nbytes / 1e6))
    with progress(f"loading {model.name}", megabytes, "MB", quiet=quiet) as advance, _compiling() as compiling:
        steps = done = 0

        def count(more: int) -> None:
            nonlocal steps, done
            steps += more
            now = steps * megabytes // total
            advance(now - done)
            done = now
            if steps - more < total <= steps and device == "cuda" and not quiet:
                compiling()

        writer = load(model, advance=count, observer=records.live, **streaming, **settings)
    with writer:
        records.about(writer, described(writer), verified="verify_slots" in streaming)
        if not quiet:
            said = notes(writer, calibrated="calibration" in streaming)
            say_notes(errors(), [*said, *beyond_training(model, settings.get("n_ctx"))], ())
        yield writer


@contextmanager
def _compiling() -> Iterator[Callable[[], None]]:
    """Yield what is called when all is read: what then takes its time is compiling kernels, and a line says so."""
    said = "compiling the GPU's kernels: once on this machine"
    timer = threading.Timer(_NOTICED_S, lambda: print(said, file=sys.stderr, flush=True))  # noqa: T201
    timer.daemon = True
    try:
        yield timer.start
    finally:
        timer.cancel()


def make_ready(quiet: bool) -> None:
    """Make the native callback ready, and say so where that takes its time: at the first start on a machine."""
    from edgemoe.streaming.compiled import ready

    done = threading.Event()

    def tell() -> None:
        if done.wait(_COMPILING_S):
            return
        said = "compiling the routing callback: once on this machine, for about 20 s"
        if not sys.stderr.isatty():
            print(said, file=sys.stderr, flush=True)  # noqa: T201
            return
        from rich.console import Console

        with Console(stderr=True).status(said):
            done.wait()

    teller = threading.Thread(target=tell, daemon=True)
    if not quiet:
        teller.start()
    try:
        ready()
    finally:
        done.set()
        if not quiet:
            teller.join()


def notes(writer: Writer, calibrated: bool) -> Iterator[str]:
    """What a person should know of how the experts are held before reading the text."""
    from edgemoe.policy import Policy

    streaming, offloading = _streaming(writer), _offloading(writer)
    engine = streaming or offloading
    if engine is None:
        return
    n_experts, policy = engine.model.geometry.n_experts, engine.policy
    where = "RAM" if not offloading else "VRAM" if offloading.target.is_gpu else "RAM, as on a GPU"
    if offloading:
        yield from _loaded(offloading)
    yield f"{engine.capacity} of {n_experts} experts per layer have a slot in {where}; policy: {policy}"
    if engine.capacity == n_experts and streaming:
        yield "every expert fits: without --ram and --residency llama.cpp may arrange them for speed"
    if not calibrated and policy != Policy():
        scale = ", the bonus scale is a running mean" if policy.uses_bonus else ""
        yield f"no --calibration: the warm set is experts 0 to {engine.capacity - 1}{scale}, there is no token prior"
    if policy.routing != "exact":
        place = "RAM" if streaming else "a slot"
        yield f"the router is steered towards what is in {place}: the text is not exactly the model's own"
    if streaming and not streaming.direct:
        yield "this file system cannot be read past the page cache: what reads leave in it is dropped"


def beyond_training(model: Path, n_ctx: int | None) -> Iterator[str]:
    """What to know of a context that was asked for: not every model goes on well behind what it was trained for."""
    from edgemoe.model import read_model

    if n_ctx is None:
        return
    trained = read_model(model).geometry.n_ctx
    if 0 < trained < n_ctx:
        yield f"-c {n_ctx:,}: the model was trained for {trained:,} tokens of context; text beyond may be poor"


def _loaded(engine: OffloadEngine) -> Iterator[str]:
    """How long loading took, and what drives the GPU."""
    driver = {"device": "which decides for itself", "host": "driven by the host"}
    target = engine.target
    on = f" for {target.name}, {driver[target.executor]}" if target.is_gpu else ""
    yield f"loaded in {engine.load_seconds:.1f} s{on}"
    if target.note:
        yield target.note


def _streaming(writer: Writer) -> StreamingEngine | None:
    """Its engine, if that reads experts from disk. It runs on Linux only, and is not imported where it is not used."""
    if "edgemoe.streaming.engine" not in sys.modules:
        return None
    from edgemoe.streaming.engine import StreamingEngine

    return writer.engine if isinstance(writer.engine, StreamingEngine) else None


def _offloading(writer: Writer) -> OffloadEngine | None:
    """Its engine, if that holds experts in RAM and slots on a device. Where it is not used, torch is not imported."""
    if "edgemoe.gpu_offload.engine" not in sys.modules:
        return None
    from edgemoe.gpu_offload.engine import OffloadEngine

    return writer.engine if isinstance(writer.engine, OffloadEngine) else None


def described(writer: Writer) -> dict[str, Any]:
    """How the experts were held, for `--json`."""
    offloading = _offloading(writer)
    engine = offloading or _streaming(writer)
    if engine is None:
        return {"experts": "resident"}
    return {
        "experts": "offloaded" if offloading else "streamed",
        **(_placed(offloading) if offloading else {}),
        "slots": engine.capacity,
        "policy": str(engine.policy),
        "policy_hash": engine.policy.hash,
        "config_hash": engine.config_hash,
    }


def _placed(engine: OffloadEngine) -> dict[str, Any]:
    target = engine.target
    gpu = {"gpu": target.name, "gpu_index": target.device.index, "executor": target.executor} if target.is_gpu else {}
    return {"device": engine.device, **gpu, "dtype": engine.dtype, "load_s": engine.load_seconds}


def probed(writer: Writer) -> float | None:
    """Bytes per second that `edgemoe probe` measured of where experts come from, in pieces as they are read: of the
    disk, or of the link to this GPU; None without such a figure."""
    from edgemoe.errors import UserError
    from edgemoe.machine.profile import load_profile

    engine, offloading = _streaming(writer), _offloading(writer)
    if offloading and offloading.target.is_gpu:
        try:
            rates = [gpu for gpu in load_profile().gpus if gpu.uuid == offloading.target.uuid]
        except UserError:
            return None
        return rates[0].h2d(offloading.expert_bytes) if rates else None
    if engine is None:
        return None
    model = engine.model
    try:
        ssd = load_profile(model=model.path).ssd
    except UserError:
        return None
    layer = model.geometry.moe_layers[0]
    return ssd.random_expert(max(piece.length for piece in model.expert_slices(layer, 0))) if ssd else None


def predicted(writer: Writer) -> dict[str, Any]:
    """The hit rate that simulation predicted for this policy and capacity, or why there is none."""
    streaming, known = _streaming(writer), writer.calibration
    engine = streaming or _offloading(writer)
    if engine is None:
        return {}
    if known is None:
        return {"unpredicted": "no calibration"}
    if known.hits is None:
        return {"unpredicted": "the calibration is of an earlier version: make it again"}
    if streaming and any(streaming.pins):
        return {"unpredicted": "the calibration's caches pin no experts, this plan does"}
    rate = known.hits.at(engine.policy.hash, engine.capacity)
    if rate is None:
        return {"unpredicted": "the calibration covers presets as they are"}
    return {"predicted_hit_rate": rate}


def offloaded(writer: Writer) -> dict[str, Any]:
    """Where experts and slots are, if experts are held in RAM and slots on a device."""
    engine = _offloading(writer)
    return {"experts_from": "RAM", "vram_in_ram": not engine.target.is_gpu} if engine else {}


def perform(
    writer: Writer, prompt: str | Sequence[Message], options: Options, records: Records, quiet: bool, **more: Any
) -> tuple[str, Summary]:
    """Generate, showing the text (unless `quiet`) and the status line; the text and how it went.

    Ctrl-C ends it like any other end: the summary says `interrupted`. Raises `UserError` for what the prompt or the
    options make impossible.
    """
    from edgemoe.generation.summary import Meter

    meter, text = Meter(writer.engine), []
    meter.begin()
    drawn = 0.0
    try:
        steps = writer.run(prompt, options)
        with StatusLine(quiet) as line:
            first = _first_step(steps, writer, line)
            for step in itertools.chain([first], steps):
                meter.step(step)
                records.add(step, meter, **more)
                text.append(step.text)
                if not quiet:
                    line.write(step.text)
                if line.active and time.monotonic() - drawn > _REDRAW_S:
                    drawn = time.monotonic()
                    line.show(_status(meter))
    except KeyboardInterrupt:
        meter.finish = "interrupted"
    summary = meter.summary(
        seed=writer.seed,
        prompt_tokens=len(writer.prompt),
        reused_tokens=writer.context.reused,
        disk_bytes_per_s=probed(writer),
        **predicted(writer),
        **offloaded(writer),
    )
    return "".join(text), summary


def _first_step(steps: Iterator[Step], writer: Writer, line: StatusLine) -> Step:
    """The first token; until it is there, the line says how much of the prompt has been read."""
    done = threading.Event()
    total = len(writer.prompt)

    def tell() -> None:
        while not done.wait(_REDRAW_S):
            line.show(f"reading the prompt: {min(writer.engine.position, total):,} of {total:,} tokens")

    teller = threading.Thread(target=tell, daemon=True)
    if line.active:
        teller.start()
    try:
        return next(steps)
    finally:
        done.set()
        if line.active:
            teller.join()


def _status(meter: Meter) -> str:
    """`12.3 tok/s · 45 tokens · hit rate 83% · disk 1.2 GB/s · RAM 4.1 GB · context 512 of 4,096`"""
    from edgemoe.cli.output import counted
    from edgemoe.units import format_bytes

    rate, since = meter.recent()
    parts = [f"{rate:.1f} tok/s"] if rate else []
    parts.append(counted(meter.generated, "token"))
    if since.hit_rate is not None:
        parts.append(f"hit rate {since.hit_rate:.0%}")
    if since.read_bytes and rate:
        source = "disk" if not hasattr(meter.engine, "device") else "copies"
        parts.append(f"{source} {format_bytes(since.read_bytes * rate / since.tokens)}/s")
    vram = "as VRAM" if getattr(meter.engine, "device", None) == "cpu" else "VRAM"
    for name, held in (("RAM", since.ram_bytes), (vram, since.vram_bytes)):
        if held:
            parts.append(f"{name} {format_bytes(held)}")
    engine = meter.engine
    return " · ".join([*parts, f"context {engine.position:,} of {engine.n_ctx:,}"])
