"""What a trace must be before anything computes with it; checked once, when a `Trace` is made, however it is made.

The compiled loops index by expert id and by window without looking, so a trace that contradicts itself stops here.
Every check raises `ValueError` with words that fit after "<name of the trace>: ".
"""

from typing import Any

import numpy as np

MAX_EXPERTS = 1 << 15  # ids are int16


def array(name: str, values: Any, kind: type, shape: tuple[int | None, ...]) -> np.ndarray:
    """The values as `kind`, if they are integers (or floats) of this shape that fit it; None is any length."""
    if not isinstance(values, np.ndarray):
        raise ValueError(f"`{name}` is a {type(values).__name__}, expected an array")
    wanted: np.dtype = np.dtype(kind)
    if values.dtype.kind not in ("iu" if wanted.kind == "i" else "f"):
        what = "integers" if wanted.kind == "i" else "floating-point numbers"
        raise ValueError(f"`{name}` holds {values.dtype}, expected {what}")
    if values.ndim != len(shape) or any(n not in (None, m) for n, m in zip(shape, values.shape, strict=True)):
        expected = ", ".join("any" if n is None else str(n) for n in shape)
        raise ValueError(f"`{name}` has shape {values.shape}, expected ({expected})")
    if wanted.kind == "i" and values.size:
        low, high, bounds = int(values.min()), int(values.max()), np.iinfo(wanted)
        if low < bounds.min or high > bounds.max:
            raise ValueError(f"`{name}` holds {low if low < bounds.min else high}, which no {wanted} can be")
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and is refused as that
        return values.astype(wanted, copy=False)


def count_of_experts(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 1 <= value <= MAX_EXPERTS:
        raise ValueError(f"{value!r} experts per layer, expected a number from 1 to {MAX_EXPERTS}")
    return int(value)


def experts(values: Any, n_experts: int) -> np.ndarray:  # [L, T, k] int16
    """Ids of experts that there are, or −1; at least one token, and in each layer at least one id."""
    if isinstance(values, np.ndarray) and values.ndim == 3 and 0 in values.shape:
        raise ValueError("the trace holds no tokens")
    if isinstance(values, np.ndarray) and values.dtype.kind in "iu" and values.size:
        low, high = int(values.min()), int(values.max())
        if low < -1 or high >= n_experts:
            wrong = low if low < -1 else high
            raise ValueError(f"expert id {wrong}, but the model has experts 0 to {n_experts - 1}")
    values = array("experts", values, np.int16, (None, None, None))
    if values.shape[2] > n_experts:
        raise ValueError(f"{values.shape[2]} experts per token, but the model has {n_experts}")
    empty = np.flatnonzero(values.max(axis=(1, 2)) < 0)
    if len(empty):
        raise ValueError(f"row {empty[0]} of `experts` holds no expert at all")
    return values


def executed(values: Any, n_experts: int, shape: tuple[int, ...]) -> np.ndarray:  # [L, T, k] int16
    """Ids of experts that there are, or −1, as many as were chosen."""
    values = array("executed", values, np.int16, shape)
    if values.min() < -1 or values.max() >= n_experts:
        raise ValueError(f"`executed` holds an expert that is none of 0 to {n_experts - 1}")
    return values


def layers(values: Any, n_layers: int) -> np.ndarray:  # [L] int32
    values = array("layers", values, np.int32, (n_layers,))
    if values[0] < 0 or (np.diff(values) <= 0).any():
        raise ValueError("its `layers` are not ids that ascend")
    return values


def windows(values: Any, n_tokens: int) -> np.ndarray:  # [W] int64
    values = array("windows", values, np.int64, (None,))
    bounds = np.append(values, n_tokens)
    if bounds[0] != 0 or (np.diff(bounds) <= 0).any():
        raise ValueError(f"its windows do not ascend from 0 to the {n_tokens} tokens")
    return values


def domains(values: Any, n_windows: int) -> tuple[str, ...]:
    if not isinstance(values, list | tuple) or not all(isinstance(value, str) for value in values):
        raise ValueError("its domains are not a list of names")
    if len(values) != n_windows:
        raise ValueError(f"{n_windows} windows but {len(values)} domains")
    return tuple(values)


def tokens(values: Any, n_tokens: int) -> np.ndarray:  # [T] int32
    return array("tokens", values, np.int32, (n_tokens,))


def scores(name: str, values: Any, shape: tuple[int, int, int]) -> np.ndarray:  # [L, T, E] float32
    """What selection ranks: numbers, or −∞ for an expert that a mask forbids."""
    values = array(name, values, np.float32, shape)
    # One comparison finds both: a NaN compares with nothing.
    if not (values < np.inf).all():
        raise ValueError(f"`{name}` holds values that are not numbers: trace it again")
    return values


def weights(values: Any, shape: tuple[int, int, int]) -> np.ndarray:  # [L, T, k] float32
    values = array("weights", values, np.float32, shape)
    if not np.isfinite(values).all():
        raise ValueError("`weights` holds values that are not numbers: trace it again")
    return values


def delta(values: Any, n_layers: int) -> np.ndarray:  # [L] float32
    values = array("delta", values, np.float32, (n_layers,))
    if not (np.isfinite(values) & (values >= 0)).all():
        raise ValueError("`delta` holds values that are no range of scores")
    return values


def warm(values: Any, n_layers: int, n_experts: int) -> np.ndarray:  # [L, m] int16
    """Different experts, most frequent first; a list may end early."""
    values = array("warm", values, np.int16, (n_layers, None))
    ordered = np.sort(values, axis=1)
    if ((values < 0) | (values >= n_experts)).any() or (ordered[:, 1:] == ordered[:, :-1]).any():
        raise ValueError(f"`warm` is not a list of different experts for each of the {n_layers} layers")
    return values
