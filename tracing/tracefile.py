"""The trace file: which experts fired, for which token, in which layer. Format: docs/trace-format.md.

An npz archive. `experts` [L, T, k] and the JSON string `meta` are the published format (arXiv 2608.18261, §4)
and all that a reader may rely on; every other member is optional.
"""

import json
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from edgemoe.errors import UserError
from edgemoe.tracing import validate
from edgemoe.tracing.spool import Spool, spool_path

OPTIONAL = ("layers", "windows", "tokens", "scores", "pregate", "weights", "executed", "delta", "warm")
_ZIP = (b"PK\x03\x04", b"PK\x05\x06")
_KNOWN_STARTS = {
    b"GGUF": "a GGUF model: trace it first, with edgemoe trace",
    b"MOETRACE": "a trace of llama-moe-trace: convert it first, with python -m edgemoe.tracing.native",
    b"\x93NUMPY": "one NumPy array, expected an .npz archive of several",
}
_TOKEN_MAJOR = "[token, layer, expert]"


@dataclass(frozen=True, eq=False)
class Trace:
    """Routing of T tokens through L MoE layers.

    Tokens come in windows: the model's cache was cleared before each. A window belongs to one domain. Arrays are
    brought to the types below; contents that contradict each other are a `UserError`, so functions that take a trace
    need not look again.
    """

    experts: np.ndarray  # [L, T, k] int16 in rank order; layers with a smaller k are padded with −1
    n_experts: int  # E
    layers: np.ndarray  # [L] int32: the model's own layer ids
    windows: np.ndarray  # [W] int64: first token of each window, ascending from 0
    domains: tuple[str, ...]  # [W] domain of each window
    name: str
    tokens: np.ndarray | None = None  # [T] int32 token ids
    scores: np.ndarray | None = None  # [L, T, E] float32: what selection ranks
    pregate: np.ndarray | None = None  # [L, T, E] float32; zero in layers without one, see `has_pregate`
    weights: np.ndarray | None = None  # [L, T, k] float32 mixing weights
    executed: np.ndarray | None = None  # [L, T, k] int16: what a steered run executed instead of `experts`
    delta: np.ndarray | None = None  # [L] float32 bonus scale Δ̄, from held-out text
    warm: np.ndarray | None = None  # [L, ≤ E] int16: experts by frequency on held-out text, most selected first
    meta: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:
            for name, value in self._validated().items():
                object.__setattr__(self, name, value)
        except ValueError as wrong:
            raise UserError(f"{self.name}: {wrong}") from None

    def _validated(self) -> dict[str, Any]:
        n_experts = validate.count_of_experts(self.n_experts)
        experts = validate.experts(self.experts, n_experts)
        n_layers, n_tokens, top_k = experts.shape
        windows = validate.windows(self.windows, n_tokens)
        found = {
            "n_experts": n_experts,
            "experts": experts,
            "layers": validate.layers(self.layers, n_layers),
            "windows": windows,
            "domains": validate.domains(self.domains, len(windows)),
        }
        if self.tokens is not None:
            found["tokens"] = validate.tokens(self.tokens, n_tokens)
        for name in ("scores", "pregate"):
            if getattr(self, name) is not None:
                found[name] = validate.scores(name, getattr(self, name), (n_layers, n_tokens, n_experts))
        if self.weights is not None:
            found["weights"] = validate.weights(self.weights, (n_layers, n_tokens, top_k))
        if self.executed is not None:
            found["executed"] = validate.executed(self.executed, n_experts, experts.shape)
        if self.delta is not None:
            found["delta"] = validate.delta(self.delta, n_layers)
        if self.warm is not None:
            found["warm"] = validate.warm(self.warm, n_layers, n_experts)
        return found

    @property
    def n_layers(self) -> int:
        return int(self.experts.shape[0])

    @property
    def n_tokens(self) -> int:
        return int(self.experts.shape[1])

    @property
    def top_k(self) -> int:
        return int(self.experts.shape[2])

    @property
    def has_pregate(self) -> np.ndarray:  # [L] bool
        """Layers with a pre-gate: neither the first MoE layer nor one after a dense layer (PSR §4.1)."""
        follows = np.zeros(self.n_layers, dtype=bool)
        if self.pregate is not None:
            follows[1:] = np.diff(self.layers) == 1
        return follows

    @property
    def token_domains(self) -> dict[str, np.ndarray]:  # name → [T_domain] int64 token indices
        """Token indices of each domain, in order of first appearance."""
        ends = np.append(self.windows[1:], self.n_tokens)
        spans: dict[str, list[np.ndarray]] = {}
        for start, end, domain in zip(self.windows, ends, self.domains, strict=True):
            spans.setdefault(domain, []).append(np.arange(start, end))
        return {domain: np.concatenate(parts) for domain, parts in spans.items()}

    def only(self, domain: str) -> "Trace":
        """The windows of one domain; a `UserError` names the domains there are."""
        if domain not in self.domains:
            raise UserError(f"{self.name}: no domain {domain!r}; it has {', '.join(dict.fromkeys(self.domains))}")
        index = self.token_domains[domain]
        ends = np.append(self.windows[1:], self.n_tokens)
        lengths = [end - start for start, end, d in zip(self.windows, ends, self.domains, strict=True) if d == domain]
        return Trace(
            experts=self.experts[:, index],
            n_experts=self.n_experts,
            layers=self.layers,
            windows=np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64),
            domains=(domain,) * len(lengths),
            name=f"{self.name}:{domain}",
            tokens=None if self.tokens is None else self.tokens[index],
            scores=None if self.scores is None else self.scores[:, index],
            pregate=None if self.pregate is None else self.pregate[:, index],
            weights=None if self.weights is None else self.weights[:, index],
            executed=None if self.executed is None else self.executed[:, index],
            delta=self.delta,
            warm=self.warm,
            meta=self.meta,
        )

    def by_domain(self) -> Iterator[tuple[str, "Trace"]]:
        for domain in dict.fromkeys(self.domains):
            yield domain, self.only(domain)


