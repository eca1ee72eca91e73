"""A prompt's kernels in Triton's interpreter beside torch, and prompts through few and many buffers: run as a program,
since Triton asks for the interpreter once, when it is imported.

Prints one JSON object: for each case, how far off it was, or what differed.
"""

import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import torch.nn.functional as F
from launches import record

from edgemoe.gpu_offload import staging
from edgemoe.gpu_offload.arithmetic import projected, rms_norm, rotations
from edgemoe.gpu_offload.chunk_layers import ChunkLayers
from edgemoe.gpu_offload.cpu import CpuExecutor
from edgemoe.gpu_offload.decisions import Decisions
from edgemoe.gpu_offload.device import DeviceExecutor
from edgemoe.gpu_offload.kernels import chunk_rows
from edgemoe.gpu_offload.kernels.device_policy import Decisions as DeviceDecisions
from edgemoe.gpu_offload.shape import Shape, read_shape
from edgemoe.gpu_offload.weights import Layer, Weights, load_weights
from edgemoe.model import read_model
from edgemoe.model.synthetic import write_synthetic
from edgemoe.policy import LogicalCache, preset

SHAPE = Shape(
    n_layers=2, d_model=24, n_heads=6, n_kv_heads=3, d_head=12, n_experts=5, top_k=3, d_expert=8, n_vocab=20, n_ctx=96,
    rope_theta=1e4, norm_eps=1e-5, norm_topk=False, clip_qkv=None, tied_output=False,
)  # fmt: skip


