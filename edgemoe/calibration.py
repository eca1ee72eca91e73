"""What held-out text says of a model's routing: warm set, bonus scale and token prior. Format: docs/calibration.md.

Algorithm 1 (PSR paper §4.1, Appendix B) starts from experts that a layer usually selects, measures its bonus in units
of the mean score range, and evicts with an eye on the input token. All three are estimated once per model
(`edgemoe calibrate`, `edgemoe.tracing.calibrate`) and hold for that model file only.
"""

import hashlib
import json
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edgemoe.errors import UserError
from edgemoe.files import whole_file

if TYPE_CHECKING:
    from edgemoe.model import Model

FORMAT = "edgemoe calibration"
VERSION = 2
READABLE = (1, 2)  # 1 has no hit rates
_AGAIN = "run `edgemoe calibrate` again"
_PRIOR = ("tokens", "totals", "starts", "cells", "counts")
# What numpy, zipfile and json raise for bytes that are not theirs; zipfile takes a flipped bit for encryption, too.
_DAMAGE = (
    OSError, ValueError, TypeError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error
)  # fmt: skip
_TYPES = {
    "layers": "i4",
    "warm": "i2",
    "delta": "f4",
    "tokens": "i4",
    "totals": "u4",
    "starts": "i8",
    "cells": "u4",
    "counts": "u4",
    "hit_capacities": "i4",
    "hit_rates": "f4",
}
_HITS = ("hit_capacities", "hit_rates")


@dataclass(frozen=True, eq=False)
class TokenPrior:
    """πₗ(x): how often layer l's router chose each expert for input token x, as counts.

    Rows are tokens in ascending order of their ids, and a row's entries are `cells[starts[i] : starts[i + 1]]`,
    ascending, each l·E + e. A frequency is float32(count) / float32(total): one rounding, so every reader gets the
    same bits. Tokens without a row have a prior of zero.
    """

    shape: tuple[int, int]  # L, E
    tokens: np.ndarray  # [V] int32
    totals: np.ndarray  # [V] uint32: occurrences of the token
    starts: np.ndarray  # [V + 1] int64
    cells: np.ndarray  # [n] unsigned
    counts: np.ndarray  # [n] unsigned: occurrences whose layer l chose expert e

    @property
    def nbytes(self) -> int:
        return int(sum(getattr(self, name).nbytes for name in _PRIOR))

    def row(self, token: int) -> np.ndarray:  # [L, E] float32
        """The prior of one token in all layers."""
        dense = np.zeros(self.shape, dtype=np.float32)
        at = int(np.searchsorted(self.tokens, token))
        if at < len(self.tokens) and self.tokens[at] == token:
            entries = slice(self.starts[at], self.starts[at + 1])
            dense.reshape(-1)[self.cells[entries]] = self.counts[entries].astype(np.float32) / np.float32(
                self.totals[at]
            )
        return dense

    def rows(self, layer: int, tokens: np.ndarray) -> np.ndarray:  # [T, E] float32
        """The prior of T tokens in one layer (a row of the calibration, not the model's id)."""
        ids, which = np.unique(tokens, return_inverse=True)
        dense = np.zeros((len(ids), self.shape[1]), dtype=np.float32)
        at = np.searchsorted(self.tokens, ids)
        seen = np.flatnonzero(np.isin(ids, self.tokens))
        first, length = self.starts[at[seen]], self.starts[at[seen] + 1] - self.starts[at[seen]]
        owner = np.repeat(seen, length)
        entries = np.repeat(first - np.cumsum(length) + length, length) + np.arange(int(length.sum()))
        expert = self.cells[entries].astype(np.int64) - layer * self.shape[1]
        here = (expert >= 0) & (expert < self.shape[1])
        owner, expert, entries = owner[here], expert[here], entries[here]
        dense[owner, expert] = self.counts[entries].astype(np.float32) / self.totals[at[owner]].astype(np.float32)
        return dense[which.reshape(-1)]

    def check(self) -> None:
        """Raise ValueError unless every row can be read: a damaged file must not become a wrong decision."""
        n, cells = len(self.cells), self.shape[0] * self.shape[1]
        rows = len(self.tokens)
        if self.totals.shape != (rows,) or self.starts.shape != (rows + 1,) or self.counts.shape != (n,):
            raise ValueError("the arrays of the token prior do not fit together")
        if np.any(np.diff(self.tokens.astype(np.int64)) <= 0) or (rows and self.tokens[0] < 0):
            raise ValueError("the tokens of the prior do not ascend")
        if self.starts[0] != 0 or self.starts[-1] != n or np.any(np.diff(self.starts) < 0):
            raise ValueError("the rows of the token prior do not cover its entries")
        ascending = self.cells[1:] > self.cells[:-1]
        inner = self.starts[(self.starts > 0) & (self.starts < n)]
        ascending[inner - 1] = True
        if n and (self.cells.max() >= cells or not ascending.all()):
            raise ValueError(f"an entry of the token prior is not one of {cells} (layer, expert) pairs, in order")
        if n and (self.counts.min() < 1 or np.any(self.counts > np.repeat(self.totals, np.diff(self.starts)))):
            raise ValueError("a count of the token prior is not between 1 and its token's total")


