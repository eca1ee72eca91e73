"""Capture: run texts through a model on stock llama.cpp and record what its routers choose (arXiv 2608.18261, §4).

report = capture("model.gguf", [Source("code", Path("main.py"))], Path("code.npz"), Settings())
trace = load_trace("code.npz")
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from edgemoe.errors import UserError
from edgemoe.llamacpp.graph import TOPK, Router, find_routers
from edgemoe.llamacpp.hub import Hub
from edgemoe.llamacpp.session import Session, check_limits
from edgemoe.model import Model, read_model
from edgemoe.progress import Advance
from edgemoe.tracing.interrupts import interrupts_ignored
from edgemoe.tracing.output import claim, prepare
from edgemoe.tracing.provenance import provenance
from edgemoe.tracing.recorder import Recorder
from edgemoe.tracing.selfcheck import failures
from edgemoe.tracing.spool import Spool
from edgemoe.tracing.texts import Source, Window, cut_windows, read_sources, tokenize_texts
from edgemoe.units import format_ranges

# Tokens between two writes of the spool when decoding one at a time: what a kill may lose.
DECODE_CHUNK = 64


@dataclass(frozen=True)
class Settings:
    """How to trace. `layers` are the model's own ids; None is all MoE layers."""

    n_ctx: int = 512
    max_tokens: int | None = None  # per domain
    decode: bool = False  # one token at a time, as generation routes
    scores: bool = False
    weights: bool = False
    pregate: bool | None = False  # None: where the model offers one
    layers: tuple[int, ...] | None = None
    n_gpu_layers: int = 0
    n_threads: int | None = None
    n_ubatch: int | None = None

    def __post_init__(self) -> None:
        if self.n_ctx < 2:
            raise UserError(f"--ctx {self.n_ctx}: a window has at least 2 tokens")
        check_limits(self.n_ctx, self.n_threads)


@dataclass(frozen=True)
class Report:
    """What a run captured. `failures` are the self-check's complaints; a partial run was interrupted."""

    path: Path | None  # None: interrupted before the first token
    n_tokens: int
    planned_tokens: int
    n_windows: int
    layers: tuple[int, ...]
    n_experts: int
    top_k: int
    partial: bool
    members: tuple[str, ...] = ()
    failures: list[str] = field(default_factory=list)


def capture(
    model: str | Path,
    sources: Sequence[Source],
    out: Path,
    settings: Settings,
    *,
    overwrite: bool = False,
    watch: Callable[[int], AbstractContextManager[Advance]],
) -> Report:
    """Trace `sources` through `model` into the file `out`.

    `watch` is called with the number of tokens to come and gives the progress callback. KeyboardInterrupt ends the
    run early: what was captured is written and marked partial. Raises `UserError` for everything that a person can
    mend, where possible before the model is loaded; an existing output stays as it was until the new one is whole.
    """
    described = _moe_model(model, settings.layers)
    claim(out, overwrite, [*described.files, *(source.path for source in sources)])
    contents = read_sources(sources)
    hub = Hub()
    with ExitStack() as left:
        with Session(
            described.files[0],
            n_ctx=settings.n_ctx,
            n_batch=settings.n_ctx,
            n_ubatch=settings.n_ubatch,
            n_gpu_layers=settings.n_gpu_layers,
            n_threads=settings.n_threads,
            hub=hub,
        ) as session:
            texts = tokenize_texts(sources, contents, session.tokenize, settings.max_tokens)
            windows = cut_windows(texts, settings.n_ctx, session.bos)
            routers = _routers(session, hub, windows[0].tokens[:1], described, settings.layers)
            recorder = Recorder(hub, described, routers, settings.scores, settings.weights, settings.pregate)
            recorder.verify(session, windows[0].tokens[: session.n_batch])
            meta = provenance(described, session, texts, settings, routers, recorder.n_experts)
            spool = left.enter_context(
                prepare(out, overwrite, [router.layer for router in routers], recorder.widths, meta)
            )
            interrupted = _run(session, recorder, spool, windows, settings.decode, watch)
            # What is left to do is short, and undoing it would lose the trace.
            left.enter_context(interrupts_ignored())
        return _finish(spool, out, sum(len(window.tokens) for window in windows), interrupted)


