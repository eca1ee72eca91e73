"""The numbers that decide how a Mixture-of-Experts model can be run: who is routed, and where the bytes are."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from edgemoe.model.tensors import Part

# Parts that every token reads in full, whatever is routed.
_ALWAYS = (Part.SHARED, Part.ATTENTION, Part.DENSE, Part.ROUTER, Part.OUTPUT, Part.NORMS)


@dataclass(frozen=True)
class KvCache:
    """Size of the key-value cache at two bytes a value (F16).

    Grouped queries count their key-value heads only; latent attention (MLA) counts the latent and its rotary part,
    as llama.cpp caches it. `windowed` layers forget beyond `window` tokens; recurrent layers keep a state of fixed
    size instead.
    """

    full: int  # bytes per token of context, in layers that attend to all of it
    windowed: int = 0  # bytes per token within the window, in sliding-window layers
    window: int = 0
    latent: bool = False
    recurrent_layers: int = 0
    state: int = 0  # bytes of recurrent state, whatever the context

    # llama.cpp keeps a micro-batch beyond the window and rounds up (llama-kv-cache-iswa.cpp).
    MICRO_BATCH = 512
    PADDING = 256

    @property
    def per_token(self) -> int:
        """Bytes that one more token of context costs while it is within every window."""
        return self.full + self.windowed

    def cells(self, n_ctx: int) -> tuple[int, int]:
        """Tokens that have room in full and in sliding-window layers, in whole paddings; 0 without a window."""
        kept = min(n_ctx, self.window + self.MICRO_BATCH) if self.window else 0
        return -(-n_ctx // self.PADDING) * self.PADDING, -(-kept // self.PADDING) * self.PADDING

    def at(self, n_ctx: int) -> int:
        """Bytes for one sequence of `n_ctx` tokens."""
        full, windowed = self.cells(n_ctx)
        return full * self.full + windowed * self.windowed + self.state


@dataclass(frozen=True)
class ModelGeometry:
    """What a model is, in counts and bytes. A dense model has no MoE layers and E = k = 0.

    Bytes are those of the file; a tier that keeps another type in memory has to scale them.
    """

    name: str
    architecture: str
    n_layers: int
    moe_layers: tuple[int, ...]  # the model's own layer ids, ascending
    n_experts: int  # E
    top_k: int  # k, the largest of any layer
    layer_top_k: tuple[int, ...]  # [n_moe_layers]
    n_shared_experts: int
    gating: str  # softmax, sigmoid, …: how scores become mixing weights; "" if dense
    selection_bias: bool
    expert_groups: int
    expert_groups_used: int
    d_model: int
    d_expert: int  # hidden width of one expert
    n_ctx: int  # trained context
    n_vocab: int
    merged_gate_up: bool
    tied_output: bool
    expert_bytes: tuple[int, ...]  # [n_moe_layers] bytes of one expert in each MoE layer
    part_bytes: Mapping[Part, int]
    type_bytes: Mapping[str, int]  # by storage type, largest first
    expert_types: Mapping[str, int]  # the same, routed experts only
    file_bytes: int
    parameters: int
    expert_parameters: int  # of all routed experts
    kv: KvCache

    @property
    def is_moe(self) -> bool:
        return bool(self.moe_layers)

    @property
    def n_moe_layers(self) -> int:
        return len(self.moe_layers)

    @property
    def routed_bytes(self) -> int:
        return self.part_bytes.get(Part.EXPERTS, 0)

    @property
    def non_expert_bytes(self) -> int:
        """Everything that decoding may touch except routed experts."""
        return sum(self.part_bytes.values()) - self.routed_bytes - self.part_bytes.get(Part.UNUSED, 0)

    @property
    def used_bytes(self) -> int:
        return self.routed_bytes + self.non_expert_bytes

    @property
    def embedding_bytes(self) -> int:
        return self.part_bytes.get(Part.EMBEDDING, 0)

    @property
    def always_read_bytes(self) -> int:
        """Bytes read for every token whatever is routed: all but the experts, and one row of the embeddings.

        Where the output shares the embeddings' weights, they are read whole.
        """
        embedding = self.embedding_bytes if self.tied_output else self.embedding_bytes // max(self.n_vocab, 1)
        return embedding + sum(self.part_bytes.get(part, 0) for part in _ALWAYS)

    @property
    def active_expert_bytes(self) -> int:
        """Bytes of the k experts of every MoE layer: what routing decides per token."""
        return sum(k * size for k, size in zip(self.layer_top_k, self.expert_bytes, strict=True))

    @property
    def active_bytes(self) -> int:
        """Bytes read per token of decoding at batch 1, without the KV cache."""
        return self.always_read_bytes + self.active_expert_bytes

    @property
    def active_parameters(self) -> int:
        """Parameters in the path of one token, embeddings included, as model cards count them."""
        executed = sum(self.layer_top_k) * self.expert_parameters
        return self.parameters - self.expert_parameters + executed // max(self.n_experts * self.n_moe_layers, 1)

    @property
    def slot_bytes(self) -> int:
        """One slot in every MoE layer: an expert summed over the layers."""
        return sum(self.expert_bytes)

    @property
    def expert_type(self) -> str:
        """The type that most expert bytes have."""
        return next(iter(self.expert_types), "")

    @property
    def expert_sizes(self) -> dict[int, int]:
        """How many MoE layers have experts of each size: quantisers give some layers more bits."""
        return dict(sorted(Counter(self.expert_bytes).items()))
