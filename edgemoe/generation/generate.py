"""The loop: prompt in, tokens out one at a time, each with the text that it made certain."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from edgemoe.errors import UserError
from edgemoe.generation.engine import Engine
from edgemoe.generation.options import Options
from edgemoe.generation.sampling import Sampler
from edgemoe.generation.text import TextStream

Finish = Literal["end", "stop", "length", "context"]


@dataclass(frozen=True, slots=True)
class Step:
    """One generated token. The last one says why it is the last.

    end: the model ended the text (that token is in no text). stop: a stop string. length: `n` tokens.
    context: no room for another token.
    """

    index: int
    token: int
    text: str
    seconds: float
    """From asking for its logits to its text; for the first one, the prompt's time too."""
    finish: Finish | None = None


class Context:
    """An engine and the tokens that its memory holds, so that a new prompt computes only what differs from the last."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tokens: list[int] = []
        self.reused = 0
        """Tokens of the last prompt that were there already."""

    def prefill(self, prompt: Sequence[int]) -> np.ndarray:
        """The logits after `prompt`, [V]; of the memory, what agrees with it stays. Raises as `Engine.prefill`."""
        if not prompt:
            raise UserError("the prompt is empty: give some text")
        if len(prompt) > self.engine.n_ctx:
            raise UserError(
                f"the prompt has {len(prompt):,} tokens, the context holds {self.engine.n_ctx:,}: give a larger context"
                " (-c) or a shorter prompt"
            )
        held = min(len(self.tokens), self.engine.position)
        common = 0
        # At least one token is decoded, since its logits are wanted.
        while common < min(held, len(prompt) - 1) and self.tokens[common] == prompt[common]:
            common += 1
        if common:
            common = self.engine.rewind(common)
        if not common:
            self.engine.reset()
        self.reused, self.tokens = common, list(prompt)
        return self._settled(self.engine.prefill, prompt[common:])

    def decode(self, token: int) -> np.ndarray:
        """Append a token; the logits after it, [V]."""
        self.tokens.append(token)
        return self._settled(self.engine.decode, token)

    def _settled(self, call, argument):  # type: ignore[no-untyped-def]
        try:
            return call(argument)
        finally:
            del self.tokens[self.engine.position :]


def generate(
    engine: Engine | Context, prompt: Sequence[int], options: Options | None = None, sampler: Sampler | None = None
) -> Iterator[Step]:
    """Yield the tokens that follow `prompt`, until one of them ends the text or `options.n` are reached.

    Given a `Context`, its memory is used and kept. Raises `UserError` for a prompt that is empty or too long. An
    interrupt leaves the engine's memory whole; the token in progress is lost.
    """
    options = options or Options()
    sampler = sampler or Sampler(options)
    context = engine if isinstance(engine, Context) else Context(engine)
    engine = context.engine
    text = TextStream(options.stop)
    ends = frozenset() if options.ignore_eos else engine.eos_tokens
    start = time.perf_counter()
    logits = context.prefill(prompt)
    index = 0
    while True:
        token = sampler.sample(logits)
        shown = "" if token in ends else text.feed(engine.piece(token))
        finish: Finish | None = None
        if token in ends:
            finish = "end"
        elif text.stopped is not None:
            finish = "stop"
        elif options.n is not None and index + 1 >= options.n:
            finish = "length"
        elif engine.position >= engine.n_ctx:
            finish = "context"
        if finish:
            shown += text.finish()
        now = time.perf_counter()
        yield Step(index, token, shown, now - start, finish)
        if finish:
            return
        index, start = index + 1, time.perf_counter()
        logits = context.decode(token)
