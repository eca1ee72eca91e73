"""One case: a load, a number of streams and a policy, run by the tier and, where memory can be limited, by mmap.

Both are loaded in groups of the same size and take turns, round by round. Each goes on in the recorded routing where
it was, because a jump would lose what caches live on. The file's pages are dropped before; then each warms up until its
memory holds what it will.
"""

import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from edgemoe.bench.arm import MAPPED, STREAMED, Opening
from edgemoe.bench.child import Child
from edgemoe.bench.limits import SPREAD
from edgemoe.bench.memory_group import Hierarchy
from edgemoe.errors import UserError
from edgemoe.machine.page_cache import make_cold
from edgemoe.policy import Policy
from edgemoe.progress import Advance
from edgemoe.streaming.replay_reads import ReadLog, replay

# What the tier is told to hold, of its group's limit: page tables and the kernel's own are charged to the group, too.
TOLD = 0.95
_WARM = 3  # what warming up counts for in progress


@dataclass(frozen=True)
class Effort:
    """Rounds, seconds that each may take, steps that it has at most, and seconds of warming up."""

    rounds: int = 5
    seconds: float = 2.0
    steps: int = 32
    warm_seconds: float = 8.0
    warm_steps: int = 48


QUICK = Effort(rounds=3, seconds=0.3, steps=4, warm_seconds=1.0, warm_steps=8)


@dataclass(frozen=True)
class Setting:
    """What all cases share. `limit`: bytes that each side may have. `mapped`: whether mmap runs beside."""

    model: Path
    limit: int
    threads: int
    readers: int
    hierarchy: Hierarchy | None
    effort: Effort


@dataclass(frozen=True)
class Case:
    """`load` names the routing; `forced` is its file (none: the model's own random router)."""

    load: str
    streams: int
    policy_name: str
    policy: Policy
    forced: str | None = None
    beside_mmap: bool = True

    @property
    def n_ctx(self) -> int:
        return 256 if self.streams == 1 else 64

    @property
    def name(self) -> str:
        """`recorded ×8`, and the policy where it is not plain exact LRU."""
        return f"{self.load} ×{self.streams}" + (f" {self.policy_name}" if self.policy != Policy() else "")


@dataclass(frozen=True)
class Replay:
    """Seconds that a round's reads took in the run, and take without inference, layer by layer: into memory as the
    experts' is (huge pages, too many for the processor's cache), and into one buffer per reader, which stays in that
    cache."""

    busy_s: float
    alone_s: float
    buffer_s: float


@dataclass(frozen=True)
class Round:
    """What one side did in one round: seconds of its steps, and what was counted meanwhile."""

    seconds: list[float]
    counted: dict[str, float]
    ram_bytes: int
    replay: Replay | None = None

    def per_step(self, name: str) -> float:
        return self.counted.get(name, 0.0) / len(self.seconds)


@dataclass(frozen=True)
class Side:
    """One side's rounds, and what it said of itself. `problem`: why it has none."""

    described: dict[str, Any] = field(default_factory=dict)
    rounds: list[Round] = field(default_factory=list)
    peak: int | None = None
    warmed: int = 0  # steps before the first round
    problem: str = ""

    def tokens_per_s(self, streams: int) -> list[float]:
        return [streams * len(one.seconds) / sum(one.seconds) for one in self.rounds]

    def median(self, name: str) -> float:
        """Of a counter, per step."""
        return median(one.per_step(name) for one in self.rounds)


@dataclass(frozen=True)
class Outcome:
    case: Case
    streamed: Side
    mapped: Side | None

    @property
    def speedup(self) -> float | None:
        """Median over rounds of the tier's speed over mmap's in the same round."""
        if self.mapped is None or not self.mapped.rounds or not self.streamed.rounds:
            return None
        pairs = zip(self.streamed.tokens_per_s(1), self.mapped.tokens_per_s(1), strict=True)
        return median(ours / theirs for ours, theirs in pairs)


def n_steps(effort: Effort) -> int:
    """What `run` tells `advance` in all."""
    return _WARM + effort.rounds


def run(case: Case, setting: Setting, advance: Advance) -> Outcome:
    """Measure a case. What one side cannot do is said in its `problem`; the other is measured all the same."""
    effort, sides, problems = setting.effort, {}, {}
    drop_pages(setting.model)
    try:
        for arm in (STREAMED, MAPPED) if case.beside_mmap and setting.hierarchy else (STREAMED,):
            try:
                sides[arm] = _Measured(arm, case, setting)
                sides[arm].warm(effort)
            except UserError as error:
                problems[arm] = str(error)
                if arm in sides:
                    sides.pop(arm).child.close()
        advance(_WARM)
        for _ in range(effort.rounds):
            for arm, side in list(sides.items()):
                try:
                    side.round(effort)
                except UserError as error:
                    problems[arm] = str(error)
                    sides.pop(arm).child.close()
            advance(1)
        done = {arm: side.done() for arm, side in sides.items()}
    finally:
        for side in sides.values():
            side.child.close()
    for arm, problem in problems.items():
        done[arm] = Side(problem=problem)
    return Outcome(case, done[STREAMED], done.get(MAPPED))


class _Measured:
    """A side while it is measured."""

    def __init__(self, arm: str, case: Case, setting: Setting) -> None:
        opening = Opening(
            arm=arm,
            model=str(setting.model),
            streams=case.streams,
            n_ctx=case.n_ctx,
            threads=setting.threads,
            forced=case.forced,
            ram=round(TOLD * setting.limit),
            policy=asdict(case.policy),
            readers=setting.readers,
        )
        self.child = Child(opening, setting.hierarchy, setting.limit)
        self.readers = setting.readers
        self.rounds: list[Round] = []
        self.step_s, self.warmed, self.at = 0.0, 0, 0

    def warm(self, effort: Effort) -> None:
        spent: list[float] = []
        while len(spent) < effort.warm_steps and sum(spent) < effort.warm_seconds:
            spent += self.child.steps(len(spent), 1)["seconds"]
        self.step_s = median(spent[len(spent) // 2 :])
        self.warmed = self.at = len(spent)

    def round(self, effort: Effort) -> None:
        count = max(1, min(effort.steps, round(effort.seconds / self.step_s)))
        with tempfile.TemporaryDirectory(prefix="edgemoe-bench-") as folder:
            log = Path(folder) / "reads.npz"
            answer = self.child.steps(self.at, count, log)
            self.at += count
            again = _replay(ReadLog.load(log), self.readers) if log.exists() else None
        self.rounds.append(Round(**answer, replay=again))

    def done(self) -> Side:
        return Side(self.child.described, self.rounds, self.child.peak, self.warmed)


def _replay(log: ReadLog, readers: int) -> Replay:
    return Replay(log.busy_s, replay(log, readers=readers, spread=SPREAD), replay(log, readers=readers))


def drop_pages(path: Path) -> None:
    """Take a file out of the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        make_cold(descriptor, 0.0)
    finally:
        os.close(descriptor)


def spread(values: Sequence[float]) -> float:
    """Half the range of the rounds over their median: few rounds have no better measure."""
    return (max(values) - min(values)) / 2 / median(values)
