"""What a person can ask of a generation, as one value, checked once."""

import math
from dataclasses import dataclass

from edgemoe.errors import UserError


@dataclass(frozen=True, slots=True)
class Options:
    """How the next tokens are chosen and when they end. The filters apply in the order top-k, top-p, min-p, then the
    temperature, as in llama.cpp; its defaults are these.

    `n` tokens at most, None for as many as the context holds; `seed` None means that `Writer` draws one and says it.
    A `UserError` names a value that is out of range.
    """

    n: int | None = None
    temperature: float = 0.8
    """0 is greedy: the likeliest token, the lower id among equals."""
    top_k: int = 40
    """Only the k likeliest tokens; 0 for all."""
    top_p: float = 0.95
    """Only the likeliest tokens that together reach this probability; 1 for all."""
    min_p: float = 0.05
    """Only tokens at least so likely as this share of the likeliest; 0 for all."""
    seed: int | None = None
    stop: tuple[str, ...] = ()
    """Texts that end the generation; they are not part of what is printed."""
    ignore_eos: bool = False
    """Go on past the end of the text."""

    def __post_init__(self) -> None:
        if self.n is not None and self.n < 1:
            raise UserError(f"{self.n} tokens: give at least 1")
        if not (math.isfinite(self.temperature) and 0 <= self.temperature <= 100):
            raise UserError(f"temperature {self.temperature} is out of range: give 0 (greedy) to 100")
        if self.top_k < 0:
            raise UserError(f"top-k {self.top_k} is not a count: give 1 or more, or 0 for every token")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top-p {self.top_p} is not a probability: give more than 0, up to 1 (every token)")
        if not 0 <= self.min_p <= 1:
            raise UserError(f"min-p {self.min_p} is not a share: give 0 (every token) to 1")
        if self.seed is not None and not 0 <= self.seed < 2**64:
            raise UserError(f"seed {self.seed} is out of range: give 0 to 2^64 − 1")
        if "" in self.stop:
            raise UserError("an empty stop string would end every text at once: leave it out")
