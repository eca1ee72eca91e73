"""What a benchmark asks of an engine: how likely a continuation is, and what follows a prompt.

Every request starts from an empty memory and an empty logical cache, so that no answer depends on the one before.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from edgemoe.errors import UserError
from edgemoe.generation.engine import Engine, Language
from edgemoe.generation.generate import generate
from edgemoe.generation.options import Options

Pair = tuple[Sequence[int], Sequence[int]]
"""Tokens of a context (at least one) and of what continues it (at least one)."""
Prompt = tuple[Sequence[int], Options]


class Answers(Protocol):
    """A model under a policy that answers requests, given as tokens."""

    batch: int
    """Requests that share a pass; which ones do decides the last bits of their answers."""

    @property
    def language(self) -> Language: ...

    @property
    def n_ctx(self) -> int:
        """The most tokens that a request may hold; the last token of a continuation is predicted only."""

    def loglikelihoods(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        """Of each continuation: the sum of its tokens' log-probabilities in nats, and whether greedy decoding would
        write it."""

    def texts(self, prompts: Sequence[Prompt]) -> list[str]:
        """What follows each prompt, up to its stop strings, the end of the text, or `n` tokens."""


class EngineAnswers:
    """Any `edgemoe.generation.engine.Engine`: contexts are read in the engine's chunks, then one token per decode."""

    batch = 1

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def language(self) -> Language:
        return self._engine

    @property
    def n_ctx(self) -> int:
        return self._engine.n_ctx

    def loglikelihoods(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        found: list[tuple[float, bool]] = []
        held: tuple[int, ...] = ()
        row, ready = np.zeros(0, np.float32), False
        for context, continuation in pairs:
            # What follows a context is one distribution: a choice of one token needs no pass of its own.
            if held != tuple(context) or (len(continuation) > 1 and not ready):
                held, row, ready = tuple(context), self._read(context), True
            found.append(self._continued(row, continuation))
            ready = ready and len(continuation) == 1
        return found

    def _read(self, context: Sequence[int]) -> np.ndarray:
        self._engine.reset()
        return self._engine.prefill(list(context)).copy()

    def _continued(self, row: np.ndarray, continuation: Sequence[int]) -> tuple[float, bool]:
        parts = [predicted(row, continuation[0])]
        for token, following in pairwise(continuation):
            parts.append(predicted(self._engine.decode(int(token)), following))
        return sum(nats for nats, _ in parts), all(greedy for _, greedy in parts)

    def texts(self, prompts: Sequence[Prompt]) -> list[str]:
        return ["".join(step.text for step in generate(self._engine, prompt, options)) for prompt, options in prompts]


def predicted(row: np.ndarray, token: int) -> tuple[float, bool]:
    """log p(token) in nats, in float64, and whether it is the likeliest (the lower id among equals), of logits [V]."""
    if not np.isfinite(row).all():
        raise UserError("the model gives logits that are not numbers: is the file damaged?")
    shifted = row.astype(np.float64) - float(row.max())
    return float(shifted[token] - np.log(np.exp(shifted).sum())), int(row.argmax()) == token


def rows_of(batch: Any) -> np.ndarray:
    """[…, V] float32 on the host, of a torch tensor of logits."""
    found: np.ndarray = batch.detach().float().cpu().numpy()
    return found
