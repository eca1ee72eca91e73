"""Estimate a `Calibration` from held-out text: PSR paper §4.1 and Appendix B.

Per layer, over all tokens of the text: how often the router's own top-K holds each expert (the warm ranking), the mean
of max − min of the scores that are not masked (the bonus scale Δ̄), and, for each input token x, the frequency with
which an occurrence of x is routed to each expert (the token prior πₗ(x)). Layers are read one after the other, scores
in blocks, so memory does not grow with layers × tokens × experts.
"""

import json
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from edgemoe.calibration import Calibration, TokenPrior, mean_range, ranking, score_ranges
from edgemoe.errors import UserError
from edgemoe.model import Model, read_model
from edgemoe.progress import Advance, no_progress
from edgemoe.tracing.capture import Settings, capture
from edgemoe.tracing.members import blocks, layers, member
from edgemoe.tracing.output import claim
from edgemoe.tracing.predict import predict
from edgemoe.tracing.texts import Source
from edgemoe.tracing.tracefile import Trace
from edgemoe.units import format_bytes

MAX_ENTRIES = 1 << 24
"""Entries of the token prior at most: with counts of two bytes, 64 MiB in memory."""

Layer = tuple[np.ndarray, np.ndarray]  # one layer's experts [T, k] and score ranges [≤ T]


def calibrate(
    model: str | Path,
    sources: Sequence[Source],
    out: Path,
    settings: Settings,
    *,
    overwrite: bool = False,
    watch: Callable[[str, int, str], AbstractContextManager[Advance]],
) -> Calibration:
    """Route `sources` through `model`, estimate, and write the calibration file `out`.

    The scores are spooled to a folder beside `out`, 2 · T · L · (8E + 2k) bytes at most, which is removed whatever ends
    the run. `watch` is called with what is to come, how much of it and in what unit, and gives the progress callback.
    An interrupt leaves nothing, and an existing `out` as it was. Raises `UserError` for everything that a person can
    mend, where possible before the model is loaded.
    """
    described = read_model(model)
    claim(out, overwrite, [*described.files, *(source.path for source in sources)])

    def watch_tokens(total: int) -> AbstractContextManager[Advance]:
        _check_room(out.parent, total, described)
        return watch("calibrating", total, "tokens")

    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as folder:
        path = Path(folder) / "trace.npz"
        try:
            report = capture(model, sources, path, _scored(settings), watch=watch_tokens)
        except UserError as error:
            # The tracer keeps its spool and says where; this one goes.
            raise UserError(str(error).partition("; what was captured")[0]) from None
        if report.partial:
            raise KeyboardInterrupt
        if report.failures:
            raise UserError(f"{model}: its routing fails the self-check ({report.failures[0]}): nothing was written")
        with zipfile.ZipFile(path) as archive, watch("counting", len(report.layers), "layers") as advance:
            found = _from_archive(archive, report.n_experts, advance)
        with zipfile.ZipFile(path) as archive, watch("simulating", len(report.layers), "layers") as advance:
            found = replace(found, hits=predict(archive, found, advance))
    found.save(out)
    return found


def calibration_of(trace: Trace, max_entries: int = MAX_ENTRIES) -> Calibration:
    """Estimate from a trace in memory, which needs token ids and scores and says of which model file it is."""
    if trace.tokens is None or trace.scores is None:
        missing = "token ids" if trace.tokens is None else "scores"
        raise UserError(f"{trace.name}: a calibration needs {missing}, which it lacks: trace it with --scores")
    layers = ((experts, score_ranges(scores)) for experts, scores in zip(trace.experts, trace.scores, strict=True))
    return estimate(trace.name, trace.tokens, trace.layers, trace.n_experts, layers, trace.meta, max_entries)


def _scored(settings: Settings) -> Settings:
    """Settings of the capture: scores, the pre-gate where there is one, all layers, nothing that is not used."""
    return Settings(
        n_ctx=settings.n_ctx,
        max_tokens=settings.max_tokens,
        scores=True,
        pregate=None,
        n_gpu_layers=settings.n_gpu_layers,
        n_threads=settings.n_threads,
        n_ubatch=settings.n_ubatch,
    )


def _check_room(folder: Path, n_tokens: int, model: Model) -> None:
    """Refuse a run whose spool, written once raw and once as an archive, does not fit on the disk."""
    g = model.geometry
    needed = 2 * n_tokens * g.n_moe_layers * (8 * g.n_experts + 2 * g.top_k)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"{folder}: {n_tokens:,} tokens need {format_bytes(needed)} for a while, {format_bytes(free)} are free: "
            "lower --max-tokens or write to another disk"
        )


