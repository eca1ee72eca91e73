"""Tensors of a model file and what each is for: the common ground of GGUF and safetensors."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from math import prod


class Part(str, Enum):
    """What a tensor's bytes are spent on. The value is how reports name it."""

    EXPERTS = "routed experts"
    SHARED = "shared experts"
    ATTENTION = "attention"
    DENSE = "dense FFN"
    ROUTER = "routers"
    EMBEDDING = "embeddings"
    OUTPUT = "output"
    NORMS = "norms and other"
    UNUSED = "not used in decoding"  # multi-token prediction, vision: no part of a text token's path


@dataclass(frozen=True, slots=True)
class Tensor:
    """Where a tensor lies, and what it is for.

    A tensor of experts holds one expert (`expert` is its id), or all of a layer, stacked along the first axis, in
    which case `expert` is None and every expert's bytes are one contiguous E-th.
    """

    name: str
    type: str
    shape: tuple[int, ...]  # row length last, as in numpy
    file: int  # index into the model's files
    offset: int
    nbytes: int
    part: Part
    layer: int | None = None
    projection: str | None = None  # of experts: gate, up, down or gate_up; biases and scales say so: down.bias
    expert: int | None = None

    @property
    def n_values(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class ExpertSlice:
    """The bytes of one expert in one tensor: what a streaming tier reads."""

    file: int
    offset: int
    length: int
    tensor: str
    projection: str


def slice_expert(tensor: Tensor, expert: int, n_experts: int) -> ExpertSlice | None:
    """The bytes of `expert` in `tensor`, or None where it has none there."""
    if tensor.expert is None:
        length = tensor.nbytes // n_experts
        offset = tensor.offset + expert * length
    elif tensor.expert == expert:
        length, offset = tensor.nbytes, tensor.offset
    else:
        return None
    return ExpertSlice(tensor.file, offset, length, tensor.name, tensor.projection or "")


def group(tensors: Iterable[Tensor], key: Callable[[Tensor], str | int | None]) -> dict[str | int | None, int]:
    """Bytes by any property of the tensors, largest first."""
    sums: dict[str | int | None, int] = {}
    for tensor in tensors:
        sums[key(tensor)] = sums.get(key(tensor), 0) + tensor.nbytes
    return dict(sorted(sums.items(), key=lambda item: -item[1]))
