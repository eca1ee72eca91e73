"""The result file of any evaluation: what was run, and every number per question. Format: docs/results-format.md.

A file says by itself whether it may be compared with another: the same tokenizer, the same questions, and what is
different (`config`) in one place. The same content is always the same bytes, so neither time nor machine is in it.
"""

import hashlib
import json
import math
import numbers
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from edgemoe import __version__
from edgemoe.errors import UserError
from edgemoe.files import read_json, reason_of
from edgemoe.model.fingerprint import fingerprint as fingerprint

FORMAT = "edgemoe results"
VERSION = 1
PARTIAL = ".partial"  # what a run that is not finished has written so far (`edgemoe.evaluation.writer`)
Kind = Literal["divergence", "tasks"]
DAMAGE = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
"""What reading a file that is not one of ours raises."""


@dataclass(frozen=True)
class ModelId:
    """Which weights and which vocabulary."""

    name: str
    fingerprint: str
    """Of the weights' file or files, such as `edgemoe.llamacpp.header.header_fingerprint`."""
    tokenizer: str
    """`fingerprint` of the pieces in the order of their ids, the same for every file format of one tokenizer."""

    def __post_init__(self) -> None:
        for name, text in vars(self).items():
            if not isinstance(text, str) or not text:
                raise ValueError(f"model.{name} is {text!r}, not a text")


@dataclass(frozen=True)
class Task:
    """One set of questions, or of text windows."""

    metric: str
    """The one that `edgemoe eval compare` takes unless told otherwise."""
    questions: str
    """`fingerprint` of the questions with all that goes into their prompts: shots, templates, window length."""
    items: int
    in_mean: bool = True
    """Whether it counts in the mean over tasks: not where it scores another task's answers a second way (§6.1)."""

    def __post_init__(self) -> None:
        if not all(isinstance(text, str) and text for text in (self.metric, self.questions)):
            raise ValueError("a task needs a metric and a fingerprint of its questions")
        if type(self.items) is not int or self.items < 1 or type(self.in_mean) is not bool:
            raise ValueError(f"a task of {self.items!r} items")


@dataclass(frozen=True)
class Header:
    """What was run: everything but the numbers."""

    kind: Kind
    model: ModelId
    config: Mapping[str, Any]
    """All that decides the numbers: the policy's fields, capacity, engine, chunk, batch, threads, calibration, …
    Anything that JSON can hold."""
    tasks: Mapping[str, Task]
    seeds: Mapping[str, int] = field(default_factory=dict)
    edgemoe: str = __version__

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind {self.kind!r} is not one of {', '.join(get_args(Kind))}")
        if not isinstance(self.config, Mapping) or not isinstance(self.seeds, Mapping):
            raise ValueError("config and seeds are objects")
        if not self.tasks or not all(isinstance(name, str) and name for name in self.tasks):
            raise ValueError("expected at least one task, by name")
        if not all(type(seed) is int for seed in self.seeds.values()):
            raise ValueError("seeds are whole numbers")
        # As a reader will find it: tuples are lists, keys are texts. Refuses what JSON cannot hold.
        object.__setattr__(self, "config", json.loads(_compact(self.config)))

    @property
    def config_hash(self) -> str:
        """Twelve hex digits that name the model, the tokenizer and the config."""
        decides = {"model": self.model.fingerprint, "tokenizer": self.model.tokenizer, "config": self.config}
        return hashlib.sha256(_compact(decides).encode()).hexdigest()[:12]

    def as_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "edgemoe": self.edgemoe,
            "kind": self.kind,
            "model": asdict(self.model),
            "config": _sorted(self.config),
            "config_hash": self.config_hash,
            "seeds": _sorted(self.seeds),
            "tasks": {name: asdict(self.tasks[name]) for name in sorted(self.tasks)},
        }

    @classmethod
    def from_json(cls, said: Any) -> "Header":
        """What `as_json` made. Raises ValueError, TypeError, KeyError or AttributeError for anything else."""
        found = cls(
            kind=said["kind"],
            model=ModelId(**said["model"]),
            config=said["config"],
            tasks={name: Task(**task) for name, task in said["tasks"].items()},
            seeds=said["seeds"],
            edgemoe=str(said["edgemoe"]),
        )
        if said["config_hash"] != found.config_hash:
            raise ValueError(f"config_hash is {said['config_hash']}, its config gives {found.config_hash}: edited?")
        return found


@dataclass(frozen=True)
class Item:
    """One question (or window) with its numbers."""

    task: str
    id: str
    metrics: Mapping[str, float]
    """Finite numbers by name; true and false count as 1 and 0."""
    group: str | None = None
    """What it shares with other items, such as a prompt or a document: groups are independent, their items are not."""
    output: str | None = None
    """What was generated, where it was."""

    def __post_init__(self) -> None:
        for name, text in (("task", self.task), ("id", self.id)):
            if not isinstance(text, str) or not text:
                raise ValueError(f"{name} {text!r} of an item is not a text")
        for name, more in (("group", self.group), ("output", self.output)):
            if more is not None and not isinstance(more, str):
                raise ValueError(f"{name} {more!r} of item {self.id} is not a text")
        if not self.metrics:
            raise ValueError(f"item {self.id} of {self.task} has no metrics")
        plain = {name: _number(value, f"{name} of item {self.id}") for name, value in self.metrics.items()}
        object.__setattr__(self, "metrics", _sorted(plain))

    @property
    def key(self) -> tuple[str, str]:
        return self.task, self.id

    def as_json(self) -> dict[str, Any]:
        said: dict[str, Any] = {"task": self.task, "id": self.id, "metrics": self.metrics}
        more = {"group": self.group, "output": self.output}
        return said | {name: text for name, text in more.items() if text is not None}

    @classmethod
    def from_json(cls, said: Any) -> "Item":
        """What `as_json` made. Raises ValueError or TypeError for anything else."""
        item = cls(**said)
        if any(isinstance(value, bool) for value in said["metrics"].values()):
            raise ValueError(f"a metric of item {item.id} is not a number")
        return item


