"""Benchmarks under a policy: lm-evaluation-harness tasks, answered question by question, every answer kept.

The result file holds the numbers of each question and what the model answered, so an interrupted run goes on where it
stopped, and lm-eval's own table is made from stored answers, whoever computed them.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgemoe.errors import UserError
from edgemoe.evaluation.answering import Setup, answering
from edgemoe.evaluation.identity import model_id
from edgemoe.evaluation.results import Header, Item, ModelId, Results, Task, fingerprint
from edgemoe.evaluation.subjects import default_engine
from edgemoe.evaluation.task_loading import check_installed, load_tasks, seeded, silent
from edgemoe.evaluation.task_scores import Score, answers_text, by_question, metrics_of, scores_of, table_of
from edgemoe.evaluation.writer import ResultWriter
from edgemoe.gpu_offload.vocabulary import open_vocabulary
from edgemoe.model import Model, read_model
from edgemoe.policy import Policy
from edgemoe.progress import Advance
from edgemoe.units import Residency

if TYPE_CHECKING:
    from edgemoe.evaluation.lm import PolicyLM

Watch = Callable[[str, int, str], AbstractContextManager[Advance]]
"""(what, how many, of what) → where progress goes."""
DEFAULT_SEED = 1234  # lm-eval's own


@dataclass(frozen=True)
class Asked:
    """How questions are put. limit: the first so many of each task. shots: examples before each, None for what the task
    says. metric: what `edgemoe eval compare` takes, None for each task's first. chat: prompts as the model's chat
    template writes them. seed: of the examples, of whatever a task draws, and of sampled texts."""

    limit: int | None = None
    shots: int | None = None
    metric: str | None = None
    chat: bool = False
    seed: int = DEFAULT_SEED

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise UserError(f"--limit {self.limit}: expected a number of questions, 1 or more")
        if self.shots is not None and self.shots < 0:
            raise UserError(f"--num-fewshot {self.shots}: expected a number of examples, 0 or more")
        if self.seed < 0:
            raise UserError(f"--seed {self.seed}: expected 0 or more")


@dataclass(frozen=True)
class Report:
    """A finished evaluation."""

    results: Results
    table: tuple[Score, ...]
    """What lm-eval reports, with its standard errors."""
    resumed: int
    """Questions that an earlier run had answered."""
    truncated: int
    """Requests of this run that lost their beginning, because the context was too short."""
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Prepared:
    """One task with its questions: the requests of each, by its number."""

    name: str
    task: Any
    questions: dict[int, list[Any]]
    metrics: tuple[str, ...]


def evaluate_tasks(
    path: str | Path,
    names: Sequence[str],
    policy: Policy,
    out: str | Path,
    *,
    watch: Watch,
    residency: Residency | None = None,
    calibration: str | Path | None = None,
    engine: str | None = None,
    asked: Asked | None = None,
    setup: Setup | None = None,
    overwrite: bool = False,
) -> Report:
    """Answer lm-eval tasks (names, YAML files, or folders of them) under a policy, and write `out`.

    engine: of `edgemoe.evaluation.subjects.ENGINES`; default llama.cpp for a GGUF file and torch for a folder.
    residency: default 50%. A run that was interrupted, by an exception such as KeyboardInterrupt or by a kill, keeps
    its finished questions: the same call goes on, and ends in the same bytes.

    Raises `UserError`, one line, before any question is answered, for what cannot be loaded, steered or written.
    """
    asked = asked or Asked()
    model = read_model(path)
    check_installed()
    with seeded(asked.seed):
        loaded = load_tasks(names)
    notes = _configure(loaded["tasks"], asked)
    who = _identified(model)
    with answering(
        engine or default_engine(model.path),
        model,
        policy,
        residency or Residency.parse("50%"),
        Path(calibration) if calibration else None,
        setup,
    ) as (answers, config):
        from edgemoe.evaluation.lm import PolicyLM

        if asked.chat and answers.language.chat_template is None:
            raise UserError(f"{path}: this model has no chat template: leave --chat out")
        lm = PolicyLM(answers, asked.seed, asked.chat)
        prepared = [_prepared(name, task, asked, lm) for name, task in loaded["tasks"].items()]
        header = _header(who, config, prepared, asked)
        with ResultWriter(out, header, overwrite) as writer:
            resumed = writer.resumed
            _answer(lm, prepared, writer, who, answers.batch, watch)
            outputs = {one.name: dict[int, str]() for one in prepared}
            for item in writer:
                outputs[item.task][int(item.id)] = item.output or ""
            table = _table(loaded, outputs, lm, asked)
            return Report(writer.finish(), tuple(table), resumed, lm.truncated, tuple(notes))


def _identified(model: Model) -> ModelId:
    words = open_vocabulary(model)
    try:
        return model_id(model, words)
    finally:
        words.close()


def _configure(tasks: Mapping[str, Any], asked: Asked) -> list[str]:
    """Examples per question, as lm-eval's own command sets them; what was not done as asked."""
    notes = []
    for name, task in tasks.items():
        if getattr(task, "MULTIMODAL", False):
            raise UserError(f"{name}: asks about pictures or sounds, these models read text: leave it out")
        if getattr(task, "UNSAFE_CODE", False):
            raise UserError(f"{name}: runs code that the model wrote, which edgemoe does not do: leave it out")
        said = task.get_config("num_fewshot")
        if said == 0 and asked.shots:
            notes.append(f"{name} is always asked without examples: --num-fewshot {asked.shots} does not apply to it")
        elif asked.shots is not None or said is None:
            task.set_config("num_fewshot", asked.shots or 0)
    return notes


