"""Is the prediction true? Decode with llama.cpp on this machine, everything resident, and compare.

What is measured is what is predicted: one sequence at batch 1, after a short prompt, weights kept as llama.cpp keeps
them by default. Rounds are repeated until their median settles; the first tokens, which fault pages in, do not count.
Between them one rate of the profile is measured again, because a machine does not give the same every minute.
"""

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgemoe.errors import UserError
from edgemoe.machine.ggml_probe import again
from edgemoe.machine.memory import ram
from edgemoe.machine.profile import ExpertRate, Profile, Rate
from edgemoe.machine.rounds import Effort, settle
from edgemoe.model import Model
from edgemoe.model.memory import memory_needs
from edgemoe.progress import Advance, no_progress
from edgemoe.units import format_bytes
from edgemoe.wall.cpu_costs import costs_of
from edgemoe.wall.cpu_decode import CpuDecode, predict_cpu_decode

PROMPT = 16
TOKENS = 24  # of each round
EFFORT = Effort(5, 15, 60)


@dataclass(frozen=True)
class Verified:
    """Predicted beside measured, in tokens per second; `error` is predicted / measured − 1.

    `drift` is what one rate of the profile (`reference`) was worth while the model decoded, over what it was when the
    profile was made; `error_now` is the error if all of the profile had drifted so.
    """

    predicted: CpuDecode
    measured: Rate
    threads: int
    context: int
    reference: str
    drift: float

    @property
    def error(self) -> float:
        return self.predicted.tokens_per_s / self.measured.median - 1

    @property
    def error_now(self) -> float:
        return self.predicted.tokens_per_s * self.drift / self.measured.median - 1

    @property
    def bytes_per_s(self) -> float:
        """What decoding really got."""
        return self.predicted.nbytes * self.measured.median


def verify(
    model: Model, profile: Profile, threads: int | None = None, effort: Effort = EFFORT, advance: Advance = no_progress
) -> Verified:
    """Measure the model's decoding and set it beside what the profile foretells.

    `advance` is told rounds, `n_rounds(effort)` in all. Raises `UserError` where the model does not fit in RAM (then it
    would not be the resident case), is no GGUF, or has types that the profile says nothing about.
    """
    from edgemoe.llamacpp.session import default_threads

    threads = threads or default_threads()
    context = PROMPT + TOKENS // 2
    predicted = predict_cpu_decode(model, costs_of(profile, threads), context)
    _check_room(model)
    rate, expert = _reference(model, profile, predicted)
    with Decoder(model.files[0], threads) as decoder, again(rate, expert) as measure_again:
        decoder.round()
        measured = settle({"decode": decoder.round, "reference": measure_again}, effort, advance)
    return Verified(
        predicted=predicted,
        measured=measured["decode"],
        threads=threads,
        context=context,
        reference=f"{'experts' if expert else 'weights'} in {rate.type}",
        drift=measured["reference"].median / rate.bytes_per_s.median,
    )


def n_rounds(effort: Effort = EFFORT) -> int:
    """What `verify` counts its progress in."""
    return 2 * effort.most


def _reference(model: Model, profile: Profile, predicted: CpuDecode) -> tuple[ExpertRate, bool]:
    """A rate of the profile that the prediction stands on: of the model's own experts, or of what stood in for them."""
    rates = [(rate, True) for rate in profile.cpu_experts] + [(rate, False) for rate in profile.cpu_dense]
    rates = [(rate, expert) for rate, expert in rates if rate.threads == predicted.threads]
    kind = model.geometry.expert_type
    wanted = (kind, *predicted.estimated.get(kind, ()))
    return next(((rate, expert) for rate, expert in rates if rate.type in wanted), rates[0])


def _check_room(model: Model) -> None:
    need = next(need for need in memory_needs(model.geometry, PROMPT + TOKENS) if need.way == "ram")
    # Page cache that holds the file already counts as available, and is what the weights need.
    free = ram().available
    if need.ram > free:
        raise UserError(
            f"{model.path}: --verify is for models that fit: it needs {format_bytes(need.ram)} of RAM, "
            f"{format_bytes(free)} is free"
        )


class Decoder:
    """A loaded model that decodes random tokens; a context manager."""

    def __init__(self, path: Path, threads: int) -> None:
        from edgemoe.llamacpp.session import Session

        self._session = Session(path, n_ctx=256, n_threads=threads)
        self._rng = np.random.default_rng(0)

    def round(self) -> float:
        """Tokens per second: of the median token after a fresh prompt, so that one interruption does not count."""
        tokens = self._rng.integers(self._session.n_vocab, size=PROMPT + TOKENS).astype(np.int32)
        self._session.clear()
        self._session.decode(tokens[:PROMPT])
        return 1 / float(np.median(self._times(tokens[PROMPT:])))

    def _times(self, tokens: np.ndarray) -> np.ndarray:
        times = []
        for position, token in enumerate(tokens, PROMPT):
            start = time.perf_counter()
            self._session.decode([token], position)
            times.append(time.perf_counter() - start)
        return np.array(times)

    def __enter__(self) -> "Decoder":
        return self

    def __exit__(self, *_: object) -> None:
        self._session.close()
