"""What is decoded: weights, windows of tokens, and either recorded routing or the model's own."""

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from edgemoe.bench.gpu.geometry import geometry, random_weights
from edgemoe.bench.gpu.replay import Routing
from edgemoe.bench.gpu.routing import Recording, Watch, demo_recording, filled, recording_of
from edgemoe.errors import UserError
from edgemoe.gpu_offload.weights import DTYPES, Weights
from edgemoe.policy import LogicalCache, Policy
from edgemoe.tracing import load_trace

if TYPE_CHECKING:
    from edgemoe.calibration import Calibration
    from edgemoe.gpu_offload.shape import Shape

_PROMPT = 32  # tokens of a random prompt


@dataclass(frozen=True)
class Subject:
    """One model on one device, with what its rows are run on."""

    name: str
    fingerprint: str
    """Of the weights, or how they are drawn; of recorded routing; of the calibration."""
    device: str
    weights: Weights
    windows: tuple[np.ndarray, ...]  # [T] token ids each: decoded alone, one after the other, from a new sequence on
    domains: tuple[str, ...]  # of each window
    prompts: tuple[np.ndarray, ...]  # that free generation begins with
    recording: Recording | None = None
    calibration: "Calibration | None" = None
    notes: tuple[str, ...] = ()
    load_s: float | None = None
    """From the file to weights that are in place; None where they were drawn."""

    def cache(self, policy: Policy, slots: int) -> LogicalCache:
        """A new logical cache. Raises `UserError` where policy, model and slots do not fit."""
        shape, known = self.weights.shape, self.calibration
        estimated = self.recording or known
        return LogicalCache(
            policy.completed(estimated is not None),
            n_layers=shape.n_layers,
            n_experts=shape.n_experts,
            top_k=shape.top_k,
            capacity=slots,
            delta=estimated.delta if estimated else None,
            warm=estimated.warm if estimated else None,
            prior=known if known and policy.uses_prior else None,
        )

    @property
    def estimated(self) -> bool:
        """Whether the bonus scale is known from other text."""
        return self.recording is not None or self.calibration is not None

    def routing(self, window: int) -> Routing | None:
        """What the routers said in this window, where that was recorded and does not depend on the policy."""
        return self.recording.windows[window] if self.recording else None

    @cached_property
    def packed(self) -> tuple[torch.Tensor, ...]:
        """Recorded routing of each window as executors replay it, [T, L, 2, E] float32 in host memory."""
        if self.recording is None:
            return ()
        return tuple(torch.from_numpy(window.packed()) for window in self.recording.windows)

    @property
    def longest(self) -> int:
        return max(len(window) for window in self.windows)

    def close(self) -> None:
        self.weights.close()


def check_device(device: str) -> None:
    """Raises `UserError` where there is no such device."""
    if device not in ("cpu", "cuda"):
        raise UserError(f"--device {device}: expected cuda or cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "no CUDA device here that torch can use: --device cpu --geometry olmoe-narrow runs the same bench on the "
            "CPU, whose figures say nothing of a GPU"
        )


def replayed_subject(
    name: str,
    *,
    device: str,
    dtype: str,
    windows: int,
    tokens: int,
    trace: Path | None,
    seed: int,
    watch: Watch,
    accept: "Callable[[Shape], object] | None" = None,
) -> Subject:
    """Random weights of a geometry by name, run by a trace's routing or the demo model's.

    `accept` may refuse what does not fit the shape, before any work. Raises `UserError` for an unknown geometry and
    for routing that does not fit it.
    """
    shape = geometry(name)
    if accept:
        accept(shape)
    found = (
        demo_recording(windows, tokens, watch) if trace is None else recording_of(load_trace(trace), windows, tokens)
    )
    experts = found.windows[0].scores.shape[-1]
    if (experts, found.top_k) != (shape.n_experts, shape.top_k):
        raise UserError(
            f"{found.name}: top-{found.top_k} of {experts} experts, {name} has top-{shape.top_k} of "
            f"{shape.n_experts}: give a trace of such a model"
        )
    found = filled(found, shape.n_layers)
    with watch("drawing weights", 1, "model") as advance:
        weights = random_weights(shape, dtype, device, seed)
        advance(1)
    rng = np.random.default_rng(seed)
    return Subject(
        name=f"{name}, random weights",
        fingerprint=_digest(name, dtype, str(seed), found.digest),
        device=device,
        weights=weights,
        # Ids of another vocabulary: they choose rows of a random embedding, and nothing else.
        windows=tuple(ids % shape.n_vocab for ids in found.tokens),
        domains=found.domains,
        prompts=tuple(rng.integers(0, shape.n_vocab, _PROMPT) for _ in range(2)),
        recording=found,
        notes=(
            f"weights are random: routing is that of {found.name}",
            *found.notes,
            *_fewer(found.tokens, windows, tokens),
        ),
    )