def load_trace(path: str | Path) -> Trace:
    """Read a trace file: ours, the published format, or one with token-major float16 scores (said in its meta).

    `OUT.partial`, the folder that a killed `edgemoe trace` leaves, is read as the partial trace that it is. Raises
    `UserError` for a file that is missing, no archive, damaged, without the two members of the format, or with
    contents that contradict each other.
    """
    path = Path(path)
    if path.is_dir():
        with Spool.open(path) as spool:
            members, meta = spool.read(partial=True)
    else:
        members = _read_members(path)
        meta = _read_meta(path, members.pop("meta"))
    return _assemble(path, members, meta)


def _read_members(path: Path) -> dict[str, np.ndarray]:
    """The arrays of the format in an archive; others are left alone."""
    try:
        with path.open("rb") as file:
            start = file.read(8)
            if not start.startswith(_ZIP):
                what = next((words for magic, words in _KNOWN_STARTS.items() if start.startswith(magic)), "no archive")
                raise UserError(f"{path}: not a readable trace file ({what})")
            file.seek(0)
            with np.load(file, allow_pickle=False) as archive:
                for name in ("experts", "meta"):
                    if name not in archive.files:
                        raise UserError(f"{path}: not a trace file: it has no member {name!r}")
                wanted = [name for name in ("experts", "meta", *OPTIONAL) if name in archive.files]
                return {name: _read_member(path, archive, name) for name in wanted}
    except FileNotFoundError:
        left = spool_path(path)
        hint = f"; an interrupted run left {left.name}, which can be read" if left.is_dir() else ""
        raise UserError(f"{path}: no such trace file{hint}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None
    except (ValueError, EOFError, zipfile.BadZipFile, NotImplementedError, RuntimeError):
        raise UserError(f"{path}: not a readable trace file (a damaged or truncated archive)") from None


def _read_member(path: Path, archive: Any, name: str) -> np.ndarray:
    """One array; numpy's and zlib's own words would speak of pickles, seeks and buffer sizes."""
    try:
        values = archive[name]
    except MemoryError:
        raise UserError(f"{path}: `{name}` does not fit in memory") from None
    except (OSError, ValueError, EOFError, zlib.error, zipfile.BadZipFile, NotImplementedError, RuntimeError):
        raise UserError(f"{path}: not a readable trace file (`{name}` is damaged, or no plain array)") from None
    if not isinstance(values, np.ndarray):
        raise UserError(f"{path}: not a readable trace file (`{name}` is no array)")
    return values


def _read_meta(path: Path, text: np.ndarray) -> dict[str, Any]:
    try:
        meta = json.loads(text.item()) if text.dtype.kind == "U" and text.size == 1 else None
    except (ValueError, RecursionError):
        meta = None
    if not isinstance(meta, dict):
        raise UserError(f"{path}: not a trace file: its `meta` is not a JSON object")
    return meta


def _assemble(path: Path, members: dict[str, np.ndarray], meta: dict[str, Any]) -> Trace:
    experts = members["experts"]
    if experts.ndim != 3 or experts.dtype.kind not in "iu":
        raise UserError(
            f"{path}: `experts` is {experts.dtype} of shape {experts.shape}, expected integers [layers, tokens, k]"
        )
    n_layers, n_tokens, _ = experts.shape
    name = path.name.removesuffix(".npz")
    windows = members.get("windows")
    if windows is None:
        length = meta.get("window", max(n_tokens, 1))
        if type(length) is not int or length < 1:
            raise UserError(f"{path}: `window` in its meta is {length!r}, expected tokens per window")
        windows = np.arange(0, max(n_tokens, 1), length)
    token_major = str(meta.get("scores", "")).startswith(_TOKEN_MAJOR)
    if token_major:
        meta = {**meta, "scores": "[layer, token, expert]" + meta["scores"].removeprefix(_TOKEN_MAJOR)}
    return Trace(
        experts=experts,
        n_experts=meta.get("num_experts", int(experts.max(initial=0)) + 1),
        layers=members.get("layers", np.arange(n_layers)),
        windows=windows,
        domains=meta.get("domains") or (meta.get("domain", name),) * windows.size,
        name=name,
        tokens=members.get("tokens"),
        scores=_layer_major(members.get("scores"), token_major, (n_layers, n_tokens)),
        pregate=_layer_major(members.get("pregate"), token_major, (n_layers, n_tokens)),
        weights=members.get("weights"),
        executed=members.get("executed"),
        delta=members.get("delta"),
        warm=members.get("warm"),
        meta=meta,
    )


def _layer_major(values: np.ndarray | None, token_major: bool, shape: tuple[int, int]) -> np.ndarray | None:
    """[L, T, E] of a member that the file declares to be [T, L, E], as the published score files do.

    Only the declaration counts: where T equals L, the shape says nothing.
    """
    if values is None or not token_major or values.ndim != 3 or values.shape[:2] != shape[::-1]:
        return values
    return np.ascontiguousarray(values.transpose(1, 0, 2))


def save_trace(trace: Trace, path: str | Path) -> None:
    """Write a trace that is in memory; the file appears whole or not at all."""
    path = Path(path)
    arrays = {name: getattr(trace, name) for name in ("experts", *OPTIONAL)}
    meta = {**trace.meta, "num_experts": trace.n_experts, "top_k": trace.top_k, "domains": list(trace.domains)}
    partial = path.with_name(path.name + ".tmp")
    with partial.open("wb") as file:
        np.savez_compressed(
            file, meta=np.array(json.dumps(meta)), **{name: a for name, a in arrays.items() if a is not None}
        )
    partial.replace(path)
