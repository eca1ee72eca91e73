"""The next token, chosen from (seed, position) alone, so that a device can choose many without asking the host.

Philox 4x32-10 (Salmon et al. 2011), keyed by the seed and counted by the position, as Triton's `tl.rand(seed,
position)` is, bit for bit.
"""

import numpy as np

from edgemoe.generation.options import Options
from edgemoe.generation.sampling import candidates

_MASK = 0xFFFFFFFF
_SCALE = np.float32(4.6566127342e-10)  # just below 2⁻³¹: the largest draw stays below 1


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Ten rounds of Philox 4x32."""
    (a, b, c, d), (low, high) = counter, key
    for _ in range(10):
        first, second = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (second >> 32) ^ b ^ low, second & _MASK, (first >> 32) ^ d ^ high, first & _MASK
        low, high = (low + 0x9E3779B9) & _MASK, (high + 0xBB67AE85) & _MASK
    return a, b, c, d


def uniform(seed: int, position: int) -> np.float32:
    """A float32 in [0, 1) for a seed below 2⁶⁴ and a position below 2³²."""
    drawn = philox((position & _MASK, 0, 0, 0), (seed & _MASK, seed >> 32))[0]
    return np.float32(drawn if drawn < 1 << 31 else _MASK - drawn) * _SCALE


def next_token(logits: np.ndarray, options: Options, position: int) -> int:
    """The token that follows the one at `position`, for its logits [V]: the likeliest, or one drawn from what the
    options' filters leave, by inverting their distribution at `uniform(options.seed, position)`."""
    if options.temperature == 0:
        return int(logits.argmax())
    tokens, probabilities = candidates(logits, options)
    reached = np.cumsum(probabilities)
    drawn = np.searchsorted(reached, float(uniform(options.seed or 0, position)) * reached[-1], side="right")
    return int(tokens[min(int(drawn), len(tokens) - 1)])
