"""Comparisons: the right test for each task, one family for the table, and nothing compared that may not be."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from evaluations import MODEL, header, items

from edgemoe import stats
from edgemoe.errors import UserError
from edgemoe.evaluation.compare import compare, smallest_sample
from edgemoe.evaluation.results import Results, Task

RNG = np.random.default_rng(12)
BASE = RNG.integers(0, 2, 400)
FLIPS = RNG.random(400) < 0.15
OTHER = np.where(FLIPS, 1 - BASE, BASE)
WORSE = np.where(FLIPS, 0, BASE)


def run(name: str, scores: dict[str, Sequence[float]], group: int | None = None, **other: Any) -> tuple[str, Results]:
    metric = other.pop("metric", "acc")
    head = header({task: len(values) for task, values in scores.items()}, metric, **other)
    return name, Results(head, tuple(i for task, values in scores.items() for i in items(task, values, metric, group)))


def test_right_and_wrong_answers_get_mcnemar() -> None:
    [row] = compare([run("exact", {"arc": BASE}), run("psr", {"arc": OTHER})]).rows
    test = stats.mcnemar(OTHER, BASE)
    assert (row.test, row.p, row.won, row.lost) == ("mcnemar", test.p, test.won, test.lost)
    assert row.difference == stats.paired_difference(OTHER, BASE)
    assert (row.mean, row.reference_mean) == pytest.approx((OTHER.mean(), BASE.mean()))
    assert row.detectable == stats.smallest_discordance(400, test.discordant)
    assert (row.n, row.units, row.run, row.task, row.metric) == (400, 400, "psr", "arc", "acc")


def test_groups_get_cluster_robust_errors_and_sign_flips() -> None:
    [row] = compare([run("exact", {"ifeval": BASE}, group=3), run("psr", {"ifeval": OTHER}, group=3)]).rows
    groups = np.arange(400) // 3
    assert (row.test, row.units, row.n) == ("sign-flip", 134, 400)
    assert row.difference == stats.clustered_difference(OTHER, BASE, groups)
    assert row.p == stats.sign_flip(OTHER, BASE, groups).p
    assert row.detectable == stats.smallest_difference(row.difference.se, 133)
    assert (row.won, row.lost) == (stats.mcnemar(OTHER, BASE).won, stats.mcnemar(OTHER, BASE).lost)


def test_groups_of_one_are_no_groups() -> None:
    alone = compare([run("a", {"t": BASE}), run("b", {"t": OTHER})])
    assert compare([run("a", {"t": BASE}, group=1), run("b", {"t": OTHER}, group=1)]).rows == alone.rows


def test_other_numbers_get_the_t_test() -> None:
    nll, more = RNG.normal(2, 0.3, 40), RNG.normal(0.01, 0.01, 40)
    kind = {"metric": "nll", "kind": "divergence"}
    [row] = compare([run("a", {"prose": nll}, **kind), run("b", {"prose": nll + more}, **kind)]).rows
    assert row.test == "t" and row.won is None and row.p == row.difference.p and not row.binary
    assert row.detectable == stats.smallest_difference(row.difference.se, 39)


def test_a_divergence_of_zero_is_no_wrong_answer() -> None:
    kind = {"metric": "kl", "kind": "divergence"}
    [row] = compare([run("a", {"prose": [0.0] * 9}, **kind), run("b", {"prose": [0.0] * 9}, **kind)]).rows
    assert (row.test, row.binary, row.p, row.detectable, row.verdict) == ("t", False, 1, None, "unresolved")


def test_the_family_is_the_whole_table() -> None:
    rng = np.random.default_rng(3)
    scores = {task: rng.integers(0, 2, 200) for task in "abc"}
    changed = [{t: np.where(rng.random(200) < 0.1, 0, v) for t, v in scores.items()} for _ in range(2)]
    found = compare([run("exact", scores), run("x", changed[0]), run("y", changed[1])])
    assert found.family == "all 6 tests of this table (3 tasks × 2 runs)" and len(found.rows) == 6
    assert tuple(row.p_holm for row in found.rows) == stats.holm([row.p for row in found.rows]).adjusted
    assert found.runs == ("x", "y") and found.reference == "exact"
    for row in found.rows:
        assert row.detectable_holm == stats.smallest_discordance(200, row.won + row.lost, 0.05 / 6) > row.detectable


def test_the_three_verdicts() -> None:
    base = np.zeros(100)
    scores = {"clear": 20, "hint": 6, "none": 2}
    better = {task: np.r_[np.ones(count), np.zeros(100 - count)] for task, count in scores.items()}
    found = compare([run("a", dict.fromkeys(scores, base)), run("b", better)])
    assert {row.task: row.verdict for row in found.rows} == {
        "clear": "significant",
        "hint": "nominal",  # p = 2 / 2^6 = 0.031, and 0.0625 as the second smallest of three
        "none": "unresolved",
    }
    strict = compare([run("a", dict.fromkeys(scores, base)), run("b", better)], alpha=0.01)
    assert [row.verdict for row in strict.rows] == ["significant", "unresolved", "unresolved"]
    assert strict.alpha == 0.01 and strict.rows[1].detectable > found.rows[1].detectable


def test_the_mean_over_tasks_leaves_out_what_counts_twice() -> None:
    scores = {"arc": BASE, "ifeval": BASE[:100], "ifeval-instructions": BASE[:300]}
    others = {"arc": OTHER, "ifeval": OTHER[:100], "ifeval-instructions": OTHER[:300]}

    def with_flag(name: str, values: dict[str, Any]) -> tuple[str, Results]:
        name, results = run(name, values)
        twice = replace(results.header.tasks["ifeval-instructions"], in_mean=False)
        tasks = {**results.header.tasks, "ifeval-instructions": twice}
        return name, Results(replace(results.header, tasks=tasks), results.items)

    found = compare([with_flag("a", scores), with_flag("b", others)])
    [overall] = found.overall
    parts = [stats.paired_difference(OTHER, BASE), stats.paired_difference(OTHER[:100], BASE[:100])]
    assert overall.difference == stats.mean_over_tasks(parts) and overall.n == 500
    assert overall.mean - overall.reference_mean == pytest.approx(overall.difference.mean)
    assert len(found.rows) == 3


def test_no_mean_over_one_task_or_over_unlike_metrics() -> None:
    assert compare([run("a", {"arc": BASE}), run("b", {"arc": OTHER})]).overall == ()
    mixed = []
    for name, values in (("a", BASE), ("b", OTHER)):
        head = header({"arc": 400, "f1": 400})
        head = replace(head, tasks={**head.tasks, "f1": Task("f1", "q", 400)})
        mixed.append((name, Results(head, (*items("arc", values), *items("f1", values * 0.5, "f1")))))
    found = compare(mixed)
    assert found.overall == () and [row.metric for row in found.rows] == ["acc", "f1"]


def test_turning_it_round_turns_every_sign() -> None:
    files = [run("a", {"x": BASE, "y": BASE[:90]}), run("b", {"x": OTHER, "y": OTHER[:90]})]
    one, other = compare(files), compare(files, reference=1)
    assert (one.reference, other.reference, other.runs) == ("a", "b", ("a",))
    for row, turned in zip(one.rows, other.rows, strict=True):
        assert row.difference.mean == -turned.difference.mean and (row.won, row.lost) == (turned.lost, turned.won)
        assert (row.p, row.p_holm, row.verdict) == (turned.p, turned.p_holm, turned.verdict)


def test_pairs_are_found_whatever_the_order_in_the_file() -> None:
    head = header({"arc": 400})
    shuffled = [items("arc", OTHER)[at] for at in RNG.permutation(400)]
    expected = compare([run("a", {"arc": BASE}), run("b", {"arc": OTHER})])
    assert compare([run("a", {"arc": BASE}), ("b", Results(head, tuple(shuffled)))]).rows == expected.rows


def test_a_run_against_itself_resolves_nothing_and_says_so() -> None:
    found = compare([run("a", {"arc": BASE}), run("b", {"arc": BASE})])
    [row] = found.rows
    assert (row.p, row.verdict, row.difference.mean) == (1, "unresolved", 0) and row.detectable > 0
    assert found.family == "1 test: no correction is needed"
    assert any("same configuration" in note for note in found.notes)


def test_other_seeds_and_versions_are_noted() -> None:
    config = {"policy": {"lam": 1}, "slots": 8, "chunk": 1}
    other = run("b", {"arc": OTHER}, seeds={"generation": 9}, edgemoe="0.0.1", config=config)
    notes = compare([run("a", {"arc": BASE}), other]).notes
    assert len(notes) == 2 and "different seeds" in notes[0] and "edgemoe 0.0.1" in notes[1]


def test_what_differs_besides_the_policy_is_noted() -> None:
    config = {"policy": {"lam": 1}, "engine": "torch", "slots": 16, "chunk": 128}
    (note,) = compare([run("a", {"arc": BASE}), run("b", {"arc": OTHER}, config=config)]).notes
    assert note == "b and a differ in more than the policy: chunk (128, 1), engine (torch, absent)"


def regrouped(name: str) -> tuple[str, Results]:
    return run(name, {"arc": OTHER}, group=2)


def asked_otherwise(name: str) -> tuple[str, Results]:
    _, results = run(name, {"arc": OTHER})
    return name, Results(replace(results.header, tasks={"arc": Task("acc", "5 shots", 400)}), results.items)


REFUSED = [
    (run("b", {"arc": OTHER}, model=replace(MODEL, tokenizer="t")), "b (demo-moe) was made with another tokenizer"),
    (run("b", {"arc": OTHER}, model=replace(MODEL, fingerprint="f")), "b is of another model file"),
    (run("b", {"arc": OTHER}, kind="divergence"), "b holds divergence, a holds tasks"),
    (run("b", {"arc": OTHER, "mmlu": OTHER}), "only b has the task mmlu"),
    (run("b", {"mmlu": OTHER}), "only a has the task arc"),
    (run("b", {"arc": OTHER[:399]}), "arc: 1 questions are not in both files, such as 399 in a only"),
    (run("b", {"arc": [*OTHER, 1]}), "such as 400 in b only"),
    (run("b", {"arc": OTHER}, metric="f1"), "b: arc has no metric acc, only f1"),
    (asked_otherwise("b"), "asked its questions differently"),
    (regrouped("b"), "group the questions differently"),
]


@pytest.mark.parametrize(("other", "says"), REFUSED)
def test_what_may_not_be_compared_is_one_line(other: tuple[str, Results], says: str) -> None:
    with pytest.raises(UserError) as refused:
        compare([run("a", {"arc": BASE}), other])
    assert says in str(refused.value) and "\n" not in str(refused.value)


def test_another_model_is_compared_when_asked_for_but_never_another_tokenizer() -> None:
    quantised = run("b", {"arc": OTHER}, model=replace(MODEL, fingerprint="f"))
    assert compare([run("a", {"arc": BASE}), quantised], same_model=False).rows
    foreign = run("b", {"arc": OTHER}, model=replace(MODEL, fingerprint="f", tokenizer="t"))
    with pytest.raises(UserError, match="tokenizer"):
        compare([run("a", {"arc": BASE}), foreign], same_model=False)


@pytest.mark.parametrize(("alpha", "least"), [(0.05, 6), (0.01, 8), (0.5, 2), (0.001, 11), (0.0625, 5)])
def test_too_few_pairs_are_those_that_no_exact_test_can_use(alpha: float, least: int) -> None:
    assert smallest_sample(alpha) == least
    assert stats.mcnemar([1] * least, [0] * least).p <= alpha < stats.mcnemar([1] * (least - 1), [0] * (least - 1)).p
    enough = [run("a", {"arc": BASE[:least]}), run("b", {"arc": OTHER[:least]})]
    assert compare(enough, alpha=alpha).rows
    few = [run("a", {"arc": BASE[: least - 1]}), run("b", {"arc": OTHER[: least - 1]})]
    with pytest.raises(UserError, match=f"arc: {least - 1} pairs, expected at least {least}"):
        compare(few, alpha=alpha)


def test_too_few_groups_and_a_single_file_are_refused() -> None:
    with pytest.raises(UserError, match="400 pairs in 4 groups, expected at least 6 groups"):
        compare([run("a", {"arc": BASE}, group=100), run("b", {"arc": OTHER}, group=100)])
    with pytest.raises(UserError, match="at least two"):
        compare([run("a", {"arc": BASE})])
    with pytest.raises(UserError, match="a: arc has no metric f1, only acc"):
        compare([run("a", {"arc": BASE}), run("b", {"arc": OTHER})], metric="f1")