@dataclass(frozen=True, eq=False)
class HitRates:
    """What caches of some sizes would hit on the calibration's text (`edgemoe.tracing.predict`)."""

    policies: dict[str, str]  # preset → hash of its `Policy`, in the order of the rates
    capacities: np.ndarray  # [C] int32 slots per layer, ascending
    rates: np.ndarray  # [P, C] float32; NaN where the policy is not defined
    n_tokens: int  # that were replayed

    def __post_init__(self) -> None:
        """Raise ValueError for arrays that are no hit rates."""
        if len(self.capacities) < 1 or np.any(np.diff(self.capacities) <= 0):
            raise ValueError("the capacities of its hit rates do not ascend")
        known = self.rates[~np.isnan(self.rates)]
        if self.rates.shape != (len(self.policies), len(self.capacities)) or np.any((known < 0) | (known > 1)):
            raise ValueError("its hit rates are not one share for each policy and capacity")

    def at(self, policy_hash: str, capacity: int) -> float | None:
        """The hit rate, between two sizes on the line from one to the other; None for what was not simulated."""
        if policy_hash not in self.policies.values():
            return None
        rates = self.rates[list(self.policies.values()).index(policy_hash)]
        known = ~np.isnan(rates)
        sizes = self.capacities[known]
        if not len(sizes) or not sizes[0] <= capacity <= sizes[-1]:
            return None
        return float(np.interp(capacity, sizes, rates[known]))


@dataclass(frozen=True, eq=False)
class Calibration:
    """Everything that Algorithm 1 takes from held-out text, of one model file.

    `LogicalCache(..., delta=c.delta, warm=c.warm, prior=c)` decides with it.
    """

    layers: np.ndarray  # [L] int32: the model's own ids of its MoE layers
    n_experts: int  # E
    delta: np.ndarray  # [L] float32 bonus scale Δ̄: mean over tokens of max − min of the scores that are not masked
    warm: np.ndarray  # [L, E] int16: all experts, most selected first, ties to the lowest index
    prior: TokenPrior
    model: str  # its name
    header_sha256: tuple[str, ...]  # of each of its files
    texts: tuple[dict[str, Any], ...] = ()  # domain, file, sha256 and tokens of each
    settings: dict[str, Any] = field(default_factory=dict)
    n_tokens: int = 0  # T, BOS included
    dropped: tuple[int, int] = (0, 0)  # distinct tokens without a row for want of room, and their occurrences
    hits: HitRates | None = None
    version: int = VERSION

    @property
    def digest(self) -> str:
        """SHA-256 of all that decisions depend on: Δ̄, the ranking, the prior."""
        content = hashlib.sha256()
        for values in (self.delta, self.warm, *(getattr(self.prior, name) for name in _PRIOR)):
            content.update(np.ascontiguousarray(values).tobytes())
        return content.hexdigest()

    def __post_init__(self) -> None:
        """Raise ValueError for arrays that are no calibration."""
        n_layers = len(self.layers)
        if n_layers < 1 or self.n_experts < 1 or np.any(np.diff(self.layers) <= 0):
            raise ValueError("its layers are not ascending ids")
        if self.delta.shape != (n_layers,) or not np.all(np.isfinite(self.delta) & (self.delta >= 0)):
            raise ValueError("the bonus scale is not one finite number per layer")
        everyone = np.arange(self.n_experts)
        if self.warm.shape != (n_layers, self.n_experts) or np.any(np.sort(self.warm, axis=1) != everyone):
            raise ValueError(f"the warm ranking does not name each of the {self.n_experts} experts once per layer")
        if self.prior.shape != (n_layers, self.n_experts):
            raise ValueError("the token prior has another shape than the model")
        self.prior.check()

    def prior_row(self, token: int) -> np.ndarray:  # [L, E] float32
        """πₗ(token) in all layers; zeros for a token that the text did not hold."""
        return self.prior.row(token)

    def save(self, path: str | Path) -> None:
        """Write the file, whole or not at all; `UserError` where it cannot be written."""
        meta = {
            "format": FORMAT,
            "version": self.version,
            "model": self.model,
            "num_experts": self.n_experts,
            "header_sha256": list(self.header_sha256),
            "num_tokens": self.n_tokens,
            "dropped": list(self.dropped),
            "texts": list(self.texts),
            "settings": self.settings,
        }
        arrays = {name: getattr(self, name) for name in ("layers", "delta", "warm")}
        arrays |= {name: getattr(self.prior, name) for name in _PRIOR}
        if self.hits:
            meta |= {"hit_policies": self.hits.policies, "hit_tokens": self.hits.n_tokens}
            arrays |= {"hit_capacities": self.hits.capacities, "hit_rates": self.hits.rates}
        with whole_file(path) as file:
            np.savez_compressed(file, meta=np.array(json.dumps(meta)), **arrays)


def score_ranges(scores: np.ndarray) -> np.ndarray:  # [≤ T] float32
    """max − min of each token's scores [T, E] over the experts that are not masked (−inf); without any, none."""
    high: np.ndarray = scores.max(axis=1)
    known = ~np.isneginf(high)
    low: np.ndarray = np.where(np.isneginf(scores), np.inf, scores).min(axis=1)
    return high[known] - low[known]


