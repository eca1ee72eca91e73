"""What a policy costs on text: perplexity, KL and agreement with exact routing, by domain (PSR paper §6.1, §6.6).

Every window is run under exact routing once, and under each policy. A policy has a result file of its own, whose items
are the windows: `edgemoe eval compare` pairs them.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgemoe.errors import UserError
from edgemoe.evaluation.identity import model_id
from edgemoe.evaluation.results import Header, Item, ModelId, Results, Task
from edgemoe.evaluation.subject import Subject
from edgemoe.evaluation.subjects import Runs, check_model, default_engine, subject
from edgemoe.evaluation.windows import SELFGEN, fingerprint_of, text_windows
from edgemoe.evaluation.writer import ResultWriter, refuse_input
from edgemoe.gpu_offload.vocabulary import open_vocabulary
from edgemoe.model import read_model
from edgemoe.policy import Policy
from edgemoe.progress import Advance
from edgemoe.tracing.texts import Source, read_sources
from edgemoe.units import Residency

Watch = Callable[[str, int, str], AbstractContextManager[Advance]]
"""(what, how many, of what) → where progress goes."""


@dataclass(frozen=True)
class Extent:
    """How much: windows of each text, tokens of each, windows that the model writes itself, and their seed."""

    windows: int = 8
    length: int = 256
    selfgen: int = 0
    seed: int = 0


def evaluate(
    path: str | Path,
    sources: Sequence[Source],
    policies: Mapping[str, Policy],
    out: Mapping[str, Path],
    *,
    watch: Watch,
    residency: Residency | None = None,
    calibration: str | Path | None = None,
    engine: str | None = None,
    extent: Extent | None = None,
    runs: Runs | None = None,
    overwrite: bool = False,
) -> dict[str, Results]:
    """Measure `policies`, by name, on a model, and write `out[name]` for each.

    engine: of `edgemoe.evaluation.subjects.ENGINES`; default llama.cpp for a GGUF file and torch for a folder.
    residency: default 50%. runs: how windows are run; its length is that of `extent`. A run that was interrupted, by an
    exception such as KeyboardInterrupt or by a kill, keeps its finished windows: the same call goes on.

    Raises `UserError`, one line, before anything is run, for what cannot be read, steered or written.
    """
    extent = extent or Extent()
    runs = runs or Runs(extent.length)
    if runs.length != extent.length:
        raise ValueError("the windows have one length")
    if extent.selfgen == 1 or extent.selfgen < 0:
        raise UserError(f"--selfgen {extent.selfgen}: an interval needs at least 2 windows")
    for place in out.values():
        refuse_input(place, sources)
    contents = read_sources(sources)
    model = read_model(path)
    check_model(model, extent.length)
    words = open_vocabulary(model)
    try:
        texts = text_windows(sources, contents, words, extent.windows, extent.length)
        prefix = words.bos if words.bos is not None else min(words.eos_tokens, default=None)
        who = model_id(model, words)
    finally:
        words.close()
    name = engine or default_engine(model.path)
    ran = subject(name, model, residency or Residency.parse("50%"), Path(calibration) if calibration else None, runs)
    chosen = {name: ran.completed(policy) for name, policy in policies.items()}
    ran.check(list(chosen.values()))
    seeds = {}
    if extent.selfgen:
        if prefix is None:
            raise UserError(f"{path}: without BOS or end-of-text token nothing begins a text: leave --selfgen out")
        total = extent.selfgen * (extent.length - 1)
        with watch("text of the model's own", total, "tokens") as advance:
            texts[SELFGEN] = ran.sample(extent.selfgen, extent.length, prefix, extent.seed, advance)
        seeds["selfgen"] = extent.seed
    headers = {
        name: Header("divergence", who, ran.configuration(policy), _tasks(texts), seeds)
        for name, policy in chosen.items()
    }
    return _run(ran, who, texts, chosen, headers, out, watch, overwrite)


def _tasks(texts: Mapping[str, Sequence[np.ndarray]]) -> dict[str, Task]:
    """Text that the model wrote is a diagnostic, no domain: it does not count in a mean."""
    return {
        domain: Task("nll", fingerprint_of(windows), len(windows), in_mean=domain != SELFGEN)
        for domain, windows in texts.items()
    }


def _run(
    ran: Subject,
    who: ModelId,
    texts: Mapping[str, Sequence[np.ndarray]],
    policies: Mapping[str, Policy],
    headers: Mapping[str, Header],
    out: Mapping[str, Path],
    watch: Watch,
    overwrite: bool,
) -> dict[str, Results]:
    names = list(policies)
    places = [(domain, str(at)) for domain, windows in texts.items() for at in range(len(windows))]
    windows = [window for found in texts.values() for window in found]
    with ExitStack() as stack:
        writers = [stack.enter_context(ResultWriter(out[name], headers[name], overwrite)) for name in names]

        def finished(at: int, which: int) -> bool:
            return writers[which].has(*places[at])

        left = [at for at in range(len(windows)) if not all(finished(at, which) for which in range(len(names)))]
        settings = list(policies.values())
        with watch(f"{who.name}, {len(left):,} windows", ran.work(windows, settings, finished), "tokens") as advance:
            for at, which, metrics in ran.divergences(windows, settings, finished, advance):
                if not finished(at, which):
                    writers[which].add(Item(*places[at], metrics.means()))
        return {name: writer.finish() for name, writer in zip(names, writers, strict=True)}


@dataclass(frozen=True)
class Estimate:
    """A mean over windows with its 95% interval; windows are the unit."""

    mean: float
    half_width: float


@dataclass(frozen=True)
class Summary:
    """One text, or all of them, under one policy. Everything is per predicted token; counts are over all layers."""

    domain: str
    windows: int
    perplexity_exact: float
    perplexity: float
    excess_nll: Estimate
    """nats, steered − exact, in pairs. On the model's own text it estimates the KL."""
    kl: Estimate
    top1: Estimate
    """Share of the tokens where both rank the same one first."""
    replaced: Estimate
    demand: Estimate
    prefetch: Estimate
    unused: Estimate

    @property
    def copies(self) -> float:
        return self.demand.mean + self.prefetch.mean

    @property
    def excess_perplexity(self) -> float:
        """As a share of the exact one."""
        return float(np.expm1(self.excess_nll.mean))

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "copies": self.copies, "excess_perplexity": self.excess_perplexity}


