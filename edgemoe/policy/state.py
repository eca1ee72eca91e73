"""The logical cache's memory: one block of bytes, and named arrays that look into it.

One block, because a host hands it to native code as one address (the llama.cpp tier decides inside a C callback), and
because a snapshot of the whole policy is then one copy. `attach` is the only place that knows the layout; it runs
compiled and as plain Python alike.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numba import carray

from edgemoe.policy._jit import kernel
from edgemoe.policy.config import Policy

EXACT, CACHE_PRIOR, SPECULATIVE, TAU = range(4)
LRU, LFU, STATIC, SCORE = range(4)
NO_PREFETCH, PRE_GATE, TOKEN_PRIOR = range(3)
_ROUTING = {"exact": EXACT, "cache-prior": CACHE_PRIOR, "speculative": SPECULATIVE, "tau": TAU}
_EVICTION = {"lru": LRU, "lfu": LFU, "static": STATIC, "score": SCORE}
_PREFETCH = {"none": NO_PREFETCH, "pre-gate": PRE_GATE, "token-prior": TOKEN_PRIOR}

HEADER = 16  # 64-bit words: the block's size, the geometry, the policy


class Cache(NamedTuple):
    """The state of Algorithm 1 for all L layers. R_l is the set of experts with `slot_of[l, e] ≥ 0`."""

    # Geometry and policy, constant.
    n_layers: int
    n_experts: int
    capacity: int
    routing: int
    eviction: int
    prefetch: int
    gated: int
    running: int
    top_j: int
    window: int
    budget: int
    rules: np.ndarray  # [3] float32: λ, ln(1 − τ), ln(ε / (1 − ε))
    # Per layer and expert, [L, E], int64 unless said.
    slot_of: np.ndarray  # −1 for an expert that is not resident
    warm_slot: np.ndarray  # `slot_of` at the start of a sequence
    warm_rank: np.ndarray  # E for the most frequent expert on held-out text, then E − 1, …; 0 unknown
    recency: np.ndarray  # the token (from 1) that last executed the expert; 0 never
    uses: np.ndarray  # tokens that executed the expert
    protected: np.ndarray  # B: visited by part 1 of this step
    fast: np.ndarray  # float32, moving average of the router's own choice, decay 0.5
    slow: np.ndarray  # float32, the same with decay 0.98
    prior: np.ndarray  # float32, π_l(token)
    priority: np.ndarray  # float64: holds a float32 score and an integer recency exactly
    # Per layer, [L], int64 unless said.
    top_k: np.ndarray
    clock: np.ndarray  # tokens finished since the reset
    frozen: np.ndarray  # whether `priority` is that of the current token
    n_predicted: np.ndarray  # how many experts part 1 predicted
    pinned: np.ndarray  # how many experts are never evicted: those in the first slots
    scale: np.ndarray  # float32, Δ̄
    range_sum: np.ndarray  # float32, for the running Δ̄
    predicted: np.ndarray  # [L, E] int32, g[1:K]
    # What the last call decided, and its working memory, [E], int64 unless said.
    n_copies: np.ndarray  # [1]
    copy_expert: np.ndarray  # copies in order
    copy_slot: np.ndarray
    executed: np.ndarray  # S by the router's own scores
    own: np.ndarray  # the router's own top-K
    order: np.ndarray
    chosen: np.ndarray  # 1[· ∈ S] during part 2, zero otherwise
    accepted: np.ndarray  # what the gate lets pass
    biased: np.ndarray  # float32


def block_bytes(n_layers: int, n_experts: int) -> int:
    """Size of the block for L layers of E experts."""
    cells = n_layers * n_experts
    words = HEADER + (1 + 7) * cells + 5 * n_layers + 8 * n_experts
    singles = 3 * cells + 2 * n_layers + n_experts + 3
    return 8 * words + 4 * singles


@kernel
def attach(block: np.ndarray) -> Cache:
    """The named arrays of a block, a [bytes] uint8 array. Nothing is copied."""
    head = block[: 8 * HEADER].view(np.int64)
    layers, experts = head[1], head[2]
    cells = layers * experts
    words = block[8 * HEADER : 8 * (HEADER + 8 * cells + 5 * layers + 8 * experts)].view(np.int64)
    singles = block[8 * (HEADER + len(words)) :].view(np.float32)
    grids = words[: 7 * cells].reshape((7, layers, experts))
    rows = words[7 * cells : 7 * cells + 5 * layers].reshape((5, layers))
    lists = words[7 * cells + 5 * layers : 7 * cells + 5 * layers + 8 * experts].reshape((8, experts))
    priority = words[7 * cells + 5 * layers + 8 * experts :].view(np.float64).reshape((layers, experts))
    reals = singles[: 3 * cells].reshape((3, layers, experts))
    scales = singles[3 * cells : 3 * cells + 2 * layers].reshape((2, layers))
    biased = singles[3 * cells + 2 * layers : 3 * cells + 2 * layers + experts]
    rules = singles[3 * cells + 2 * layers + experts :]
    return Cache(
        layers, experts, head[3], head[4], head[5], head[6], head[7], head[8], head[9], head[10], head[11],
        rules,
        grids[0], grids[1], grids[2], grids[3], grids[4], grids[5],
        reals[0], reals[1], reals[2],
        priority,
        rows[0], rows[1], rows[2], rows[3], rows[4],
        scales[0], scales[1],
        grids[6],
        lists[0], lists[1], lists[2], lists[3], lists[4], lists[5], lists[6], lists[7],
        biased,
    )  # fmt: skip


def view(block: np.ndarray) -> Cache:
    """`attach` in Python: what kernels that take a `Cache` are called with, and a look at the state."""
    cache: Cache = attach.py_func(block)  # type: ignore[attr-defined]
    return cache


@kernel
def attach_address(address):  # type: ignore[no-untyped-def]
    """The named arrays of the block at an address: what a `numba.cfunc` does with its `user_data` pointer."""
    size = carray(address, (1,), np.int64)[0]
    return attach(carray(address, (size,), np.uint8))


def new_block(
    policy: Policy,
    top_k: np.ndarray,  # [L]
    n_experts: int,
    capacity: int,
    delta: np.ndarray,  # [L] float32
    warm: np.ndarray,  # [L, m]: experts, most frequent first
    pinned: Sequence[Sequence[int]] | None = None,  # [L]: experts that have slots besides the `capacity`, for good
) -> np.ndarray:
    """A block for these layers under this policy, before its first reset."""
    n_layers = len(top_k)
    block = np.zeros(block_bytes(n_layers, n_experts), dtype=np.uint8)
    block[: 8 * HEADER].view(np.int64)[:12] = (
        len(block),
        n_layers,
        n_experts,
        capacity,
        _ROUTING[policy.routing],
        _EVICTION[policy.eviction],
        _PREFETCH[policy.prefetch],
        policy.gate == "predicted",
        policy.scale == "running",
        policy.top_j,
        policy.window,
        policy.insertions,
    )
    cache = view(block)
    with np.errstate(divide="ignore"):
        cache.rules[:] = (policy.lam, np.log1p(-policy.tau), np.log(policy.elide) - np.log1p(-policy.elide))
    cache.top_k[:] = top_k
    cache.scale[:] = delta
    cache.warm_slot[:] = -1
    for layer in range(n_layers):
        ranked = [int(e) for e in dict.fromkeys(warm[layer].tolist())]
        cache.warm_rank[layer, ranked] = n_experts - np.arange(len(ranked))
        pins = list(pinned[layer]) if pinned is not None else []
        held = list(dict.fromkeys([*pins, *ranked, *range(n_experts)]))[: len(pins) + capacity]
        cache.warm_slot[layer, held] = np.arange(len(held))
        cache.pinned[layer] = len(pins)
    return block
