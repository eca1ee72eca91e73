"""The weights of a model, loaded: dense ones on the device, experts in the arena, the routers in float32."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Literal

import torch

from edgemoe.gpu_offload.arena import Arena
from edgemoe.gpu_offload.shape import Shape
from edgemoe.gpu_offload.tensors import TensorSource
from edgemoe.model import Model
from edgemoe.model.tensors import Part
from edgemoe.progress import Advance, no_progress

DType = Literal["bfloat16", "float32"]
DTYPES: dict[str, torch.dtype] = {"bfloat16": torch.bfloat16, "float32": torch.float32}
THREADS = 8


@dataclass(frozen=True)
class Layer:
    """The dense weights of a layer. Matrices are [out, in] in the storage type, norms float32."""

    attn_norm: torch.Tensor  # [d]
    qkv: torch.Tensor  # [(H + 2·Hkv)·d_head, d]: queries, keys, values
    q_norm: torch.Tensor  # [H·d_head]
    k_norm: torch.Tensor  # [Hkv·d_head]
    o: torch.Tensor  # [d, H·d_head]
    ffn_norm: torch.Tensor  # [d]


@dataclass(frozen=True)
class Weights:
    """Everything that an executor reads. The arena is in host memory, all else on the device."""

    shape: Shape
    dtype: torch.dtype
    embedding: torch.Tensor  # [V, d]
    norm: torch.Tensor  # [d] float32
    output: torch.Tensor  # [V, d]; the embedding itself where the model ties them
    routers: torch.Tensor  # [L, E, d] float32: rows l and l + 1 in one product are the scores and the next pre-gate
    layers: tuple[Layer, ...]
    arena: Arena

    def close(self) -> None:
        self.arena.close()


def load_bytes(model: Model) -> int:
    """What `load_weights` counts to: the bytes of the tensors that it reads."""
    return sum(tensor.nbytes for tensor in model.tensors if tensor.part is not Part.UNUSED)


def load_weights(
    model: Model,
    shape: Shape,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    threads: int = THREADS,
    advance: Advance = no_progress,
) -> Weights:
    """Read a model into memory, `threads` tensors at a time, whatever its storage types.

    Raises `UserError`, one line, for a tensor that is missing, of another shape, of an unknown type, or cut short.
    """
    device = torch.device(device)
    arena = Arena(shape, dtype, pinned=device.type == "cuda")
    try:
        with TensorSource(model) as source:
            _run(list(_expert_jobs(source, arena)), threads, advance)
            weights = _dense(source, shape, dtype, device, arena, advance)
    except BaseException:
        arena.close()
        raise
    return weights


def _expert_jobs(source: TensorSource, arena: Arena) -> Iterator[Callable[[], int]]:
    """One job per expert: fill its place in the arena; returns the bytes read."""
    shape = arena.shape

    def fill(layer: int, expert: int) -> int:
        views = arena.expert(layer, expert)
        return sum(source.read_expert(role, layer, expert, getattr(views, role)) for role in ("gate", "up", "down"))

    for layer in range(shape.n_layers):
        for expert in range(shape.n_experts):
            yield lambda layer=layer, expert=expert: fill(layer, expert)  # type: ignore[misc]


def _run(jobs: list[Callable[[], int]], threads: int, advance: Advance) -> None:
    """Run jobs in threads; `advance` is called here only. The first error, or Ctrl-C, drops those not begun."""
    with ThreadPoolExecutor(threads, thread_name_prefix="load") as pool:
        futures = [pool.submit(job) for job in jobs]
        try:
            for future in as_completed(futures):
                advance(future.result())
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _dense(
    source: TensorSource, shape: Shape, dtype: torch.dtype, device: torch.device, arena: Arena, advance: Advance
) -> Weights:
    def read(role: str, *size: int, layer: int = 0, kind: torch.dtype = dtype) -> torch.Tensor:
        values, nbytes = source.dense(role, layer, size)
        advance(nbytes)
        return values.to(device=device, dtype=kind)

    def norm(role: str, width: int, layer: int = 0) -> torch.Tensor:
        return read(role, width, layer=layer, kind=torch.float32)

    d, q, kv, single = shape.d_model, shape.d_query, shape.d_kv, torch.float32
    layers = []
    for at in range(shape.n_layers):
        parts = [read(role, width, d, layer=at) for role, width in (("q", q), ("k", kv), ("v", kv))]
        layers.append(
            Layer(
                attn_norm=norm("attn_norm", d, at),
                qkv=torch.cat(parts),
                q_norm=norm("q_norm", q, at),
                k_norm=norm("k_norm", kv, at),
                o=read("o", d, q, layer=at),
                ffn_norm=norm("ffn_norm", d, at),
            )
        )
    embedding = read("embedding", shape.n_vocab, d)
    return Weights(
        shape=shape,
        dtype=dtype,
        embedding=embedding,
        norm=norm("norm", d),
        output=embedding if shape.tied_output else read("output", shape.n_vocab, d),
        routers=torch.stack([read("router", shape.n_experts, d, layer=at, kind=single) for at in range(len(layers))]),
        layers=tuple(layers),
        arena=arena,
    )
