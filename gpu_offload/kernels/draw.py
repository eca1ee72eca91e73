"""What the device's choice of a token is, in numpy: the same bits from the same logits, seed and position.

The filters and their order are those of `edgemoe.generation.sampling`: top-k, top-p, min-p, then the temperature. What
differs is where chance comes from, and that nothing depends on the order of a sum: the draw of a position is Philox
4×32-10 of (seed, position), so a token depends on no earlier draw; weights are integers in units of 2⁻³¹ of the
likeliest token's. The exponential is a polynomial of IEEE sums and products, which every machine rounds alike.
"""

import numpy as np

from edgemoe.errors import UserError
from edgemoe.generation.options import Options
from edgemoe.generation.sampling import likeliest

WEIGHT_BITS = 31
SHARE_BITS = 24  # top-p in units of 2⁻²⁴
FLOOR = -22.0  # e^FLOOR is less than half a unit of weight

# Cephes' expf: e^r on |r| ≤ ln(2) / 2.
LOG2_E = 1.44269504
LN2_HIGH = 0.693359375  # few bits: its product with a small integer is exact
LN2_LOW = -2.12194440e-4
POLYNOMIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)


def philox(seed: int, position: int) -> int:
    """64 random bits of Philox 4×32-10 with key `seed` and counter `position` (Salmon et al., 2011)."""
    low = 2**32 - 1
    counter = [position & low, (position >> 32) & low, 0, 0]
    key = [seed & low, (seed >> 32) & low]
    for _ in range(ROUNDS):
        first, second = MULTIPLIERS[0] * counter[0], MULTIPLIERS[1] * counter[2]
        counter = [(second >> 32) ^ counter[1] ^ key[0], second & low, (first >> 32) ^ counter[3] ^ key[1], first & low]
        key = [(word + step) & low for word, step in zip(key, WEYL, strict=True)]
    return counter[1] << 32 | counter[0]


def weights(x: np.ndarray) -> np.ndarray:  # [n] int64
    """⌊2³¹ eˣ⌋ of x ≤ 0 [n] float32, zero below `FLOOR`."""
    f = np.float32
    x = np.maximum(x, f(-30))
    n = (x * f(LOG2_E) - f(0.5)).astype(np.int32)
    r = x - n.astype(np.float32) * f(LN2_HIGH)
    r = r - n.astype(np.float32) * f(LN2_LOW)
    p = np.full_like(r, POLYNOMIAL[0])
    for coefficient in POLYNOMIAL[1:]:
        p = p * r + f(coefficient)
    y = (p * r * r + r) + f(1)
    units: np.ndarray = (y * ((n + (WEIGHT_BITS + 127)) << 23).view(np.float32)).astype(np.int64)
    units[x < f(FLOOR)] = 0
    return units


def top_p_units(options: Options) -> int:
    return round(options.top_p * 2**SHARE_BITS)


def log_min_p(options: Options) -> float:
    return float(np.float32(np.log(options.min_p))) if options.min_p > 0 else float("-inf")


def choose(logits: np.ndarray, options: Options, seed: int, position: int) -> int:
    """The token at `position` for logits [V] float32. Raises `UserError` where they are no numbers.

    The host's choice, with the device's bits: of an executor on the CPU, and where the device has none, for a top-k
    beyond its limit.
    """
    logits = np.asarray(logits, dtype=np.float32)
    if not np.isfinite(logits.max()):
        raise UserError("the model's logits are not finite: is the file damaged? (edgemoe info shows its layout)")
    if options.temperature == 0:
        return int(logits.argmax())
    tokens = likeliest(logits, options.top_k or len(logits))
    below = logits[tokens] - logits[tokens[0]]
    shares = weights(below)
    reached = np.cumsum(shares)
    kept = (reached - shares < _needed(int(reached[-1]), options)) & (below >= np.float32(log_min_p(options)))
    with np.errstate(over="ignore"):
        drawn_from = np.where(kept, weights(below / np.float32(options.temperature)), 0)
    reached = np.cumsum(drawn_from)
    at = philox(seed, position) * int(reached[-1]) >> 64
    return int(tokens[np.searchsorted(reached, at, side="right")])


def _needed(total: int, options: Options) -> int:
    """The least weight that is a share of top-p."""
    return (total * top_p_units(options) + 2**SHARE_BITS - 1) >> SHARE_BITS
