"""Whether runs differ: paired tests per task, Holm's correction over the table, and what stays unresolved.

The PSR paper's protocol (§6.1, §6.4): the same questions in pairs, one family of tests per table, the mean over tasks
as an interval without a test, and no conclusion of equality from a difference that is not significant.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from edgemoe.errors import UserError
from edgemoe.evaluation.results import Item, Results
from edgemoe.stats import Difference, MeanOverTasks

OF_THE_POLICY = {"policy", "slots", "calibration"}
"""The fields of a config that runs are expected to differ in."""
Verdict = Literal["significant", "nominal", "unresolved"]
Test = Literal["t", "mcnemar", "sign-flip"]


@dataclass(frozen=True)
class Row:
    """One task of one run against the reference."""

    run: str
    task: str
    metric: str
    n: int
    """Pairs."""
    units: int
    """Independent ones: groups where the task has them."""
    mean: float
    reference_mean: float
    difference: Difference
    """mean − reference_mean; cluster-robust where the task has groups."""
    binary: bool
    """Whether it is an outcome of 0 or 1 in every run: a right or a wrong answer."""
    won: int | None
    """Outcomes of 1 here and 0 in the reference; None for other metrics."""
    lost: int | None
    test: Test
    """Where `p` comes from: sign-flip over groups, else exact McNemar for 0/1 outcomes, else the paired t-test."""
    p: float
    p_holm: float
    detectable: float | None
    """The smallest true difference that the test finds with 80% probability at α (before correction)."""
    detectable_holm: float | None
    """The same at α over the number of tests, Holm's first step. None where the sample could find none."""
    verdict: Verdict


@dataclass(frozen=True)
class Overall:
    """One run against the reference, on average over tasks: an interval without a test."""

    run: str
    n: int
    """Pairs, of all tasks that count."""
    mean: float
    reference_mean: float
    difference: MeanOverTasks
    binary: bool
    detectable: float | None
    """The smallest true mean difference whose interval at 1 − α would exclude 0 with 80% probability."""


@dataclass(frozen=True)
class Comparison:
    """The table of `edgemoe eval compare`."""

    reference: str
    runs: tuple[str, ...]
    rows: tuple[Row, ...]
    overall: tuple[Overall, ...]
    """Where more than one task counts in the mean, all by the same metric."""
    alpha: float
    family: str
    """What Holm's correction runs over, in words."""
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def compare(
    runs: Sequence[tuple[str, Results]],
    reference: int = 0,
    metric: str | None = None,
    alpha: float = 0.05,
    same_model: bool = True,
    seed: int = 0,
) -> Comparison:
    """Pair every run's items with those of the reference by (task, id), and test each task of each run.

    runs: at least two, each with the name that messages and tables call it by. metric: of all tasks, instead of each
    task's own. same_model: refuse other weights, too; the tokenizer always has to agree. Raises `UserError`, one line,
    for runs that cannot be compared: another kind, tokenizer, model, set of questions or metric, too few pairs.
    """
    if len(runs) < 2:
        raise UserError(f"{len(runs)} result file, expected at least two: a reference and what to compare with it")
    ours = runs[reference]
    others = [run for at, run in enumerate(runs) if at != reference]
    for other in others:
        _check_comparable(ours, other, same_model)
    metrics = {task: metric or ours[1].header.tasks[task].metric for task in ours[1].header.tasks}
    for name, results in runs:
        _check_metrics(name, results, metrics)
    _check_enough(ours, metrics, alpha)
    binary = {task: _is_binary(task, its, [results for _, results in runs]) for task, its in metrics.items()}
    measured = [
        _measure(name, results, ours[1], task, metrics[task], binary[task], seed)
        for name, results in others
        for task in metrics
    ]
    rows = _judged(measured, alpha)
    family = _family(len(metrics), len(others))
    names = tuple(name for name, _ in others)
    overall = _overall(rows, ours[1], names, alpha)
    return Comparison(ours[0], names, rows, overall, alpha, family, _notes(ours, others))


def smallest_sample(alpha: float) -> int:
    """The fewest pairs with which an exact paired test can reach α at all: all n one way have p = 2^(1−n)."""
    return 1 + math.ceil(math.log2(1 / alpha))


