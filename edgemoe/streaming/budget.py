"""How many slots a RAM budget buys: everything else first, by formula, so that a configuration always gives the same.

What a process holds besides experts is not measured, because it varies by some MB from run to run, and with it the
number of slots would vary, and with that what steered routing executes.
"""

from dataclasses import dataclass
from mmap import PAGESIZE

from edgemoe.errors import UserError
from edgemoe.model import Model, Part
from edgemoe.policy import Policy
from edgemoe.streaming.skeleton import is_streamed
from edgemoe.units import format_bytes

RUNTIME_BYTES = 260 << 20  # the interpreter, llama.cpp, numba and its compiler
STRAYS = 8  # prefetches that many streams may have under way when nobody wants them any more
# Bytes of a block of 32 values to those of 32 times f16
KV_SCALE = {
    "f16": 1.0,
    "bf16": 1.0,
    "q8_0": 34 / 64,
    "q5_1": 24 / 64,
    "q5_0": 22 / 64,
    "q4_1": 20 / 64,
    "q4_0": 18 / 64,
    "iq4_nl": 18 / 64,
}


@dataclass(frozen=True)
class Budget:
    """Bytes of RAM: what is held whatever happens, what a chunk needs at once beyond the slots, and the slots."""

    fixed: int
    scratch: int
    slots: int  # C
    slot_bytes: int  # one slot in every MoE layer
    at_once: int  # experts that a layer may have in RAM while it runs

    @property
    def total(self) -> int:
        return self.fixed + self.scratch + self.slots * self.slot_bytes


def fixed_bytes(model: Model, policy: Policy, *, n_ctx: int, chunk: int, kv_type: str, streams: int = 1) -> int:
    """RAM without experts: the process, all other weights, KV cache, llama.cpp's work buffer, logits, pre-gates.

    `n_ctx` is each stream's; one decode has a chunk of one stream, or one token of each.
    """
    geometry, rows_at_once = model.geometry, max(chunk, streams)
    dense = sum(t.nbytes for t in model.tensors if not is_streamed(t) and t.part is not Part.UNUSED)
    experts = geometry.top_k * 2 * (geometry.d_expert + geometry.d_model)
    widest = max(geometry.n_vocab + 2 * geometry.d_model, experts)
    work = rows_at_once * (4 * widest + 2 * streams * sum(geometry.kv.cells(n_ctx)))
    logits = (rows_at_once + (streams if streams > 1 else 0)) * geometry.n_vocab * 4
    rows = geometry.n_moe_layers * geometry.n_experts * 4
    pregates = rows * (geometry.d_model + rows_at_once) if policy.needs_pregate else 0
    decisions = pregates + rows_at_once * rows + (24 + 40 * streams) * rows
    kv = streams * round(geometry.kv.at(n_ctx) * KV_SCALE[kv_type])
    return RUNTIME_BYTES + dense + kv + work + logits + decisions


def expert_pages(model: Model) -> list[int]:  # [L]
    """Bytes of RAM that an expert of each MoE layer takes: its slices in whole pages, as the store holds them."""
    sizes = dict.fromkeys(model.geometry.moe_layers, 0)
    for tensor in filter(is_streamed, model.tensors):
        assert tensor.layer is not None
        sizes[tensor.layer] += (-(-(tensor.nbytes // model.geometry.n_experts) // PAGESIZE) + 1) * PAGESIZE
    return list(sizes.values())


def budget(
    model: Model,
    policy: Policy,
    *,
    fixed: int,
    expert_bytes: list[int],  # [L]: an expert in whole pages
    chunk: int,
    ram: int | None = None,
    slots: int | None = None,
    streams: int = 1,
) -> Budget:
    """The most slots per layer that `ram` holds, or what `slots` need; with both, they must fit.

    A chunk of tokens, or one of each stream, may execute every expert of a layer, and has them in RAM while that layer
    runs: what exceeds the slots is scratch, of one layer at a time. Raises `UserError`, with the minimum, where the
    budget is too small.
    """
    n_experts, top_k = model.geometry.n_experts, model.geometry.top_k
    widest, slot = max(expert_bytes), sum(expert_bytes)

    executed = min(n_experts, max(chunk, streams) * top_k)
    strays = max(policy.insertions, min(policy.insertions * streams, STRAYS))

    def need(count: int) -> Budget:
        return Budget(fixed, (max(executed - count, 0) + strays) * widest, count, slot, max(executed, count))

    least = slots or max(top_k, policy.window)
    if ram is None:
        return need(least if slots else n_experts)
    if need(least).total > ram:
        what = f"{slots} slots per layer" if slots else f"the {least} slots per layer that one token needs"
        many = f" for {streams} streams" if streams > 1 else ""
        raise UserError(
            f"{model.path}: {format_bytes(ram)} of RAM are too little{many}: {what}, in chunks of {chunk}, need "
            f"{format_bytes(need(least).total)}: give at least that, or a smaller context or chunk"
        )
    if slots:
        return need(slots)
    return max(
        (need(count) for count in range(least, n_experts + 1) if need(count).total <= ram), key=lambda b: b.slots
    )


def budget_of_streams(
    model: Model,
    policy: Policy,
    streams: int,
    *,
    n_ctx: int,
    kv_type: str,
    expert_bytes: list[int],
    chunk: int,
    ram: int | None = None,
    slots: int | None = None,
    pinned: int = 0,
) -> Budget:
    """`budget` for so many streams of `n_ctx` tokens, and `pinned` bytes of experts besides the slots; where they are
    too many, the `UserError` says how many fit."""

    def of(count: int) -> Budget:
        fixed = fixed_bytes(model, policy, n_ctx=n_ctx, chunk=chunk, kv_type=kv_type, streams=count) + pinned
        return budget(
            model,
            policy,
            fixed=fixed,
            expert_bytes=expert_bytes,
            chunk=chunk,
            ram=ram,
            slots=slots,
            streams=count,
        )

    try:
        return of(streams)
    except UserError as refusal:
        if pinned:
            raise UserError(f"{refusal}; {format_bytes(pinned)} of that are the plan's: or pin fewer experts") from None
        for fewer in range(streams - 1, 0, -1):
            try:
                of(fewer)
            except UserError:
                continue
            raise UserError(f"{refusal}; {fewer} would fit") from None
        raise