@dataclass(frozen=True)
class Results:
    """A whole evaluation: every item of every task, in the order of task and id."""

    header: Header
    items: tuple[Item, ...]

    def __post_init__(self) -> None:
        """Raise ValueError unless the items are those that the header promises, each once, alike within a task."""
        object.__setattr__(self, "items", tuple(sorted(self.items, key=_order)))
        seen: dict[str, Item] = {}
        counts = dict.fromkeys(self.header.tasks, 0)
        last = None
        for item in self.items:
            check_item(self.header, item, seen.setdefault(item.task, item))
            if item.key == last:
                raise ValueError(f"item {item.id} of {item.task} is there twice")
            last = item.key
            counts[item.task] += 1
        for name, count in counts.items():
            if count != self.header.tasks[name].items:
                raise ValueError(f"{count} items of {name}, its header says {self.header.tasks[name].items}")

    def of(self, task: str) -> tuple[Item, ...]:
        """The items of one task, in the order of their ids."""
        return tuple(item for item in self.items if item.task == task)

    def metrics(self, task: str) -> tuple[str, ...]:
        """The names that every item of a task has a number for."""
        return tuple(next(item.metrics for item in self.items if item.task == task))

    def mean(self, task: str, metric: str) -> float:
        """The mean over a task's items, each counting the same."""
        values = [item.metrics[metric] for item in self.of(task)]
        return math.fsum(values) / len(values)

    def as_bytes(self) -> bytes:
        """The file: a header to read, then one line per item."""
        head = json.dumps(self.header.as_json(), indent=2, allow_nan=False)
        lines = ",\n".join("    " + one_line(item) for item in self.items)
        return f'{head[:-2]},\n  "items": [\n{lines}\n  ]\n}}\n'.encode()


def check_item(header: Header, item: Item, like: Item) -> None:
    """Raise ValueError for an item of no task, without its task's metric, or unlike `like`, another of its task."""
    task = header.tasks.get(item.task)
    if task is None:
        raise ValueError(f"item {item.id} is of {item.task}, which the header does not name")
    if task.metric not in item.metrics:
        raise ValueError(f"item {item.id} of {item.task} has no {task.metric}")
    if list(item.metrics) != list(like.metrics):
        raise ValueError(f"items {like.id} and {item.id} of {item.task} have different metrics")
    if (item.group is None) != (like.group is None):
        raise ValueError(f"of items {like.id} and {item.id} of {item.task} only one has a group")


def one_line(item: Item) -> str:
    return json.dumps(item.as_json(), allow_nan=False)


def load_results(path: str | Path) -> Results:
    """Read a result file.

    Raises `UserError`, one line, for one that is missing, not finished, damaged, edited so that it contradicts itself,
    of another version, or no result file at all.
    """
    path = Path(path)
    if path.suffix == PARTIAL and path.is_file():
        raise UserError(f"{path}: of a run that was interrupted: run the same command again to finish it")
    said = read_json(path, "result file", "edgemoe eval divergence and eval tasks write them")
    if not isinstance(said, dict) or said.get("format") != FORMAT:
        raise UserError(f'{path}: not a result file of edgemoe eval (expected "format": "{FORMAT}")')
    version = said.get("version")
    if version != VERSION:
        shown = str(version)[:20]
        raise UserError(f"{path}: a result file of version {shown}, this edgemoe reads {VERSION}: evaluate again")
    try:
        return Results(Header.from_json(said), tuple(Item.from_json(item) for item in said["items"]))
    except DAMAGE as error:
        raise UserError(f"{path}: not a sound result file ({reason_of(error)}): evaluate again") from None


def _number(value: Any, what: str) -> float:
    """A plain int or float of any real number."""
    if not isinstance(value, numbers.Real | bool) and not hasattr(value, "dtype"):
        raise ValueError(f"{what} is {str(value)[:20]!r}, not a number")
    plain = value.item() if hasattr(value, "item") else value
    if isinstance(plain, bool | numbers.Integral):
        plain = int(plain)
        if abs(plain) >= 2**63:
            raise ValueError(f"{what} is too large")
        return plain
    if not isinstance(plain, numbers.Real) or not math.isfinite(plain):
        raise ValueError(f"{what} is {str(value)[:20]}, not a finite number")
    return float(plain)


def _order(item: Item) -> tuple[str, int, int, str]:
    """By task, then numbered ids by number, then the others by name."""
    numbered = item.id.isascii() and item.id.isdecimal() and len(item.id) < 19
    return item.task, not numbered, int(item.id) if numbered else 0, item.id


def _sorted(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """The same with keys in order at every depth."""
    return {key: _sorted(value) if isinstance(value, Mapping) else value for key, value in sorted(mapping.items())}


def _compact(said: Any) -> str:
    return json.dumps(said, sort_keys=True, separators=(",", ":"), allow_nan=False, default=dict)
