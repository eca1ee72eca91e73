"""How much memory a configuration needs, by formula, before anything is allocated; and how many slots fit.

    device:  dense + KV + token prior + work + C · slot, and on a GPU what CUDA itself takes
    host:    arena (page-locked for a GPU), and what loading holds at once

With the CPU as the device, both are the same RAM.
"""

from dataclasses import dataclass

import numpy as np

from edgemoe.calibration import Calibration
from edgemoe.errors import UserError
from edgemoe.gpu_offload.kernels import layout
from edgemoe.gpu_offload.shape import Shape
from edgemoe.gpu_offload.staging import staging_bytes
from edgemoe.policy import Policy
from edgemoe.units import Residency, format_bytes

_SINGLE = 4  # bytes of a float32
SNAPSHOTS = 512  # logical caches that an engine keeps
CHOICES = 4  # options to choose tokens by that a GPU keeps ready, each with a graph
GPU_RESERVE = 512 << 20  # libraries and their workspaces, kernels, graphs, and the allocator's rounding
_RECORD = 40  # bytes that the device keeps of a slot and its copies


@dataclass(frozen=True)
class Room:
    """Free bytes. `shared`: device and host are the same memory."""

    device: int
    host: int
    shared: bool


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
    """Activations and decisions of a chunk, attention scores, logits, experts in staging, snapshots, choices of tokens,
    CUDA's own."""
    slot: int
    """One slot in every layer."""
    arena: int
    loading: int
    """What the loading threads hold: an expert each, as stored and in float32; or the largest dense tensor."""

    def device(self, slots: int) -> int:
        return self.dense + self.kv + self.prior + self.work + slots * self.slot

    def host(self) -> int:
        return self.arena + self.loading


def need(
    shape: Shape, *, itemsize: int, n_ctx: int, chunk: int, prior_bytes: int, threads: int, gpu: bool = False
) -> Need:
    """`itemsize`: bytes of a stored weight, 2 (bfloat16) or 4 (float32)."""
    d, q, kv, n_layers, n_experts = shape.d_model, shape.d_query, shape.d_kv, shape.n_layers, shape.n_experts
    vocabulary = shape.n_vocab * d
    matrices = vocabulary * (1 if shape.tied_output else 2) + n_layers * (2 * q + 2 * kv) * d
    singles = d + n_layers * (n_experts * d + 2 * d + q + kv)
    expert = shape.expert_values
    largest = max(vocabulary, expert * threads)
    work = _gpu_work if gpu else _cpu_work
    return Need(
        dense=matrices * itemsize + singles * _SINGLE,
        kv=2 * n_layers * n_ctx * kv * itemsize,
        prior=prior_bytes,
        work=work(shape, itemsize, n_ctx, chunk),
        slot=n_layers * (expert * itemsize + (_RECORD if gpu else 0)),
        arena=n_layers * n_experts * expert * itemsize,
        loading=2 * _SINGLE * largest,
    )


def _cpu_work(shape: Shape, itemsize: int, n_ctx: int, chunk: int) -> int:
    values = _chunk_values(shape, n_ctx, chunk) + shape.n_vocab + shape.expert_values
    return _SINGLE * values + shape.expert_values * itemsize


def _gpu_work(shape: Shape, itemsize: int, n_ctx: int, chunk: int) -> int:
    """Of both executors the more: the logits of every token of a chunk and, host-driven, attention scores and the
    context once more, a row of keys for each head."""
    state = _SINGLE * shape.n_layers * layout.padded(shape.n_experts) * (len(layout.INTS) + len(layout.REALS))
    logits = chunk * shape.n_vocab * (itemsize + _SINGLE) + 2 * _SINGLE * shape.n_vocab
    context = n_ctx * (2 * shape.d_query * itemsize + 2 * _SINGLE * shape.d_head + chunk + 8)
    staged = staging_bytes(shape.expert_values * itemsize) + shape.expert_values * itemsize
    activations = _SINGLE * _chunk_values(shape, n_ctx, chunk)
    chosen = CHOICES * (8 * n_ctx + _SINGLE * shape.n_vocab)  # tokens by position, and those that are the likeliest
    return activations + logits + context + staged + chosen + (SNAPSHOTS + 1) * state + GPU_RESERVE


def _chunk_values(shape: Shape, n_ctx: int, chunk: int) -> int:
    """Activations, attention scores and decisions of a chunk; every row once for each expert that executes it, four
    times: its input, its output, that in its token's order, and mixed."""
    d, q, kv, n_experts = shape.d_model, shape.d_query, shape.d_kv, shape.n_experts
    copies = shape.top_k * (4 * d + 2 * shape.d_expert)
    rows = chunk * (6 * d + 3 * (q + 2 * kv) + 4 * n_experts + copies)
    scores = chunk * n_ctx * shape.n_heads
    return rows + scores + chunk * shape.n_layers * (6 * n_experts + shape.top_k + 2)


def prior_bytes(calibration: Calibration | None, gpu: bool) -> int:
    """Bytes of a calibration's token prior: as its file stores it, or as `kernels.state.DevicePrior` does."""
    if calibration is None:
        return 0
    prior = calibration.prior
    if not gpu:
        return prior.nbytes
    n_layers, rows = prior.shape[0], len(prior.tokens)
    known = int(np.max(prior.tokens, initial=-1)) + 1
    return 6 * len(prior.counts) + 4 * (rows * n_layers + 1) + 4 * known


def choose_slots(
    where: str,
    shape: Shape,
    policy: Policy,
    needed: Need,
    *,
    residency: Residency | None,
    vram: int | None,
    room: Room,
) -> int:
    """C, the slots per layer: what `residency` says, else the most that `vram` bytes, or what is free, hold.

    Raises `UserError`, one line that says what would fit, where the configuration does not.
    """
    least = max(shape.top_k, policy.window)
    if residency is not None:
        slots = residency.slots(shape.n_experts, needed.slot)
        policy.check(shape.n_experts, shape.top_k, slots)
    else:
        slots = least
    policy.check(shape.n_experts, shape.top_k, max(slots, min(least, shape.n_experts)))
    limit = min(room.device - (needed.host() if room.shared else 0), room.device if vram is None else vram)
    if needed.host() > room.host:
        raise UserError(
            f"{where}: its experts take {format_bytes(needed.arena)} of RAM and loading them "
            f"{format_bytes(needed.loading)}, {format_bytes(room.host)} are free: free some, or use a smaller model"
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
