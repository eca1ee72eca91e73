"""Repeat measurements until their medians settle, or say that they did not (thermal limits, noisy neighbours).

Cells are measured in turn, one round each, so that a machine that slows down slows every cell alike: the rates of one
profile stay comparable. Cells that have settled leave the queue.
"""

import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import TypeVar

from edgemoe.machine.profile import Rate
from edgemoe.progress import Advance, no_progress

K = TypeVar("K", bound=Hashable)

TOLERANCE = 0.03


@dataclass(frozen=True)
class Effort:
    """How long to try: at least `least` rounds of each cell, at most `most`, and about `seconds` in all."""

    least: int
    most: int
    seconds: float

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ValueError(f"{self.least} to {self.most} rounds")


def settle(cells: Mapping[K, Callable[[], float]], effort: Effort, advance: Advance = no_progress) -> dict[K, Rate]:
    """Bytes per second of each cell, a callable that measures it once.

    `advance` is told rounds, `most` per cell in all: one that settles early counts as done. When the time is up, each
    cell that has one round at least stays as it is.
    """
    measured: dict[K, list[float]] = {key: [] for key in cells}
    waiting = list(cells)
    end = time.monotonic() + effort.seconds
    while waiting:
        for key in tuple(waiting):
            rounds = measured[key]
            if rounds and time.monotonic() > end:
                waiting.remove(key)
                advance(effort.most - len(rounds))
                continue
            rounds.append(cells[key]())
            advance(1)
            if len(rounds) >= effort.most or (len(rounds) >= effort.least and is_stable(rounds)):
                waiting.remove(key)
                advance(effort.most - len(rounds))
    return {key: rate(rounds) for key, rounds in measured.items()}


def rate(rounds: Sequence[float]) -> Rate:
    """The rounds as one figure."""
    middle = median(rounds)
    spread = 0.0
    if len(rounds) > 1:
        low, _, high = quantiles(rounds, n=4, method="inclusive")
        spread = (high - low) / 2 / middle
    return Rate(middle, spread, len(rounds), is_stable(rounds))


def is_stable(rounds: Sequence[float]) -> bool:
    """Is the median known to ± 3%, and is it the same in the earlier and the later half of the rounds?

    Known: the half-width of its 95% interval, from order statistics (no assumption on the distribution; of fewer than
    six rounds that is their whole range). Two rounds say nothing.
    """
    count = len(rounds)
    if count < 3:
        return False
    ranked, middle = sorted(rounds), median(rounds)
    outside = _outside(count)
    known = (ranked[-1 - outside] - ranked[outside]) / 2 <= TOLERANCE * middle
    drift = abs(median(rounds[: count // 2]) - median(rounds[-(count // 2) :]))
    return known and drift <= TOLERANCE * middle


def _outside(count: int) -> int:
    """How many rounds to leave out at each end for the 95% interval of the median: binomial(count, 1/2)."""
    tail, outside = 0.0, -1
    while True:
        tail += math.comb(count, outside + 1) / 2**count
        if tail > 0.025:
            return max(outside, 0)
        outside += 1