@dataclass(frozen=True)
class _Measured:
    """A row before the table is complete: all but what depends on the other rows."""

    fields: dict[str, Any]

    def detectable(self, alpha: float) -> float | None:
        from edgemoe.stats import smallest_difference, smallest_discordance

        row = self.fields
        if row["test"] == "mcnemar":
            return smallest_discordance(row["n"], row["won"] + row["lost"], alpha)
        return smallest_difference(row["difference"].se, row["difference"].df, alpha)


def _measure(
    run: str, results: Results, reference: Results, task: str, metric: str, binary: bool, seed: int
) -> _Measured:
    from edgemoe.stats import clustered_difference, mcnemar, paired_difference, sign_flip

    ours, theirs = results.of(task), reference.of(task)
    values, others = _column(ours, metric), _column(theirs, metric)
    groups = [item.group for item in theirs]
    clustered = groups[0] is not None and len(set(groups)) < len(groups)
    answers = mcnemar(values, others) if binary else None
    found = clustered_difference(values, others, groups) if clustered else paired_difference(values, others)
    test: Test = "sign-flip" if clustered else "mcnemar" if binary else "t"
    p = found.p
    if clustered:
        p = sign_flip(values, others, groups, seed).p
    elif answers:
        p = answers.p
    return _Measured(
        {
            "run": run,
            "task": task,
            "metric": metric,
            "n": found.n,
            "units": found.units,
            "mean": results.mean(task, metric),
            "reference_mean": reference.mean(task, metric),
            "difference": found,
            "binary": binary,
            "won": answers.won if answers else None,
            "lost": answers.lost if answers else None,
            "test": test,
            "p": p,
        }
    )


def _judged(measured: Sequence[_Measured], alpha: float) -> tuple[Row, ...]:
    from edgemoe.stats import holm

    corrected = holm([row.fields["p"] for row in measured], alpha)
    return tuple(
        Row(
            **row.fields,
            p_holm=adjusted,
            detectable=row.detectable(alpha),
            detectable_holm=row.detectable(alpha / len(measured)),
            verdict="significant" if rejected else "nominal" if row.fields["p"] <= alpha else "unresolved",
        )
        for row, adjusted, rejected in zip(measured, corrected.adjusted, corrected.rejected, strict=True)
    )


def _overall(rows: Sequence[Row], reference: Results, runs: Sequence[str], alpha: float) -> tuple[Overall, ...]:
    """The mean over tasks of each run; none where there is one task, or where their metrics do not add up."""
    counted = [row for row in rows if reference.header.tasks[row.task].in_mean]
    units = {"points" if row.binary else row.metric for row in counted}
    if len({row.task for row in counted}) < 2 or len(units) > 1:
        return ()
    return tuple(_mean_of(run, [row for row in counted if row.run == run], alpha) for run in runs)


def _mean_of(run: str, rows: Sequence[Row], alpha: float) -> Overall:
    from edgemoe.stats import mean_over_tasks, smallest_difference

    found = mean_over_tasks([row.difference for row in rows])
    return Overall(
        run,
        n=sum(row.n for row in rows),
        mean=math.fsum(row.mean for row in rows) / len(rows),
        reference_mean=math.fsum(row.reference_mean for row in rows) / len(rows),
        difference=found,
        binary=rows[0].binary,
        detectable=smallest_difference(found.se, found.df, alpha),
    )


def _family(tasks: int, runs: int) -> str:
    tests = tasks * runs
    if tests == 1:
        return "1 test: no correction is needed"
    parts = [f"{tasks} task{'s' * (tasks > 1)}", f"{runs} run{'s' * (runs > 1)}"]
    return f"all {tests} tests of this table ({' × '.join(parts)})"


