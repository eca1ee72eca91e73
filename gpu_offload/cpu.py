"""The executor on the CPU: plain torch, one operation after the other, for tests and for watching PSR without a GPU.

Weights and KV cache are stored in the model's type (bfloat16 or float32); all arithmetic is float32. "Device" is the
same RAM here, so copies are memory to memory and always in time: what an executor on a GPU must decide and move, it
decides and moves too.
"""

import numpy as np
import torch
import torch.nn.functional as F

from edgemoe.errors import UserError
from edgemoe.gpu_offload.arithmetic import mixing_weights, projected, rms_norm, rotations, run_expert
from edgemoe.gpu_offload.decisions import Decisions
from edgemoe.gpu_offload.executor import kept_in_place
from edgemoe.gpu_offload.grouped import Grouped, count_settled
from edgemoe.gpu_offload.host_executor import HostExecutor
from edgemoe.gpu_offload.weights import Weights

_BLOCK = 1 << 20  # weights that are widened to float32 at once: they stay in a core's cache


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, in] float32 · weight [out, in] in any type, transposed → [T, out] float32."""
    if weight.dtype == torch.float32:
        return F.linear(x, weight)
    rows = max(1, _BLOCK // weight.shape[1])
    return torch.cat([F.linear(x, block.float()) for block in weight.split(rows)], dim=1)


class CpuExecutor(HostExecutor):
    """An `edgemoe.gpu_offload.executor.Executor`."""

    name = "cpu"

    def __init__(self, weights: Weights, decisions: Decisions, *, n_ctx: int) -> None:
        super().__init__(weights, decisions)
        shape = weights.shape
        size = (shape.n_layers, shape.n_kv_heads, n_ctx, shape.d_head)
        self._keys, self._values = (torch.zeros(size, dtype=weights.dtype) for _ in range(2))
        self._cos, self._sin = rotations(n_ctx, shape.d_head, shape.rope_theta)
        self.reset()

    @torch.inference_mode()
    def step(self, tokens: np.ndarray, position: int, *, all_rows: bool = False) -> np.ndarray:
        self.decisions.begin(tokens)
        x = self.weights.embedding[torch.from_numpy(np.asarray(tokens, np.int64))].float()
        x = self._decode(x, position) if len(tokens) == 1 else self._chunk(x, position)
        last = x if all_rows else x[-1:]
        logits = product(rms_norm(last, self.weights.norm, self.weights.shape.norm_eps), self.weights.output).numpy()
        return logits if all_rows else logits[0]

    def close(self) -> None:
        """Nothing to give back early: the memory goes with the object."""

    def _decode(self, x: torch.Tensor, position: int) -> torch.Tensor:
        """One token: part 2 of a layer, part 1 of the next, then the experts."""
        n_layers = self.weights.shape.n_layers
        prefetched = self._part1(0, None)
        for layer in range(n_layers):
            x = x + self._attention(layer, x, position)
            h = self._moe_input(layer, x)
            scores, pregate = self._scores(layer, h)
            with self._timed("policy_s"):
                demand = self.decisions.part2(layer, scores[0].numpy())
            executed = [e for e in self.decisions.executed[layer, 0].tolist() if e >= 0]
            self._count(len(executed), len(demand), prefetched, executed)
            with self._timed("wait_s"):
                for expert, slot in demand:
                    self.slots.copy(layer, expert, slot)
            prefetched = self._part1(layer + 1, pregate) if layer + 1 < n_layers else []
            mix = self._mix(scores, np.array([executed]))
            slots = self._state.slot_of[layer, executed].tolist()
            outputs = [run_expert(h, self.slots.views(layer, slot), product) for slot in slots]
            x = x + (torch.stack(outputs, 1) * mix).sum(1)
        return x

    def _part1(self, layer: int, pregate: torch.Tensor | None) -> list[int]:
        """Decide and bring what is predicted for a layer; the experts."""
        with self._timed("policy_s"):
            copies = self.decisions.part1(layer, None if pregate is None else pregate[0].numpy())
        for expert, slot in copies:
            self.slots.copy(layer, expert, slot)
        return [expert for expert, _ in copies]

    def _count(self, loads: int, misses: int, prefetched: list[int], executed: list[int]) -> None:
        c = self.counters
        used = len(set(prefetched) & set(executed))
        c.loads, c.misses, c.demand = c.loads + loads, c.misses + misses, c.demand + misses
        c.prefetch, c.in_time = c.prefetch + len(prefetched), c.in_time + used
        c.unused += len(prefetched) - used

    def _chunk(self, x: torch.Tensor, position: int) -> torch.Tensor:
        """Several tokens, layer by layer."""
        before: torch.Tensor | None = None
        for layer in range(self.weights.shape.n_layers):
            x = x + self._attention(layer, x, position)
            h = self._moe_input(layer, x)
            scores, following = self._scores(layer, h)
            with self._timed("policy_s"):
                executed = self.decisions.chunk(
                    layer, scores.numpy(), None if before is None else before.contiguous().numpy()
                )
            before = following
            x = x + self._union(layer, h, scores, executed)
        return x

    def _union(self, layer: int, h: torch.Tensor, scores: torch.Tensor, executed: np.ndarray) -> torch.Tensor:
        """The experts of a chunk, each brought once: first those in slots, then each of the others in the slot that it
        ends in, or in staging. No slot is overwritten before its expert has run. [T, d]."""
        slot_of, c = self._state.slot_of[layer], self.counters
        slot_of[:] = kept_in_place(slot_of, self.slots.held[layer])
        c.loads += int((executed >= 0).sum())
        c.misses += int(self.decisions.counts[layer, : len(executed), 1].sum())
        held = self.slots.places(layer)
        grouped = Grouped(h, executed, product)
        for e in [e for e in grouped.experts if e in held]:
            grouped.run(e, self.slots.views(layer, held[e]))
        for e in [e for e in grouped.experts if e not in held]:
            c.demand += 1
            with self._timed("wait_s"):
                if slot_of[e] >= 0:
                    self.slots.copy(layer, e, int(slot_of[e]))
                    views = self.slots.views(layer, int(slot_of[e]))
                else:
                    views = self.slots.stage(layer, e)
            grouped.run(e, views)
        count_settled(c, len(self.slots.settle(layer, slot_of)))
        return grouped.mixed(self._mix(scores, executed))

    def _mix(self, scores: torch.Tensor, executed: np.ndarray) -> torch.Tensor:
        return mixing_weights(scores, torch.from_numpy(executed.astype(np.int64)), self.weights.shape.norm_topk)

    def _moe_input(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weights.layers[layer].ffn_norm, self.weights.shape.norm_eps)

    def _scores(self, layer: int, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The router's scores [T, E] and the next layer's pre-gate (PSR §2: its router on this layer's MoE input)."""
        n_experts = self.weights.shape.n_experts
        both = F.linear(h, self.weights.routers[layer : layer + 2].flatten(0, 1))
        if not bool(torch.isfinite(both).all()):
            raise UserError(f"the scores of layer {layer} are not finite: is the model file damaged?")
        scores = both[:, :n_experts].contiguous()
        return scores, both[:, n_experts:] if both.shape[1] > n_experts else None

    def _attention(self, layer: int, x: torch.Tensor, position: int) -> torch.Tensor:
        """Causal attention of T tokens from `position` on, their keys and values appended: [T, d]."""
        w, shape, count = self.weights.layers[layer], self.weights.shape, len(x)
        end = position + count
        q, k, v = projected(x, w, shape, self._cos[position:end], self._sin[position:end], product)
        self._keys[layer, :, position:end] = k
        self._values[layer, :, position:end] = v
        keys, values = (
            cache[layer, :, :end].float().repeat_interleave(shape.n_heads // shape.n_kv_heads, 0)
            for cache in (self._keys, self._values)
        )
        mask = None
        if count > 1:
            mask = torch.ones(count, end, dtype=torch.bool).tril(position)
        y = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        return product(y.transpose(0, 1).flatten(-2), w.o)
