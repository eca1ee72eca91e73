"""What one token of decoding reads, by class, exactly as the model's geometry has it (arXiv 2608.18261, §3)."""

from dataclasses import asdict, dataclass

from edgemoe.model.geometry import ModelGeometry
from edgemoe.model.tensors import Part


@dataclass(frozen=True)
class TokenBytes:
    """Bytes that one token reads at batch 1. Only `routed` can be spared by a cache; `kv` grows with the context."""

    routed: int  # the k experts of every MoE layer
    shared: int
    attention: int
    dense: int  # FFN of dense layers
    routers: int
    embedding: int  # one row, or all of it where the output is the same matrix
    output: int
    norms: int
    kv: int

    @property
    def always(self) -> int:
        """Weights that are read whatever is routed."""
        return self.total - self.routed - self.kv

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


def token_bytes(g: ModelGeometry, n_ctx: int) -> TokenBytes:
    """Bytes per token when the context holds `n_ctx` tokens; weights add up to `g.active_bytes`."""
    part = g.part_bytes
    return TokenBytes(
        routed=g.active_expert_bytes,
        shared=part.get(Part.SHARED, 0),
        attention=part.get(Part.ATTENTION, 0),
        dense=part.get(Part.DENSE, 0),
        routers=part.get(Part.ROUTER, 0),
        embedding=g.embedding_bytes if g.tied_output else g.embedding_bytes // max(g.n_vocab, 1),
        output=part.get(Part.OUTPUT, 0),
        norms=part.get(Part.NORMS, 0),
        kv=kv_read(g, n_ctx),
    )


def kv_read(g: ModelGeometry, n_ctx: int) -> int:
    """Bytes of key-value cache that one token reads: every token of the context, or of the window, and the state."""
    kv = g.kv
    return n_ctx * kv.full + min(n_ctx, kv.window) * kv.windowed + kv.state
