"""The pre-gate: layer l+1's router on layer l's MoE input (PSR §4.1), computed beside llama.cpp in float32.

Which product, gating function, bias and group mask make a layer's scores is read from the model's graph
(`edgemoe.llamacpp.graph.Gate`); the weights are read from the model file, once.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from edgemoe.errors import UserError
from edgemoe.llamacpp.graph import Gate, Groups
from edgemoe.model import Model

# Largest error of a recomputed score, in standard deviations of its row: kernels round a router's input to its type.
TOLERANCE = 0.05


@dataclass(frozen=True)
class PreGate:
    """A router outside its graph."""

    weight: np.ndarray  # [E, d] float32
    steps: tuple[tuple[str, np.ndarray | None], ...]
    groups: Groups | None

    @classmethod
    def load(cls, model: Model, gate: Gate) -> "PreGate":
        """Read the router's tensors, dequantised to float32; a `UserError` if the file has no tensor of that name."""
        steps = tuple((name, _tensor(model, operand).ravel() if operand else None) for name, operand in gate.steps)
        return cls(_tensor(model, gate.weight), steps, gate.groups)

    def scores(self, inputs: np.ndarray) -> np.ndarray:  # [T, d] → [T, E] float32
        """What this router's selection would rank for these inputs; −inf in groups that it would mask."""
        values = inputs @ self.weight.T
        for name, operand in self.steps:
            values = _APPLY[name](values, operand)
        if self.groups is not None:
            values = _mask_groups(values, self.groups)
        return values.astype(np.float32, copy=False)

    def agrees(self, inputs: np.ndarray, scores: np.ndarray) -> bool:
        """Does this recompute the graph's own scores [T, E] from the graph's own router inputs [T, d]?"""
        ours = self.scores(inputs)
        finite = np.isfinite(ours) & np.isfinite(scores)
        spread = np.std(scores, axis=1, where=np.isfinite(scores), keepdims=True)
        error = np.abs(np.subtract(ours, scores, where=finite, out=np.zeros_like(ours)))
        close = error <= TOLERANCE * spread + 1e-6
        # A near-tie may swap a whole group, so the masks need to agree mostly, the values always.
        return bool(close.all() and (np.isfinite(ours) == np.isfinite(scores)).mean() > 0.9)


def _tensor(model: Model, name: str) -> np.ndarray:
    import gguf

    entry = next((tensor for tensor in model.tensors if tensor.name == name), None)
    if entry is None:
        raise UserError(f"{model.path}: no tensor {name}, which its graph routes by: --pregate is not possible here")
    with model.files[entry.file].open("rb") as file:
        file.seek(entry.offset)
        raw = np.frombuffer(file.read(entry.nbytes), np.uint8)
    kind = gguf.GGMLQuantizationType[entry.type]
    return np.asarray(gguf.quants.dequantize(raw, kind), np.float32).reshape(entry.shape)


def _softmax(values: np.ndarray) -> np.ndarray:
    powers = np.exp(values - values.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True))


_APPLY: dict[str, Any] = {
    "ADD": lambda values, operand: values + operand,
    "SIGMOID": lambda values, _: 1 / (1 + np.exp(-values)),
    "SOFT_MAX": lambda values, _: _softmax(values),
    "SOFTPLUS": lambda values, _: np.logaddexp(values, 0),
    "SQRT": lambda values, _: np.sqrt(values),
}


def _mask_groups(values: np.ndarray, groups: Groups) -> np.ndarray:
    """−inf outside the groups with the largest sum of their two best (DeepSeek-V3, as llama.cpp computes it)."""
    ranked = _softmax(values) if groups.of_softmax else values
    split = ranked.reshape(len(values), groups.count, -1)
    best_two = np.sort(split, axis=2)[:, :, -2:].sum(axis=2)
    kept = np.argsort(-best_two, axis=1, kind="stable")[:, : groups.used]
    allowed = np.zeros(split.shape[:2], dtype=bool)
    np.put_along_axis(allowed, kept, True, axis=1)
    return np.where(np.repeat(allowed, split.shape[2], axis=1), values, -np.inf)