def model_subject(
    path: Path,
    *,
    device: str,
    dtype: str,
    windows: int,
    tokens: int,
    texts: Sequence[Path],
    calibration: Path | None,
    watch: Watch,
    accept: "Callable[[Shape], object] | None" = None,
) -> Subject:
    """A real model on windows of texts, the demo model's own ones unless others are given. `accept`: as above.

    Raises `UserError` for a model or text that cannot be read or run.
    """
    from edgemoe.calibration import load_calibration
    from edgemoe.gpu_offload.hub import resolve
    from edgemoe.gpu_offload.shape import read_shape
    from edgemoe.gpu_offload.vocabulary import open_vocabulary
    from edgemoe.gpu_offload.weights import load_bytes, load_weights
    from edgemoe.llamacpp.header import header_fingerprint
    from edgemoe.model import read_model

    model = read_model(resolve(path))
    shape = read_shape(model)
    if accept:
        accept(shape)
    known = load_calibration(calibration, model) if calibration else None
    words = open_vocabulary(model)
    try:
        found, domains = _windows(texts or _demo_texts(), words, windows, tokens)
    finally:
        words.close()
    start = time.monotonic()
    with watch(f"loading {model.geometry.name}", load_bytes(model), "bytes") as advance:
        weights = load_weights(model, shape, dtype=DTYPES[dtype], device=device, advance=advance)
    load_s = time.monotonic() - start
    files = [header_fingerprint(file) for file in model.files] if model.format == "GGUF" else [str(model.path)]
    notes = () if known else ("no calibration: experts 0, 1, 2, … are warm, the bonus scale is a running mean",)
    return Subject(
        name=model.geometry.name,
        fingerprint=_digest(*files, dtype, known.digest if known else ""),
        device=device,
        weights=weights,
        windows=found,
        domains=domains,
        prompts=tuple(window[:_PROMPT] for window in found[:2]),
        calibration=known,
        notes=(*notes, *_fewer(found, windows, tokens)),
        load_s=load_s,
    )


def _demo_texts() -> list[Path]:
    from edgemoe.data import DOMAINS
    from edgemoe.demo import demo_file

    return [demo_file(f"{domain}.txt") for domain in DOMAINS]


def _windows(
    texts: Sequence[Path], words: object, windows: int, tokens: int
) -> tuple[tuple[np.ndarray, ...], tuple[str, ...]]:
    """Windows of `tokens` tokens, of each text in turn, as many as there are up to `windows`."""
    found: list[tuple[int, int, str, np.ndarray]] = []
    for order, path in enumerate(texts):
        try:
            text = path.read_bytes().decode()
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: not UTF-8 text (byte {error.start:,}): convert it first") from None
        ids = words.tokenize(text[: 16 * windows * tokens].encode()).astype(np.int64)  # type: ignore[attr-defined]
        for number in range(min(windows, len(ids) // tokens)):
            found.append((number, order, path.stem, ids[number * tokens : (number + 1) * tokens]))
    if not found:
        raise UserError(f"no text of {tokens} tokens: give longer ones, or --tokens less")
    found = sorted(found, key=lambda one: one[:2])[:windows]
    return tuple(one[3] for one in found), tuple(one[2] for one in found)


def _fewer(found: Sequence[np.ndarray], windows: int, tokens: int) -> tuple[str, ...]:
    """A note where there is less than was asked for."""
    longest = max(map(len, found))
    if len(found) >= windows and longest >= tokens:
        return ()
    return (f"{windows} windows of {tokens} tokens were asked for; there are {len(found)}, of {longest} at most",)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
