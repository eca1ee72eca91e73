"""The loop: prompt in, tokens out one at a time, each with the text that it made certain."""

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np

from edgemoe.errors import UserError
from edgemoe.generation.engine import Choosing, Engine, Language
from edgemoe.generation.options import Options
from edgemoe.generation.sampling import Sampler
from edgemoe.generation.text import TextStream
from edgemoe.tracing.interrupts import interrupts_deferred

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
    """From asking for its logits to its text, or its share of the time of a block of tokens; for the first one, the
    prompt's time too."""
    finish: Finish | None = None


class Context:
    """An engine and the tokens that its memory holds, so that a new prompt computes only what differs from the last."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tokens: list[int] = []
        self.reused = 0
        """Tokens of the last prompt that were there already."""
        self.singly = False
        """Whether an engine that could choose many tokens at once chooses one at a time: each has its figures then."""

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

    def extend(self, token: int, count: int, options: Options) -> list[int]:
        """Append a token and those that the engine chooses after it: `edgemoe.generation.engine.Choosing.extend`."""
        chosen = cast(Choosing, self.engine).extend(token, count, options)
        self.tokens += [token, *chosen[:-1]]
        return chosen

    def shorten(self, position: int) -> None:
        """Forget the tokens from `position` on."""
        self._settled(self.engine.rewind, position)

    def _settled(self, call, argument):  # type: ignore[no-untyped-def]
        try:
            return call(argument)
        finally:
            del self.tokens[self.engine.position :]


class Draft:
    """A text in the making: logits in, one token out, with the text that it made certain and whether it is the last."""

    def __init__(self, language: Language, options: Options, sampler: Sampler) -> None:
        self._language, self._options, self._sampler = language, options, sampler
        self._text = TextStream(options.stop)
        self._ends = frozenset() if options.ignore_eos else language.eos_tokens
        self._index = 0

    @property
    def left(self) -> int:
        """Tokens to come at most."""
        return sys.maxsize if self._options.n is None else self._options.n - self._index

    def take(self, logits: np.ndarray, room: bool, start: float) -> Step:
        """The next token. `room`: the context has some for it. `start`: when its logits were asked for, in seconds of
        `perf_counter`."""
        token = self._sampler.sample(logits)
        return self.add(token, room, time.perf_counter() - start)

    def add(self, token: int, room: bool, seconds: float) -> Step:
        """The next token, chosen elsewhere in so many seconds."""
        index, options = self._index, self._options
        shown = "" if token in self._ends else self._text.feed(self._language.piece(token))
        finish: Finish | None = None
        if token in self._ends:
            finish = "end"
        elif self._text.stopped is not None:
            finish = "stop"
        elif options.n is not None and index + 1 >= options.n:
            finish = "length"
        elif not room:
            finish = "context"
        if finish:
            shown += self._text.finish()
        self._index += 1
        return Step(index, token, shown, seconds, finish)


def generate(
    engine: Engine | Context, prompt: Sequence[int], options: Options | None = None, sampler: Sampler | None = None
) -> Iterator[Step]:
    """Yield the tokens that follow `prompt`, until one of them ends the text or `options.n` are reached.

    Given a `Context`, its memory is used and kept. Raises `UserError` for a prompt that is empty or too long. An
    interrupt leaves the engine's memory whole; the token in progress is lost. An engine that chooses tokens in blocks
    finishes the block first, and its tokens are yielded.
    """
    context = engine if isinstance(engine, Context) else Context(engine)
    engine = context.engine
    sampler = sampler or Sampler(options or Options(), engine)
    draft = Draft(engine, options or sampler.options, sampler)
    start = time.perf_counter()
    step = draft.take(context.prefill(prompt), engine.position < engine.n_ctx, start)
    yield step
    while not step.finish:
        for following in _following(context, draft, step.token, sampler.options):
            yield following
        step = following


def _following(context: Context, draft: Draft, token: int, options: Options) -> Iterator[Step]:
    """The next token after this one, or as many as the engine chooses at once."""
    engine, start = context.engine, time.perf_counter()
    block = 1
    if isinstance(engine, Choosing) and not context.singly:
        block = min(engine.block, draft.left, engine.n_ctx - engine.position)
    if block == 1:
        logits = context.decode(token)
        yield draft.take(logits, engine.position < engine.n_ctx, start)
        return
    position, chosen, interrupt = engine.position, list[int](), None
    try:
        with interrupts_deferred():
            chosen = context.extend(token, block, options)
    except KeyboardInterrupt as late:
        if not chosen:
            raise
        interrupt = late
    seconds = (time.perf_counter() - start) / len(chosen)
    for count, token in enumerate(chosen, 1):
        step = draft.add(token, position + count < engine.n_ctx, seconds)
        if step.finish and count < len(chosen):  # a stop string: the tokens behind it are not of this text
            context.shorten(position + count)
        yield step
        if step.finish:
            break
    if interrupt:
        raise interrupt
