"""`evaluate_tasks` on tasks of our own, from local files: every question stored, resumed, and compared."""

import json
import logging
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("lm_eval", reason="needs lm_eval (pip install edgemoe[eval])")

import datasets

from edgemoe.demo import demo_model
from edgemoe.errors import UserError
from edgemoe.evaluation.answering import Setup
from edgemoe.evaluation.compare import compare
from edgemoe.evaluation.results import load_results
from edgemoe.evaluation.tasks import Asked, evaluate_tasks
from edgemoe.model.synthetic import write_synthetic
from edgemoe.policy import preset
from edgemoe.progress import no_progress

TASKS = Path(__file__).with_name("tasks")
CHOICES, NUMBERS = str(TASKS / "odd_one_out.yaml"), str(TASKS / "next_number.yaml")
SMALL = {"setup": Setup(n_ctx=160, threads=1)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    write_synthetic(folder / "moe.gguf")
    write_synthetic(folder / "dense.gguf", "llama")
    return folder


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path_factory):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


@contextmanager
def unwatched(*_):
    yield no_progress


def run(model, out, names=(CHOICES, NUMBERS), policy="psr", watch=unwatched, **more):
    settings = {"window": 6} if "psr" in policy else {}
    return evaluate_tasks(model, names, preset(policy, **settings), out, watch=watch, **{**SMALL, **more})


def value(report, task, metric, chosen="none"):
    lines = [
        (s.value, s.stderr, s.items) for s in report.table if (s.task, s.metric, s.filter) == (task, metric, chosen)
    ]
    assert len(lines) == 1
    return lines[0]


def test_the_demo_model_answers(tmp_path, capfd):
    """Exact policies answer alike to the last bit; a steered one does not; compare reads their files."""
    reports = {
        name: evaluate_tasks(
            demo_model(), [str(TASKS)], preset(name), tmp_path / f"{name}.json", watch=unwatched, **SMALL
        )
        for name in ("exact-lru", "exact-prefetch", "psr")
    }
    exact, twin, steered = (reports[name].results for name in reports)
    assert exact.items == twin.items != steered.items
    assert [(name, task.items, task.metric) for name, task in sorted(exact.header.tasks.items())] == [
        ("next_number", 6, "exact_match,number"),
        ("odd_one_out", 7, "acc"),
    ]
    # Of 1, 2, 3, 4, 5 it knows what follows.
    first = exact.of("next_number")[0]
    assert first.output == " 6" and first.metrics == {"exact_match,number": 1, "exact_match,written": 0}
    for item in exact.of("odd_one_out"):
        nats = [answer[0][0] for answer in json.loads(item.output)]
        truth = [json.loads(line) for line in (TASKS / "odd_one_out.jsonl").read_text().splitlines()][int(item.id)]
        assert len(nats) == len(truth["choices"]) and max(nats) < 0
        assert item.metrics["acc"] == (np.argmax(nats) == truth["answer"])
        lengths = [len(choice) for choice in truth["choices"]]
        assert item.metrics["acc_norm"] == (np.argmax(np.divide(nats, lengths)) == truth["answer"])
    # lm-eval's own table is the mean over what is stored, with the standard error of a mean.
    accuracy, error, count = value(reports["psr"], "odd_one_out", "acc")
    stored = [item.metrics["acc"] for item in steered.of("odd_one_out")]
    assert accuracy == pytest.approx(np.mean(stored)) and count == 7
    assert error == pytest.approx(np.std(stored, ddof=1) / np.sqrt(7))
    files = [(name, load_results(tmp_path / f"{name}.json")) for name in reports]
    table = compare(files)
    assert {(row.run, row.task, row.n, row.test) for row in table.rows} == {
        (run, task, n, "mcnemar")
        for run in ("exact-prefetch", "psr")
        for task, n in (("next_number", 6), ("odd_one_out", 7))
    }
    assert all(row.won == row.lost == 0 for row in table.rows if row.run == "exact-prefetch")
    said = capfd.readouterr()
    assert said.out == said.err == "" and logging.getLogger("lm_eval").level != logging.CRITICAL


def test_an_interrupted_run_goes_on(folder, tmp_path):
    whole = run(folder / "moe.gguf", tmp_path / "whole.json")
    assert whole.resumed == 0

    @contextmanager
    def stopped(what, total, unit):
        assert "13 questions" in what and unit == "tokens"
        seen = []

        def advance(count):
            seen.append(count)
            if len(seen) == 5:
                raise KeyboardInterrupt

        yield advance

    out = tmp_path / "out.json"
    with pytest.raises(KeyboardInterrupt):
        run(folder / "moe.gguf", out, watch=stopped)
    assert not out.exists()
    counted, announced = [], []

    @contextmanager
    def watch(what, total, unit):
        assert "8 questions" in what
        announced.append(total)
        yield counted.append

    report = run(folder / "moe.gguf", out, watch=watch)
    assert report.resumed == 5 and len(counted) == 8 and [sum(counted)] == announced
    assert out.read_bytes() == (tmp_path / "whole.json").read_bytes()
    assert report.table == whole.table and not (tmp_path / "out.json.partial").exists()
    with pytest.raises(UserError, match="exists already"):
        run(folder / "moe.gguf", out)
    assert run(folder / "moe.gguf", out, overwrite=True).results == whole.results


