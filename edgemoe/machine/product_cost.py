"""Fit what a product costs from products of several shapes: so much per node, per row, and per byte.

The bytes of a weight come from RAM at the kernel's rate, but a row of it is one call of a dot product, and a node one
meeting of the threads. Rates of one shape therefore mislead about another: rows of 512 values were seen at half the
GB/s of rows of 2048.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from edgemoe.machine.profile import ProductCost

_BYTES = 2  # column of the bytes, which every fit keeps


@dataclass(frozen=True)
class Timed:
    """One product: how many bytes and rows of weights it read, and how long it took."""

    nbytes: int
    rows: int
    seconds: float


def fit_cost(products: Sequence[Timed]) -> ProductCost:
    """The cost whose largest parts explain the products best: least squares of relative errors, nothing negative.

    At least one product; terms that the shapes cannot tell apart come out as zero.
    """
    columns = np.array([(1.0, product.rows, product.nbytes) for product in products])
    relative = columns / np.array([[product.seconds] for product in products])
    best: tuple[float, np.ndarray] | None = None
    for count in range(_BYTES + 1):
        for others in combinations(range(_BYTES), count):
            kept = [*others, _BYTES]
            found, _, rank, _ = np.linalg.lstsq(relative[:, kept], np.ones(len(products)), rcond=None)
            if rank < len(kept) or (found < 0).any() or found[-1] <= 0:
                continue
            terms = np.zeros(_BYTES + 1)
            terms[kept] = found
            error = float(((relative @ terms - 1) ** 2).sum())
            if best is None or error < best[0] - 1e-12:
                best = error, terms
    assert best is not None, "bytes alone always fit"
    per_node, per_row, per_byte = (float(term) for term in best[1])
    return ProductCost(per_node, per_row, per_byte, float(np.abs(relative @ best[1] - 1).max()))
