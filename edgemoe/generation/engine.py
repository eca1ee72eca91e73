"""What generation asks of an engine: tokens in, logits of the next token out, and figures about how it went.

`edgemoe.llamacpp.resident.ResidentEngine` keeps the whole model in RAM; `edgemoe.streaming.StreamingEngine` keeps what
fits and reads the rest. Sampling, chat and the commands know this protocol only.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import TracebackType
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np

from edgemoe.generation.options import Options

_E = TypeVar("_E", bound="Engine")


@dataclass(frozen=True)
class EngineStats:
    """Running totals since the engine was made; the difference of two is what happened in between.

    An engine without a cache leaves everything below `seconds` at zero.
    """

    tokens: int = 0
    """Tokens decoded, those of prompts included."""
    seconds: float = 0.0
    """Time inside the engine's calls; the three shares below are parts of it, None where nobody can tell them apart."""
    compute_s: float | None = 0.0
    demand_wait_s: float | None = 0.0
    """Time a layer stood still until the experts that it executes had been read."""
    policy_s: float | None = 0.0
    loads: int = 0
    """Expert loads: executions of one expert for one token in one layer."""
    hits: int = 0
    """Loads whose expert was resident in the logical cache."""
    demand_reads: int = 0
    demand_bytes: int = 0
    prefetch_reads: int = 0
    prefetch_bytes: int = 0
    prefetch_in_time: int = 0
    prefetch_late: int = 0
    prefetch_unused: int = 0
    ram_bytes: int = 0
    """RAM that this process holds now, weights included: a level, not a total."""
    vram_bytes: int = 0
    """The same of a GPU's memory, where the engine manages it; where the CPU stands for the GPU, what of `ram_bytes`
    stands for its memory, as computed for its budget."""

    def __sub__(self, earlier: "EngineStats") -> "EngineStats":
        """What happened since `earlier`; the memory is the later one's."""
        return self._with(earlier, operator.sub, self)

    def __add__(self, later: "EngineStats") -> "EngineStats":
        """Two stretches as one; the memory is the later one's."""
        return self._with(later, operator.add, later)

    def _with(self, other: "EngineStats", combine: Callable[[Any, Any], Any], levels: "EngineStats") -> "EngineStats":
        pairs = {f.name: (getattr(self, f.name), getattr(other, f.name)) for f in fields(self)}
        found: dict[str, Any] = {name: None if None in pair else combine(*pair) for name, pair in pairs.items()}
        return EngineStats(**{**found, "ram_bytes": levels.ram_bytes, "vram_bytes": levels.vram_bytes})

    @property
    def shares(self) -> dict[str, float]:
        """Seconds of compute, demand wait and policy; empty where they are not known apart."""
        parts = {"compute": self.compute_s, "demand_wait": self.demand_wait_s, "policy": self.policy_s}
        return {name: seconds for name, seconds in parts.items() if seconds is not None}

    @property
    def hit_rate(self) -> float | None:
        """1 − misses / loads, None before the first load."""
        return self.hits / self.loads if self.loads else None

    @property
    def read_bytes(self) -> int:
        return self.demand_bytes + self.prefetch_bytes


class Observer(Protocol):
    """Told by an engine of every token that it decoded, in the order of execution; undone decodes are not told."""

    def reset(self) -> None:
        """A new sequence starts: the memory is empty, the caches are as at the start."""

    def decoded(self, tokens: np.ndarray, rows: Mapping[str, np.ndarray]) -> None:
        """T tokens [T]: the experts that ran, `executed` [L, T, k] (−1 pads), and where the graph ranks them `scores`
        [L, T, E]; `pregate` [L, T, E] under a policy that forms it. The arrays are the observer's to keep."""


class Language(Protocol):
    """What a model knows of text: its tokens, and how turns of a conversation are written."""

    @property
    def n_vocab(self) -> int: ...

    @property
    def bos(self) -> int | None:
        """The token that a text starts with, where the model wants one."""

    @property
    def eos_tokens(self) -> frozenset[int]:
        """Tokens that end a text or a turn."""

    @property
    def chat_template(self) -> str | None:
        """The Jinja template in the model file, if it has one."""

    def special_text(self, name: str) -> str:
        """The text of the `bos` or `eos` token, as chat templates write it; empty where there is none."""

    def tokenize(self, text: bytes, *, special: bool = False) -> np.ndarray:
        """Token ids of a text, [T] int32, without BOS. `special` reads `<|im_end|>` and the like as the tokens that
        they name: for the output of a chat template."""

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """What a token adds to the text: any bytes, also a part of a character; nothing for control tokens, or their
        names where `special` asks for them."""


class Engine(Language, Protocol):
    """One model and one sequence of tokens, whose memory (KV cache) holds the tokens before `position`.

    `edgemoe.llamacpp.vocabulary.Vocabulary` gives a llama.cpp engine everything that is about text.
    """

    @property
    def description(self) -> str:
        """The model in a few words, for people."""

    @property
    def n_ctx(self) -> int:
        """The most tokens that a sequence can have."""

    @property
    def position(self) -> int:
        """Tokens that the memory holds."""

    def prefill(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """Append tokens (at least one) in batches; the logits after the last one, [V] float32.

        Raises `UserError`, before anything is decoded, where they do not fit into the context. After any exception
        (Ctrl-C, a disk that fails) the memory holds exactly the tokens before `position`, which may include some of the
        new ones, and the engine can go on from there.
        """

    def decode(self, token: int) -> np.ndarray:
        """Append one token; the logits after it, [V] float32. Errors and exceptions as in `prefill`."""

    def rewind(self, position: int) -> int:
        """Forget the tokens from `position` on; what caches hold stays. Returns the new position: 0 where a model's
        memory (recurrent layers, sliding windows) cannot forget a part."""

    def reset(self) -> None:
        """Start a new sequence: the memory empty, the policy as at the start."""

    def stats(self) -> EngineStats: ...

    def close(self) -> None:
        """Free everything; may be called again."""

    def __enter__(self: _E) -> _E: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@runtime_checkable
class Choosing(Protocol):
    """What an engine has besides `Engine` if it chooses tokens itself: a draw depends on seed and position alone, so
    many tokens can follow one another without the host between them."""

    @property
    def block(self) -> int:
        """Tokens that are best asked for at once; 1: `Engine.decode` and `choose` serve as well."""

    def choose(self, logits: np.ndarray, options: Options) -> int:
        """The next token for the logits [V] after the last one. The options' seed is given."""

    def extend(self, token: int, count: int, options: Options) -> list[int]:
        """Append `token`, choose the next, append that, and so on: the `count` tokens chosen, fewer after one that ends
        the text. The last one is not appended. All of it happens, or it raises and nothing has."""
