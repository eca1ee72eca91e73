"""What ggml's products cost on this CPU, by storage type: as measured, or estimated from the nearest types measured.

On a CPU a kernel takes about as long for every weight of related types, however many bits each has (2-bit rows of Q2_K
run at 19 GB/s where 6-bit rows of Q6_K run at 34), so a type that was not measured takes its time per weight from its
relatives: those kept in the same way, and of the same block length if there are any.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edgemoe.errors import UserError
from edgemoe.llamacpp.weights import block_length, row_bytes
from edgemoe.machine.ggml_probe import ProductPlan, probe_products
from edgemoe.machine.profile import ExpertRate, NodeCost, ProductCost, Profile

# Types whose values are looked up in large codebooks cost a multiple of the others.
_CODEBOOK = ("IQ1", "IQ2", "IQ3")
_WIDTH = 4096  # values of a row that any type's blocks divide


@dataclass(frozen=True)
class Kept:
    """How a weight is kept and used: its type, whether repacked, and whether it is one of experts."""

    type: str
    repacked: bool
    expert: bool


@dataclass(frozen=True)
class Costs:
    """The costs of one profile at one number of threads."""

    threads: int  # as measured: the nearest number not above what was asked for, else the least
    products: Mapping[Kept, ProductCost]
    nodes: NodeCost

    def of(self, kept: Kept) -> tuple[ProductCost, tuple[str, ...]]:
        """The cost, and from which other types it was estimated: from none if it was measured.

        Raises `UserError` where nothing related was measured.
        """
        if kept in self.products:
            return self.products[kept], ()
        alike = {
            other.type: cost
            for other, cost in self.products.items()
            if (other.repacked, other.expert, _codebook(other)) == (kept.repacked, kept.expert, _codebook(kept))
        }
        near = {kind: cost for kind, cost in alike.items() if block_length(kind) == block_length(kept.type)}
        related = near or alike
        if not related:
            raise UserError(
                f"this machine's profile has no rate for {kept.type}, nor for a type like it: run `edgemoe probe`"
            )
        return _between(kept.type, related)


def costs_of(profile: Profile, threads: int) -> Costs:
    """The profile's costs at `threads` threads. A `UserError` where the profile is from before costs were fitted."""
    if not profile.cpu_nodes:
        raise UserError("this machine's profile has no costs of ggml's products: run `edgemoe probe` again")
    return _costs(profile.cpu_experts, profile.cpu_dense, profile.cpu_nodes, threads)


def probed_costs(plan: ProductPlan) -> Costs:
    """Costs measured now, at the plan's largest number of threads."""
    found = probe_products(plan)
    return _costs(found.experts, found.dense, found.nodes, max(plan.threads))


def _costs(
    experts: Sequence[ExpertRate], dense: Sequence[ExpertRate], nodes: Sequence[NodeCost], threads: int
) -> Costs:
    counts = sorted(node.threads for node in nodes)
    chosen = max((count for count in counts if count <= threads), default=counts[0])
    products = {
        Kept(rate.type, rate.repacked, expert): rate.cost
        for expert, rates in ((True, experts), (False, dense))
        for rate in rates
        if rate.threads == chosen and rate.cost is not None
    }
    return Costs(chosen, products, next(node for node in nodes if node.threads == chosen))


def without(costs: Costs, kind: str) -> Costs:
    """The same as if `kind` had not been measured: to learn how good the estimates are."""
    kept = {key: cost for key, cost in costs.products.items() if key.type != kind}
    return Costs(costs.threads, kept, costs.nodes)


def _codebook(kept: Kept) -> bool:
    return kept.type.startswith(_CODEBOOK)


def _between(kind: str, related: Mapping[str, ProductCost]) -> tuple[ProductCost, tuple[str, ...]]:
    """Interpolate the time per weight by bits per weight; beyond the measured types the nearest one's holds."""

    def size(name: str) -> float:
        return row_bytes(name, _WIDTH) / _WIDTH

    own = size(kind)
    below = max((name for name in related if size(name) <= own), key=size, default=None)
    above = min((name for name in related if size(name) >= own), key=size, default=None)
    low, high = below or above, above or below
    assert low and high
    share = 0.0 if size(low) == size(high) else (own - size(low)) / (size(high) - size(low))
    parts = ((related[low], size(low), 1 - share), (related[high], size(high), share))
    cost = ProductCost(
        per_node=sum(part.per_node * weight for part, _, weight in parts),
        per_row=sum(part.per_row * weight for part, _, weight in parts),
        per_byte=sum(part.per_byte * bytes_per_weight * weight for part, bytes_per_weight, weight in parts) / own,
        residual=max(part.residual for part, _, _ in parts),
    )
    return cost, tuple(dict.fromkeys((low, high)))