def _prompts(asked: Asked) -> dict[str, Any]:
    return {"limit": asked.limit, "apply_chat_template": asked.chat, "fewshot_as_multiturn": asked.chat}


def _prepared(name: str, task: Any, asked: Asked, lm: "PolicyLM") -> _Prepared:
    chat = {"chat_template": lm.apply_chat_template, "tokenizer_name": lm.tokenizer_name} if asked.chat else {}
    task.set_fewshot_seed(asked.seed)
    try:
        with seeded(asked.seed), silent():
            task.build_all_requests(**_prompts(asked), **chat)
            questions = by_question(task)
            first = next(iter(questions.values()))
            metrics = metrics_of(name, task, first)
    except UserError:
        raise
    # The code and templates of a task raise anything; it is about this task.
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{name}: lm-eval cannot write its questions ({reason[:200]})") from None
    if asked.metric is not None and asked.metric not in metrics:
        raise UserError(f"--metric {asked.metric}: {name} has {', '.join(metrics)}: choose one of them")
    return _Prepared(name, task, questions, metrics)


def _header(who: ModelId, config: dict[str, Any], prepared: Sequence[_Prepared], asked: Asked) -> Header:
    shots = {one.name: one.task.get_config("num_fewshot") or 0 for one in prepared}
    return Header(
        "tasks",
        who,
        {**config, "lm_eval": version("lm-eval"), "chat": asked.chat, "num_fewshot": shots},
        {
            one.name: Task(asked.metric or one.metrics[0], fingerprint(_described(one)), len(one.questions))
            for one in prepared
        },
        {"tasks": asked.seed},
    )


def _described(one: _Prepared) -> Iterator[str]:
    """What two results must share to be compared: every prompt as it is written, with its true answer."""
    yield str(one.task.VERSION)
    for requests in one.questions.values():
        said = [[request.request_type, request.repeats, request.arguments] for request in requests]
        yield json.dumps([said, requests[0].doc], sort_keys=True, default=str)


def _answer(
    lm: "PolicyLM", prepared: Sequence[_Prepared], writer: ResultWriter, who: ModelId, batch: int, watch: Watch
) -> None:
    """Answer what is not answered yet, so many questions at a time; the same ones share passes whoever is missing, so
    that a resumed run repeats the bits of one that was not interrupted."""
    blocks = []
    for one in prepared:
        numbers = list(one.questions)
        for at in range(0, len(numbers), batch):
            block = numbers[at : at + batch]
            if not all(writer.has(one.name, str(number)) for number in block):
                blocks.append((one, block))
    sizes = [sum(lm.work(r) * r.repeats for number in block for r in one.questions[number]) for one, block in blocks]
    left = sum(len(block) for _, block in blocks)
    with watch(f"{who.name}, {left:,} questions", sum(sizes), "tokens") as advance:
        for (one, block), size in zip(blocks, sizes, strict=True):
            _ask(lm, [request for number in block for request in one.questions[number]])
            for number in block:
                if not writer.has(one.name, str(number)):
                    writer.add(_item(one, number))
            advance(size)


def _ask(lm: "PolicyLM", requests: Sequence[Any]) -> None:
    for request in requests:
        request.resps = []
    for kind in dict.fromkeys(request.request_type for request in requests):
        asked = [request for request in requests if request.request_type == kind for _ in range(request.repeats)]
        for request, answer in zip(asked, getattr(lm, kind)(asked), strict=True):
            request.resps.append(answer)


def _item(one: _Prepared, number: int) -> Item:
    requests = one.questions[number]
    try:
        with silent():
            metrics = scores_of(one.task, requests)
        if tuple(metrics) != one.metrics:
            raise ValueError(f"it has {', '.join(metrics) or 'no metrics'} instead of {', '.join(one.metrics)}")
        return Item(one.name, str(number), metrics, output=answers_text(requests))
    # The code of a task raises anything; it is about this question.
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{one.name}: lm-eval cannot score question {number} ({reason[:200]})") from None


def _table(
    loaded: Mapping[str, Any], outputs: Mapping[str, Mapping[int, str]], lm: "PolicyLM", asked: Asked
) -> list[Score]:
    for task in loaded["tasks"].values():
        task.set_fewshot_seed(asked.seed)
    with seeded(asked.seed), silent():
        return table_of(loaded, outputs, lm, **_prompts(asked))


def as_json(report: Report, path: Path) -> dict[str, Any]:
    """What `edgemoe eval tasks --json` prints."""
    header = report.results.header
    return {
        "model": header.model.name,
        "path": str(path),
        "config": header.config,
        "config_hash": header.config_hash,
        "scores": [score.as_json() for score in report.table],
        "questions": len(report.results.items),
        "resumed": report.resumed,
        "truncated": report.truncated,
        "notes": list(report.notes),
    }
