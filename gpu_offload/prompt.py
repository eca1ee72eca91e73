"""A chunk of a prompt on the device, layer by layer: every token decided in order, then every expert brought once.

The link never waits for a slot to become free: an expert that is not held comes into one of a few staging buffers,
runs from there, and is moved on the device into the slot that it ends in.
"""

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F

from edgemoe.gpu_offload.arena import ExpertViews, expert_views
from edgemoe.gpu_offload.cpu import projected, rms_norm, run_expert
from edgemoe.gpu_offload.executor import Counters
from edgemoe.gpu_offload.kernels.device_policy import Decisions, DevicePolicy
from edgemoe.gpu_offload.program import TokenProgram
from edgemoe.gpu_offload.slots import Slots
from edgemoe.gpu_offload.weights import Weights

STAGING = 3  # experts on their way, running, and being moved


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, in] float32 · weight [out, in], transposed → [T, out] float32; inputs are rounded to the weights' type."""
    return F.linear(x.to(weight.dtype), weight).float()


class Staging:
    """Buffers of one expert each, filled on a stream of their own."""

    def __init__(self, slots: Slots) -> None:
        self._slots, device = slots, slots.bytes.device
        self._buffers = torch.empty((STAGING, slots.arena.expert_bytes), dtype=torch.uint8, device=device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def bring(self, layer: int, experts: list[int]) -> Iterator[tuple[int, torch.Tensor]]:
        """(expert, its bytes) for each, as they arrive. The bytes last until the next but one is asked for."""
        arena = self._slots.arena.bytes
        if self._stream is None:
            for expert in experts:
                self._buffers[0].copy_(arena[layer, expert])
                yield expert, self._buffers[0]
            return
        main, stream = torch.cuda.current_stream(), self._stream
        stream.wait_stream(main)  # what an earlier layer left in the buffers has been read
        arrived: list[torch.cuda.Event] = []
        free: list[torch.cuda.Event] = []
        for at in range(len(experts) + STAGING - 1):
            if at < len(experts):
                with torch.cuda.stream(stream):
                    if at >= STAGING:
                        stream.wait_event(free[at - STAGING])
                    self._buffers[at % STAGING].copy_(arena[layer, experts[at]], non_blocking=True)
                    arrived.append(stream.record_event())
            use = at - (STAGING - 1)
            if use >= 0:
                main.wait_event(arrived[use])
                yield experts[use], self._buffers[use % STAGING]
                free.append(main.record_event())


class Prompt:
    """Chunks of a sequence whose KV cache is a `TokenProgram`'s."""

    def __init__(self, weights: Weights, policy: DevicePolicy, slots: Slots, program: TokenProgram, chunk: int) -> None:
        self.weights, self.policy, self.slots, self.program = weights, policy, slots, program
        shape, device = weights.shape, weights.embedding.device
        self._staging = Staging(slots)
        self._decided = [Decisions.empty(chunk, policy.width, policy.budget, device) for _ in range(shape.n_layers)]
        size = (shape.n_layers, chunk, shape.n_experts)
        self._scores, self._pregates = (torch.zeros(size, dtype=torch.float32, device=device) for _ in range(2))

    def run(self, tokens: np.ndarray, position: int, counters: Counters) -> torch.Tensor:
        """Append tokens [T]; the logits after each, [T, V] float32. The slots' `held` must be known; what they hold
        afterwards is what they held, or what the logical cache says."""
        w, device, eps = self.weights, self.weights.embedding.device, self.weights.shape.norm_eps
        ids = torch.from_numpy(np.asarray(tokens, np.int64)).to(device)
        x = w.embedding[ids].float()
        for layer in range(w.shape.n_layers):
            x = x + self._attention(layer, x, position)
            h = rms_norm(x, w.layers[layer].ffn_norm, eps)
            decided = self._decide(layer, h, ids)
            x = x + self._experts(layer, h, decided, counters)
        return product(rms_norm(x, w.norm, eps), w.output)

    def _decide(self, layer: int, h: torch.Tensor, ids: torch.Tensor) -> Decisions:
        count, shape = len(h), self.weights.shape
        both = F.linear(h, self.weights.routers[layer : layer + 2].flatten(0, 1))
        scores, pregate = self._scores[layer, :count], self._pregates[layer, :count]
        scores.copy_(both[:, : shape.n_experts])
        uses = self.policy.uses_pregate and layer > 0
        if layer + 1 < shape.n_layers:
            self._pregates[layer + 1, :count].copy_(both[:, shape.n_experts :])
        return self.policy.chunk(layer, scores, pregate if uses else None, ids, out=self._decided[layer])

    def _attention(self, layer: int, x: torch.Tensor, position: int) -> torch.Tensor:
        """Causal attention of T tokens from `position` on, their keys and values appended: [T, d]."""
        w, shape, p, end = self.weights.layers[layer], self.weights.shape, self.program, position + len(x)
        q, k, v = projected(x, w, shape, p.cos[position:end], p.sin[position:end], product)
        p.keys[layer, :, position:end] = k
        p.values[layer, :, position:end] = v
        group = shape.n_heads // shape.n_kv_heads
        keys, values = (cache[layer, :, :end].repeat_interleave(group, 0) for cache in (p.keys, p.values))
        mask = torch.ones(len(x), end, dtype=torch.bool, device=x.device).tril(position)
        y = F.scaled_dot_product_attention(q.to(keys.dtype), keys, values, attn_mask=mask)
        return product(y.transpose(0, 1).flatten(-2).float(), w.o)

    def _experts(self, layer: int, h: torch.Tensor, decided: Decisions, counters: Counters) -> torch.Tensor:
        """The union of what the tokens execute, each expert once: those in slots first, then the others."""
        count, held = len(h), self.slots.held[layer]
        sizes = decided.counts[:count].cpu().numpy()  # the host waits here: it must know the union
        executed = decided.executed[:count].cpu().numpy()
        executed = np.where(np.arange(executed.shape[1]) < sizes[:, :1], executed, -1)
        union = [e for e in np.unique(executed).tolist() if e >= 0]
        slot_of = self.policy.state.slot_of()[layer]
        where = {int(expert): slot for slot, expert in enumerate(held) if expert >= 0}
        missing = [e for e in union if e not in where]
        counters.loads += int((executed >= 0).sum())
        counters.misses += int(sizes[:, 1].sum())
        counters.demand += len(missing)
        outputs = torch.zeros((count, executed.shape[1], h.shape[1]), device=h.device)
        arriving = self._staging.bring(layer, missing)
        for e in union:
            if e in where:
                self._run(h, e, executed, self.slots.views(layer, where[e]), outputs)
        for e, content in arriving:
            self._run(h, e, executed, self._views(content), outputs)
            if slot_of[e] >= 0:
                held[slot_of[e]] = -1
                self.slots.bytes[layer, slot_of[e]].copy_(content)
                held[slot_of[e]] = e
        self._count_rest(layer, slot_of, union, counters)
        # Summed in each token's own order: the bits do not depend on what was resident.
        weights = decided.weights[:count] * torch.from_numpy(executed >= 0).to(h.device)
        return (outputs * weights.unsqueeze(-1)).sum(1)

    def _count_rest(self, layer: int, slot_of: np.ndarray, union: list[int], counters: Counters) -> None:
        """What is still to be moved when the chunk ends: evicted and brought back, or predicted and not executed."""
        experts = np.flatnonzero(slot_of >= 0)
        for e in experts[self.slots.held[layer, slot_of[experts]] != experts].tolist():
            if e in union:
                counters.demand += 1
            else:
                counters.prefetch, counters.unused = counters.prefetch + 1, counters.unused + 1

    def _run(
        self, h: torch.Tensor, expert: int, executed: np.ndarray, views: ExpertViews, outputs: torch.Tensor
    ) -> None:
        rows, places = (torch.from_numpy(found).to(h.device) for found in np.nonzero(executed == expert))
        outputs[rows, places] = run_expert(h[rows], views, product)

    def _views(self, content: torch.Tensor) -> ExpertViews:
        return expert_views(content, self.weights.shape, self.weights.dtype)

    def record(self, count: int) -> dict[str, np.ndarray]:
        """What the last chunk of `count` tokens decided, as `edgemoe.gpu_offload.decisions.Decisions.record`."""
        return self._recorded([_rows(d, count) for d in self._decided], self._scores[:, :count], self._pregates, count)

    def record_of_token(self) -> dict[str, np.ndarray]:
        """The same of the last token that went through the program."""
        p, lists = self.program, self.policy.decisions
        pregates = torch.zeros_like(self._pregates[:, :1])
        pregates[1:, 0] = p.scores[:-1, 1]
        layers = [tuple(t[layer : layer + 1] for t in lists.tensors) for layer in range(p.weights.shape.n_layers)]
        return self._recorded(layers, p.scores[:, :1], pregates, 1)

    def _recorded(
        self, layers: list[tuple[torch.Tensor, ...]], scores: torch.Tensor, pregates: torch.Tensor, count: int
    ) -> dict[str, np.ndarray]:
        n_experts, width = self.weights.shape.n_experts, self.policy.width
        size = (len(layers), count)
        out = {
            "executed": np.full((*size, width), -1, np.int32),
            "counts": np.zeros((*size, 2), np.int32),
            "copies": np.zeros((*size, 2, n_experts), np.int32),
            "scores": scores.cpu().numpy().copy(),
        }
        for layer, (executed, _, _, _, copies, counts) in enumerate(layers):
            m, demand, prefetch = counts.cpu().numpy().T
            out["counts"][layer] = np.stack([prefetch, demand], axis=1)
            here = np.arange(width) < m[:, None]
            out["executed"][layer][here] = executed.cpu().numpy()[here]
            pairs = copies.cpu().numpy()
            out["copies"][layer, :, 1, :width] = pairs[:, :width, 0]
            out["copies"][layer, :, 0, : pairs.shape[1] - width] = pairs[:, width:, 0]
        if self.policy.uses_pregate:
            out["pregate"] = pregates[:, :count].cpu().numpy().copy()
        return out


def _rows(decided: Decisions, count: int) -> tuple[torch.Tensor, ...]:
    return tuple(tensor[:count] for tensor in decided.tensors)
