"""Texts through a Hugging Face folder under transformers: the trace and the calibration of models without a GGUF file.

What `edgemoe.tracing.capture` and `edgemoe.tracing.calibrate` do on llama.cpp, of the same texts in the same windows.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import nn

from edgemoe.calibration import Calibration
from edgemoe.errors import UserError
from edgemoe.gpu_offload.harness.calibrate import calibrate_model
from edgemoe.gpu_offload.harness.families import find_routers
from edgemoe.gpu_offload.harness.loading import load
from edgemoe.gpu_offload.harness.record import Level, Record, trace_of
from edgemoe.gpu_offload.harness.steer import steer
from edgemoe.gpu_offload.harness.windows import passes, stacked
from edgemoe.gpu_offload.vocabulary import FolderVocabulary
from edgemoe.model import Model
from edgemoe.policy import Policy
from edgemoe.progress import Advance
from edgemoe.tracing.capture import Report, Settings
from edgemoe.tracing.output import claim
from edgemoe.tracing.provenance import described
from edgemoe.tracing.selfcheck import failures
from edgemoe.tracing.texts import Source, Text, Window, cut_windows, read_sources, tokenize_texts
from edgemoe.tracing.tracefile import save_trace

Watch = Callable[[int], AbstractContextManager[Advance]]


def calibrate_folder(
    model: Model,
    sources: Sequence[Source],
    out: Path,
    settings: Settings,
    *,
    watch: Watch,
    overwrite: bool = False,
    dtype: str | None = None,
    device: str | None = None,
) -> Calibration:
    """Route `sources` exactly, estimate, and write the calibration file `out`; an interrupt leaves nothing.

    settings: windows, tokens and threads. dtype, device: as of `load`, by default bfloat16 on the CPU. Memory: T · L ·
    (2k + 4) bytes. watch: given the number of tokens to come. Raises `UserError` for everything that a person can mend.
    """
    loaded, texts, windows = _opened(model, sources, out, settings, overwrite, dtype, device)
    whole = [window.tokens for window in windows if len(window.tokens) > 1]
    with watch(sum(map(len, whole))) as advance:
        found = calibrate_model(loaded, whole, texts=described(texts), advance=advance)
    found.save(out)
    return found


def trace_folder(
    model: Model,
    sources: Sequence[Source],
    out: Path,
    settings: Settings,
    *,
    watch: Watch,
    overwrite: bool = False,
    dtype: str | None = None,
    device: str | None = None,
) -> Report:
    """Trace `sources` under exact routing into the file `out`. An interrupt keeps the windows that are finished.

    Scores and pre-gates are held in memory, 4 · T · L · E bytes each. Otherwise as `calibrate_folder`.
    """
    if settings.weights or settings.layers is not None:
        raise UserError("--weights and --layers: a folder's trace has all layers and no weights: leave them out")
    loaded, texts, windows = _opened(model, sources, out, settings, overwrite, dtype, device)
    planned = sum(len(window.tokens) for window in windows)
    level: Level = "scores" if settings.scores or settings.pregate else "decisions"
    n_experts = find_routers(loaded)[0].n_experts
    records: list[Record] = []
    with steer(loaded, Policy(), n_experts, record=level) as exact:
        partial = _run(loaded, windows, records, exact.take, 1 if settings.decode else None, watch)
        about = exact.provenance(batch=1, chunk=1 if settings.decode else settings.n_ctx)
    tokens = sum(len(record.tokens) for record in records)
    report = Report(
        path=out if records else None,
        n_tokens=tokens,
        planned_tokens=planned,
        n_windows=len(records),
        layers=tuple(about["layers"]),
        n_experts=n_experts,
        top_k=about["top_k"],
        partial=partial,
    )
    if not records:
        return report
    trace = trace_of(records, about, out.stem, [window.domain for window in windows[: len(records)]])
    wrong = failures(trace.experts, n_experts, trace.windows, report.layers, trace.tokens)
    said = {
        "texts": described(texts),
        "settings": asdict(settings),
        "partial": partial,
        "self_check": wrong or "passed",
    }
    trace = replace(
        trace,
        scores=trace.scores if settings.scores else None,
        pregate=trace.pregate if settings.pregate else None,
        meta={**trace.meta, **said},
    )
    save_trace(trace, out)
    members = tuple(name for name in ("experts", "scores", "pregate") if getattr(trace, name) is not None)
    return replace(report, members=members, failures=wrong)


def _run(
    loaded: nn.Module,
    windows: Sequence[Window],
    records: list[Record],
    take: Callable[[], list[Record]],
    chunk: int | None,
    watch: Watch,
) -> bool:
    """Run every window; whether an interrupt ended it early. `records` has those that are finished."""
    try:
        with watch(sum(len(window.tokens) for window in windows)) as advance:
            for window in windows:
                for _ in passes(loaded, stacked(loaded, [window.tokens]), chunk):
                    pass
                records += take()
                advance(len(window.tokens))
    except KeyboardInterrupt:
        return True
    return False


def _opened(
    model: Model,
    sources: Sequence[Source],
    out: Path,
    settings: Settings,
    overwrite: bool,
    dtype: str | None,
    device: str | None,
) -> tuple[nn.Module, list[Text], list[Window]]:
    """The model and the windows of the texts, all that can be refused early refused before the weights are read."""
    import transformers

    if settings.n_gpu_layers:
        raise UserError("--n-gpu-layers is for GGUF files, --device for a folder: leave it out")
    if not model.geometry.is_moe:
        raise UserError(f"{model.path}: a dense model ({model.geometry.architecture}): it has no experts to trace")
    claim(out, overwrite, [*model.files, *(source.path for source in sources)])
    contents = read_sources(sources)
    words = FolderVocabulary(model.path)
    texts = tokenize_texts(sources, contents, words.tokenize, settings.max_tokens)
    if settings.n_threads:
        torch.set_num_threads(settings.n_threads)
    transformers.utils.logging.disable_progress_bar()  # progress is the command's to show
    loaded, _ = load(model.path, dtype=dtype or "bfloat16", device=device or "cpu")
    return loaded, texts, cut_windows(texts, settings.n_ctx, words.bos)
