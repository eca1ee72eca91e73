"""The next token on the device, in two launches: each block's likeliest tokens, then the choice among them.

Bit for bit `draw.choose`. Tokens are ranked as one integer, the logit's key above the id's complement, so that the
lower id comes first among equals. Fused multiply-adds are off, as in the policy.
"""

import numpy as np
import torch
import triton
import triton.language as tl

from edgemoe.generation.options import Options
from edgemoe.gpu_offload.kernels import draw
from edgemoe.gpu_offload.kernels.ranking import MASKED, NOTHING, ordered, unordered

BLOCK = 2048
MOST = 128  # the largest top-k that is chosen from on the device

RUNNING, ENDED, NOT_FINITE, FULL = range(4)
"""Why a sequence goes on or not: an end-of-sequence token, logits that are no numbers, no room for another token."""
SEED, POSITION, STATE, TOKEN = range(4)
"""The words of `control`."""

SEED_AT, POSITION_AT, STATE_AT, TOKEN_AT = (tl.constexpr(i) for i in (SEED, POSITION, STATE, TOKEN))
ENDED_STATE, NOT_FINITE_STATE, FULL_STATE = (tl.constexpr(i) for i in (ENDED, NOT_FINITE, FULL))
NONE = tl.constexpr(-(2**63))
INFINITE = tl.constexpr(0x7F800000)  # ordered(∞); every NaN is made larger
ID_MASK = tl.constexpr(2**31 - 1)
LOG2_E = tl.constexpr(draw.LOG2_E)
LN2_HIGH = tl.constexpr(draw.LN2_HIGH)
LN2_LOW = tl.constexpr(draw.LN2_LOW)
P0, P1, P2, P3, P4, P5 = (tl.constexpr(x) for x in draw.POLYNOMIAL)
FLOOR = tl.constexpr(draw.FLOOR)
WEIGHT_BITS = tl.constexpr(draw.WEIGHT_BITS)
SHARE_BITS = tl.constexpr(draw.SHARE_BITS)
SHARE_MASK = tl.constexpr(2**draw.SHARE_BITS - 1)
PHILOX_ROUNDS = tl.constexpr(draw.ROUNDS)
MULTIPLIER_0, MULTIPLIER_1 = (tl.constexpr(x) for x in draw.MULTIPLIERS)
WEYL_0, WEYL_1 = (tl.constexpr(x) for x in draw.WEYL)
LOW_WORD = tl.constexpr(2**32 - 1)


@triton.jit
def weight(x):  # type: ignore[no-untyped-def]
    """⌊2³¹ eˣ⌋ of x ≤ 0 as int64, zero below FLOOR: `draw.weights`."""
    x = tl.maximum(x, -30.0)
    n = (x * LOG2_E - 0.5).to(tl.int32)
    whole = n.to(tl.float32)
    r = (x - whole * LN2_HIGH) - whole * LN2_LOW
    p = ((((r * P0 + P1) * r + P2) * r + P3) * r + P4) * r + P5
    y = (p * r * r + r) + 1.0
    units = (y * ((n + (WEIGHT_BITS + 127)) << 23).to(tl.float32, bitcast=True)).to(tl.int64)
    return tl.where(x < FLOOR, 0, units)


@triton.jit
def philox(seed, position):  # type: ignore[no-untyped-def]
    """64 random bits, as uint64: `draw.philox`. Words are the low halves of int64, so products are never signed."""
    seed = seed.to(tl.uint64, bitcast=True)
    position = position.to(tl.uint64, bitcast=True)
    low = tl.full((), LOW_WORD, tl.uint64)
    c0 = position & low
    c1 = position >> 32
    c2 = c0 * 0
    c3 = c2
    k0 = seed & low
    k1 = seed >> 32
    for _ in tl.static_range(PHILOX_ROUNDS):
        first = c0 * MULTIPLIER_0
        second = c2 * MULTIPLIER_1
        c0 = (second >> 32) ^ c1 ^ k0
        c1 = second & low
        c2 = (first >> 32) ^ c3 ^ k1
        c3 = first & low
        k0 = (k0 + WEYL_0) & low
        k1 = (k1 + WEYL_1) & low
    return (c1 << 32) | c0


