"""All statistics of several texts at once: what `edgemoe stats` prints, writes as CSV and gives as JSON."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from dataclasses import replace as replaced
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from edgemoe.errors import UserError
from edgemoe.progress import Advance, no_progress
from edgemoe.tracing import stats
from edgemoe.tracing.tracefile import Trace


@dataclass(frozen=True)
class Summary:
    """The frames of `edgemoe.tracing.stats`, rows of all texts below each other; similarity needs two texts or more."""

    traces: list[Trace]
    reuse: pd.DataFrame
    working_set: pd.DataFrame
    load: pd.DataFrame
    drift: pd.DataFrame
    pregate: pd.DataFrame
    cosine: pd.DataFrame
    jaccard: pd.DataFrame
    notes: tuple[str, ...]

    @property
    def tables(self) -> dict[str, pd.DataFrame]:
        """The frames with a row per trace and layer, by name."""
        return {name: getattr(self, name) for name in ("reuse", "working_set", "load", "drift", "pregate")}

    def as_json(self) -> dict[str, Any]:
        """One object of plain values; what is not defined (a lag longer than the text) is null."""
        shape = [
            {"trace": t.name, "tokens": t.n_tokens, "layers": t.n_layers, "experts": t.n_experts, "top_k": t.top_k}
            for t in self.traces
        ]
        similarity = {
            "names": list(self.cosine.index),
            "measure": "cosine",
            "matrix": _plain(self.cosine.to_numpy().tolist()),
            "jaccard": _plain(self.jaccard.to_numpy().tolist()),
        }
        rows = {name: _plain(table.to_dict("records")) for name, table in self.tables.items()}
        return {"traces": shape, **rows, "similarity": similarity, "notes": list(self.notes)}

    def write_csv(self, path: Path) -> list[Path]:
        """A table per file in a folder, or, if the name ends in .csv, one long table (statistic, trace, layer, …)."""
        matrices = {"cosine": self.cosine, "jaccard": self.jaccard}
        try:
            if path.suffix.lower() == ".csv":
                path.parent.mkdir(parents=True, exist_ok=True)
                self._long().to_csv(path, index=False)
                return [path]
            path.mkdir(parents=True, exist_ok=True)
            for name, table in self.tables.items():
                table.to_csv(path / f"{name}.csv", index=False)
            for name, matrix in matrices.items():
                matrix.to_csv(path / f"similarity-{name}.csv", index_label="trace")
            return [path / f"{name}.csv" for name in (*self.tables, *(f"similarity-{name}" for name in matrices))]
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}; name a .csv file or a folder") from None

    def _long(self) -> pd.DataFrame:
        """Columns statistic, trace, layer, at, value; `at` is the lag, coverage or width, or the other trace."""
        parts = []
        for name, table in self.tables.items():
            at = next((column for column in ("lag", "coverage", "width") if column in table), None)
            keys = ["trace", "layer", *([at] if at else [])]
            long = table.melt(id_vars=keys, var_name="statistic")
            long["statistic"] = name + "." + long["statistic"].astype(str)
            parts.append(long.rename(columns={at: "at"}) if at else long)
        for name, matrix in (("cosine", self.cosine), ("jaccard", self.jaccard)):
            long = matrix.rename_axis("trace").reset_index().melt(id_vars="trace", var_name="at")
            parts.append(long.assign(statistic=f"similarity.{name}"))
        frame = pd.concat([part.astype(object) for part in parts if len(part)], ignore_index=True)
        return frame.reindex(columns=["statistic", "trace", "layer", "at", "value"])


def summarise(
    traces: Sequence[Trace],
    lags: Sequence[int] | None = None,
    layer: int | str | None = None,
    advance: Advance = no_progress,
) -> Summary:
    """Every statistic of every text in `traces` (see `stats.split`).

    `layer` keeps one layer (the model's id) or, if it is "all", the rows over all layers; without it both are there.
    Similarity is then that of the one layer. `advance` is told of each text done. Raises `UserError` for no such layer.
    """
    if isinstance(layer, int):
        for trace in traces:
            stats.layer_row(trace, layer)
    frames: dict[str, list[pd.DataFrame]] = {}
    for trace in traces:
        computed: dict[str, Callable[[Trace], pd.DataFrame]] = {
            "reuse": lambda t: stats.reuse(t, lags),
            "working_set": stats.working_set,
            "load": stats.load,
            "drift": stats.drift,
            "pregate": stats.pregate_recall,
        }
        for name, compute in computed.items():
            frames.setdefault(name, []).append(compute(trace))
        advance(1)
    compared = [one_layer(trace, layer) if isinstance(layer, int) else trace for trace in traces]
    return Summary(
        traces=list(traces),
        **{name: _joined(parts, layer) for name, parts in frames.items()},
        cosine=stats.similarity(compared),
        jaccard=stats.similarity(compared, "jaccard"),
        notes=tuple(_notes(compared)),
    )


def one_layer(trace: Trace, layer: int) -> Trace:
    """The routing of one layer, without scores."""
    at = stats.layer_row(trace, layer)
    experts, layers = trace.experts[at : at + 1], trace.layers[at : at + 1]
    return replaced(
        trace, experts=experts, layers=layers, scores=None, pregate=None, weights=None, delta=None, warm=None
    )


def short_names(names: Sequence[str]) -> list[str]:
    """The names without what all of them begin with, up to a delimiter: `qwen3.code`, `qwen3.math` → `code`, `math`."""
    if len(names) < 2:
        return list(names)
    first, last = min(names), max(names)
    same = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    cut = max(first.rfind(delimiter, 0, same) for delimiter in ".:/-_") + 1
    return [name[cut:] or name for name in names]


def _joined(parts: list[pd.DataFrame], layer: int | str | None) -> pd.DataFrame:
    filled = [part for part in parts if len(part)] or parts[:1]
    frame = pd.concat(filled, ignore_index=True)
    return frame if layer is None else frame[frame["layer"] == layer].reset_index(drop=True)


def _notes(traces: Sequence[Trace]) -> list[str]:
    notes = [
        f"{trace.name}: this trace is partial, its run was interrupted" for trace in traces if trace.meta.get("partial")
    ]
    for trace in traces:
        complaints = trace.meta.get("self_check", "passed")
        if complaints != "passed":
            words = complaints if isinstance(complaints, str) else "; ".join(map(str, complaints))
            notes.append(f"{trace.name}: this trace failed its self-check ({words})")
    odd = next((trace for trace in traces if not stats.comparable(traces[0], trace)), None)
    if odd is not None:
        notes.append(
            f"similarity: {traces[0].name} has {_geometry(traces[0])}, {odd.name} has {_geometry(odd)};"
            " only texts of one model are compared"
        )
    models = list(dict.fromkeys(str(trace.meta["model"]) for trace in traces if "model" in trace.meta))
    if odd is None and len(models) > 1:
        notes.append(
            f"similarity: the traces name different models ({', '.join(models)}); expert 5 of one is not of the other"
        )
    return notes


def _geometry(trace: Trace) -> str:
    return f"{trace.n_layers} layers ({trace.layers.min()} to {trace.layers.max()}) of {trace.n_experts} experts"


def _plain(value: Any) -> Any:
    """Values that JSON knows: NaN becomes null, numpy numbers become numbers."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