ALL = "all"


def summarise(results: Results) -> list[Summary]:
    """A line per domain, and one over all (each counting alike, windows as units within each), without selfgen."""
    tasks = results.header.tasks
    domains = [name for name in sorted(tasks) if tasks[name].in_mean]
    lines = [_summary(name, results, [name]) for name in domains]
    if len(domains) > 1:
        lines.append(_summary(ALL, results, domains))
    return lines + [_summary(name, results, [name]) for name in sorted(tasks) if not tasks[name].in_mean]


def _summary(name: str, results: Results, domains: Sequence[str]) -> Summary:
    from edgemoe.stats import mean_over_tasks, paired_difference

    def column(domain: str, metric: str) -> np.ndarray:
        return np.array([item.metrics[metric] for item in results.of(domain)], np.float64)

    def estimate(metric: str, minus: str | None = None) -> Estimate:
        parts = []
        for domain in domains:
            values = column(domain, metric)
            parts.append(paired_difference(values, column(domain, minus) if minus else np.zeros(len(values))))
        whole = mean_over_tasks(parts)
        return Estimate(whole.mean, whole.half_width)

    counted = {metric: estimate(metric) for metric in ("kl", "top1", "replaced", "demand", "prefetch", "unused")}
    return Summary(
        name,
        sum(results.header.tasks[domain].items for domain in domains),
        float(np.exp(estimate("nll_exact").mean)),
        float(np.exp(estimate("nll").mean)),
        estimate("nll", "nll_exact"),
        **counted,
    )
