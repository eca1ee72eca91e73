"""From the hub's taps to the spool: which rows make up the members of a trace, and in what shape."""

from collections.abc import Callable, Sequence

import numpy as np

from edgemoe.errors import UserError
from edgemoe.llamacpp.graph import Gate, Reading, Router
from edgemoe.llamacpp.hub import Hub, Tap
from edgemoe.llamacpp.session import Session
from edgemoe.model import Model
from edgemoe.progress import Advance
from edgemoe.tracing.pregate import PreGate
from edgemoe.tracing.spool import Spool


class Recorder:
    """Taps for the wanted members of the wanted routers."""

    def __init__(
        self, hub: Hub, model: Model, routers: Sequence[Router], scores: bool, weights: bool, pregate: bool | None
    ) -> None:
        """Raises `UserError` where the model's graph does not offer a wanted member; a pre-gate of None is wanted where
        there is one."""
        self.hub, self.model, self.routers = hub, model, list(routers)
        self.top_k = max(router.top_k for router in routers)
        self.n_experts = max([model.geometry.n_experts, *(router.n_experts for router in routers)])
        self.widths = {"experts": self.top_k}
        self._taps: list[Tap] = []
        self._experts = [self._tap(router.topk) for router in routers]
        self._scores: list[int] = []
        self._masks: list[int | None] = []
        self._weights: list[int] = []
        self._inputs: list[int] = []
        self._gates: list[PreGate | None] = []
        self._must_gate = pregate is True
        if scores or pregate:
            self._want_scores()
        if scores:
            self.widths["scores"] = self.n_experts
        if weights:
            self._want_weights()
        if pregate is not False:
            self._offer(self._want_pregate)

    def _tap(self, at: Reading, of_input: bool = False) -> int:
        tap = Tap(at, of_input)
        if tap not in self._taps:
            self._taps.append(tap)
        return self._taps.index(tap)

    def _want_scores(self) -> None:
        for router in self.routers:
            if not isinstance(router.scores, Reading):
                raise UserError(
                    f"{self.model.path}: layer {router.layer} has no scores to store ({router.scores}): "
                    "leave out --scores and --pregate"
                )
            self._scores.append(self._tap(router.scores))
            self._masks.append(self._tap(router.mask) if router.mask else None)

    def _want_weights(self) -> None:
        self.widths["weights"] = self.top_k
        for router in self.routers:
            if router.weights is None:
                raise UserError(f"{self.model.path}: layer {router.layer} has no mixing weights: leave out --weights")
            self._weights.append(self._tap(router.weights))

    def _offer(self, want: Callable[[], None]) -> None:
        """Do what the pre-gate needs; without it go on, unless it was asked for."""
        try:
            want()
        except UserError:
            if self._must_gate:
                raise
            self._gates = []
            self.widths.pop("pregate", None)

    def _want_pregate(self) -> None:
        for router in self.routers:
            if not isinstance(router.gate, Gate):
                raise self._no_pregate(router.layer, router.gate)
            self._inputs.append(self._tap(router.gate.product, of_input=True))
            self._gates.append(PreGate.load(self.model, router.gate))
        self.widths["pregate"] = self.n_experts

    def _no_pregate(self, layer: int, why: str) -> UserError:
        return UserError(
            f"{self.model.path}: --pregate does not fit this model (layer {layer}: {why}): leave it out; "
            "trace, --scores and --weights work"
        )

    def verify(self, session: Session, tokens: np.ndarray) -> None:
        """Install the taps; with a pre-gate, hold it against the graph: every router must recompute its own scores."""
        self.hub.install(self._taps, session.n_batch)
        if not self._gates:
            return
        with self.hub.capture():
            session.decode(tokens)
        self._offer(lambda: self._recompute(len(tokens)))
        session.clear()

    def _recompute(self, n_tokens: int) -> None:
        for row, gate in enumerate(self._gates):
            assert gate is not None
            if not gate.agrees(self.hub.rows(self._inputs[row]), self._score_rows(row, n_tokens)):
                raise self._no_pregate(self.routers[row].layer, "its scores cannot be recomputed from its input")

    def record(
        self, session: Session, spool: Spool, tokens: np.ndarray, position: int, decode: bool, advance: Advance
    ) -> None:
        """Decode tokens (at once, or one by one) and spool their rows; an interrupt keeps whole decodes."""
        done = 0
        try:
            with self.hub.capture():
                for part in np.split(tokens, len(tokens)) if decode else [tokens]:
                    session.decode(part, position + done)
                    done += len(part)
                    advance(len(part))
        finally:
            if done:
                spool.append(tokens[:done], self._members(done))

    def _members(self, count: int) -> dict[str, list[np.ndarray]]:
        rows = range(len(self.routers))
        members = {"experts": [_padded(self._rows(self._experts[row], count), self.top_k, -1) for row in rows]}
        if "scores" in self.widths:
            members["scores"] = [_padded(self._score_rows(row, count), self.n_experts, -np.inf) for row in rows]
        if "weights" in self.widths:
            members["weights"] = [_padded(self._rows(self._weights[row], count), self.top_k, 0) for row in rows]
        if "pregate" in self.widths:
            members["pregate"] = [self._pregate_rows(row, count) for row in rows]
        return members

    def _rows(self, tap: int, count: int) -> np.ndarray:
        rows = self.hub.rows(tap)
        if len(rows) < count:
            raise UserError(
                f"{self.model.path}: {self._taps[tap].at.stem}-{self._taps[tap].at.layer} gave {len(rows)} rows for "
                f"{count} tokens: this llama.cpp build routes in a way that edgemoe does not know"
            )
        return rows[:count]

    def _score_rows(self, row: int, count: int) -> np.ndarray:
        scores = self._rows(self._scores[row], count)
        mask = self._masks[row]
        return scores if mask is None else np.where(np.isneginf(self._rows(mask, count)), -np.inf, scores)

    def _pregate_rows(self, row: int, count: int) -> np.ndarray:
        """Layer l's router on layer l−1's input; zero where the layer before is dense or not traced."""
        gate = self._gates[row]
        if row == 0 or gate is None or self.routers[row].layer != self.routers[row - 1].layer + 1:
            return np.zeros((count, self.n_experts), np.float32)
        return _padded(gate.scores(self._rows(self._inputs[row - 1], count)), self.n_experts, -np.inf)


def _padded(rows: np.ndarray, width: int, value: float) -> np.ndarray:
    if rows.shape[1] == width:
        return rows
    return np.pad(rows, ((0, 0), (0, width - rows.shape[1])), constant_values=value)
