"""Many prompts side by side: a finished text's place is taken by the next prompt, until none is left.

with load_streams("model.gguf", 8, ram="6GB") as streams:
    for texts in Parallel(streams, prompts, options).run():
        for text in texts:
            print(text.index, text.text)
"""

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgemoe.errors import UserError
from edgemoe.generation.engine import EngineStats
from edgemoe.generation.generate import Draft, Step
from edgemoe.generation.options import Options
from edgemoe.generation.sampling import Sampler
from edgemoe.progress import Advance, no_progress
from edgemoe.units import Residency, parse_bytes

if TYPE_CHECKING:
    from edgemoe.calibration import Calibration
    from edgemoe.policy import Policy
    from edgemoe.streaming.stream import Stream
    from edgemoe.streaming.streams import Streams


def load_streams(
    path: str | Path,
    places: int,
    *,
    ram: int | str | None = None,
    residency: Residency | str | None = None,
    policy: "Policy | str | None" = None,
    calibration: "Calibration | str | Path | None" = None,
    advance: Advance = no_progress,
    **settings: Any,
) -> "Streams":
    """`edgemoe.generation.load` for `places` texts at a time, of as many tokens each as the context holds."""
    from edgemoe.generation.tuned import named
    from edgemoe.streaming.streams import Streams

    policy, calibration = named(policy, calibration, path)
    return Streams(
        path,
        places,
        ram=parse_bytes(ram) if isinstance(ram, str) else ram,
        residency=None if residency is None else Residency.of(residency),
        policy=policy,
        calibration=calibration,
        advance=advance,
        **settings,
    )


@dataclass
class Written:
    """One prompt's text so far; `finish` is None while it goes on. Seconds are a person's, the others' share included:
    of the prompt, and from the first token to the last."""

    index: int
    prompt_tokens: int
    seed: int
    text: str = ""
    tokens: int = 0
    finish: str | None = None
    first_token_s: float = 0.0
    decode_s: float = 0.0

    @property
    def tokens_per_s(self) -> float | None:
        return (self.tokens - 1) / self.decode_s if self.tokens > 1 and self.decode_s else None

    def add(self, step: Step) -> None:
        self.text += step.text
        self.tokens += 1
        self.finish = step.finish
        if step.index == 0:
            self.first_token_s = step.seconds


class Parallel:
    """Texts for many prompts (token ids), each with its own options; as many at a time as `streams` has places.

    `written` are the texts begun, in the prompts' order.
    """

    def __init__(self, streams: "Streams", prompts: Sequence[Sequence[int]], options: Sequence[Options]) -> None:
        for number, prompt in enumerate(prompts, 1):
            if not prompt:
                raise UserError(f"prompt {number} is empty: give some text")
            if len(prompt) > streams.n_ctx:
                raise UserError(
                    f"prompt {number} has {len(prompt):,} tokens, the context holds {streams.n_ctx:,}: give a larger "
                    "context (-c) or a shorter prompt"
                )
        self.streams, self.total = streams, len(prompts)
        self.written: list[Written] = []
        self.steps, self.rows, self.step_s = 0, 0, 0.0
        """Decodes of one token per live text, the tokens that they made, and their seconds."""
        self.decode = EngineStats()
        """What the engine did in those."""
        self._waiting = iter(enumerate(zip(prompts, options, strict=True)))
        self._live: dict[Stream, tuple[Draft, Written, float]] = {}
        self._next: dict[Stream, int] = {}

    @property
    def live(self) -> int:
        """Texts in the making."""
        return len(self._live)

    def run(self) -> Iterator[list[Written]]:
        """Yield, after each prompt that was read and each step, the texts that it made whole. Ctrl-C ends the step that
        is under way, and the texts stay as they were before it."""
        while True:
            while len(self._live) < self.streams.places:
                joining = next(self._waiting, None)
                if joining is None:
                    break
                yield self._join(*joining)
            if not self._live:
                return
            start, before = time.perf_counter(), self.streams.stats()
            self.streams.step(self._next)
            self.step_s += time.perf_counter() - start
            self.decode += self.streams.stats() - before
            self.steps, self.rows = self.steps + 1, self.rows + len(self._next)
            yield [written for stream in list(self._live) for written in self._take(stream, start)]

    def _join(self, index: int, prompt: tuple[Sequence[int], Options]) -> list[Written]:
        tokens, options = prompt
        start = time.perf_counter()
        stream = self.streams.join(tokens)
        sampler = Sampler(options)
        written = Written(index, len(tokens), sampler.seed)
        self.written.append(written)
        self._live[stream] = Draft(self.streams, options, sampler), written, time.perf_counter()
        return self._take(stream, start)

    def _take(self, stream: "Stream", start: float) -> list[Written]:
        """The next token of a text; the text, if it is the last."""
        draft, written, begun = self._live[stream]
        step = draft.take(stream.logits, stream.position < self.streams.n_ctx, start)
        written.add(step)
        written.decode_s = time.perf_counter() - begun
        self._next[stream] = step.token
        if not step.finish:
            return []
        del self._live[stream], self._next[stream]
        self.streams.leave(stream)
        return [written]


def seeded(options: Options, count: int) -> list[Options]:
    """The options for so many prompts: seeds that follow one another, from the given one or one that is drawn."""
    first = secrets.randbits(32) if options.seed is None else options.seed
    return [replace(options, seed=(first + i) % 2**64) for i in range(count)]
