"""How much memory a configuration needs, by formula, before anything is allocated; and how many slots fit.

    device:  dense + KV + token prior + work + C · slot
    host:    arena, and what loading holds at once

With the CPU as the device, both are the same RAM.
"""

from dataclasses import dataclass

from edgemoe.errors import UserError
from edgemoe.gpu_offload.shape import Shape
from edgemoe.policy import Policy
from edgemoe.units import Residency, format_bytes

_SINGLE = 4  # bytes of a float32


@dataclass(frozen=True)
class Need:
    """Bytes by purpose. `dense`, `kv`, `prior`, `work` and C times `slot` lie on the device, the rest on the host."""

    dense: int
    """Embedding, output, attention in the storage type; routers and norms in float32."""
    kv: int
    """Keys and values of `n_ctx` tokens, in the storage type."""
    prior: int
    """The token prior as the calibration stores it: sparse."""
    work: int
    """Activations and decisions of a chunk, attention scores, logits, one expert in staging and in float32."""
    slot: int
    """One slot in every layer."""
    arena: int
    loading: int
    """What the loading threads hold: an expert each, as stored and in float32; or the largest dense tensor."""

    def device(self, slots: int) -> int:
        return self.dense + self.kv + self.prior + self.work + slots * self.slot

    def host(self) -> int:
        return self.arena + self.loading


def need(shape: Shape, *, itemsize: int, n_ctx: int, chunk: int, prior_bytes: int, threads: int) -> Need:
    """`itemsize`: bytes of a stored weight, 2 (bfloat16) or 4 (float32)."""
    d, q, kv, n_layers, n_experts = shape.d_model, shape.d_query, shape.d_kv, shape.n_layers, shape.n_experts
    vocabulary = shape.n_vocab * d
    matrices = vocabulary * (1 if shape.tied_output else 2) + n_layers * (2 * q + 2 * kv) * d
    singles = d + n_layers * (n_experts * d + 2 * d + q + kv)
    expert = shape.expert_values
    rows = chunk * (6 * d + 3 * (q + 2 * kv) + 2 * shape.d_expert * shape.top_k + 4 * n_experts)
    scores = chunk * n_ctx * shape.n_heads
    decisions = chunk * n_layers * (6 * n_experts + shape.top_k + 2)
    largest = max(vocabulary, expert * threads)
    return Need(
        dense=matrices * itemsize + singles * _SINGLE,
        kv=2 * n_layers * n_ctx * kv * itemsize,
        prior=prior_bytes,
        work=_SINGLE * (rows + scores + decisions + shape.n_vocab + expert) + expert * itemsize,
        slot=n_layers * expert * itemsize,
        arena=n_layers * n_experts * expert * itemsize,
        loading=2 * _SINGLE * largest,
    )


def choose_slots(
    where: str,
    shape: Shape,
    policy: Policy,
    needed: Need,
    *,
    residency: Residency | None,
    vram: int | None,
    device_free: int,
    host_free: int,
    shared: bool,
) -> int:
    """C, the slots per layer: what `residency` says, else the most that `vram` bytes, or what is free, hold.

    `shared`: device and host are the same memory. Raises `UserError`, one line that says what would fit, where the
    configuration does not.
    """
    least = max(shape.top_k, policy.window)
    if residency is not None:
        slots = residency.slots(shape.n_experts, needed.slot)
        policy.check(shape.n_experts, shape.top_k, slots)
    else:
        slots = least
    policy.check(shape.n_experts, shape.top_k, max(slots, min(least, shape.n_experts)))
    limit = min(device_free - (needed.host() if shared else 0), device_free if vram is None else vram)
    if needed.host() > host_free:
        raise UserError(
            f"{where}: its experts take {format_bytes(needed.arena)} of RAM and loading them "
            f"{format_bytes(needed.loading)}, {format_bytes(host_free)} are free: free some, or use a smaller model"
        )
    if needed.device(slots) > limit:
        raise UserError(_too_much(where, needed, slots, limit, least, vram))
    if residency is not None:
        return slots
    return min((limit - needed.device(0)) // needed.slot, shape.n_experts)


def _too_much(where: str, needed: Need, slots: int, limit: int, least: int, vram: int | None) -> str:
    fits = (limit - needed.device(0)) // needed.slot
    parts = f"{format_bytes(needed.dense)} dense, {format_bytes(needed.kv)} context, {slots} slots per layer"
    room = f"{format_bytes(max(limit, 0))} {'are allowed (--vram)' if limit == vram else 'are free'}"
    advice = (
        f"--residency {fits} fits"
        if fits >= least
        else f"even {least} slots, the least for one token, do not fit: give a smaller context (-c) or --chunk"
    )
    return f"{where}: {format_bytes(needed.device(slots))} are needed ({parts} and the rest), {room}: {advice}"
