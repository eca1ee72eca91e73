"""A token on the device, from its id to the logits of the next, as launches that need no host in between.

Per layer: queries, keys and values; attention; its output; the router's scores and the next layer's pre-gate in one
product; the decision (part 2 of this layer, part 1 of the next) and its copies; the experts, whose blocks wait for
what they execute. The copy blocks run beside all of it, on a stream of their own that the graph joins at its end.

On Triton's interpreter (`TRITON_INTERPRET=1`) the same launches run one after the other on the CPU, without a graph.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton

from edgemoe.gpu_offload.arithmetic import rotations
from edgemoe.gpu_offload.kernels import attention, copying, deciding, dense, experts
from edgemoe.gpu_offload.kernels.device_policy import DevicePolicy
from edgemoe.gpu_offload.kernels.sampling import POSITION, STATE, TOKEN
from edgemoe.gpu_offload.records import TILE_WORDS, WORDS_AT_ONCE, Records
from edgemoe.gpu_offload.weights import Weights


@dataclass(frozen=True)
class Cut:
    """How a product is cut: rows of the matrix per block, columns at once, warps, registers of a thread at most."""

    rows: int
    columns: int
    warps: int = 4
    registers: int | None = None


@dataclass(frozen=True)
class Tuning:
    """How the work of a token is cut. Decides no token's experts beyond rounding; part of the config hash."""

    qkv: Cut = Cut(4, 2048)
    o: Cut = Cut(2, 2048)
    router: Cut = Cut(4, 2048, warps=8)
    gate_and_up: Cut = Cut(2, 2048)
    down: Cut = Cut(1, 512, registers=64)
    output: Cut = Cut(4, 2048)
    splits: int = 15  # of a head's positions; the token itself has one more
    positions: int = 64  # at once
    copy_blocks: int = 16
    copy_warps: int = 8
    delay: int = 0  # looks at the queue by which a chunk is held back on average, as tests do
    early: bool | None = None
    """Start a kernel's blocks while the one before runs (`kernels.ordering`). None: where the GPU can."""


