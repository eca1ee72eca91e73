"""What a steered model did, token by token: counts, choices, copies, scores; and the trace file that they make."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from edgemoe.errors import UserError
from edgemoe.policy.block import Decisions
from edgemoe.tracing.tracefile import Trace

Level = Literal["counts", "decisions", "scores"]
LEVELS: tuple[Level, ...] = ("counts", "decisions", "scores")
_OF_LEVEL = {
    "counts": ("counts",),
    "decisions": ("counts", "executed", "own", "copies"),
    "scores": ("counts", "executed", "own", "copies", "scores", "pregate"),
}


@dataclass(frozen=True, eq=False)
class Record:
    """One request of one batch row, padding left out: T tokens through L MoE layers, under one policy.

    Counts are per token and layer: executed experts, demand copies, prefetch copies, prefetch copies whose expert the
    layer did not execute for this token, and executed experts that the router's own top-K does not hold. Index the last
    axis by the names in `edgemoe.policy.replay`.
    """

    tokens: np.ndarray  # [T] int32; −1 where the model was given embeddings
    counts: np.ndarray  # [L, T, 5] int16
    executed: np.ndarray | None = None  # [L, T, k] int16, by the router's own scores; −1 where a gate was elided
    own: np.ndarray | None = None  # [L, T, k] int16: the router's own choice
    copies: np.ndarray | None = None  # [L, T, n + k, 2] int16 (expert, slot): prefetch first, then demand; padded −1
    scores: np.ndarray | None = None  # [L, T, E] float32
    pregate: np.ndarray | None = None  # [L, T, E] float32; zero in layers without one


@dataclass
class _Request:
    """The forward passes of one request, all batch rows."""

    tokens: list[np.ndarray] = field(default_factory=list)  # of [B, S]
    valid: list[np.ndarray] = field(default_factory=list)  # of [B, S]
    steps: list[dict[str, list[np.ndarray]]] = field(default_factory=list)  # name → of [B, S, …], one per layer


class Recorder:
    """Collects what each layer decided in each forward pass."""

    def __init__(self, level: Level) -> None:
        if level not in LEVELS:
            raise UserError(f"record {level!r} is not one of {', '.join(LEVELS)}")
        self.level = level
        self._requests: list[_Request] = []

    def start(self) -> None:
        """A new request begins."""
        self._requests.append(_Request())

    def step(self, tokens: np.ndarray, valid: np.ndarray) -> None:
        """A forward pass over these [B, S] tokens begins."""
        request = self._requests[-1]
        request.tokens.append(tokens)
        request.valid.append(valid)
        request.steps.append({name: [] for name in _OF_LEVEL[self.level]})

    def layer(self, decided: Decisions, scores: np.ndarray, pregate: np.ndarray | None) -> None:
        """The next layer of the current pass."""
        found = {**decided._asdict(), "scores": scores}
        found["pregate"] = np.zeros_like(scores) if pregate is None else pregate
        for name, layers in self._requests[-1].steps[-1].items():
            layers.append(found[name])

    def drop_step(self) -> None:
        """Forget a pass that did not end."""
        request = self._requests[-1]
        for parts in (request.tokens, request.valid, request.steps):
            parts.pop()

    def take(self) -> list[Record]:
        """The records since the last call, request by request, row by row; requests that go on start afresh."""
        found = [record for request in self._requests for record in _rows(request)]
        self._requests = [_Request()] if self._requests else []
        return found


def _rows(request: _Request) -> Iterable[Record]:
    if not request.steps:
        return
    for row in range(len(request.tokens[0])):
        kept = [valid[row] for valid in request.valid]
        arrays = {
            name: np.concatenate(
                [
                    np.stack([layer[row] for layer in step[name]])[:, mask]
                    for step, mask in zip(request.steps, kept, strict=True)
                ],
                axis=1,
            )
            for name in request.steps[0]
        }
        tokens = np.concatenate([ids[row][mask] for ids, mask in zip(request.tokens, kept, strict=True)])
        yield Record(tokens=tokens.astype(np.int32), **arrays)


def trace_of(
    records: Sequence[Record], about: dict[str, Any], name: str, domains: Sequence[str] | None = None
) -> Trace:
    """The trace of these requests, one window each: `save_trace`, `edgemoe stats` and `edgemoe simulate` take it.

    As in the trace of any run, `experts` is the router's own choice; a steered run adds what was `executed` instead.
    about: `Steered.provenance()`. domains: one per record. Raises `UserError` without a record of level "decisions" or
    "scores".
    """
    if not records or any(len(record.tokens) == 0 for record in records):
        raise UserError(f"{name}: no tokens were recorded: run the model first")
    if any(record.executed is None for record in records):
        raise UserError(f'{name}: only counts were recorded, a trace needs the choices: record "decisions" or "scores"')

    def joined(what: str) -> np.ndarray | None:
        parts = [getattr(record, what) for record in records]
        return None if any(part is None for part in parts) else np.concatenate(parts, axis=1)

    own, tokens = joined("own"), np.concatenate([record.tokens for record in records])
    assert own is not None
    lengths = [len(record.tokens) for record in records]
    return Trace(
        experts=own,
        n_experts=int(about["num_experts"]),
        layers=np.asarray(about["layers"], np.int32),
        windows=np.cumsum([0, *lengths[:-1]]).astype(np.int64),
        domains=tuple(domains) if domains is not None else (name,) * len(records),
        name=name,
        tokens=None if (tokens < 0).any() else tokens,
        scores=joined("scores"),
        pregate=joined("pregate"),
        executed=joined("executed") if about["steered"] else None,
        meta={**{key: value for key, value in about.items() if key != "layers"}, "num_tokens": int(sum(lengths))},
    )
