"""Small evaluations, written the way an evaluation writes them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edgemoe.evaluation.results import Header, Item, ModelId, Results, Task, fingerprint
from edgemoe.evaluation.writer import ResultWriter

MODEL = ModelId("demo-moe", fingerprint(["weights"]), fingerprint(["a", "b", "ab"]))


def header(tasks: Mapping[str, int], metric: str = "acc", **other: Any) -> Header:
    """Of tasks with so many items each."""
    named = {name: Task(metric, fingerprint([name]), count) for name, count in tasks.items()}
    default = {"kind": "tasks", "model": MODEL, "config": {"policy": {"lam": 0.0}, "slots": 16, "chunk": 1}}
    return Header(**{**default, "tasks": named, "seeds": {"generation": 0}, **other})


def items(task: str, values: Sequence[float], metric: str = "acc", group: int | None = None) -> list[Item]:
    """Numbered items, with `group` of them to a group."""
    return [
        Item(task, str(at), {metric: value}, group=None if group is None else f"g{at // group}")
        for at, value in enumerate(values)
    ]


def write(path: Path, head: Header, records: Sequence[Item]) -> Results:
    with ResultWriter(path, head) as writer:
        for item in records:
            writer.add(item)
        return writer.finish()


def evaluate(path: Path, scores: Mapping[str, Sequence[float]], metric: str = "acc", **other: Any) -> Path:
    """A result file of these scores."""
    head = header({task: len(values) for task, values in scores.items()}, metric, **other)
    write(path, head, [item for task, values in scores.items() for item in items(task, values, metric)])
    return path