def test_limits_shots_and_seeds_decide_the_questions(folder, tmp_path):
    def made(name, asked):
        return run(folder / "moe.gguf", tmp_path / f"{name}.json", [CHOICES], asked=asked).results

    two = made("two", Asked(limit=2, shots=2))
    assert [item.id for item in two.items] == ["0", "1"] and two.header.config["num_fewshot"] == {"odd_one_out": 2}
    none = made("none", Asked(limit=2))
    other = made("other", Asked(limit=2, shots=2, seed=5))
    again = made("again", Asked(limit=2, shots=2))
    assert again.as_bytes() == two.as_bytes()
    prints = {found.header.tasks["odd_one_out"].questions for found in (two, none, other)}
    assert len(prints) == 3 and two.header.seeds == {"tasks": 1234}
    chosen = made("metric", Asked(limit=9, metric="acc_norm"))
    assert chosen.header.tasks["odd_one_out"].metric == "acc_norm" and len(chosen.items) == 7
    report = run(folder / "moe.gguf", tmp_path / "n.json", [NUMBERS], asked=Asked(limit=2, shots=3))
    assert report.notes == ("next_number is always asked without examples: --num-fewshot 3 does not apply to it",)


def test_lm_eval_itself_finds_the_same(folder, tmp_path):
    """`PolicyLM` handed to lm-eval, without any of our own scoring."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    from edgemoe.evaluation.answering import answering
    from edgemoe.evaluation.lm import PolicyLM
    from edgemoe.model import read_model
    from edgemoe.units import Residency

    report = run(folder / "moe.gguf", tmp_path / "ours.json", asked=Asked(shots=1))
    model, half = read_model(folder / "moe.gguf"), Residency.parse("50%")
    with answering("llama.cpp", model, preset("psr", window=6), half, None, SMALL["setup"]) as (answers, _):
        from edgemoe.evaluation.task_loading import load_tasks

        tasks = list(load_tasks([CHOICES, NUMBERS])["tasks"].values())
        theirs = lm_eval.simple_evaluate(
            PolicyLM(answers, seed=1234),
            tasks=tasks,
            num_fewshot=1,
            bootstrap_iters=10,
            task_manager=TaskManager(include_defaults=False),
        )
    for score in report.table:
        assert theirs["results"][score.task][f"{score.metric},{score.filter}"] == score.value
    for task, samples in theirs["samples"].items():
        if task == "odd_one_out":
            answered = [[list(part[0]) for part in sample["resps"]] for sample in samples]
            stored = [[part[0] for part in json.loads(item.output)] for item in report.results.of(task)]
            assert answered == stored


def written(folder, name, questions, **config):
    """A task file with its questions beside it."""
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    shape = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": f"{name}.jsonl"}},
        "test_split": "test",
        **config,
    }
    (folder / f"{name}.yaml").write_text(json.dumps(shape))  # JSON is YAML
    return str(folder / f"{name}.yaml")


def test_what_is_no_number_of_one_question(folder, tmp_path):
    """Perplexity is stored as nats and F1 as agreement; lm-eval's table has its own numbers, from the same answers."""
    texts = [
        {"text": "A first text, of some words."},
        {"text": "Another."},
        {"text": "And a third one, the longest of them."},
    ]
    rolling = written(
        tmp_path,
        "texts",
        texts,
        output_type="loglikelihood_rolling",
        doc_to_text="",
        doc_to_target="{{text}}",
        metric_list=[{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    )
    questions = [{"q": "ab", "right": at % 2} for at in range(3)]
    choice = written(
        tmp_path,
        "either",
        questions,
        output_type="multiple_choice",
        doc_to_text="{{q}}",
        doc_to_target="{{right}}",
        doc_to_choice=["x", "y"],
        metric_list=[{"metric": "f1"}, {"metric": "brier_score"}, {"metric": "acc"}],
    )
    cloze = written(
        tmp_path,
        "cloze",
        texts,
        output_type="loglikelihood",
        doc_to_text="{{text[:-2]}}",
        doc_to_target="{{text[-2:]}}",
        target_delimiter="",
        repeats=2,
        metric_list=[{"metric": "perplexity"}, {"metric": "acc"}],
    )
    report = run(folder / "moe.gguf", tmp_path / "out.json", [rolling, choice, cloze])
    of = report.results.of
    words = [len(text["text"].split()) for text in texts]
    nats = [item.metrics["word_perplexity_nll"] for item in of("texts")]
    assert value(report, "texts", "word_perplexity")[0] == pytest.approx(np.exp(np.average(nats, weights=words)))
    bits = [item.metrics["bits_per_byte"] for item in of("texts")]
    sizes = [len(text["text"]) for text in texts]
    assert value(report, "texts", "bits_per_byte")[0] == pytest.approx(np.average(bits, weights=sizes))
    nats = [item.metrics["perplexity_nll"] for item in of("cloze")]
    assert value(report, "cloze", "perplexity")[0] == pytest.approx(np.exp(np.mean(nats)))
    assert value(report, "cloze", "perplexity")[1] > 0  # resampled
    assert all(len(json.loads(item.output)[0]) == 2 for item in of("cloze"))
    for item in of("either"):
        assert item.metrics["f1_match"] == item.metrics["acc"]
    brier = [item.metrics["brier_score"] for item in of("either")]
    assert value(report, "either", "brier_score")[0] == pytest.approx(np.mean(brier))


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"limit": 0}, "--limit 0: expected a number of questions"),
        ({"shots": -1}, "--num-fewshot -1"),
        ({"seed": -1}, "--seed -1"),
    ],
)
def test_questions_are_asked_sensibly(asked, words):
    with pytest.raises(UserError, match=words):
        Asked(**asked)


