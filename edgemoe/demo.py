"""The demonstration: trace the shipped model on its four texts, and say in plain numbers what a cache would gain."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from edgemoe.data import DOMAINS
from edgemoe.errors import UserError
from edgemoe.progress import Advance
from edgemoe.tracing import Trace, load_trace
from edgemoe.tracing.capture import Settings, capture
from edgemoe.tracing.pictures import hit_rate_by_capacity, save, write_all
from edgemoe.tracing.simulate import simulate
from edgemoe.tracing.stats import split
from edgemoe.tracing.summary import Summary, summarise
from edgemoe.tracing.texts import Source

RULES = ("lru", "static-oracle", "belady")
PRESETS = ("exact-lru", "psr-gated")
SHARES = (0.125, 0.25, 0.5)
HEADLINE, STEERED = 0.25, 0.5  # the shares that the findings speak of


@dataclass(frozen=True)
class Findings:
    """What a newcomer should remember. Rates are shares of the expert loads, over all layers and texts."""

    capacity: int  # slots per layer at the headline share
    lru: float
    fixed: float  # the best fixed set, chosen with hindsight
    belady: float
    reuse: float
    chance: float
    working_set: float  # share of the experts that serves 95% of a text's loads, mean over texts
    least_alike: tuple[str, str]
    shared: float  # Jaccard index of their 95% sets
    loads_per_token: int
    steered_capacity: int
    exact_copies: float  # per token, exact routing with LRU
    steered_copies: float  # per token, psr-gated: demand and prefetch
    replaced: float  # per token: executed experts that the router would not have chosen


@dataclass(frozen=True)
class Demo:
    trace: Trace
    path: Path
    summary: Summary
    caches: pd.DataFrame  # rows of `simulate`
    findings: Findings
    pictures: list[Path]


def demo_file(name: str) -> Path:
    """A file of the package's data; a `UserError` where the installation lacks it."""
    path = Path(str(files("edgemoe.data").joinpath(name)))
    if not path.exists():
        raise UserError(f"{path}: missing from this installation; install edgemoe again")
    return path


def demo_model() -> Path:
    return demo_file("demo-moe-32m-q8_0.gguf")


def record(directory: Path, max_tokens: int, watch: Callable[[int], AbstractContextManager[Advance]]) -> Path:
    """Trace the four texts, `max_tokens` of each, with scores and pre-gate, into `directory/demo.npz`.

    Raises KeyboardInterrupt if it was interrupted; what was captured is then in the file.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make {directory}: {error.strerror}; give another with --plots") from None
    out = directory / "demo.npz"
    sources = [Source(domain, demo_file(f"{domain}.txt")) for domain in DOMAINS]
    settings = Settings(max_tokens=max_tokens, scores=True, pregate=True)
    report = capture(demo_model(), sources, out, settings, overwrite=True, watch=watch)
    if report.partial:
        raise KeyboardInterrupt
    if report.failures:
        raise UserError(f"{out}: the trace fails its self-check: {report.failures[0]}; run edgemoe doctor")
    return out


def study(path: Path, advance: Advance) -> Demo:
    """Statistics, simulated caches and pictures (beside `path`) of a recorded demo; four steps of `advance`."""
    trace = load_trace(path)
    summary = summarise(split([trace]))
    advance(1)
    shares = sorted({*SHARES, 0.75, 1.0})
    capacities = [round(share * trace.n_experts) for share in shares]
    rules = simulate(trace, capacities, RULES)
    advance(1)
    steered = simulate(trace, [round(STEERED * trace.n_experts)], PRESETS)
    advance(1)
    caches = pd.concat([rules, steered], ignore_index=True)
    pictures = write_all(summary, path.parent)
    pictures.append(save(hit_rate_by_capacity(rules), path.parent / "hit-rate.png"))
    advance(1)
    return Demo(trace, path, summary, caches, _findings(trace, summary, caches), pictures)


def _findings(trace: Trace, summary: Summary, caches: pd.DataFrame) -> Findings:
    at, steered_at = (round(share * trace.n_experts) for share in (HEADLINE, STEERED))
    rows = caches.set_index(["policy", "capacity"])
    reuse = summary.reuse[(summary.reuse["layer"] == "all") & (summary.reuse["lag"] == 1)]
    working = summary.working_set[(summary.working_set["layer"] == "all") & (summary.working_set["coverage"] == 0.95)]
    jaccard = summary.jaccard.to_numpy()
    first, second = np.unravel_index(np.argmin(jaccard), jaccard.shape)
    names = [name.split(":")[-1] for name in summary.jaccard.index]
    gated = rows.loc[("psr-gated", steered_at)]
    return Findings(
        capacity=at,
        lru=float(rows.loc[("lru", at), "hit_rate"]),
        fixed=float(rows.loc[("static-oracle", at), "hit_rate"]),
        belady=float(rows.loc[("belady", at), "hit_rate"]),
        reuse=float(reuse["reuse"].mean()),
        chance=float(reuse["chance"].mean()),
        working_set=float(working["share"].mean()),
        least_alike=(names[int(first)], names[int(second)]),
        shared=float(jaccard[first, second]),
        loads_per_token=trace.n_layers * trace.top_k,
        steered_capacity=steered_at,
        exact_copies=float(rows.loc[("exact-lru", steered_at), "demand_per_token"]),
        steered_copies=float(gated["demand_per_token"] + gated["prefetch_per_token"]),
        replaced=float(gated["replaced_per_token"]),
    )


def as_json(demo: Demo) -> dict[str, Any]:
    """The findings, and where the trace and the pictures are."""
    caches = demo.caches.astype(object).where(demo.caches.notna(), None)
    return {
        "findings": asdict(demo.findings),
        "rows": caches.to_dict("records"),
        "trace": str(demo.path),
        "pictures": [str(path) for path in demo.pictures],
    }
