"""The logical cache's state on the device, taken from a `LogicalCache` and comparable with one, field by field."""

from dataclasses import dataclass

import numpy as np
import torch

from edgemoe.calibration import Calibration, TokenPrior
from edgemoe.gpu_offload.kernels import layout
from edgemoe.policy import LogicalCache
from edgemoe.policy.state import SCORE, Cache, view

COMPARED = (
    *("slot_of", "warm_slot", "warm_rank", "recency", "uses", "protected", "fast", "slow", "prior", "priority"),
    *("top_k", "clock", "frozen", "n_predicted", "scale", "range_sum"),
)


@dataclass(frozen=True, eq=False)
class DevicePolicyState:
    """R_l and the statistics of all layers, in four tensors that `layout` describes.

    Everything a decision depends on lies here, so that `snapshot` and `restore` are how a sequence is resumed.
    """

    ints: torch.Tensor  # [L, 8, EP] int32
    reals: torch.Tensor  # [L, 3, EP] float32
    words: torch.Tensor  # [L, 4] int32
    scales: torch.Tensor  # [L, 2] float32
    like: np.ndarray  # the block of the cache that this was made from: geometry, policy, top-k

    @classmethod
    def from_cache(cls, cache: LogicalCache, device: str | torch.device = "cuda") -> "DevicePolicyState":
        """The cache's state at this moment, on the device."""
        c = cache.state
        n_layers, wide = c.n_layers, layout.padded(c.n_experts)
        ints = np.zeros((n_layers, len(layout.INTS), wide), dtype=np.int32)
        ints[:, :2] = -1  # padding has no slot
        reals = np.zeros((n_layers, len(layout.REALS), wide), dtype=np.float32)
        for row, name in enumerate(layout.INTS):
            if name not in ("priority", "predicted"):
                ints[:, row, : c.n_experts] = getattr(c, name)
        ints[:, layout.INTS.index("priority"), : c.n_experts] = _packed_priority(c)
        for layer in range(n_layers):
            n = int(c.n_predicted[layer])
            ints[layer, layout.INTS.index("predicted"), c.predicted[layer, :n]] = 1 + np.arange(n)
        for row, name in enumerate(layout.REALS):
            reals[:, row, : c.n_experts] = getattr(c, name)
        words = np.stack([c.clock, c.frozen, c.n_predicted, np.zeros(n_layers)], axis=1).astype(np.int32)
        scales = np.stack([c.scale, c.range_sum], axis=1).astype(np.float32)
        tensors = [torch.from_numpy(array).to(device) for array in (ints, reals, words, scales)]
        return cls(tensors[0], tensors[1], tensors[2], tensors[3], cache.block.copy())

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.ints, self.reals, self.words, self.scales

    def snapshot(self) -> tuple[torch.Tensor, ...]:
        """Copies of the tensors, on the device."""
        return tuple(tensor.clone() for tensor in self.tensors)

    def restore(self, snapshot: tuple[torch.Tensor, ...]) -> None:
        """Return to a snapshot, in place: a captured graph keeps its addresses."""
        for tensor, kept in zip(self.tensors, snapshot, strict=True):
            tensor.copy_(kept)

    def slot_of(self) -> np.ndarray:  # [L, E] int32
        """The slot of each expert, −1 for none, on the host."""
        experts: np.ndarray = self.ints[:, 0, : view(self.like).n_experts].cpu().numpy().copy()
        return experts  # a copy also where the device is the host

    def reset(self) -> None:
        """Start a sequence as `LogicalCache.reset` does: the warm set in its slots, statistics zero."""
        keep = [layout.INTS.index("warm_slot"), layout.INTS.index("warm_rank"), layout.INTS.index("priority")]
        clear = [row for row in range(len(layout.INTS)) if row not in keep]
        self.ints[:, clear] = 0
        self.ints[:, 0] = self.ints[:, layout.INTS.index("warm_slot")]
        self.reals.zero_()
        self.words.zero_()
        self.scales[:, 1] = 0

    def to_block(self) -> np.ndarray:
        """The state as a block of `edgemoe.policy.state`; what is working memory there is left as it was."""
        block = self.like.copy()
        c = view(block)
        ints, reals, words, scales = (tensor.cpu().numpy() for tensor in self.tensors)
        for row, name in enumerate(layout.INTS):
            if name not in ("priority", "predicted"):
                getattr(c, name)[:] = ints[:, row, : c.n_experts]
        for row, name in enumerate(layout.REALS):
            getattr(c, name)[:] = reals[:, row, : c.n_experts]
        priority = np.ascontiguousarray(ints[:, layout.INTS.index("priority"), : c.n_experts])
        c.priority[:] = priority.view(np.float32) if c.eviction == SCORE else priority
        c.clock[:], c.frozen[:], c.n_predicted[:] = words[:, 0], words[:, 1], words[:, 2]
        c.scale[:], c.range_sum[:] = scales[:, 0], scales[:, 1]
        places = ints[:, layout.INTS.index("predicted"), : c.n_experts]
        for layer in range(c.n_layers):
            (experts,) = np.nonzero(places[layer])
            c.predicted[layer, places[layer, experts] - 1] = experts
        return block