def _blocks(size: int, rows: int) -> tuple[int]:
    return (-(-size // rows),)


class TokenProgram:
    """The launches of one token, over buffers that stay where they are."""

    def __init__(
        self,
        weights: Weights,
        policy: DevicePolicy,
        records: Records,
        control: torch.Tensor,
        *,
        n_ctx: int,
        tuning: Tuning,
        concurrent: bool,
        recorded: torch.Tensor | None = None,
    ) -> None:
        """control: as `kernels.sampling.DeviceSampler` has it. concurrent: copy blocks run beside the token; else they
        run after each decision. recorded: [T, L, 2, E] float32, scores and the next layer's pre-gates of a sequence,
        that are decided by in place of the routers' (which are computed all the same): for benchmarks."""
        self.weights, self.policy, self.records = weights, policy, records
        self.tuning, self.concurrent, self.n_ctx = tuning, concurrent, n_ctx
        shape, device = weights.shape, weights.embedding.device

        def single(*size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.float32, device=device)

        self._token, self._position, self._stop = (control[word] for word in (TOKEN, POSITION, STATE))
        self._ended = torch.zeros(shape.n_heads, dtype=torch.int32, device=device)
        self.x, self.logits = single(shape.d_model), single(shape.n_vocab)
        self._qkv, self._y = single(shape.d_query + 2 * shape.d_kv), single(shape.d_query)
        self._partial = single(shape.n_heads, tuning.splits + 1, shape.d_head + 2)
        self.scores = single(shape.n_layers, 2, shape.n_experts)  # of each layer, and the pre-gate of the next
        self._recorded = recorded
        self._routed = self.scores if recorded is None else torch.zeros_like(self.scores)
        self._hidden = single(shape.top_k, shape.d_expert)
        size = (shape.n_layers, shape.n_kv_heads, n_ctx, shape.d_head)
        self.keys, self.values = (torch.zeros(size, dtype=weights.dtype, device=device) for _ in range(2))
        self.cos, self.sin = (angles.to(device) for angles in rotations(n_ctx, shape.d_head, shape.rope_theta))
        self.drain = 1 << 20  # chunks that are moved after a decision, where nothing is concurrent
        # Two in a row are two: torch hands out 32 in turns, and what forks onto its own stream would wait for itself.
        self.stream, self._side = (torch.cuda.Stream(device) if concurrent else None for _ in range(2))
        able = concurrent and torch.cuda.get_device_capability(device) >= (9, 0)
        self._early = able if tuning.early is None else tuning.early and able
        self._following = {"EARLY": self._early, **({"launch_pdl": True} if self._early else {})}

    def launch(self) -> None:
        """Append the token that `control` says, where it says; logits in `logits`. Nothing, once the text has ended."""
        w, shape = self.weights, self.weights.shape
        self.policy.begin_token(self._token.view(1))  # two kernels before the first decision, which reads it early
        block = 1024
        # Launched whole, as `begin_token` is: all kernels behind may read what the token before left (`ordering`).
        dense.load_token[_blocks(shape.d_model, block)](
            self._token, w.embedding, self.x, self._stop, self.records.queue,
            WIDTH=shape.d_model, BLOCK=block, EARLY=self._early, num_warps=4,
        )  # fmt: skip
        joined = self._fork()
        if self._recorded is not None:
            values = self.scores.numel()
            dense.load_recorded[_blocks(values, block)](
                self._recorded, self.scores, self._position, N=values, BLOCK=block, num_warps=4
            )
        self._decide(None, 0)
        for layer in range(shape.n_layers):
            self._attention(layer)
            routers, scores = w.routers[layer : layer + 2], self._routed[layer]
            self._product(self.x, w.layers[layer].ffn_norm, routers, scores, self.tuning.router)
            self._decide(layer, layer + 1 if layer + 1 < shape.n_layers else None)
            self._experts(layer)
        self._product(self.x, w.norm, w.output, self.logits, self.tuning.output)
        self._join(joined)

    def _product(self, x: torch.Tensor, norm: torch.Tensor, matrix: torch.Tensor, out: torch.Tensor, cut: Cut) -> None:
        width = matrix.shape[-1]
        count = matrix.numel() // width
        dense.normed_product[_blocks(count, cut.rows)](
            x, norm, matrix, out, self._stop, self.weights.shape.norm_eps,
            N_ROWS=count, WIDTH=width, **self._options(cut),
        )  # fmt: skip

    def _options(self, cut: Cut) -> dict[str, Any]:
        limit = {"maxnreg": cut.registers} if cut.registers else {}
        return {"ROWS": cut.rows, "BLOCK": cut.columns, "num_warps": cut.warps, **limit, **self._following}

    def _attention(self, layer: int) -> None:
        w, shape, t = self.weights.layers[layer], self.weights.shape, self.tuning
        self._product(self.x, w.attn_norm, w.qkv, self._qkv, t.qkv)
        attention.attend[(shape.n_heads, t.splits + 1)](
            self._qkv, w.q_norm, w.k_norm, self.cos, self.sin, self.keys[layer], self.values[layer], self._position,
            self._partial, self._ended, self._y, self._stop, shape.norm_eps, shape.clip_qkv or 0.0, self.n_ctx,
            N_HEADS=shape.n_heads, N_KV=shape.n_kv_heads, D=shape.d_head,
            Q_P=triton.next_power_of_2(shape.d_query), KV_P=triton.next_power_of_2(shape.d_kv),
            SPLITS=t.splits, BLOCK=t.positions, CLIPS=shape.clip_qkv is not None, num_warps=4, **self._following,
        )  # fmt: skip
        dense.added_product[_blocks(shape.d_model, t.o.rows)](
            self._y, w.o, self.x, self._stop, N_ROWS=shape.d_model, WIDTH=shape.d_query, **self._options(t.o)
        )

    def _decide(self, layer: int | None, following: int | None) -> None:
        policy, r = self.policy, self.records
        scores = None if layer is None else self.scores[layer, 0]
        pregate = None if layer is None or following is None or not policy.uses_pregate else self.scores[layer, 1]
        arguments, constants = policy.arguments(layer, following, scores, pregate)
        deciding.decide[(1,)](
            *arguments, self._stop, *r.arguments,
            C=r.slots.capacity, CHUNKS=r.chunks, **constants, **self._following,
        )  # fmt: skip
        if not self.concurrent:
            self._serve(blocks=1, drain=self.drain)

    def _experts(self, layer: int) -> None:
        w, shape, t, r = self.weights, self.weights.shape, self.tuning, self.records
        slots = r.slots.bytes.view(w.dtype)
        d, f = shape.d_model, shape.d_expert
        width = self.policy.width
        experts.gate_and_up[_blocks(f, t.gate_and_up.rows)[0], width](
            self.x, w.layers[layer].ffn_norm, slots, r.turns, self._hidden, self._stop, shape.norm_eps,
            *self._memory(), r.experts, r.claims, r.after, r.done, r.queue, layer,
            WIDTH=width, D=d, F=f, **self._copying(t.gate_and_up.warps), **self._options(t.gate_and_up),
        )  # fmt: skip
        experts.down[_blocks(d, t.down.rows)](
            self.x, slots, r.tickets, self.policy.decisions.weights, self._hidden, self._stop, layer,
            WIDTH=width, D=d, F=f, **self._options(t.down),
        )  # fmt: skip

    def _memory(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Arena and slots as words of four bytes."""
        return self.records.slots.arena.bytes.view(torch.int32), self.records.slots.bytes.view(torch.int32)

    def _copying(self, warps: int) -> dict[str, Any]:
        r = self.records
        return {
            "E": self.weights.shape.n_experts,
            "C": r.slots.capacity,
            "WORDS": r.words,
            "CHUNK": r.chunk,
            "TILE": min(TILE_WORDS, WORDS_AT_ONCE * 32 * warps),
            "CHUNKS": r.chunks,
        }

    def _serve(self, blocks: int, drain: int) -> None:
        r, (arena, slots) = self.records, self._memory()
        copying.serve[(blocks,)](
            arena, slots, r.experts, r.claims, r.after, r.done, r.demand_queue, r.prefetch_queue, r.queue, self._stop,
            DELAY=self.tuning.delay, DRAIN=drain,
            num_warps=self.tuning.copy_warps, **self._copying(self.tuning.copy_warps),
        )  # fmt: skip

    def _fork(self) -> "torch.cuda.Event | None":
        """Start the copy blocks on their stream; the event that they end with."""
        if self._side is None:
            return None
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            self._serve(self.tuning.copy_blocks, drain=0)
            return self._side.record_event()

    def _join(self, event: "torch.cuda.Event | None") -> None:
        """A capture must end with every stream that was forked from it; so no copy outlasts its token."""
        if event is not None:
            torch.cuda.current_stream().wait_event(event)
