"""Recorded routing: what the routers of a trained model said, for random weights to be run by.

A model with random weights routes at random, which is the worst case of every cache. With a trained model's scores and
pre-gates in the place of its own, the policies decide and copy what they would for that model, and all else takes the
time that it takes.
"""

import hashlib
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from edgemoe.bench.gpu.replay import Routing
from edgemoe.calibration import mean_range, ranking, score_ranges
from edgemoe.errors import UserError
from edgemoe.progress import Advance
from edgemoe.tracing import Trace, load_trace

Watch = Callable[[str, int, str], AbstractContextManager[Advance]]
_DEMO_TOKENS = 2048  # of each of the demo model's texts, four windows: half estimate, half are replayed


@dataclass(frozen=True)
class Recording:
    """Windows of recorded routing, each from the start of a sequence, with what was estimated on other text."""

    name: str
    windows: tuple[Routing, ...]
    domains: tuple[str, ...]  # of each window
    tokens: tuple[np.ndarray, ...]  # [T] of each window: the recorded model's ids
    delta: np.ndarray  # [L] float32, Δ̄
    warm: np.ndarray  # [L, E]: most selected first
    top_k: int
    notes: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """Of everything that decides."""
        content = hashlib.sha256()
        for window in self.windows:
            content.update(window.scores.tobytes() + window.pregate.tobytes())
        content.update(self.delta.tobytes() + np.ascontiguousarray(self.warm).tobytes())
        return content.hexdigest()[:12]


def recording_of(trace: Trace, windows: int, tokens: int) -> Recording:
    """`windows` windows of a trace, one of each domain in turn, and of each the first `tokens` tokens.

    A trace without bonus scale and warm set gives the first half of each domain's windows to estimate them, and
    replays the rest. Raises `UserError` for a trace without scores and pre-gates, or without the windows for that.
    """
    missing = [what for what in ("scores", "pregate") if getattr(trace, what) is None]
    if missing:
        raise UserError(
            f"{trace.name}: no {' and no '.join(missing)} in it: trace again with --scores --pregate; without --trace "
            "the demo model's routing is taken"
        )
    if trace.delta is not None and trace.warm is not None:
        return _cut(trace, _in_turn(trace, list(range(len(trace.domains))), tokens)[:windows], tokens)
    return _halved(trace, windows, tokens)


def _halved(trace: Trace, windows: int, tokens: int) -> Recording:
    """The first half of each domain's windows estimates, of the rest `windows` are replayed."""
    assert trace.scores is not None
    index = np.searchsorted(trace.windows, np.arange(trace.n_tokens), side="right") - 1  # of each token's window
    numbers = [np.unique(index[at]) for at in trace.token_domains.values()]
    early = np.isin(index, np.concatenate([found[: len(found) // 2] for found in numbers]))
    late = np.concatenate([found[len(found) // 2 :] for found in numbers])
    if not early.any():
        raise UserError(
            f"{trace.name}: no bonus scale and warm set in it, and one window of each text leaves none to estimate "
            "them from: trace more tokens"
        )
    estimated = replace(
        trace,
        delta=np.array([mean_range(score_ranges(scores[early])) for scores in trace.scores], np.float32),
        warm=np.array([ranking(experts[early], trace.n_experts) for experts in trace.experts]),
    )
    said = "the first half of each text's windows estimates the bonus scale and the warm set, the rest is replayed"
    return _cut(estimated, _in_turn(trace, late.tolist(), tokens)[:windows], tokens, (said,))


def _cut(trace: Trace, numbers: Sequence[int], tokens: int, notes: tuple[str, ...] = ()) -> Recording:
    """These windows of a trace."""
    assert trace.scores is not None and trace.pregate is not None and trace.delta is not None and trace.warm is not None
    ends = np.append(trace.windows[1:], trace.n_tokens)
    parts = [slice(int(trace.windows[i]), int(min(ends[i], trace.windows[i] + tokens))) for i in numbers]
    ids = np.zeros(trace.n_tokens, np.int64) if trace.tokens is None else trace.tokens.astype(np.int64)
    return Recording(
        name=trace.name,
        windows=tuple(Routing(trace.scores[:, part].copy(), trace.pregate[:, part].copy()) for part in parts),
        domains=tuple(trace.domains[i] for i in numbers),
        tokens=tuple(ids[part] for part in parts),
        delta=trace.delta,
        warm=trace.warm,
        top_k=trace.top_k,
        notes=notes,
    )


def _in_turn(trace: Trace, numbers: list[int], tokens: int) -> list[int]:
    """These windows' numbers, the first of every domain before the second of any. The tail of a text is none where
    others have the tokens."""
    domains, lengths = trace.domains, np.diff(np.append(trace.windows, trace.n_tokens))
    least = min(tokens, int(lengths[numbers].max()))
    seen: dict[str, int] = {}
    order = []
    for number in numbers:
        if lengths[number] < least:
            continue
        seen[domains[number]] = seen.get(domains[number], -1) + 1
        order.append((seen[domains[number]], number))
    return [number for _, number in sorted(order)]


def filled(recording: Recording, n_layers: int) -> Recording:
    """The same for a model of more layers: layers from the second on (the first has no pre-gate) are used again, each
    time with another window's tokens, so that no two layers of a token do the same. Fewer layers: the first ones."""
    known = len(recording.delta)
    if known == n_layers:
        return recording
    again = [(1 + i % (known - 1), 1 + i // (known - 1)) for i in range(max(n_layers - known, 0))]
    plan = [(layer, 0) for layer in range(min(known, n_layers))] + again
    count = len(recording.windows)
    length = min(window.tokens for window in recording.windows)

    def gathered(number: int) -> Routing:
        of = [(layer, recording.windows[(number + shift) % count]) for layer, shift in plan]
        return Routing(
            np.stack([window.scores[layer, :length] for layer, window in of]),
            np.stack([window.pregate[layer, :length] for layer, window in of]),
        )

    layers = [layer for layer, _ in plan]
    said = f"recorded on {known} layers, "
    said += f"layers 1 to {known - 1} again to fill {n_layers}, from other windows" if again else f"{n_layers} are used"
    return Recording(
        name=recording.name,
        windows=tuple(gathered(number) for number in range(count)),
        domains=recording.domains,
        tokens=tuple(tokens[:length] for tokens in recording.tokens),
        delta=recording.delta[layers],
        warm=recording.warm[layers],
        top_k=recording.top_k,
        notes=(*recording.notes, f"{recording.name}: {said}"),
    )


def demo_recording(windows: int, tokens: int, watch: Watch, per_text: int = _DEMO_TOKENS) -> Recording:
    """The demo model's routing of its four texts, traced now."""
    from edgemoe.demo import record

    with tempfile.TemporaryDirectory(prefix="edgemoe-bench-") as folder:
        path = record(Path(folder), per_text, lambda total: watch("tracing the demo model", total, "tokens"))
        trace = load_trace(path)
    return _halved(replace(trace, name="the demo model on its texts"), windows, tokens)
