"""Attention of one token against torch's, over as many positions as there may be: on a GPU, or as a program in
Triton's interpreter, since Triton asks for it once, when it is imported.

The program prints the relative error of each case.
"""

import json
import os
import sys
from dataclasses import dataclass

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"

import torch
import torch.nn.functional as F

from edgemoe.gpu_offload.arithmetic import rms_norm, rotate, rotations
from edgemoe.gpu_offload.kernels.attention import attend

EPS = 1e-5


@dataclass(frozen=True)
class Case:
    n_heads: int
    n_kv_heads: int
    d_head: int
    splits: int
    block: int
    positions: tuple[int, ...]
    """How many tokens there are before the one that attends, each time over the same cache."""


SMALL = Case(n_heads=4, n_kv_heads=2, d_head=8, splits=3, block=4, positions=(0, 1, 3, 4, 5, 11, 12, 13, 24, 25, 40))


def far(splits: int, block: int) -> Case:
    """OLMoE's heads: no splits with a block, some, each with one, two and more of them."""
    once = splits * block
    positions = (0, 1, block - 1, block, block + 1, once - 1, once, once + 1, 1024, 2 * once, 2 * once + 1, 4095)
    return Case(n_heads=16, n_kv_heads=16, d_head=128, splits=splits, block=block, positions=positions)


def errors(case: Case, device: str) -> dict[int, float]:
    """By position: the largest error beside the largest value. Raises ValueError if a repetition has other bits, or a
    cache does not hold the token's own key and value behind those before."""
    torch.manual_seed(0)
    n_ctx = max(case.positions) + 1
    d_query, d_kv = case.n_heads * case.d_head, case.n_kv_heads * case.d_head
    cos, sin = (table.to(device) for table in rotations(n_ctx, case.d_head, 1e4))
    q_norm, k_norm = (torch.rand(size, device=device) + 0.5 for size in (d_query, d_kv))
    past = torch.randn(2, case.n_kv_heads, n_ctx, case.d_head, device=device)
    stop = torch.zeros(1, dtype=torch.int64, device=device)
    ended = torch.zeros(case.n_heads, dtype=torch.int32, device=device)
    found = {}
    for here in case.positions:
        qkv = torch.randn(d_query + 2 * d_kv, device=device)
        outputs = []
        for _ in range(2):
            keys, values = past.clone()
            # What is not there yet, and what another token left between the blocks, must not be read.
            keys[:, here:], values[:, here:] = torch.nan, torch.nan
            partial = torch.full((case.n_heads, case.splits + 1, case.d_head + 2), torch.nan, device=device)
            y = torch.full((d_query,), torch.nan, device=device)
            position = torch.tensor([here], device=device)
            attend[(case.n_heads, case.splits + 1)](
                qkv, q_norm, k_norm, cos, sin, keys, values, position, partial, ended, y, stop, EPS, 0.0, n_ctx,
                N_HEADS=case.n_heads, N_KV=case.n_kv_heads, D=case.d_head,
                Q_P=d_query, KV_P=d_kv, SPLITS=case.splits, BLOCK=case.block, CLIPS=False, EARLY=False, num_warps=4,
            )  # fmt: skip
            outputs.append(y)
        if not torch.equal(*outputs) or ended.any():
            raise ValueError(f"position {here}: a repetition differs, or blocks are still counted")
        q, k, v = qkv.split([d_query, d_kv, d_kv])
        q = rotate(rms_norm(q, q_norm, EPS).view(case.n_heads, case.d_head), cos[here], sin[here])
        k = rotate(rms_norm(k, k_norm, EPS).view(case.n_kv_heads, case.d_head), cos[here], sin[here])
        own = torch.stack((k, v.view(case.n_kv_heads, case.d_head))).unsqueeze(2)
        cache = torch.cat((past[:, :, :here], own), 2)
        if not torch.allclose(torch.stack((keys, values))[:, :, : here + 1], cache, rtol=1e-5, atol=1e-5):
            raise ValueError(f"position {here}: the cache does not hold the token's key and value")
        wide = cache.double().repeat_interleave(case.n_heads // case.n_kv_heads, 1)
        theirs = F.scaled_dot_product_attention(q.double().unsqueeze(1), *wide).flatten()
        found[here] = float((outputs[0] - theirs).abs().max() / theirs.abs().max())
    return found


if __name__ == "__main__":
    json.dump(errors(SMALL, "cpu"), sys.stdout)
