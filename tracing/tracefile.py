"""The trace file: which experts fired, for which token, in which layer. Format: docs/trace-format.md.

An npz archive. `experts` [L, T, k] and the JSON string `meta` are the published format (arXiv 2608.18261, §4)
and all that a reader may rely on; every other member is optional.
"""

import json
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from edgemoe.errors import UserError
from edgemoe.tracing.spool import Spool, spool_path


@dataclass(frozen=True, eq=False)
class Trace:
    """Routing of T tokens through L MoE layers.

    Tokens come in windows: the model's cache was cleared before each. A window belongs to one domain.
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
    delta: np.ndarray | None = None  # [L] float32 bonus scale Δ̄, from held-out text
    warm: np.ndarray | None = None  # [L, E] int16: experts by frequency on held-out text, most selected first
    meta: dict[str, Any] = field(default_factory=dict)

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
    `UserError` for a file that is missing, no archive, truncated, or without the two members of the format.
    """
    path = Path(path)
    if path.is_dir():
        spool = Spool.open(path)
        members = spool.read()
        return _assemble(path, members.pop("experts"), spool.full_meta(partial=True), members)
    try:
        with np.load(path, allow_pickle=False) as archive:
            members = {name: archive[name] for name in archive.files}
        meta = json.loads(str(members.pop("meta")))
        experts = members.pop("experts")
    except FileNotFoundError:
        left = spool_path(path)
        hint = f"; an interrupted run left {left.name}, which can be read" if left.is_dir() else ""
        raise UserError(f"{path}: no such trace file{hint}") from None
    except KeyError as missing:
        raise UserError(f"{path}: not a trace file: it has no member {missing}") from None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{path}: not a readable trace file ({str(error).splitlines()[0]})") from None
    return _assemble(path, experts, meta, members)


def _assemble(path: Path, experts: np.ndarray, meta: dict[str, Any], members: dict[str, np.ndarray]) -> Trace:
    if experts.ndim != 3:
        raise UserError(f"{path}: `experts` has shape {experts.shape}, expected [layers, tokens, k]")
    n_layers, n_tokens, _ = experts.shape
    n_experts = int(meta.get("num_experts", experts.max(initial=0) + 1))
    windows = members.get("windows")
    if windows is None:
        length = int(meta.get("window", max(n_tokens, 1)))
        windows = np.arange(0, max(n_tokens, 1), length)
    domains = meta.get("domains") or [meta.get("domain", path.name.removesuffix(".npz"))] * len(windows)
    if len(domains) != len(windows):
        raise UserError(f"{path}: {len(windows)} windows but {len(domains)} domains in its meta")
    return Trace(
        experts=experts.astype(np.int16, copy=False),
        n_experts=n_experts,
        layers=members.get("layers", np.arange(n_layers)).astype(np.int32),
        windows=np.asarray(windows, dtype=np.int64),
        domains=tuple(domains),
        name=path.name.removesuffix(".npz"),
        tokens=members["tokens"].astype(np.int32) if "tokens" in members else None,
        scores=_layer_major(path, "scores", members, (n_layers, n_tokens, n_experts)),
        pregate=_layer_major(path, "pregate", members, (n_layers, n_tokens, n_experts)),
        weights=members.get("weights"),
        delta=members.get("delta"),
        warm=members.get("warm"),
        meta=meta,
    )


def _layer_major(
    path: Path, name: str, members: dict[str, np.ndarray], shape: tuple[int, int, int]
) -> np.ndarray | None:
    """A member as float32 [L, T, E]; the published score files are token-major [T, L, E]."""
    values = members.get(name)
    if values is None:
        return None
    if values.shape == (shape[1], shape[0], shape[2]):
        values = values.transpose(1, 0, 2)
    if values.shape != shape:
        raise UserError(f"{path}: `{name}` has shape {values.shape}, expected {shape} [layers, tokens, experts]")
    return np.ascontiguousarray(values, dtype=np.float32)


def save_trace(trace: Trace, path: str | Path) -> None:
    """Write a trace that is in memory; the file appears whole or not at all."""
    path = Path(path)
    arrays = {
        name: getattr(trace, name)
        for name in ("experts", "layers", "windows", "tokens", "scores", "pregate", "weights", "delta", "warm")
    }
    meta = {**trace.meta, "num_experts": trace.n_experts, "top_k": trace.top_k, "domains": list(trace.domains)}
    partial = path.with_name(path.name + ".tmp")
    with partial.open("wb") as file:
        np.savez_compressed(
            file, meta=np.array(json.dumps(meta)), **{name: a for name, a in arrays.items() if a is not None}
        )
    partial.replace(path)