def off(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


def layers_of(shape: Shape, chunk: int) -> ChunkLayers:
    """Random weights and what is needed of a program."""
    torch.manual_seed(1)

    def norm(width: int) -> torch.Tensor:
        return torch.rand(width) + 0.5

    d, q, kv = shape.d_model, shape.d_query, shape.d_kv
    layers = tuple(
        Layer(norm(d), torch.randn(q + 2 * kv, d), norm(q), norm(kv), torch.randn(d, q), norm(d))
        for _ in range(shape.n_layers)
    )
    weights = SimpleNamespace(
        shape=shape, dtype=torch.float32, embedding=torch.randn(shape.n_vocab, d), norm=norm(d), layers=layers,
        output=torch.randn(shape.n_vocab, d), routers=torch.randn(shape.n_layers, shape.n_experts, d),
    )  # fmt: skip
    cos, sin = rotations(shape.n_ctx, shape.d_head, shape.rope_theta)
    size = (shape.n_layers, shape.n_kv_heads, shape.n_ctx, shape.d_head)
    program = SimpleNamespace(cos=cos, sin=sin, keys=torch.zeros(size), values=torch.zeros(size), n_ctx=shape.n_ctx)
    return ChunkLayers(weights, program, chunk)  # type: ignore[arg-type]


def attention(shape: Shape) -> float:
    """Two chunks, neither a whole number of blocks, in the second layer; then the router's scores and pre-gates."""
    ours, worst = layers_of(shape, 50), 0.0
    w, weights = ours.weights.layers[1], ours.weights
    keys, values = torch.zeros(2, shape.n_kv_heads, shape.n_ctx, shape.d_head)
    for first, last in ((0, 5), (5, 39)):
        ids = torch.randint(0, shape.n_vocab, (last - first,))
        ours.begin(ids, first)
        x = weights.embedding[ids]
        ours.h[: len(ids)] = rms_norm(x, w.attn_norm, shape.norm_eps)
        q, k, v = projected(x, w, shape, ours.program.cos[first:last], ours.program.sin[first:last], F.linear)
        keys[:, first:last], values[:, first:last] = k, v
        group = shape.n_heads // shape.n_kv_heads
        k, v = (cache[:, :last].repeat_interleave(group, 0) for cache in (keys, values))
        mask = torch.ones(len(ids), last, dtype=torch.bool).tril(first)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(0, 1).flatten(1)
        h = rms_norm(x + F.linear(y, w.o), w.ffn_norm, shape.norm_eps)
        ours.attend(1)
        scores, _, following = ours.route(1)
        assert following is None
        worst = max(worst, off(ours.rows(), h), off(scores, F.linear(h, weights.routers[1])))
        pregate = ours.route(0)[2]
        assert pregate is not None
        worst = max(worst, off(pregate, F.linear(h, weights.routers[1])))
    return worst


def mixture() -> float:
    """Tokens of which some executed fewer experts than others: what no expert computed is not looked at."""
    ours, count = layers_of(SHAPE, 9), 7
    ids = torch.randint(0, SHAPE.n_vocab, (count,))
    ours.begin(ids, 0)
    decided = DeviceDecisions.empty(9, SHAPE.top_k, 0, "cpu")
    decided.counts[:, 0] = torch.tensor([3, 2, 1, 3, 0, 2, 3, 3, 3])
    decided.weights.copy_(torch.rand(9, SHAPE.top_k))
    outputs = torch.randn(9 * SHAPE.top_k, SHAPE.d_model)
    inside = torch.arange(SHAPE.top_k) < decided.counts[:count, :1]
    mixed = (outputs.view(9, SHAPE.top_k, -1)[:count] * (decided.weights[:count] * inside).unsqueeze(-1)).sum(1)
    outputs.view(9, SHAPE.top_k, -1)[:count][~inside] = float("nan")
    ours.mix(1, outputs, decided)
    x = ours.weights.embedding[ids] + mixed
    return off(ours.rows(), rms_norm(x, ours.weights.norm, SHAPE.norm_eps))


def told() -> bool:
    """Counts of the next pre-gate's choices, ties to the lowest index; slots, misses, and who ran."""
    rng = np.random.default_rng(0)
    count, n_experts, width = 11, 9, 4
    pregate = torch.from_numpy(rng.integers(0, 6, (count, n_experts)).astype(np.float32))
    executed = torch.from_numpy(rng.integers(0, n_experts, (count, width)).astype(np.int32))
    counts = torch.from_numpy(rng.integers(0, width + 1, (count, 3)).astype(np.int32))
    slot_of = torch.from_numpy(rng.integers(-1, 5, 32).astype(np.int32))
    found = torch.zeros(2 * n_experts + 1 + count * width, dtype=torch.int32)
    chunk_rows.tell[(3,)](
        pregate, executed, counts, slot_of, found, count,
        E=n_experts, EP=32, WIDTH=width, WIDTH_P=4, COUNTS=3, K_NEXT=3, ROWS=4,
    )  # fmt: skip
    best = np.argsort(-pregate.numpy(), axis=1, kind="stable")[:, :3]
    ran = np.where(np.arange(width) < counts[:, :1].numpy(), executed.numpy(), -1)
    parts = (np.bincount(best.ravel(), minlength=n_experts), slot_of[:n_experts], [int(counts[:, 1].sum())], ran)
    return np.array_equal(found.numpy(), np.concatenate([np.ravel(part) for part in parts]))


def prompts(weights: Weights, name: str, capacity: int, buffers: tuple[int, int, int]) -> dict[str, object]:
    """Prompts of several lengths beside the CPU's. buffers: ahead at most, working, together."""
    staging._MOST_AHEAD, staging.WORKING, staging._MOST_TOGETHER = buffers
    shape = weights.shape
    cache = LogicalCache(
        preset(name, **({"window": 2} if preset(name).window else {})), n_layers=shape.n_layers,
        n_experts=shape.n_experts, top_k=shape.top_k, capacity=capacity, delta=np.ones(shape.n_layers, np.float32),
    )  # fmt: skip
    host = CpuExecutor(weights, Decisions(cache, 8, None), n_ctx=40)
    device = DeviceExecutor(weights, cache, n_ctx=40, chunk=8, concurrent=False)
    tokens = np.random.default_rng(2).integers(0, shape.n_vocab, 12)
    rows, worst, wrong = [], 0.0, []
    for first, last in ((0, 8), (8, 12)):
        a, b = (one.step(tokens[first:last], first, all_rows=True) for one in (host, device))
        worst = max(worst, float(np.abs(a - b).max() / np.abs(a).max()))
        mine, its = host.record(last - first), device.record(last - first)
        wrong += [f"{key} at {first}" for key in ("executed", "counts") if not np.array_equal(mine[key], its[key])]
        device.verify()
        rows.append(b)
    c, d = host.counters, device.counters
    if (c.loads, c.misses, c.demand) != (d.loads, d.misses, d.demand):
        wrong.append(f"counters {c} {d}")
    if d.prefetch != d.unused or d.unused < c.unused:
        wrong.append(f"prefetches {c} {d}")
    return {"worst": worst, "wrong": wrong, "bits": np.concatenate(rows).tobytes().hex(), "unused": d.unused}


def main() -> None:
    record(Path(sys.argv[1]))
    torch.set_num_threads(1)
    clipped = replace(SHAPE, n_kv_heads=6, clip_qkv=0.7)
    found: dict[str, object] = {
        "attention": attention(SHAPE), "clipped": attention(clipped), "mixture": mixture(), "told": told()
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        shape = {"n_layers": 3, "n_experts": 8, "top_k": 2, "d_model": 32, "d_expert": 16, "n_vocab": 300, "n_heads": 2}
        [path] = write_synthetic(Path(folder) / "m.gguf", **shape)
        model = read_model(path)
        weights = load_weights(model, read_shape(model), dtype=torch.float32)
    with torch.inference_mode():
        for case in (
            *(("exact-lru", 2, (0, 1, 1)), ("exact-lru", 4, (2, 3, 4)), ("exact-lru", 8, (16, 3, 4))),
            *(("exact-prefetch", 3, (5, 3, 2)), ("psr-gated", 4, (3, 2, 4))),
        ):
            found[f"{case}"] = prompts(weights, *case)
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
