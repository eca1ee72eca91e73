"""The exact McNemar test: which of two configurations answers more of the same questions (PSR paper §6.1)."""

from dataclasses import dataclass

import numpy as np

from edgemoe.stats.distributions import functions
from edgemoe.stats.vectors import Numbers, numbers


@dataclass(frozen=True)
class McNemar:
    """Questions that two configurations answer differently, and how surprising their balance is."""

    n: int
    won: int
    """1 here and 0 in the reference."""
    lost: int
    """0 here and 1 in the reference."""
    p: float
    """Two-sided and exact."""

    @property
    def discordant(self) -> int:
        return self.won + self.lost


def mcnemar(values: Numbers, reference: Numbers) -> McNemar:
    """The exact test on the discordant pairs of two 0/1 outcomes [n]: won ~ Binomial(won + lost, 1/2), two-sided.

    PSR paper §6.1: "an exact McNemar test on discordant questions". Assumes independent questions: where they come in
    groups, use `sign_flip`. Raises ValueError for outcomes other than 0 and 1.
    """
    ours, theirs = numbers(values), numbers(reference)
    if len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} values and {len(theirs)} of the reference: expected pairs")
    if not (np.isin(ours, (0, 1)).all() and np.isin(theirs, (0, 1)).all()):
        raise ValueError("expected outcomes of 0 and 1")
    won, lost = int((ours > theirs).sum()), int((ours < theirs).sum())
    return McNemar(len(ours), won, lost, balance_p(won, lost))


def balance_p(won: int, lost: int) -> float:
    """P of a balance at least as uneven as won : lost, by coin flips. 1 where nothing is discordant."""
    special = functions()
    return min(1.0, float(2 * special.bdtr(min(won, lost), won + lost, 0.5))) if won + lost else 1.0
