"""What surrounds the experts of a chunk on the device: the residual stream, attention and the router, in few launches.

A launch costs the host more time than most of these take the GPU.
"""

import torch
import torch.nn.functional as F
import triton

from edgemoe.gpu_offload.kernels import chunk_attention, chunk_rows, layout
from edgemoe.gpu_offload.kernels.device_policy import Decisions
from edgemoe.gpu_offload.program import TokenProgram
from edgemoe.gpu_offload.weights import Weights

# Newer versions of torch can give sums as they are; older ones round them to the weights' type.
_KEEPS_SUMS = any("out_dtype" in str(schema) for schema in torch._C._jit_get_schemas_for_operator("aten::mm"))
_ROWS = {torch.bfloat16: 64, torch.float32: 32}  # of queries, and of keys, that a block holds at once
_WIDE = 128  # of wider heads an Ada card's shared memory holds half as many


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, in] · weight [out, in], transposed → [T, out] float32; both in the storage type."""
    if _KEEPS_SUMS and weight.is_cuda and weight.dtype != torch.float32:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return F.linear(x, weight).float()


class ChunkLayers:
    """The rows of one chunk of a sequence whose KV cache is a `TokenProgram`'s, from layer to layer.

    In each, `attend`, then `route`, then, once the experts have run, `mix`.
    """

    def __init__(self, weights: Weights, program: TokenProgram, chunk: int) -> None:
        self.weights, self.program = weights, program
        shape, device = weights.shape, weights.embedding.device
        self.h = torch.empty((chunk, shape.d_model), dtype=weights.dtype, device=device)
        """What the next product reads: a normed row of each token."""
        self._single = torch.empty((chunk, shape.d_model), dtype=torch.float32, device=device)
        self._q, self._y = (torch.empty((chunk, shape.d_query), dtype=weights.dtype, device=device) for _ in range(2))
        self.routed = torch.zeros((shape.n_layers, 2, chunk, shape.n_experts), dtype=torch.float32, device=device)
        """Each layer's scores, and the pre-gates of the next."""

    def begin(self, ids: torch.Tensor, position: int) -> None:
        """ids [T] int64 on the device."""
        self._count, self._position = len(ids), position
        self._x = self.weights.embedding[ids].float()
        self._norm(self.weights.layers[0].attn_norm)

    def rows(self) -> torch.Tensor:
        """`h` of the tokens that there are, [T, d]."""
        return self.h[: self._count]

    def attend(self, layer: int) -> None:
        """x += attention(x), whose keys and values are appended; `h` is what experts read."""
        w, shape, p, count = self.weights.layers[layer], self.weights.shape, self.program, self._count
        qkv = product(self.rows(), w.qkv)
        heads = {"N_HEADS": shape.n_heads, "N_KV": shape.n_kv_heads, "D": shape.d_head}
        keys, values, power = p.keys[layer], p.values[layer], triton.next_power_of_2
        chunk_attention.place[count, 3](
            qkv, w.q_norm, w.k_norm, p.cos, p.sin, self._q, keys, values, self._position, p.n_ctx,
            shape.norm_eps, float(shape.clip_qkv or 0.0),
            Q_P=power(shape.d_query), KV_P=power(shape.d_kv), CLIPS=shape.clip_qkv is not None, **heads,
        )  # fmt: skip
        rows = _ROWS[self.weights.dtype] // (2 if shape.d_head > _WIDE else 1)
        chunk_attention.attend[triton.cdiv(count, rows), shape.n_heads](
            self._q, keys, values, self._y, self._position, count, p.n_ctx, shape.d_head**-0.5,
            D_P=max(16, power(shape.d_head)), ROWS=rows, BLOCK=rows, num_warps=4, num_stages=2, **heads,
        )  # fmt: skip
        self._norm(w.ffn_norm, added=product(self._y[:count], w.o), single=True)

    def route(self, layer: int) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Scores [T, E] of a layer, the pre-gates that it was given, and those of the next one, where there are any."""
        n_layers, n_experts, count = self.weights.shape.n_layers, self.weights.shape.n_experts, self._count
        found = F.linear(self._single[:count], self.weights.routers[layer : layer + 2].flatten(0, 1))
        parts = found.view(count, -1, n_experts).transpose(0, 1)
        self.routed[layer, : len(parts), :count].copy_(parts)
        before = self.routed[layer - 1, 1, :count] if layer else None
        return self.routed[layer, 0, :count], before, self.routed[layer, 1, :count] if layer + 1 < n_layers else None

    def mix(self, layer: int, outputs: torch.Tensor, decided: Decisions) -> None:
        """x += the mixture of the outputs [T · k, d] of each token's experts; `h` is what comes after."""
        layers = self.weights.layers
        after = layers[layer + 1].attn_norm if layer + 1 < len(layers) else self.weights.norm
        self._norm(after, mixed=(outputs, decided))

    def logits(self) -> torch.Tensor:
        """After the last layer: [T, V] float32."""
        return product(self.rows(), self.weights.output)

    def _norm(
        self,
        weight: torch.Tensor,
        *,
        added: torch.Tensor | None = None,
        mixed: tuple[torch.Tensor, Decisions] | None = None,
        single: bool = False,
    ) -> None:
        width = self.weights.shape.d_model
        nothing = self._x
        outputs, weights, counts = nothing, nothing, nothing
        if mixed is not None:
            outputs, weights, counts = mixed[0], mixed[1].weights, mixed[1].counts
        chunk_rows.normed[(self._count,)](
            self._x, nothing if added is None else added, outputs, weights, counts, weight, self._single, self.h,
            self.weights.shape.norm_eps, WIDTH=width, WIDTH_P=triton.next_power_of_2(width), K=weights.shape[-1],
            COUNTS=len(layout.COUNTS), ADDS=added is not None, MIXES=mixed is not None, SINGLE=single, num_warps=8,
        )  # fmt: skip
