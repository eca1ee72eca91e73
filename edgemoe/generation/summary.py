"""How a generation went, in figures: what was decoded, where the time went, what was read."""

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

from edgemoe.generation.engine import Choosing, Engine, EngineStats
from edgemoe.generation.generate import Step

_RECENT_S = 3.0


@dataclass(frozen=True)
class Summary:
    """One generation. `prompt` and `decode` are what the engine did up to the first token, and after it.

    Seconds of `decode_s` are the person's: from the first token to the last, sampling and detokenising included.
    """

    finish: str  # a `Finish`, or interrupted
    seed: int
    prompt_tokens: int
    reused_tokens: int  # of the prompt, already in memory
    read_tokens: int  # of the prompt, in memory at the end: all but where it was interrupted before
    generated_tokens: int
    first_token_s: float | None
    decode_s: float
    prompt: EngineStats
    decode: EngineStats
    context_tokens: int
    n_ctx: int
    decoded_tokens: int
    """Tokens that a decode of their own was for: all but the first, whose logits the prompt gave."""
    disk_bytes_per_s: float | None = None
    """As probed, for reads of an expert's size; where experts come from RAM, of the link to the GPU."""
    predicted_hit_rate: float | None = None
    """What simulation on the calibration's text gave for this policy and capacity."""
    unpredicted: str = ""
    """Why there is no such figure; empty where there is one, or no cache."""
    experts_from: str = "disk"
    """Where experts are copied from: the disk, or the RAM."""
    vram_in_ram: bool = False
    """Whether the CPU stands for a GPU: `vram_bytes` is part of `ram_bytes` then."""

    def then(self, later: "Summary") -> "Summary":
        """Two turns of a conversation as one; what cannot be added is the later one's."""
        tokens = ("prompt_tokens", "reused_tokens", "read_tokens", "generated_tokens", "decoded_tokens")
        added = (*tokens, "decode_s", "prompt", "decode")
        both = {name: getattr(self, name) + getattr(later, name) for name in added}
        return replace(later, first_token_s=None, **both)

    @property
    def tokens_per_s(self) -> float | None:
        return self.decoded_tokens / self.decode_s if self.decoded_tokens else None

    @property
    def prompt_tokens_per_s(self) -> float | None:
        return self.prompt.tokens / self.prompt.seconds if self.prompt.seconds else None

    @property
    def seconds_per_token(self) -> dict[str, float]:
        """compute, demand wait, policy, and what is left over (sampling, text, the terminal); where the engine cannot
        tell the first three apart, device for all of them. Empty before a decode."""
        if not self.decoded_tokens:
            return {}
        parts = self.decode.shares or {"device": self.decode.seconds}
        parts["other"] = max(self.decode_s - sum(parts.values()), 0.0)
        return {name: seconds / self.decoded_tokens for name, seconds in parts.items()}

    @property
    def bytes_per_token(self) -> float | None:
        """Read per token that the engine decoded, demand and prefetch."""
        return self.decode.read_bytes / self.decode.tokens if self.decode.tokens else None

    @property
    def read_bytes_per_s(self) -> float | None:
        """What decoding got out of the disk: bytes over its whole time, computing included."""
        return self.decode.read_bytes / self.decode_s if self.decoded_tokens and self.decode.read_bytes else None

    @property
    def share_of_disk(self) -> float | None:
        rate = self.read_bytes_per_s
        return rate / self.disk_bytes_per_s if rate and self.disk_bytes_per_s else None

    def as_json(self) -> dict[str, Any]:
        """Every figure by name; those that are not defined are null."""
        derived = ("tokens_per_s", "prompt_tokens_per_s", "bytes_per_token", "read_bytes_per_s", "share_of_disk")
        fields = {name: value for name, value in vars(self).items() if name not in ("prompt", "decode")}
        stats = {f"{name}_phase": _as_json(getattr(self, name)) for name in ("prompt", "decode")}
        return {
            **fields,
            **{name: getattr(self, name) for name in derived},
            "seconds_per_token": self.seconds_per_token or None,
            **stats,
        }


def _as_json(stats: EngineStats) -> dict[str, Any]:
    return {**vars(stats), "hit_rate": stats.hit_rate}


@dataclass
class Meter:
    """Watches one generation: `begin`, then every `step`, then `summary`."""

    engine: Engine
    _recent: deque[tuple[float, EngineStats]] = field(default_factory=deque)

    def begin(self) -> None:
        self._start = self._first = self._last = self._whole = self.engine.stats()
        # An engine on the host counts what it did for a token even where an interrupt undoes it. Others do not, or
        # finish the token, and some need long to tell.
        self._undoes = isinstance(self.engine, Choosing) and self.engine.block == 1
        self.generated, self.decode_s = 0, 0.0
        self.first_token_s: float | None = None
        self.finish = "interrupted"
        self._recent.clear()

    def step(self, step: Step) -> None:
        self.generated += 1
        if step.index == 0:
            self.first_token_s = step.seconds
            self._first = self._whole = self.engine.stats()
        else:
            self.decode_s += step.seconds
            if self._undoes:
                self._whole = self.engine.stats()
        if step.finish:
            self.finish = step.finish

    def since_last(self) -> EngineStats:
        """What the engine did since the last call (or since `begin`)."""
        now = self.engine.stats()
        since, self._last = now - self._last, now
        return since

    def recent(self) -> tuple[float | None, EngineStats]:
        """Tokens per second, and what the engine did, over the last seconds of decoding."""
        now = (self.decode_s, self.engine.stats())
        self._recent.append(now)
        while len(self._recent) > 2 and now[0] - self._recent[0][0] > _RECENT_S:
            self._recent.popleft()
        seconds, stats = now[0] - self._recent[0][0], now[1] - self._recent[0][1]
        return (stats.tokens / seconds if seconds else None), stats

    def summary(self, *, seed: int, prompt_tokens: int, reused_tokens: int, **known: Any) -> Summary:
        """What happened since `begin`; `known` are fields of `Summary` that no engine can tell."""
        undone = self._undoes and self.finish == "interrupted" and self.generated
        now = self._whole if undone else self.engine.stats()
        first = self._first if self.generated else now
        return Summary(
            finish=self.finish,
            seed=seed,
            prompt_tokens=prompt_tokens,
            reused_tokens=reused_tokens,
            read_tokens=prompt_tokens if self.generated else min(self.engine.position, prompt_tokens),
            generated_tokens=self.generated,
            first_token_s=self.first_token_s,
            decode_s=self.decode_s,
            prompt=first - self._start,
            decode=now - first,
            context_tokens=self.engine.position,
            n_ctx=self.engine.n_ctx,
            decoded_tokens=max(self.generated - 1, 0),
            **known,
        )
