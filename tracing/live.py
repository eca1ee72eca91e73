"""A trace file of what an engine executes while it generates (`edgemoe run --trace`). Format: docs/trace-format.md.

An engine with an observer (`edgemoe.generation.engine.Observer`) tells it of every token that it decoded. They are
spooled to disk, some at a time, so memory does not grow with the text.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edgemoe import __version__
from edgemoe.errors import UserError
from edgemoe.model import Model
from edgemoe.tracing.interrupts import interrupts_deferred, interrupts_ignored
from edgemoe.tracing.output import claim, prepare
from edgemoe.tracing.provenance import of_model
from edgemoe.tracing.selfcheck import failures
from edgemoe.tracing.spool import Spool

HELD = 64  # tokens between two writes of the spool: what a kill may lose


class LiveTrace:
    """The observer of one engine. `about` before the first token, `finish` after the last.

    A window starts where the engine was reset. `experts` is always the router's own choice; what a steered run executed
    instead is the member `executed`. Raises `UserError` where `out` cannot be written, or may not be replaced.
    """

    def __init__(self, model: Model, out: Path, *, overwrite: bool = False, domain: str = "run") -> None:
        claim(out, overwrite, model.files)
        self.model, self.out, self.overwrite, self.domain = model, out, overwrite, domain
        self._spool: Spool | None = None
        self._held: list[tuple[np.ndarray, dict[str, np.ndarray]]] = []
        self._starts = True  # the next token starts a window
        self._meta: dict[str, Any] = {}

    def about(self, *, description: str, bos: int | None, steered: bool, run: Mapping[str, Any]) -> None:
        """What the file will say of the engine: the model in words, whether its policy steers, and what it was."""
        self._description, self._bos, self._steered = description, bos, steered
        how = "router steered, its own choice recorded" if steered else "routing untouched"
        reader = "edgemoe's own engine" if "device" in run else "llama.cpp eval callback"
        source = f"edgemoe {__version__} {self.domain} ({reader}, {how})"
        self._meta = {"source": source, "steered": steered, "run": dict(run)}

    def reset(self) -> None:
        """The engine starts a new sequence."""
        self._flush()
        self._starts = True

    def decoded(self, tokens: np.ndarray, rows: Mapping[str, np.ndarray]) -> None:
        """T tokens were decoded: ids [T], `executed` [L, T, k], and where known `scores` and `pregate` [L, T, E]."""
        self._held.append((tokens, self._members(rows)))
        if sum(len(tokens) for tokens, _ in self._held) >= HELD:
            self._flush()

    def _members(self, rows: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        members = {**rows, "experts": rows["executed"]}
        if self._steered:
            members["experts"] = _own(rows["scores"], rows["executed"])
        else:
            del members["executed"]
        return members

    def _flush(self) -> None:
        """Hand what is held to the spool: all of it, whatever interrupts."""
        if not self._held:
            return
        with interrupts_deferred():
            held, self._held = self._held, []
            try:
                spool = self._spool = self._spool or self._create(held[0][1])
                if self._starts:
                    spool.begin_window(self.domain)
                    self._starts = False
                tokens = np.concatenate([tokens for tokens, _ in held])
                joined = {name: np.concatenate([part[name] for _, part in held], axis=1) for name in held[0][1]}
                spool.append(tokens, {name: list(layers) for name, layers in joined.items()})
            except OSError as error:
                raise UserError(f"{self.out}: the trace cannot be written ({error.strerror})") from None

    def _create(self, members: Mapping[str, np.ndarray]) -> Spool:
        layers = self.model.geometry.moe_layers
        top_k = (members["experts"] >= 0).sum(axis=2).max(axis=1).tolist()
        meta = of_model(self.model, self._description, self._bos, top_k, self.model.geometry.n_experts)
        widths = {name: values.shape[2] for name, values in members.items()}
        return prepare(self.out, self.overwrite, layers, widths, {**meta, **self._meta})

    def finish(self, *, partial: bool) -> int:
        """Write the trace file; how many tokens it holds, and without any there is no file. Call it once."""
        with interrupts_ignored():
            try:
                self._flush()
                if self._spool is None:
                    return 0
                with self._spool as spool:
                    count = spool.n_tokens
                    if not count:
                        spool.remove()
                        return 0
                    starts = np.array(spool.windows(count)[0], np.int64)
                    layers = spool.member("experts", count)
                    wrong = failures(layers, spool.meta["num_experts"], starts, spool.layers, spool.tokens(count))
                    spool.assemble(self.out, partial=partial, self_check=wrong or "passed")
                    return count
            except OSError as error:
                left = f"; what was captured is in {self._spool.path}" if self._spool else ""
                raise UserError(f"{self.out}: cannot be written ({error.strerror}){left}") from None


def _own(scores: np.ndarray, executed: np.ndarray) -> np.ndarray:  # [L, T, k]
    """The router's own choice: the best scores, ties to the lower index, as many as were executed."""
    own = np.argsort(-scores, axis=2, kind="stable")[:, :, : executed.shape[2]]
    return np.where(executed >= 0, own, -1)