def _from_archive(archive: zipfile.ZipFile, n_experts: int, advance: Advance) -> Calibration:
    """Estimate from a trace file without loading it."""
    meta = json.loads(str(member(archive, "meta")))
    found = zip(layers(archive, "experts"), map(_ranges, blocks(archive, "scores")), strict=True)
    tokens, ids = member(archive, "tokens"), member(archive, "layers")
    return estimate(meta["model"], tokens, ids, n_experts, found, meta, MAX_ENTRIES, advance)


def _ranges(blocks: Iterator[np.ndarray]) -> np.ndarray:
    return np.concatenate([score_ranges(block) for block in blocks])


def estimate(
    name: str,
    tokens: np.ndarray,  # [T]
    layer_ids: np.ndarray,  # [L]
    n_experts: int,
    layers: Iterable[Layer],
    meta: dict[str, Any],
    max_entries: int = MAX_ENTRIES,
    advance: Advance = no_progress,
) -> Calibration:
    """Estimate from the tokens of a text and, layer by layer, what its router chose and the ranges of its scores.

    `meta` is a trace's: `header_sha256` says of which model. `advance` is told of each layer.
    """
    if "header_sha256" not in meta:
        raise UserError(f"{name}: does not say of which model file it is (no header_sha256): trace it again")
    if len(tokens) == 0:
        raise UserError(f"{name}: the trace holds no tokens")
    counter: _PriorCounter | None = None
    delta, warm = [], []
    for layer, (experts, ranges) in zip(layer_ids, layers, strict=True):
        scale = mean_range(ranges)
        if not np.isfinite(scale):
            raise UserError(f"{name}: layer {layer} has scores that are not numbers: is the model file damaged?")
        counter = counter or _PriorCounter(tokens, (len(layer_ids), n_experts), experts.shape[1], max_entries)
        delta.append(scale)
        warm.append(ranking(experts, n_experts))
        counter.add(experts)
        advance(1)
    assert counter is not None
    return Calibration(
        layers=np.asarray(layer_ids, np.int32),
        n_experts=n_experts,
        delta=np.array(delta, np.float32),
        warm=np.array(warm),
        prior=counter.prior(),
        model=str(meta.get("model", name)),
        header_sha256=tuple(meta["header_sha256"]),
        texts=tuple(meta.get("texts", ())),
        settings={**meta.get("settings", {}), "max_entries": max_entries},
        n_tokens=len(tokens),
        dropped=counter.dropped,
    )


class _PriorCounter:
    """Counts (token, layer, expert) one layer at a time.

    Which tokens get a row is decided first, from the worst case of min(N·k, E) entries per layer for a token seen N
    times: most frequent first, then lowest id, as long as all fit in `max_entries`.
    """

    def __init__(self, tokens: np.ndarray, shape: tuple[int, int], k: int, max_entries: int) -> None:
        self.shape = shape
        ids, at, totals = np.unique(tokens, return_inverse=True, return_counts=True)
        entries = shape[0] * np.minimum(totals * k, shape[1])
        order = np.argsort(-totals, kind="stable")
        kept = np.zeros(len(ids), dtype=bool)
        kept[order[np.cumsum(entries[order]) <= max_entries]] = True
        self.tokens, self.totals = ids[kept].astype(np.int32), totals[kept].astype(np.uint32)
        self.dropped = (int((~kept).sum()), int(totals[~kept].sum()))
        row = np.where(kept, np.cumsum(kept) - 1, -1)
        self._row = row[at.reshape(-1)]  # [T], −1 for a token without a row
        self._found: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def add(self, experts: np.ndarray) -> None:
        """Count the next layer's experts [T, k]."""
        n_layers, n_experts = self.shape
        layer = len(self._found)
        row = np.broadcast_to(self._row[:, None], experts.shape)
        counted = (row >= 0) & (experts >= 0)
        keys, counts = np.unique(row[counted] * n_experts + experts[counted], return_counts=True)
        cells = (keys % n_experts + layer * n_experts).astype(_narrowest(n_layers * n_experts - 1))
        self._found.append(((keys // n_experts).astype(np.int32), cells, counts.astype(self._count_type)))

    @property
    def _count_type(self) -> type[np.unsignedinteger[Any]]:
        return _narrowest(int(self.totals.max(initial=0)))

    def prior(self) -> TokenPrior:
        rows, cells, counts = (np.concatenate(parts) for parts in zip(*self._found, strict=True))
        order = np.argsort(rows, kind="stable")
        starts = np.append(0, np.cumsum(np.bincount(rows, minlength=len(self.tokens))))
        return TokenPrior(self.shape, self.tokens, self.totals, starts.astype(np.int64), cells[order], counts[order])


def _narrowest(largest: int) -> type[np.unsignedinteger[Any]]:
    return np.uint16 if largest < 1 << 16 else np.uint32