def _moe_model(path: str | Path, layers: Sequence[int] | None) -> Model:
    model = read_model(path)
    if model.format != "GGUF":
        raise UserError(f"{path}: {model.format}, but llama.cpp runs GGUF files: convert it first")
    if not model.geometry.is_moe:
        raise UserError(f"{path}: a dense model ({model.geometry.architecture}): it has no experts to trace")
    _check_layers(path, layers, model.geometry.moe_layers)
    return model


def _check_layers(path: str | Path, wanted: Sequence[int] | None, there: Sequence[int]) -> None:
    unknown = [layer for layer in wanted or () if layer not in there]
    if unknown:
        raise UserError(f"{path}: layer {unknown[0]} is no MoE layer: they are {format_ranges(there)}")


def _routers(
    session: Session, hub: Hub, tokens: np.ndarray, model: Model, layers: Sequence[int] | None
) -> list[Router]:
    """The wanted routers, found in the graph of one decode."""
    with hub.survey():
        session.decode(tokens)
    found = find_routers(hub.nodes())
    session.clear()
    if not found:
        raise UserError(f"{model.path}: llama.cpp's graph of it has no {TOPK} nodes: nothing to trace")
    _check_layers(model.path, layers, list(found))
    return [found[layer] for layer in sorted(layers if layers is not None else found)]


def _run(
    session: Session,
    recorder: Recorder,
    spool: Spool,
    windows: list[Window],
    decode: bool,
    watch: Callable[[int], AbstractContextManager[Advance]],
) -> bool:
    """Spool every window; whether an interrupt ended it early. Other endings say where the spool is."""
    try:
        with watch(sum(len(window.tokens) for window in windows)) as advance:
            for window in windows:
                session.clear()
                spool.begin_window(window.domain)
                step = min(DECODE_CHUNK, session.n_batch) if decode else session.n_batch
                for start in range(0, len(window.tokens), step):
                    recorder.record(session, spool, window.tokens[start : start + step], start, decode, advance)
    except KeyboardInterrupt:
        return True
    except OSError as error:
        raise UserError(f"{spool.path}: cannot be written ({error.strerror}); what was captured is there") from None
    except UserError as error:
        if spool.n_tokens:
            raise UserError(f"{error}; what was captured until then is in {spool.path}") from None
        spool.remove()
        raise
    return False


def _finish(spool: Spool, out: Path, planned: int, interrupted: bool) -> Report:
    """Check what was captured and turn the spool into the trace file."""
    try:
        n_tokens = spool.n_tokens
        starts = np.array(spool.windows(n_tokens)[0], np.int64)
        report = Report(
            path=out,
            n_tokens=n_tokens,
            planned_tokens=planned,
            n_windows=len(starts),
            layers=spool.layers,
            n_experts=spool.meta["num_experts"],
            top_k=spool.widths["experts"],
            partial=interrupted,
            members=tuple(spool.widths),
        )
        if interrupted and not n_tokens:
            spool.remove()
            return replace(report, path=None)
        if n_tokens > planned or (n_tokens < planned and not interrupted):
            raise UserError(
                f"{spool.path}: holds {n_tokens} tokens where {planned} were to be traced: "
                "something else changed it; remove it and trace again"
            )
        layers = spool.member("experts", n_tokens)
        wrong = failures(layers, report.n_experts, starts, spool.layers, spool.tokens(n_tokens))
        spool.assemble(out, partial=interrupted, self_check=wrong or "passed")
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror}); what was captured is in {spool.path}") from None
    return replace(report, failures=wrong)
