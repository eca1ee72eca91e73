"""The least RAM and VRAM that each way of running a model needs: sums of the geometry's bytes, with the formula.

All are bytes at a stated context, for one sequence with an F16 cache. They are what the weights, the cache and the work
buffers occupy; the process and its libraries (some 100 MB, more with CUDA) come on top.
"""

from dataclasses import dataclass

from edgemoe.model.geometry import ModelGeometry

DEFAULT_CONTEXT = 4096
MICRO_BATCH = 512  # llama.cpp's default


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes that one way of running needs at least. `per_slot` is what a further slot in every MoE layer costs."""

    way: str
    how: str  # in words; flags are llama.cpp's
    vram: int
    ram: int
    vram_formula: str
    ram_formula: str
    slots: int = 0  # slots per layer that the figure includes (C = k)
    per_slot: int = 0


def work_bytes(geometry: ModelGeometry, n_ctx: int) -> int:
    """llama.cpp's compute buffer, from above: u·4·max(V + 2d, k·(2f + 2d)) + u·2·cells, u = 512 rows.

    The widest point of the graph is the logits, or the inputs and outputs of the chosen experts; the attention masks
    come on top (F16, one for the context and one for the window). Where fewer rows want logits it is less.
    """
    experts = geometry.top_k * 2 * (geometry.d_expert + geometry.d_model)
    widest = max(geometry.n_vocab + 2 * geometry.d_model, experts)
    return MICRO_BATCH * (4 * widest + 2 * sum(geometry.kv.cells(n_ctx)))


def memory_needs(geometry: ModelGeometry, n_ctx: int = DEFAULT_CONTEXT) -> list[MemoryNeed]:
    """Each way of running the model, fastest hardware first; a dense model has only the first and the third.

    With slots, the figure is the least that can decode: C = k slots in every MoE layer.
    """
    kv_and_work = geometry.kv.at(n_ctx) + work_bytes(geometry, n_ctx)
    embedding = geometry.embedding_bytes
    # llama.cpp looks embeddings up on the CPU. Where the output is the same matrix, the GPU gets a second copy.
    dense_on_gpu = geometry.non_expert_bytes - (0 if geometry.tied_output else embedding)
    slots, experts = geometry.active_expert_bytes, geometry.routed_bytes
    everything = MemoryNeed(
        way="vram",
        how="all in VRAM (-ngl 99)",
        vram=dense_on_gpu + experts + kv_and_work,
        ram=embedding,
        vram_formula="non-expert − embeddings + routed experts + KV + work",
        ram_formula="embeddings",
    )
    in_ram = MemoryNeed(
        way="ram",
        how="all in RAM (CPU only)",
        vram=0,
        ram=geometry.used_bytes + kv_and_work,
        vram_formula="0",
        ram_formula="non-expert + routed experts + KV + work",
    )
    if not geometry.is_moe:
        return [everything, in_ram]
    split = MemoryNeed(
        way="experts-in-ram",
        how="experts in RAM (--cpu-moe)",
        vram=dense_on_gpu + kv_and_work,
        ram=experts + embedding,
        vram_formula="non-expert − embeddings + KV + work",
        ram_formula="routed experts + embeddings",
    )
    ram_to_vram = MemoryNeed(
        way="ram-to-vram",
        how="slots in VRAM, experts in RAM",
        vram=geometry.non_expert_bytes + kv_and_work + slots,
        ram=experts,
        vram_formula="non-expert + KV + work + C slots per MoE layer",
        ram_formula="routed experts, pinned",
        slots=geometry.top_k,
        per_slot=geometry.slot_bytes,
    )
    ssd_to_ram = MemoryNeed(
        way="ssd-to-ram",
        how="slots in RAM, experts on SSD",
        vram=0,
        ram=geometry.non_expert_bytes + kv_and_work + slots,
        vram_formula="0",
        ram_formula="non-expert + KV + work + C slots per MoE layer",
        slots=geometry.top_k,
        per_slot=geometry.slot_bytes,
    )
    return [everything, ram_to_vram, split, in_ram, ssd_to_ram]