def mean_range(ranges: np.ndarray) -> np.float32:
    """Δ̄ of one layer; NaN if there is no range, or if one is not a number."""
    return np.float32(ranges.mean(dtype=np.float64)) if len(ranges) else np.float32(np.nan)


def ranking(experts: np.ndarray, n_experts: int) -> np.ndarray:  # [E] int16
    """All experts of one layer [T, k] by how often they were chosen, most first, ties to the lowest index."""
    counts = np.bincount(experts[experts >= 0], minlength=n_experts)
    return np.argsort(-counts, kind="stable").astype(np.int16)


def is_calibration(path: str | Path) -> bool:
    """Whether a file is a calibration (whole or damaged) and not, say, a trace: by the names of its members."""
    try:
        with zipfile.ZipFile(path) as archive:
            return {"totals.npy", "starts.npy"} <= set(archive.namelist())
    except (OSError, zipfile.BadZipFile):
        return False


def load_calibration(path: str | Path, model: "str | Path | Model | None" = None) -> Calibration:
    """Read a calibration; with `model` (a GGUF file, or what `read_model` made of it), refuse that of another.

    Raises `UserError`, one line, for a file that is missing, damaged, of another version, of another model, or that
    holds values which are not numbers.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            if file.read(2) != b"PK":  # otherwise numpy takes it for a pickle, and recommends to load it as one
                raise ValueError("it is no npz archive")
        with np.load(path, allow_pickle=False) as archive:
            if "meta" not in archive.files:
                raise ValueError("it has no member meta")
            meta = json.loads(str(archive["meta"]))
            if not isinstance(meta, dict) or meta.get("format") != FORMAT:
                raise ValueError("its meta is another format's: is it a trace?")
            if meta.get("version") not in READABLE:
                raise UserError(
                    f"{path}: a calibration of version {meta.get('version')}, this edgemoe reads "
                    f"{READABLE[0]} to {READABLE[-1]}: {_AGAIN}"
                )
            wanted = [name for name in _TYPES if name not in _HITS or "hit_policies" in meta]
            found = _assemble({name: _array(archive, name) for name in wanted}, meta)
    except FileNotFoundError:
        raise UserError(f"{path}: no such calibration file: `edgemoe calibrate` makes one") from None
    except IsADirectoryError:
        raise UserError(f"{path}: a folder, expected a calibration file") from None
    except _DAMAGE as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path}: not a sound calibration file ({reason}): {_AGAIN}") from None
    if model is not None:
        _check_model(path, found, model)
    return found


def _array(archive: Any, name: str) -> np.ndarray:
    """A member with the kind of its numbers checked; unsigned ones may be stored narrower."""
    array: np.ndarray = archive[name]
    wanted = np.dtype(_TYPES[name])
    if array.dtype.kind != wanted.kind or array.dtype.itemsize > wanted.itemsize:
        raise ValueError(f"{name} holds {array.dtype}, expected {wanted}")
    if array.ndim != (2 if name in ("warm", "hit_rates") else 1):
        raise ValueError(f"{name} has shape {array.shape}")
    return array


def _assemble(arrays: dict[str, np.ndarray], meta: dict[str, Any]) -> Calibration:
    n_experts = int(meta["num_experts"])
    shape = (len(arrays["layers"]), n_experts)
    dropped, occurrences = meta["dropped"]
    hits = None
    if "hit_policies" in meta:
        policies = {str(name): str(value) for name, value in meta["hit_policies"].items()}
        hits = HitRates(policies, arrays["hit_capacities"], arrays["hit_rates"], int(meta["hit_tokens"]))
    return Calibration(
        layers=arrays["layers"],
        n_experts=n_experts,
        delta=arrays["delta"],
        warm=arrays["warm"],
        prior=TokenPrior(shape, *(arrays[name] for name in _PRIOR)),
        model=str(meta["model"]),
        header_sha256=tuple(map(str, meta["header_sha256"])),
        texts=tuple(meta["texts"]),
        settings=dict(meta["settings"]),
        n_tokens=int(meta["num_tokens"]),
        dropped=(int(dropped), int(occurrences)),
        hits=hits,
        version=int(meta["version"]),
    )


def _check_model(path: Path, found: Calibration, model: "str | Path | Model") -> None:
    from edgemoe.llamacpp.header import header_fingerprint
    from edgemoe.model import read_model

    if isinstance(model, str | Path):
        model = read_model(model)
    check_fingerprint(path, found, model.geometry.name, [header_fingerprint(file) for file in model.files])


def check_fingerprint(path: str | Path, found: Calibration, model: str, header_sha256: Sequence[str]) -> None:
    """Raise `UserError` unless the calibration is of the model with these header fingerprints, one per file."""
    if tuple(header_sha256) != found.header_sha256:
        other = f"of {found.model}" if found.model != model else "of another file"
        raise UserError(
            f"{path}: a calibration {other}, not of this {model} (header fingerprints differ): "
            "run `edgemoe calibrate` on this file"
        )