@triton.jit
def likeliest(logits, control, bests, V: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The M likeliest of each block of logits [V] float32 to `bests` [blocks, M] int64."""
    if tl.load(control + STATE_AT) == 0:
        token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + token, mask=token < V, other=0.0)
        score = tl.where(x == x, ordered(x), NOTHING)  # not where it is no number
        key = (score.to(tl.int64) << 32) | (token ^ ID_MASK).to(tl.int64)
        key = tl.where(token < V, key, NONE)
        for i in range(M):
            best = tl.max(key, 0)
            tl.store(bests + tl.program_id(0) * M + i, best)
            key = tl.where(key == best, NONE, key)


@triton.jit(do_not_specialize=["share", "capacity"])
def choose(  # type: ignore[no-untyped-def]
    bests, control, sequence, ends, temperature, log_min_p, share, capacity,
    N: tl.constexpr, NP: tl.constexpr, M: tl.constexpr, KP: tl.constexpr, ENDS: tl.constexpr, GREEDY: tl.constexpr
):  # fmt: skip
    """One token from bests [N] int64, at the position that `control` says; then the position moves on.

    Writes the token to `control` and to sequence [capacity] int64. ends [ENDS] int64 are what ends the text, padded to
    a power of two by repeating one, or −1.
    """
    if tl.load(control + STATE_AT) == 0:
        position = tl.load(control + POSITION_AT)
        at = tl.arange(0, NP)
        keys = tl.load(bests + at, mask=at < N, other=NONE)
        lead = tl.max(keys, 0)
        high = (lead >> 32).to(tl.int32)
        token = (lead & ID_MASK) ^ ID_MASK
        if (high >= INFINITE) | (high <= MASKED):
            tl.store(control + STATE_AT, NOT_FINITE_STATE)
        else:
            if not GREEDY:
                rank = tl.arange(0, KP)
                kept = tl.full((KP,), NONE, tl.int64)
                for i in range(M):
                    best = tl.max(keys, 0)
                    kept = tl.where(rank == i, best, kept)
                    keys = tl.where(keys == best, NONE, keys)
                below = unordered((kept >> 32).to(tl.int32)) - unordered(high)
                below = tl.where(kept == NONE, float("-inf"), below)
                shares = weight(below)
                reached = tl.cumsum(shares, 0)
                need = (tl.sum(shares, 0) * share + SHARE_MASK) >> SHARE_BITS
                inside = (reached - shares < need) & (below >= log_min_p)
                cooled = tl.div_rn(below, tl.full((KP,), 0.0, tl.float32) + temperature)
                drawn_from = tl.where(inside, weight(cooled), 0)
                total = tl.sum(drawn_from, 0).to(tl.uint64)
                random = philox(tl.load(control + SEED_AT), position)
                aim = tl.umulhi(random, total).to(tl.int64)
                drawn = tl.min(tl.where(tl.cumsum(drawn_from, 0) > aim, rank, KP), 0)
                token = (tl.sum(tl.where(rank == drawn, kept, 0), 0) & ID_MASK) ^ ID_MASK
            tl.store(sequence + position, token, mask=position < capacity)
            tl.store(control + TOKEN_AT, token)
            tl.store(control + POSITION_AT, position + 1)
            ended = tl.max((tl.load(ends + tl.arange(0, ENDS)) == token).to(tl.int32), 0)
            if ended == 1:
                tl.store(control + STATE_AT, ENDED_STATE)
            elif position + 1 >= capacity:
                tl.store(control + STATE_AT, FULL_STATE)


def supported(options: Options) -> bool:
    """Whether the device chooses for these options; otherwise `draw.choose` does, from logits that it is given."""
    return options.temperature == 0 or 1 <= options.top_k <= MOST


class DeviceSampler:
    """Chooses tokens one after the other without the host, until one ends the text; then launches do nothing.

    `control` [4] int64 on the device holds seed, position, state (`RUNNING` …) and the last token; `sequence`
    [capacity] int64 the tokens by position.
    """

    def __init__(
        self,
        options: Options,
        vocabulary: int,
        capacity: int,
        *,
        ends: tuple[int, ...] = (),
        control: torch.Tensor | None = None,
        device: str | torch.device = "cuda",
    ) -> None:
        """Room for all launches. control: where the words lie, if others work on them too.

        Raises ValueError for options that are not `supported`.
        """
        if not supported(options):
            raise ValueError(f"top-k {options.top_k} is not chosen on the device: at most {MOST}, at least 1")
        self.vocabulary, self.capacity = vocabulary, capacity
        self.control = torch.zeros(4, dtype=torch.int64, device=device) if control is None else control
        self.sequence = torch.zeros(capacity, dtype=torch.int64, device=device)
        n_ends = triton.next_power_of_2(max(1, len(ends)))
        padded = (*ends, *[ends[0] if ends else -1] * (n_ends - len(ends)))
        self.ends = torch.tensor(padded, dtype=torch.int64, device=device)
        self._greedy = options.temperature == 0
        self._most = 1 if self._greedy else min(options.top_k, vocabulary)
        self._blocks = triton.cdiv(vocabulary, BLOCK)
        self._bests = torch.zeros(self._blocks * self._most, dtype=torch.int64, device=device)
        self._temperature = float(np.float32(options.temperature))
        self._log_min_p, self._share = draw.log_min_p(options), draw.top_p_units(options)

    def start(self, seed: int, position: int = 0) -> None:
        """Begin a text: the next token is the one at `position` of this seed's."""
        signed = seed - 2**64 if seed >= 2**63 else seed
        self.control.copy_(torch.tensor([signed, position, RUNNING, -1], dtype=torch.int64))

    def sample(self, logits: torch.Tensor) -> None:
        """Choose from logits [V] float32 on the device."""
        if logits.shape != (self.vocabulary,) or logits.dtype != torch.float32 or not logits.is_contiguous():
            found = f"{logits.dtype} {tuple(logits.shape)}"
            raise ValueError(f"logits must be contiguous float32 [{self.vocabulary}], not {found}")
        likeliest[(self._blocks,)](
            logits, self.control, self._bests,
            V=self.vocabulary, M=self._most, BLOCK=BLOCK, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
        n = self._blocks * self._most
        choose[(1,)](
            self._bests, self.control, self.sequence, self.ends,
            self._temperature, self._log_min_p, self._share, self.capacity,
            N=n, NP=triton.next_power_of_2(n), M=self._most, KP=triton.next_power_of_2(self._most),
            ENDS=len(self.ends), GREEDY=self._greedy, num_warps=4 if n <= 1024 else 8, enable_fp_fusion=False,
        )  # fmt: skip