def _packed_priority(c: Cache) -> np.ndarray:  # [L, E] int32
    if c.eviction == SCORE:
        return c.priority.astype(np.float32).view(np.int32)
    return c.priority.astype(np.int32)


def differences(one: np.ndarray, other: np.ndarray, layers: slice = slice(None)) -> list[str]:
    """The fields in which two blocks differ in these layers, bit for bit; none: they decide alike for ever."""
    a, b = view(one), view(other)
    found = [name for name in COMPARED if getattr(a, name)[layers].tobytes() != getattr(b, name)[layers].tobytes()]
    for layer in range(a.n_layers)[layers]:
        n = int(a.n_predicted[layer])
        if "n_predicted" not in found and not np.array_equal(a.predicted[layer, :n], b.predicted[layer, :n]):
            found.append("predicted")
    return found


@dataclass(frozen=True, eq=False)
class DevicePrior:
    """The token prior on the device, sparse: 6 bytes for each (token, layer, expert) that was seen."""

    row_of: torch.Tensor  # [V] int32: a token's row, −1 for none; tokens beyond are unknown
    starts: torch.Tensor  # [rows · L + 1] int32
    experts: torch.Tensor  # [n] int16
    shares: torch.Tensor  # [n] float32: π, already divided
    n_layers: int

    @classmethod
    def from_prior(cls, prior: TokenPrior | Calibration | np.ndarray, device: str | torch.device) -> "DevicePrior":
        """From a calibration, its token prior, or [L, V, E] float32: all that `LogicalCache(prior=...)` takes.

        Raises ValueError for anything else, and for more entries than an int32 counts.
        """
        if isinstance(prior, Calibration):
            prior = prior.prior
        if isinstance(prior, TokenPrior):
            n_layers, n_experts = prior.shape
            lengths = np.diff(prior.starts)
            rows = np.repeat(np.arange(len(lengths)), lengths)
            cells, tokens = prior.cells.astype(np.int64), prior.tokens
            shares = prior.counts.astype(np.float32) / prior.totals.astype(np.float32)[rows]
        elif isinstance(prior, np.ndarray):
            n_layers, n_tokens, n_experts = prior.shape
            dense = prior.transpose(1, 0, 2).reshape(n_tokens, -1).astype(np.float32)
            tokens = np.arange(n_tokens)
            rows, cells = np.nonzero(dense)
            shares = dense[rows, cells]
        else:
            raise ValueError(f"a token prior on the device is made from a calibration or an array, not {type(prior)}")
        if max(len(shares), len(tokens) * n_layers) > layout.MOST_ENTRIES:
            raise ValueError(f"{len(shares)} entries of the token prior are more than the device's index can count")
        counts = np.bincount(rows * n_layers + cells // n_experts, minlength=len(tokens) * n_layers)
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        row_of = np.full(int(tokens.max(initial=-1)) + 1, -1, dtype=np.int32)
        row_of[tokens] = np.arange(len(tokens))
        # An empty prior still needs addresses.
        filled = [array if len(array) else np.full(1, -1) for array in (row_of, cells % n_experts, shares)]
        kinds = (np.int32, np.int16, np.float32)
        known, experts, values = (
            torch.from_numpy(a.astype(kind)).to(device) for a, kind in zip(filled, kinds, strict=True)
        )
        return cls(known, torch.from_numpy(starts).to(device), experts, values, n_layers)

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.row_of, self.starts, self.experts, self.shares))
