"""From logits to a token: greedy, or drawn from what top-k, top-p, min-p and the temperature leave."""

import secrets
from dataclasses import replace

import numpy as np

from edgemoe.errors import UserError
from edgemoe.generation.engine import Choosing, Engine
from edgemoe.generation.options import Options


class Sampler:
    """Draws tokens; the same seed and the same logits give the same tokens, on every machine.

    Probabilities are computed in float64 and ties go to the lower id, so nothing depends on a sort's whims.
    """

    def __init__(self, options: Options, engine: Engine | None = None) -> None:
        """engine: whose own choice it is, if it has one (`edgemoe.generation.engine.Choosing`)."""
        self.seed = secrets.randbits(32) if options.seed is None else options.seed
        self.options = replace(options, seed=self.seed)
        self._engine = engine if isinstance(engine, Choosing) else None
        self._random = np.random.Generator(np.random.PCG64(self.seed))

    def sample(self, logits: np.ndarray) -> int:
        """One token for logits [V]. Raises `UserError` where they are no numbers: a damaged model."""
        if not np.isfinite(logits.max()):
            raise UserError("the model's logits are not finite: is the file damaged? (edgemoe info shows its layout)")
        if self.options.temperature == 0:
            return int(logits.argmax())
        if self._engine:
            return self._engine.choose(logits, self.options)
        tokens, probabilities = candidates(logits, self.options)
        reached = np.cumsum(probabilities)
        drawn = np.searchsorted(reached, self._random.random() * reached[-1], side="right")
        return int(tokens[min(drawn, len(tokens) - 1)])


def candidates(logits: np.ndarray, options: Options) -> tuple[np.ndarray, np.ndarray]:
    """The tokens that may follow, likeliest first, and their probabilities: both [n], n ≥ 1."""
    tokens = likeliest(logits, options.top_k or len(logits))
    scores = logits[tokens].astype(np.float64)
    scores -= scores[0]
    keep = len(tokens)
    if options.top_p < 1:
        probabilities = np.exp(scores)
        reached = np.cumsum(probabilities / probabilities.sum())
        keep = min(keep, int(np.searchsorted(reached, options.top_p)) + 1)
    if options.min_p > 0:
        keep = min(keep, int(np.count_nonzero(scores >= np.log(options.min_p))))
    weights = np.exp(scores[:keep] / options.temperature)
    return tokens[:keep], weights / weights.sum()


def likeliest(logits: np.ndarray, k: int) -> np.ndarray:
    """Ids of the k largest logits, largest first, the lower id first among equals."""
    if k < len(logits):
        threshold = np.partition(logits, len(logits) - k)[len(logits) - k]
        above = np.flatnonzero(logits > threshold)
        equal = np.flatnonzero(logits == threshold)
        chosen = np.sort(np.concatenate([above, equal[: k - len(above)]]))
    else:
        chosen = np.arange(len(logits))
    return chosen[np.argsort(-logits[chosen].astype(np.float64), kind="stable")]
