"""From a model's answers to numbers per question, as lm-eval scores them, and to its table over all questions."""

import json
import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from numbers import Real
from typing import Any

import numpy as np

from edgemoe.errors import UserError

BOOTSTRAP = 1000  # resamples for the standard error of a metric without a formula


@dataclass(frozen=True)
class Score:
    """A line of lm-eval's table: one metric over all questions of a task, or of a group's tasks."""

    task: str
    metric: str
    filter: str
    value: float
    stderr: float | None
    """None where lm-eval gives none."""
    items: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def by_question(task: Any) -> dict[int, list[Any]]:
    """The requests of each question, in the order in which they are scored."""
    found: dict[int, list[Any]] = defaultdict(list)
    for request in task.instances:
        found[request.doc_id].append(request)
    return {question: sorted(requests, key=lambda request: request.idx) for question, requests in found.items()}


def scores_of(task: Any, requests: Sequence[Any]) -> dict[str, float]:
    """Numbers of one question whose requests have their `resps`, by metric (and filter, where there are several).

    Metrics of lm-eval that are no numbers of one question are stored as what they are made of: `perplexity` as nats
    (`…_nll`, per word or byte where it counts those), F1 and MCC as whether prediction and truth agree (`…_match`),
    several right and wrong answers as their share. Others are left out: they exist over all questions only.
    """
    task._instances = list(requests)
    task.apply_filters()
    filters = list(requests[0].filtered_resps)
    found: dict[str, float] = {}
    for name in filters:
        results = task.process_results(requests[0].doc, [request.filtered_resps[name] for request in requests])
        suffix = f",{name}" if len(filters) > 1 else ""
        for metric, value in results.items():
            for label, number in _numbers(task, metric, value):
                found[label + suffix] = number
    return found


def _numbers(task: Any, metric: str, value: Any) -> list[tuple[str, float]]:
    how = task.aggregation().get(metric)
    kind = getattr(how, "__name__", "")
    if kind == "perplexity":
        return [(f"{metric}_nll", -float(value))]
    if kind == "weighted_perplexity":
        nats, count = value
        return [(f"{metric}_nll", -float(nats) / max(count, 1))]
    if kind in ("bits_per_byte", "brier_score", "bleu", "chrf", "chrf++", "ter"):
        return [(metric, float(how([value])))]
    if kind in ("f1_score", "matthews_corrcoef"):
        truth, guess = value
        return [(f"{metric}_match", int(guess in truth if isinstance(truth, list) else guess == truth))]
    if _is_number(value):
        return [(metric, value)]
    if isinstance(value, list | tuple) and value and all(_is_number(part) for part in value):
        return [(metric, math.fsum(value) / len(value))]
    return []


def _is_number(value: Any) -> bool:
    return isinstance(value, Real | np.bool_ | np.number)


def metrics_of(name: str, task: Any, requests: Sequence[Any]) -> tuple[str, ...]:
    """What `scores_of` will give for a task's questions, learned by scoring these requests of one with empty answers.

    Raises `UserError` for a task that lm-eval scores as a whole only, or cannot score.
    """
    for request in requests:
        request.resps = [_empty(request)] * request.repeats
    try:
        found = tuple(scores_of(task, requests))
    # The code of a task raises anything; it is about this task.
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{name}: lm-eval cannot score its first question ({reason})") from None
    finally:
        _forget(requests)
    if not found:
        raise UserError(f"{name}: lm-eval scores it as a whole only, with no number per question: leave it out")
    return found


def _empty(request: Any) -> Any:
    if request.request_type == "loglikelihood":
        return -1.0 - request.idx, False
    return -1.0 if request.request_type == "loglikelihood_rolling" else ""


def _forget(requests: Sequence[Any]) -> None:
    for request in requests:
        request.resps, request.filtered_resps = [], {}


def answers_text(requests: Sequence[Any]) -> str:
    """What the model answered to one question: the text where there is one, otherwise JSON, a list per request of
    [nats, greedy] pairs, of nats, or of texts."""
    if _one_text(requests):
        return str(requests[0].resps[0])
    return json.dumps([request.resps for request in requests])


def _one_text(requests: Sequence[Any]) -> bool:
    return len(requests) == 1 and requests[0].request_type == "generate_until" and requests[0].repeats == 1


def _answers_of(requests: Sequence[Any], text: str) -> list[list[Any]]:
    """What `answers_text` was made of."""
    if _one_text(requests):
        return [[text]]
    return [[tuple(answer) if isinstance(answer, list) else answer for answer in part] for part in json.loads(text)]


def table_of(
    loaded: Mapping[str, Any], outputs: Mapping[str, Mapping[int, str]], lm: Any, **prompts: Any
) -> list[Score]:
    """lm-eval's own evaluation of stored answers, `outputs[task][question]`: its metrics and standard errors.

    lm: whose chat template wrote the prompts. prompts: what `lm_eval.evaluator.evaluate` is told of limits and chat
    templates, as when they were asked.
    """
    import lm_eval.evaluator

    with _one_process():
        found = lm_eval.evaluator.evaluate(
            _replay(loaded, outputs, lm), loaded, bootstrap_iters=BOOTSTRAP, log_samples=False, **prompts
        )
    lines = []
    for name, row in {**found["results"], **found.get("groups", {})}.items():
        for key, value in row.items():
            metric, _, chosen = key.partition(",")
            if chosen and not metric.endswith("_stderr") and _is_number(value):
                error = row.get(f"{metric}_stderr,{chosen}")
                stderr = float(error) if _is_number(error) and math.isfinite(error) else None
                lines.append(Score(name, metric, chosen, float(value), stderr, int(row.get("sample_len", 0))))
    return lines


@contextmanager
def _one_process() -> Iterator[None]:
    """lm-eval resamples in this process: forking one that runs an engine's threads is no good idea."""
    was = os.environ.get("DISABLE_MULTIPROC")
    os.environ["DISABLE_MULTIPROC"] = "1"
    try:
        yield
    finally:
        if was is None:
            del os.environ["DISABLE_MULTIPROC"]
        else:
            os.environ["DISABLE_MULTIPROC"] = was


def _replay(loaded: Mapping[str, Any], outputs: Mapping[str, Mapping[int, str]], lm: Any) -> Any:
    """An lm-eval model that repeats what was answered."""
    from lm_eval.api.model import LM

    class Replay(LM):
        tokenizer_name = lm.tokenizer_name

        def apply_chat_template(self, *given: Any, **more: Any) -> str:
            return str(lm.apply_chat_template(*given, **more))

        @cached_property
        def _answers(self) -> dict[int, Iterator[Any]]:
            """By request, once all are there: its answers, one for each time that it is asked."""
            return {
                id(request): iter(parts)
                for name, task in loaded["tasks"].items()
                for question, requests in by_question(task).items()
                for request, parts in zip(requests, _answers_of(requests, outputs[name][question]), strict=True)
            }

        def loglikelihood(self, requests: Sequence[Any]) -> list[Any]:
            return [next(self._answers[id(request)]) for request in requests]

        loglikelihood_rolling = generate_until = loglikelihood

    return Replay()
