"""A chunk of a prompt, driven by the host, layer by layer: every token decided in order, every expert brought once.

As the CPU's executor does it, on whatever device. An expert that no slot holds comes into one of a few buffers, runs
from there, and is moved on the device into the slot that it ends in: the link never waits for a slot to become free.
"""

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F

from edgemoe.errors import UserError
from edgemoe.gpu_offload.arena import expert_views
from edgemoe.gpu_offload.arithmetic import mixing_weights, projected, rms_norm
from edgemoe.gpu_offload.decisions import Decisions
from edgemoe.gpu_offload.executor import Counters, kept_in_place
from edgemoe.gpu_offload.grouped import Grouped, count_settled
from edgemoe.gpu_offload.host_driven_layers import TokenLayers
from edgemoe.gpu_offload.host_driven_link import Arrival, Link

BUFFERS = 3  # experts on their way, running, and being moved


class HostPrompt:
    """Chunks of the sequence whose KV cache is a `TokenLayers`'s. Nothing else may be on the link."""

    def __init__(self, layers: TokenLayers, decisions: Decisions, link: Link, counters: Counters) -> None:
        self._layers, self._decisions, self._link, self._counters = layers, decisions, link, counters
        self._weights, self._slots, self._device = layers.weights, layers.slots, layers.device
        self._slot_of = decisions.cache.state.slot_of
        size = (BUFFERS, self._slots.arena.expert_bytes)
        self._buffers = torch.empty(size, dtype=torch.uint8, device=self._device)

    def run(self, tokens: np.ndarray, position: int) -> torch.Tensor:
        """Append tokens [T]; what leaves the last layer, [T, d] float32. Afterwards the slots hold what the logical
        cache says."""
        w, eps = self._weights, self._weights.shape.norm_eps
        x = w.embedding[torch.from_numpy(np.asarray(tokens, np.int64)).to(self._device)].float()
        pregate: np.ndarray | None = None
        for layer in range(w.shape.n_layers):
            x = x + self._attention(layer, x, position)
            h = rms_norm(x, w.layers[layer].ffn_norm, eps)
            scores = F.linear(h, w.routers[layer : layer + 2].flatten(0, 1)).unflatten(1, (-1, w.shape.n_experts))
            routed = scores.cpu().numpy()  # the host waits here: it decides
            if not np.isfinite(routed).all():
                raise UserError(f"the scores of layer {layer} are not finite: is the model file damaged?")
            executed = self._decisions.chunk(layer, routed[:, 0], pregate)
            pregate = routed[:, -1]
            x = x + self._union(layer, h, scores[:, 0], executed)
        return x

    def _attention(self, layer: int, x: torch.Tensor, position: int) -> torch.Tensor:
        """Causal attention of T tokens from `position` on, their keys and values appended: [T, d]."""
        w, shape, own, end = self._weights.layers[layer], self._weights.shape, self._layers, position + len(x)
        q, k, v = projected(x, w, shape, own.cos[position:end], own.sin[position:end], own.multiply)
        own.keys[layer, :, position:end] = k
        own.values[layer, :, position:end] = v
        group, kind = shape.n_heads // shape.n_kv_heads, own.attention_type
        keys, values = (cache[layer, :, :end].to(kind).repeat_interleave(group, 0) for cache in (own.keys, own.values))
        mask = torch.ones(len(x), end, dtype=torch.bool, device=x.device).tril(position)
        y = F.scaled_dot_product_attention(q.to(kind), keys, values, attn_mask=mask)
        return own.multiply(y.transpose(0, 1).flatten(-2).float(), w.o)

    def _union(self, layer: int, h: torch.Tensor, scores: torch.Tensor, executed: np.ndarray) -> torch.Tensor:
        """The experts of a chunk, each once: those in slots first, then the others as they arrive. [T, d]."""
        slot_of, slots, c = self._slot_of[layer], self._slots, self._counters
        slot_of[:] = kept_in_place(slot_of, slots.held[layer])
        where = slots.places(layer)
        grouped = Grouped(h, executed, self._layers.multiply)
        missing = [e for e in grouped.experts if e not in where]
        c.loads += int((executed >= 0).sum())
        c.misses += int(self._decisions.counts[layer, : len(executed), 1].sum())
        c.demand += len(missing)
        for e in grouped.experts:
            if e in where:
                grouped.run(e, slots.views(layer, where[e]))
        for e, content in self._bring(layer, missing):
            grouped.run(e, expert_views(content, self._weights.shape, self._weights.dtype))
            slot = int(slot_of[e])
            if slot >= 0:
                slots.put(layer, e, slot, content)
        count_settled(c, len(slots.settle(layer, slot_of)))
        chosen = torch.from_numpy(executed.astype(np.int64)).to(h.device)
        return grouped.mixed(mixing_weights(scores, chosen, self._weights.shape.norm_topk))

    def _bring(self, layer: int, experts: list[int]) -> Iterator[tuple[int, torch.Tensor]]:
        """(expert, its bytes) for each, as they arrive. The bytes last until the next one is asked for."""
        link, source = self._link, self._slots.arena.bytes[layer]
        free = [self._mark()] * BUFFERS  # when the nth copy may begin
        sent: list[Arrival] = []
        for at, expert in enumerate(experts):
            for nth in range(len(sent), min(at + BUFFERS, len(experts))):
                sent.append(link.send(source[experts[nth]], self._buffers[nth % BUFFERS], free[nth]))
            link.wait([sent[at]])
            yield expert, self._buffers[at % BUFFERS]
            free.append(self._mark())

    def _mark(self) -> "torch.cuda.Event | None":
        """After all that has been enqueued."""
        return torch.cuda.current_stream(self._device).record_event() if self._device.type == "cuda" else None