def _check_comparable(ours: tuple[str, Results], other: tuple[str, Results], same_model: bool) -> None:
    """Raise `UserError` unless two runs answered the same questions with the same tokenizer (and model)."""
    (name, reference), (its, results) = ours, other
    here, there = reference.header, results.header
    if here.kind != there.kind:
        raise UserError(f"{its} holds {there.kind}, {name} holds {here.kind}: compare results of one kind")
    if here.model.tokenizer != there.model.tokenizer:
        raise UserError(
            f"{its} ({there.model.name}) was made with another tokenizer than {name} ({here.model.name}): "
            "compare runs that read the same tokens"
        )
    if same_model and here.model.fingerprint != there.model.fingerprint:
        raise UserError(
            f"{its} is of another model file ({there.model.name}) than {name} ({here.model.name}): compare runs of one "
            "file, or give --any-model"
        )
    different = sorted(set(here.tasks) ^ set(there.tasks))
    if different:
        where = its if different[0] in there.tasks else name
        raise UserError(f"only {where} has the task {different[0]}: evaluate both on the same tasks")
    for task in here.tasks:
        _check_questions(task, ours, other)


def _check_questions(task: str, ours: tuple[str, Results], other: tuple[str, Results]) -> None:
    (name, reference), (its, results) = ours, other
    groups, found = ({item.id: item.group for item in run.of(task)} for run in (reference, results))
    extra = [*(id for id in found if id not in groups), *(id for id in groups if id not in found)]
    if extra:
        where = its if extra[0] in found else name
        raise UserError(
            f"{task}: {len(extra):,} questions are not in both files, such as {extra[0][:40]} in {where} only: "
            "evaluate both on the same questions"
        )
    if reference.header.tasks[task].questions != results.header.tasks[task].questions:
        raise UserError(
            f"{task}: {its} asked its questions differently than {name} (other text, shots or template): evaluate again"
        )
    if groups != found:
        raise UserError(f"{task}: {its} and {name} group the questions differently: evaluate again")


def _check_metrics(name: str, results: Results, metrics: dict[str, str]) -> None:
    for task, metric in metrics.items():
        there = results.metrics(task)
        if metric not in there:
            raise UserError(
                f"{name}: {task} has no metric {metric[:40]}, only {', '.join(there)}: choose with --metric"
            )


def _check_enough(ours: tuple[str, Results], metrics: dict[str, str], alpha: float) -> None:
    least = smallest_sample(alpha)
    for task in metrics:
        items = ours[1].of(task)
        units = len(items) if items[0].group is None else len({item.group for item in items})
        if units < least:
            grouped = units < len(items)
            what = f"{len(items)} pairs in {units} groups" if grouped else f"{units} pairs"
            raise UserError(
                f"{task}: {what}, expected at least {least}{' groups' if grouped else ''}: with fewer no exact paired "
                f"test can reach α = {alpha:g}"
            )


def _notes(ours: tuple[str, Results], others: Sequence[tuple[str, Results]]) -> tuple[str, ...]:
    notes = []
    for name, results in others:
        if results.header.config_hash == ours[1].header.config_hash:
            notes.append(f"{name} and {ours[0]} have the same configuration ({results.header.config_hash})")
        if more := _differing(results.header.config, ours[1].header.config):
            notes.append(f"{name} and {ours[0]} differ in more than the policy: {more}")
        if results.header.seeds != ours[1].header.seeds:
            notes.append(f"{name} and {ours[0]} were run with different seeds")
        if results.header.edgemoe != ours[1].header.edgemoe:
            versions = f"{results.header.edgemoe}, {ours[0]} of {ours[1].header.edgemoe}"
            notes.append(f"{name} is of edgemoe {versions}")
    return tuple(notes)


def _differing(config: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """What else could explain a difference: `engine (torch, llama.cpp), threads (1, 2)`."""
    names = sorted({**config, **other}.keys() - OF_THE_POLICY)
    pairs = {name: (config.get(name, "absent"), other.get(name, "absent")) for name in names}
    return ", ".join(f"{name} ({str(a)[:40]}, {str(b)[:40]})" for name, (a, b) in pairs.items() if a != b)


def _is_binary(task: str, metric: str, runs: Sequence[Results]) -> bool:
    """Only where answers are scored: a divergence that happens to be 0 everywhere is no wrong answer."""
    scored = all(results.header.kind == "tasks" for results in runs)
    return scored and all(item.metrics[metric] in (0, 1) for results in runs for item in results.of(task))


def _column(items: Sequence[Item], metric: str) -> list[float]:
    return [item.metrics[metric] for item in items]
