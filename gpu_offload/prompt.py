"""A chunk of a prompt on the device, layer by layer: every token decided in order, then every expert brought once.

An expert that is not held comes into a staging buffer, runs from there, and is moved on the device into the slot that
it ends in. While the next layer attends and decides, the link brings what its pre-gate names most often: in a chunk of
many tokens, hardly an expert of those is executed by none. What is decided does not depend on it.
"""

from collections import deque

import numpy as np
import torch
import torch.nn.functional as F

from edgemoe.gpu_offload.arithmetic import projected, rms_norm
from edgemoe.gpu_offload.chunk_experts import ChunkExperts
from edgemoe.gpu_offload.executor import Counters, kept_in_place
from edgemoe.gpu_offload.grouped import count_settled
from edgemoe.gpu_offload.kernels.device_policy import Decisions, DevicePolicy
from edgemoe.gpu_offload.program import TokenProgram
from edgemoe.gpu_offload.slots import Slots
from edgemoe.gpu_offload.staging import Staged, Staging
from edgemoe.gpu_offload.weights import Weights

# Newer versions of torch can give sums as they are; older ones round them to the weights' type.
_KEEPS_SUMS = any("out_dtype" in str(schema) for schema in torch._C._jit_get_schemas_for_operator("aten::mm"))


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, in] · weight [out, in], transposed → [T, out] float32; inputs are rounded to the weights' type."""
    x = x.to(weight.dtype)
    if _KEEPS_SUMS and weight.is_cuda and weight.dtype != torch.float32:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return F.linear(x, weight).float()


class Prompt:
    """Chunks of a sequence whose KV cache is a `TokenProgram`'s."""

    def __init__(self, weights: Weights, policy: DevicePolicy, slots: Slots, program: TokenProgram, chunk: int) -> None:
        self.weights, self.policy, self.slots, self.program = weights, policy, slots, program
        shape, device = weights.shape, weights.embedding.device
        self._staging = Staging(slots)
        self._ahead: dict[int, Staged] = {}  # experts of the layer that comes next
        self._decided = [Decisions.empty(chunk, policy.width, policy.budget, device) for _ in range(shape.n_layers)]
        size = (shape.n_layers, chunk, shape.n_experts)
        self._scores, self._pregates = (torch.zeros(size, dtype=torch.float32, device=device) for _ in range(2))

    def run(self, tokens: np.ndarray, position: int, counters: Counters) -> torch.Tensor:
        """Append tokens [T]; the logits after each, [T, V] float32. The slots' `held` must be known; what they hold
        afterwards is what they held, or what the logical cache says."""
        w, device, eps = self.weights, self.weights.embedding.device, self.weights.shape.norm_eps
        ids = torch.from_numpy(np.asarray(tokens, np.int64)).to(device)
        x = w.embedding[ids].float()
        self._staging.clear()
        self._ahead.clear()
        placed = np.empty((w.shape.n_layers, w.shape.n_experts), np.int32)
        for layer in range(w.shape.n_layers):
            x = x + self._attention(layer, x, position)
            h = rms_norm(x, w.layers[layer].ffn_norm, eps)
            decided = self._decide(layer, h, ids)
            x = x + self._experts(layer, h, decided, placed[layer], counters)
        self.policy.state.ints[:, 0, : placed.shape[1]] = torch.from_numpy(placed).to(device)
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

    def _experts(
        self, layer: int, h: torch.Tensor, decided: Decisions, slot_of: np.ndarray, counters: Counters
    ) -> torch.Tensor:
        """The union of what the tokens execute, each expert once: those in slots first, then the others. [T, d].

        Out: slot_of [E], the residents that were decided; whoever has a slot and stays keeps it, and need not come
        again.
        """
        sizes, executed, said, likely = self._ask(layer, decided, len(h))
        held, staging = self.slots.held[layer], self._staging
        slot_of[:] = kept_in_place(said, held)
        where = self.slots.places(layer)
        products = ChunkExperts(h.to(self.weights.dtype), executed, where, self.weights.shape)
        missing = [e for e in products.experts if e not in where]
        counters.loads += int((executed >= 0).sum())
        counters.misses += int(sizes[:, 1].sum())
        counters.demand += len(missing)
        sent, self._ahead = self._ahead, {}
        for e in [e for e in sent if e not in missing]:
            staging.release(sent.pop(e))
            counters.prefetch, counters.unused = counters.prefetch + 1, counters.unused + 1
        coming = [*sent, *(e for e in missing if e not in sent)]
        waiting = deque(coming[len(sent) :])

        def send() -> None:
            while waiting and staging.room:
                e = waiting.popleft()
                sent[e] = staging.send(layer, e)

        send()
        products.run_held(self.slots.bytes[layer])
        for e in coming:
            content = staging.arrived(sent[e])
            products.run(e, content)
            if slot_of[e] >= 0:
                self.slots.put(layer, e, int(slot_of[e]), content)
            staging.release(sent[e])
            send()
        if layer + 1 < len(self.slots.held):
            next_held = self.slots.held[layer + 1]
            for e in [e for e in likely if e not in next_held][: staging.ahead]:
                self._ahead[e] = staging.send(layer + 1, e)
        residents = np.flatnonzero(slot_of >= 0)
        count_settled(counters, int((held[slot_of[residents]] != residents).sum()))  # moved when the chunk ends
        inside = torch.arange(executed.shape[1], device=h.device) < decided.counts[: len(h), :1]
        return products.mixed((decided.weights[: len(h)] * inside).unsqueeze(-1))

    def _ask(self, layer: int, decided: Decisions, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[int]]:
        """In one wait for the device: counts [T, 3], executed [T, k] with −1 beyond a token's, the slot of each expert
        [E] after the chunk, and the experts that the next layer's pre-gate chooses for any token, most often first."""
        n_layers, n_experts = self.weights.shape.n_layers, self.weights.shape.n_experts
        chosen = torch.zeros(n_experts, dtype=torch.int32, device=decided.counts.device)
        if layer + 1 < n_layers:
            best = self._pregates[layer + 1, :count].topk(self.policy.top_k[layer + 1], dim=-1).indices.flatten()
            chosen.scatter_add_(0, best, torch.ones_like(best, dtype=torch.int32))
        parts = (decided.counts[:count], decided.executed[:count], self.policy.state.ints[layer, 0, :n_experts], chosen)
        told = torch.cat([part.flatten() for part in parts]).cpu().numpy()
        counts, executed, slot_of, often = np.split(told, np.cumsum([part.numel() for part in parts])[:-1])
        counts, executed = counts.reshape(count, -1), executed.reshape(count, -1)
        likely = [e for e in np.argsort(-often, kind="stable").tolist() if often[e] > 0]
        return counts, np.where(np.arange(executed.shape[1]) < counts[:, :1], executed, -1), slot_of, likely

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
