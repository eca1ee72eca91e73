"""The rounds: every arm decodes every window once per round, in turns, so that drift of the machine meets all alike."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from edgemoe.bench.gpu.clocks import TIMED, Arm, Clock
from edgemoe.bench.gpu.pool import Pool
from edgemoe.bench.gpu.replay import Decided, Routing, decide
from edgemoe.bench.gpu.subject import Subject
from edgemoe.errors import UserError
from edgemoe.progress import Advance, no_progress

COUNTED = ("loads", "misses", "demand", "prefetch", "in_time", "late", "unused", "reset_copies", "reset_s", "wait_s")


@dataclass
class Timed:
    """What an arm did. `seconds` holds a list of tokens per round, all windows one after the other."""

    arm: Arm
    name: str = ""
    """The executor's own, for the config hash."""
    seconds: list[np.ndarray] = field(default_factory=list)
    counts: list[dict[str, float]] = field(default_factory=list)
    """Totals of each round, as the executor counts: `COUNTED`."""
    decided: tuple[Decided, ...] = ()
    """By the host's Algorithm 1, of each window."""
    agrees: bool | None = None
    """Whether the executor's residents after each window were those that the host decided."""
    problem: str = ""

    @property
    def tokens(self) -> int:
        return sum(len(found) for found in self.seconds)

    def per_token(self, name: str) -> float:
        return sum(found[name] for found in self.counts) / max(self.tokens, 1)

    @property
    def means(self) -> list[float]:
        """Seconds per token, of each round."""
        return [float(found.mean()) for found in self.seconds]


def prepare(subject: Subject, pool: Pool, arms: Sequence[Arm], advance: Advance = no_progress) -> list[Timed]:
    """Compile what the arms need, and find what their policies decide. An arm that cannot run says why."""
    found = []
    for arm in arms:
        timed = Timed(arm)
        with _noted(timed, pool):
            if arm.executor not in TIMED:
                timed.decided = _decided(subject, pool, arm)
            clock = pool.get(arm)
            timed.name = clock.executor.name
            clock.executor.reset()
            _warm_up(subject, clock)
        found.append(timed)
        advance(1)
    return found


def _warm_up(subject: Subject, clock: Clock) -> None:
    """Both launches that follow: a token alone, and a few that are enqueued."""
    tokens = subject.windows[0]
    clock.executor.step(tokens[:1], 0)
    clock.warm(tokens[: min(4, len(tokens))])


def _decided(subject: Subject, pool: Pool, arm: Arm) -> tuple[Decided, ...]:
    cache = subject.cache(arm.policy, arm.slots)
    return tuple(
        decide(cache, subject.routing(number) or _observed(tokens, pool.get(arm)), tokens)
        for number, tokens in enumerate(subject.windows)
    )


def _observed(tokens: np.ndarray, clock: Clock) -> Routing:
    """What the routers of a real model say in a window under this arm, untimed."""
    executor = clock.executor
    executor.reset()
    scores, pregates = [], []
    for position in range(len(tokens)):
        executor.step(tokens[position : position + 1], position)
        told = executor.record(1)
        scores.append(told["scores"])
        pregates.append(told.get("pregate", np.zeros_like(told["scores"])))
    return Routing(np.concatenate(scores, 1), np.concatenate(pregates, 1))


class _noted:
    """What goes wrong in an arm is the arm's problem, and only the arm's."""

    def __init__(self, timed: Timed, pool: Pool) -> None:
        self._timed, self._pool = timed, pool

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, UserError | torch.cuda.OutOfMemoryError):
            return False
        self._timed.problem = str(error).splitlines()[0]
        self._pool.forget(self._timed.arm)
        return True


def one_round(subject: Subject, pool: Pool, arms: Sequence[Timed], number: int, advance: Advance) -> None:
    """Time every arm that still runs. Later rounds begin with another arm."""
    going = [timed for timed in arms if not timed.problem]
    turn = number % len(going) if going else 0
    for timed in going[turn:] + going[:turn]:
        with _noted(timed, pool):
            clock = pool.get(timed.arm)
            total = dict.fromkeys(COUNTED, 0.0)
            parts = [_window(clock, timed, window, total) for window in range(len(subject.windows))]
            timed.seconds.append(np.concatenate(parts))
            timed.counts.append(total)
        advance(sum(len(tokens) for tokens in subject.windows))


def _window(clock: Clock, timed: Timed, window: int, total: dict[str, float]) -> np.ndarray:
    before = _counters(clock)
    seconds = clock.times(window)
    after = _counters(clock)
    for name in COUNTED:
        total[name] += after[name] - before[name]
    if not timed.decided:
        return seconds
    same = bool(np.array_equal(clock.executor.slot_of() >= 0, timed.decided[window].resident))
    timed.agrees = same if timed.agrees is None else timed.agrees and same
    return seconds


def _counters(clock: Clock) -> dict[str, float]:
    counters = clock.executor.counters
    return {name: float(getattr(counters, name)) for name in COUNTED}


@dataclass(frozen=True)
class Ended:
    """How the rounds ended. `why`, where there are fewer than were asked for."""

    rounds: int
    why: str = ""


def rounds(
    subject: Subject,
    pool: Pool,
    arms: Sequence[Timed],
    count: int,
    until: float | None,
    after_round: Callable[[int], None],
    advance: Advance,
) -> Ended:
    """`count` rounds, or as many as end before `until` (monotonic seconds). Ctrl-C ends them too: what was measured
    is kept, and a round that was not finished counts in no arm."""
    for number in range(count):
        start = time.monotonic()
        try:
            one_round(subject, pool, arms, number, advance)
        except KeyboardInterrupt:
            _cut(arms, number)
            return Ended(number, "interrupted")
        if not any(timed.seconds for timed in arms):
            return Ended(0, "no row could be run")
        after_round(number + 1)
        took = time.monotonic() - start
        if until is not None and number + 1 < count and time.monotonic() + took > until:
            return Ended(number + 1, f"the time that was given was up after {number + 1} of {count} rounds")
    return Ended(count)


def _cut(arms: Sequence[Timed], complete: int) -> None:
    """Forget a round that not every arm has run; of the first, keep what there is."""
    for timed in arms:
        if complete:
            del timed.seconds[complete:], timed.counts[complete:]