@pytest.mark.parametrize(
    ("names", "more", "words"),
    [
        ([""], {}, "--tasks: expected names or files"),
        (["./none.yaml"], {}, r"none.yaml: no such task file"),
        ([CHOICES], {"asked": Asked(metric="f1")}, "--metric f1: odd_one_out has acc, acc_norm: choose"),
        ([NUMBERS], {"asked": Asked(chat=True)}, "no chat template: leave --chat out"),
        ([NUMBERS], {"setup": Setup(batch=2)}, "--batch: the llama.cpp engine has no such choice"),
        ([NUMBERS], {"setup": Setup(n_ctx=99999)}, "longer than the context of 4,096"),
        ([NUMBERS], {"engine": "torch"}, "torch runs Hugging Face folders"),
    ],
)
def test_mistakes_are_answered_in_one_line(folder, tmp_path, names, more, words):
    with pytest.raises(UserError, match=words):
        run(folder / "moe.gguf", tmp_path / "out.json", names, **more)
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_a_task(folder, tmp_path, monkeypatch):
    out, good = (
        tmp_path / "out.json",
        {"output_type": "generate_until", "doc_to_text": "{{q}}", "doc_to_target": "{{q}}"},
    )

    def refused(path, words, model="moe.gguf"):
        with pytest.raises(UserError, match=words) as raised:
            run(folder / model, out, [str(path)])
        assert "\n" not in str(raised.value) and not out.exists()

    refused(NUMBERS, "a dense model, without experts to choose", "dense.gguf")
    broken = tmp_path / "broken.yaml"
    broken.write_text("task: [")
    refused(broken, "broken.yaml: not an lm-eval task file")
    broken.write_text("dataset_path: json")
    refused(broken, "names no task")
    (tmp_path / "empty").mkdir()
    refused(f"{tmp_path}/empty", "no YAML file of a task in this folder")
    path = written(tmp_path, "gone", [{"q": "a"}], **good)
    (tmp_path / "gone.jsonl").unlink()
    refused(path, "gone: its data file gone.jsonl is not there: put it beside")
    refused(written(tmp_path, "fields", [{"p": "a"}], **{**good, "doc_to_text": "{{q.x.y}}"}), "fields")
    refused(written(tmp_path, "code", [{"q": "a"}], **good, unsafe_code=True), "code: runs code that the model wrote")
    refused(written(tmp_path, "kind", [{"q": "a"}], **{**good, "output_type": "essay"}), "cannot load this .*essay")
    remote = written(tmp_path, "remote", [], **{**good, "dataset_path": "edgemoe/nothing", "dataset_kwargs": {}})
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refused(remote, "neither on this machine nor can they be downloaded .* give a task file with local data")


def test_names_come_from_lm_evals_own_index(folder, tmp_path, monkeypatch):
    """Its folder of tasks is exchanged for ours: reading the thousands there takes half a minute."""
    monkeypatch.setattr("lm_eval.tasks.manager.__file__", str(TASKS / "manager.py"))
    monkeypatch.chdir(TASKS)  # registered tasks name their files from the working directory on
    assert len(run(folder / "moe.gguf", tmp_path / "a.json", ["next_number"]).results.items) == 6
    with pytest.raises(UserError, match=r"no task arc_hard in lm-eval: expected one of its 2 names"):
        run(folder / "moe.gguf", tmp_path / "b.json", ["arc_hard"])


def test_without_lm_eval(folder, tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UserError, match=r"edgemoe eval tasks needs lm_eval: pip install edgemoe\[eval\]"):
        run(folder / "moe.gguf", tmp_path / "out.json")
