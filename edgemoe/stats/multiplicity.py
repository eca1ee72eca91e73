"""Holm's correction: what stays significant when a table holds many tests (PSR paper §6.1)."""

from dataclasses import dataclass

import numpy as np

from edgemoe.stats.vectors import Numbers, numbers


@dataclass(frozen=True)
class Holm:
    """Holm's correction over one family of tests, in the order in which they were given."""

    adjusted: tuple[float, ...]
    rejected: tuple[bool, ...]
    """adjusted ≤ α."""
    alpha: float

    @property
    def family(self) -> int:
        return len(self.adjusted)


def holm(p_values: Numbers, alpha: float = 0.05) -> Holm:
    """Adjusted p-values [m] of a family of m tests: with p sorted, the running maximum of (m − i)·p_i, at most 1.

    PSR paper §6.1: "Each table is one family of tests". Controls the chance of any false rejection at α, whatever the
    dependence between the tests. Raises ValueError for p-values outside [0, 1].
    """
    p = numbers(p_values)
    if (p < 0).any() or (p > 1).any():
        raise ValueError("expected p-values from 0 to 1")
    order = np.argsort(p, kind="stable")
    adjusted = np.empty(len(p))
    adjusted[order] = np.minimum(np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)), 1.0)
    return Holm(tuple(map(float, adjusted)), tuple(map(bool, adjusted <= alpha)), alpha)
