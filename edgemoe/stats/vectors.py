"""What every test takes: numbers in pairs, and the groups that they come in."""

from collections.abc import Hashable, Sequence
from typing import TypeAlias

import numpy as np

Numbers: TypeAlias = Sequence[float] | np.ndarray
Groups: TypeAlias = Sequence[Hashable] | np.ndarray

# Differences smaller than what rounding leaves of two equal numbers are none.
_ROUNDING = 8 * np.finfo(np.float64).eps


def differences(values: Numbers, reference: Numbers, at_least: int = 2) -> np.ndarray:  # [n] float64
    """values − reference, pair by pair. What rounding alone may have left is put at 0, or at the one difference that
    all pairs have: a test that divides by the spread must not divide by noise.

    Raises ValueError for other lengths, fewer than `at_least` pairs, or anything that is not finite.
    """
    ours, theirs = numbers(values, at_least), numbers(reference, at_least)
    if len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} values and {len(theirs)} of the reference: expected pairs")
    found: np.ndarray = ours - theirs
    noise = _ROUNDING * max(np.abs(ours).max(), np.abs(theirs).max())
    found[np.abs(found) <= noise] = 0.0
    if np.ptp(found) <= noise:
        found[:] = found[0]
    return found


def numbers(values: Numbers, at_least: int = 1) -> np.ndarray:  # [n] float64
    """The values as an array of its own; a ValueError unless there are enough, all finite."""
    array = np.array(values, dtype=np.float64)
    if array.ndim != 1 or len(array) < at_least:
        raise ValueError(f"expected at least {at_least} numbers in a row, found shape {array.shape}")
    if not np.isfinite(array).all():
        raise ValueError("expected finite numbers")
    return array


def sums_by_group(values: np.ndarray, groups: Groups) -> np.ndarray:  # [G] float64
    """The sum of each group's values, in order of first appearance. Raises ValueError for other lengths."""
    if len(groups) != len(values):
        raise ValueError(f"{len(values)} values and {len(groups)} groups: expected a group for each")
    number: dict[Hashable, int] = {}
    which = [number.setdefault(group, len(number)) for group in groups]
    return np.bincount(which, weights=values, minlength=len(number))
