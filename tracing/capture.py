"""Capture: run texts through a model on stock llama.cpp and record what its routers choose (arXiv 2608.18261, §4).

report = capture("model.gguf", [Source("code", Path("main.py"))], Path("code.npz"), Settings())
trace = load_trace("code.npz")
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from edgemoe.errors import UserError
from edgemoe.llamacpp.graph import TOPK, Router, find_routers
from edgemoe.llamacpp.hub import Hub
from edgemoe.llamacpp.session import Session
from edgemoe.model import Model, read_model
from edgemoe.progress import Advance
from edgemoe.tracing.output import claim, prepare
from edgemoe.tracing.provenance import provenance
from edgemoe.tracing.recorder import Recorder
from edgemoe.tracing.selfcheck import failures
from edgemoe.tracing.spool import Spool
from edgemoe.tracing.texts import Source, Window, check_sources, cut_windows, read_texts

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
    pregate: bool = False
    layers: tuple[int, ...] | None = None
    n_gpu_layers: int = 0
    n_threads: int | None = None
    n_ubatch: int | None = None

    def __post_init__(self) -> None:
        if self.n_ctx < 2:
            raise UserError(f"--ctx {self.n_ctx}: a window has at least 2 tokens")


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
    claim(out, overwrite)
    check_sources(sources)
    described = _moe_model(model, settings.layers)
    hub = Hub()
    with Session(
        described.files[0],
        n_ctx=settings.n_ctx,
        n_batch=settings.n_ctx,
        n_ubatch=settings.n_ubatch,
        n_gpu_layers=settings.n_gpu_layers,
        n_threads=settings.n_threads,
        hub=hub,
    ) as session:
        texts = read_texts(sources, session.tokenize, settings.max_tokens)
        windows = cut_windows(texts, settings.n_ctx, session.bos)
        routers = _routers(session, hub, windows[0].tokens[:1], described, settings.layers)
        recorder = Recorder(hub, described, routers, settings.scores, settings.weights, settings.pregate)
        recorder.verify(session, windows[0].tokens[: session.n_batch])
        meta = provenance(described, session, texts, settings, routers, recorder.n_experts)
        spool = prepare(out, overwrite, [router.layer for router in routers], recorder.widths, meta)
        planned = sum(len(window.tokens) for window in windows)
        try:
            with watch(planned) as advance:
                _run(session, recorder, spool, windows, settings.decode, advance)
            interrupted = False
        except KeyboardInterrupt:
            interrupted = True
        except OSError as error:
            raise UserError(f"{spool.path}: cannot be written ({error.strerror}); what was captured is there") from None
        except UserError as error:
            if spool.n_tokens:
                raise UserError(f"{error}; what was captured until then is in {spool.path}") from None
            spool.remove()
            raise
    return _finish(spool, out, planned, interrupted)


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
        raise UserError(f"{path}: layer {unknown[0]} is no MoE layer: they are {_ranges(there)}")


def _ranges(ids: Sequence[int]) -> str:
    """`1-3, 5` of 1, 2, 3, 5."""
    runs: list[list[int]] = []
    for i in ids:
        if runs and i == runs[-1][-1] + 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


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
    session: Session, recorder: Recorder, spool: Spool, windows: list[Window], decode: bool, advance: Advance
) -> None:
    for window in windows:
        session.clear()
        spool.begin_window(window.domain)
        step = min(DECODE_CHUNK, session.n_batch) if decode else session.n_batch
        for start in range(0, len(window.tokens), step):
            recorder.record(session, spool, window.tokens[start : start + step], start, decode, advance)


def _finish(spool: Spool, out: Path, planned: int, interrupted: bool) -> Report:
    """Check what was captured and turn the spool into the trace file."""
    report = Report(
        path=out,
        n_tokens=spool.n_tokens,
        planned_tokens=planned,
        n_windows=len(spool.windows()[0]),
        layers=spool.layers,
        n_experts=spool.meta["num_experts"],
        top_k=spool.widths["experts"],
        partial=interrupted,
        members=tuple(spool.widths),
    )
    if not report.n_tokens:
        spool.remove()
        return Report(**{**vars(report), "path": None})
    starts = np.array(spool.windows()[0], np.int64)
    wrong = failures(spool.member("experts"), report.n_experts, starts, spool.layers)
    try:
        spool.assemble(out, partial=interrupted, self_check=wrong or "passed")
    except OSError as error:
        raise UserError(
            f"{out}: cannot be written ({error.strerror}); what was captured is in {spool.path.name}"
        ) from None
    return Report(**{**vars(report), "failures": wrong})
