"""What the device computes of one token between the host's decisions: per layer, a graph before it and one after.

Graph A: attention, the router's scores and the next layer's pre-gate, brought to page-locked host memory. Graph B: the
experts that the host wrote down, from their slots (PSR paper §5). On the CPU the same operations run one by one.
"""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

from edgemoe.gpu_offload import cpu
from edgemoe.gpu_offload.arithmetic import Product, mixing_weights, projected, rms_norm, rotations, run_expert
from edgemoe.gpu_offload.slots import Slots
from edgemoe.gpu_offload.weights import Weights

Launch = Callable[[], object]
SHORTEST, GROWTH = 256, 4  # lengths of the KV cache that attention has graphs for


def rounding_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, in] float32 · weight [out, in], transposed → [T, out] float32; inputs are rounded to the weights' type."""
    return F.linear(x.to(weight.dtype), weight).float()


class Graphs:
    """Captures launches, where the device is a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        on_gpu = device.type == "cuda"
        # One pool, for the graphs run one after the other; one stream, for cuBLAS keeps a workspace for each.
        self._pool = torch.cuda.graph_pool_handle() if on_gpu else None
        self._side = torch.cuda.Stream(device) if on_gpu else None

    def captured(self, launch: Launch) -> Launch:
        """`launch` as a graph. Runs it first: compiling and loading must not fall into the capture."""
        if self._side is None:
            return launch
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            launch()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._side):  # waits for the device first
            launch()
        return graph.replay


class TokenLayers:
    """One token at a time, over buffers that stay where they are. The KV cache is [L, Hkv, n_ctx, d_head].

    A buffer in host memory is written again only after the host has seen a result that was computed behind its reader.
    """

    def __init__(self, weights: Weights, slots: Slots, *, n_ctx: int, recorded: torch.Tensor | None = None) -> None:
        """recorded [T, L, 2, E] float32: scores and the next layer's pre-gates of a sequence, that tokens are routed by
        in place of the routers' (which are computed all the same): for benchmarks."""
        self.weights, self.slots = weights, slots
        shape, self.device = weights.shape, weights.embedding.device
        on_gpu = self.device.type == "cuda"
        self.multiply: Product = rounding_product if on_gpu else cpu.product
        self.attention_type = weights.dtype if on_gpu else torch.float32

        def single(*size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.float32, device=self.device)

        def both(*size: int, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
            """On the host, and on the device."""
            host = torch.zeros(size, dtype=kind, pin_memory=on_gpu)
            return host, torch.zeros(size, dtype=kind, device=self.device)

        d, n_experts = shape.d_model, shape.n_experts
        self.keys, self.values = (
            torch.zeros(
                (shape.n_layers, shape.n_kv_heads, n_ctx, shape.d_head), dtype=weights.dtype, device=self.device
            )
            for _ in range(2)
        )
        self.cos, self.sin = (angles.to(self.device) for angles in rotations(n_ctx, shape.d_head, shape.rope_theta))
        self._cos, self._sin = (single(1, shape.d_head) for _ in range(2))
        self._places = torch.arange(n_ctx, device=self.device)
        self._bias = torch.zeros((1, 1, 1, n_ctx), dtype=self.attention_type, device=self.device)
        self._aim_host, self._aim = both(2, kind=torch.int64)  # token, position
        self._x, self._h, self._hidden = single(1, d), single(1, d), single(shape.top_k, shape.d_expert)
        self._scores_host, self._scores = both(shape.n_layers, 2, n_experts, kind=torch.float32)
        self._routed = self._scores if recorded is None else torch.zeros_like(self._scores)
        self._recorded = None if recorded is None else recorded.to(self.device)
        self._decided_host, self._decided = both(shape.n_layers, 2, shape.top_k, kind=torch.int64)
        self._logits_host, self._logits = both(shape.n_vocab, kind=torch.float32)
        self._read = self._scores_host.numpy(), self._logits_host.numpy()
        self._write = self._aim_host.numpy(), self._decided_host.numpy()
        self._reached = torch.cuda.Event() if on_gpu else None
        self._length = n_ctx
        self._capture(n_ctx)

    @torch.inference_mode()
    def _capture(self, n_ctx: int) -> None:
        layers, graphs = range(self.weights.shape.n_layers), Graphs(self.device)
        self._lengths = [n_ctx]
        while self._lengths[0] > SHORTEST:
            self._lengths.insert(0, -(-self._lengths[0] // (GROWTH * SHORTEST)) * SHORTEST)
        self._begin: Launch | None = graphs.captured(self._embed)
        self._before = {
            length: [graphs.captured(lambda at=at, n=length: self._attend_and_route(at, n)) for at in layers]  # type: ignore[misc]
            for length in self._lengths
        }
        self._after = [graphs.captured(lambda at=at: self._run_experts(at)) for at in layers]  # type: ignore[misc]
        self._end: Launch | None = graphs.captured(self._head)

    def close(self) -> None:
        """Let go of the graphs; may be called again."""
        self._before.clear()
        self._after.clear()
        self._begin = self._end = None

    def start(self, token: int, position: int) -> None:
        """Begin with a token; it goes to `position`."""
        self._write[0][:] = token, position
        self._length = next(length for length in self._lengths if position < length)
        assert self._begin is not None, "the executor is closed"
        self._begin()

    def attend(self, layer: int) -> None:
        """Enqueue graph A of a layer."""
        self._before[self._length][layer]()
        if self._reached is not None:
            self._reached.record()

    def routed(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """The scores [E] of the layer that attended last, and the next one's pre-gate [E]. The host waits for them."""
        if self._reached is not None:
            self._reached.synchronize()
        scores: np.ndarray = self._read[0][layer]
        return scores[0], scores[1]

    def execute(self, layer: int, executed: list[int], places: list[int]) -> None:
        """Enqueue graph B of a layer: these experts, from these slots."""
        decided, count = self._write[1][layer], len(executed)
        decided[0, :count], decided[0, count:] = executed, -1
        decided[1, :count], decided[1, count:] = places, places[0]
        self._after[layer]()

    def logits(self) -> np.ndarray:
        """[V] float32, after the last layer. The host waits for them."""
        assert self._end is not None, "the executor is closed"
        self._end()
        if self._reached is not None:
            self._reached.record()
            self._reached.synchronize()
        return self._read[1].copy()

    def _embed(self) -> None:
        self._aim.copy_(self._aim_host, non_blocking=True)
        token, position = self._aim[:1], self._aim[1:]
        self._x.copy_(self.weights.embedding.index_select(0, token))
        self._cos.copy_(self.cos.index_select(0, position))
        self._sin.copy_(self.sin.index_select(0, position))
        self._bias.zero_().masked_fill_(self._places > position, float("-inf"))
        if self._recorded is not None:
            self._scores.copy_(self._recorded.index_select(0, position)[0])

    def _attend_and_route(self, layer: int, length: int) -> None:
        w, shape = self.weights.layers[layer], self.weights.shape
        q, k, v = projected(self._x, w, shape, self._cos, self._sin, self.multiply)
        keys, values, position = self.keys[layer], self.values[layer], self._aim[1:]
        keys.index_copy_(1, position, k.to(keys.dtype))
        values.index_copy_(1, position, v.to(values.dtype))
        # Query heads that share keys are rows of one product.
        q = q.reshape(1, shape.n_kv_heads, -1, shape.d_head).to(self.attention_type)
        keys, values = (cache[None, :, :length].to(self.attention_type) for cache in (keys, values))
        bias = self._bias[..., :length].expand(1, 1, q.shape[2], -1)
        y = F.scaled_dot_product_attention(q, keys, values, attn_mask=bias)
        self._x += self.multiply(y.reshape(1, -1).float(), w.o)
        self._h.copy_(rms_norm(self._x, w.ffn_norm, shape.norm_eps))
        routers = self.weights.routers[layer : layer + 2]  # one for the last layer
        self._routed[layer, : len(routers)] = F.linear(self._h, routers.flatten(0, 1)).view(len(routers), -1)
        self._scores_host[layer].copy_(self._scores[layer], non_blocking=True)

    def _run_experts(self, layer: int) -> None:
        decided, scores, shape = self._decided[layer], self._scores[layer, 0], self.weights.shape
        decided.copy_(self._decided_host[layer], non_blocking=True)
        if self.device.type == "cuda":
            from edgemoe.gpu_offload.host_driven_experts import run_executed

            slots = self.slots.bytes[layer].view(self.weights.dtype)
            run_executed(
                self._x[0], self._h[0], slots, decided, scores, self._hidden, renormalised=shape.norm_topk
            )  # fmt: skip
            return
        executed, places = decided.tolist()
        outputs = [
            run_expert(self._h, self.slots.views(layer, place), self.multiply)
            for e, place in zip(executed, places, strict=True)
            if e >= 0
        ]
        mix = mixing_weights(scores[None], decided[:1, : len(outputs)], shape.norm_topk)
        self._x += (torch.stack(outputs, 1) * mix).sum(1)

    def _head(self) -> None:
        w = self.weights
        self._logits.copy_(self.multiply(rms_norm(self._x, w.norm, w.shape.norm_eps), w.output)[0])
        self._logits_host.copy_(self._logits, non_blocking=True)
