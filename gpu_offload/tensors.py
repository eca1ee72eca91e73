"""Single tensors of a model file by what they are for, whatever the format calls them and however it stores them."""

import os
import re
from math import prod
from types import TracebackType

import gguf
import numpy as np
import torch

from edgemoe.errors import UserError
from edgemoe.model import Model
from edgemoe.model.tensors import Part, Tensor

_GGUF = {
    "embedding": "token_embd",
    "norm": "output_norm",
    "output": "output",
    "attn_norm": "blk.{layer}.attn_norm",
    "q": "blk.{layer}.attn_q",
    "k": "blk.{layer}.attn_k",
    "v": "blk.{layer}.attn_v",
    "q_norm": "blk.{layer}.attn_q_norm",
    "k_norm": "blk.{layer}.attn_k_norm",
    "o": "blk.{layer}.attn_output",
    "ffn_norm": "blk.{layer}.ffn_norm",
    "router": "blk.{layer}.ffn_gate_inp",
    "gate": "blk.{layer}.ffn_gate_exps",
    "up": "blk.{layer}.ffn_up_exps",
    "down": "blk.{layer}.ffn_down_exps",
}
_BLOCK = "model.layers.{layer}."
_HF = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
    "attn_norm": _BLOCK + "input_layernorm",
    "q": _BLOCK + "self_attn.q_proj",
    "k": _BLOCK + "self_attn.k_proj",
    "v": _BLOCK + "self_attn.v_proj",
    "q_norm": _BLOCK + "self_attn.q_norm",
    "k_norm": _BLOCK + "self_attn.k_norm",
    "o": _BLOCK + "self_attn.o_proj",
    "ffn_norm": _BLOCK + "post_attention_layernorm",
    "router": _BLOCK + "mlp.gate",
    "gate": _BLOCK + "mlp.experts.{expert}.gate_proj",
    "up": _BLOCK + "mlp.experts.{expert}.up_proj",
    "down": _BLOCK + "mlp.experts.{expert}.down_proj",
}
_PLAIN = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


class TensorSource:
    """Reads tensors of an open model; any thread may. Values keep their storage type where torch has it (BF16, F16,
    F32), and are dequantised to float32 by gguf-py otherwise."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._names = _GGUF if model.format == "GGUF" else _HF
        self._tensors = {tensor.name: tensor for tensor in model.tensors}
        self._refuse_strangers()
        self._files: list[int] = []
        try:
            for file in model.files:
                self._files.append(os.open(file, os.O_RDONLY))
        except OSError as error:
            self.close()
            raise UserError(f"{file}: cannot be read ({error.strerror})") from None

    def _refuse_strangers(self) -> None:
        """A weight that nobody would read is a variant of the architecture that nobody implemented."""
        known = {re.sub(r"\{\w+\}", "#", name) + ".weight" for name in self._names.values()}
        for tensor in self._model.tensors:
            strange = re.sub(r"(?<=\.)\d+(?=\.)", "#", tensor.name) not in known
            if strange and tensor.part is not Part.UNUSED and not tensor.name.endswith("rotary_emb.inv_freq"):
                raise UserError(
                    f"{self._model.path}: a tensor {tensor.name}, which OLMoE's architecture does not have: this "
                    "variant is not implemented here: use edgemoe run without --device, on a GGUF file"
                )

    def dense(self, role: str, layer: int, size: tuple[int, ...]) -> tuple[torch.Tensor, int]:
        """A whole tensor of that size, and the bytes it took in the file."""
        tensor = self._find(role, layer, 0)
        self._check(tensor, tensor.shape, size)
        return self._values(tensor, tensor.offset, tensor.nbytes, size), tensor.nbytes

    def read_expert(self, role: str, layer: int, expert: int, out: torch.Tensor) -> int:
        """Fill `out` (contiguous) with one expert's matrix, from a tensor of its own or from the stacked one of its
        layer; the bytes it took in the file. Where it is stored as `out` is, it is read in place."""
        tensor, size = self._find(role, layer, expert), tuple(out.shape)
        stacked = tensor.expert is None
        n_experts = self._model.geometry.n_experts
        self._check(tensor, tensor.shape, (n_experts, *size) if stacked else size)
        nbytes = tensor.nbytes // n_experts if stacked else tensor.nbytes
        offset = tensor.offset + (expert * nbytes if stacked else 0)
        if _PLAIN.get(tensor.type) == out.dtype and nbytes == out.nbytes:
            self._fill(tensor, offset, out.view(-1).view(torch.uint8).numpy())
        else:
            out.copy_(self._values(tensor, offset, nbytes, size))
        return nbytes

    def _find(self, role: str, layer: int, expert: int) -> Tensor:
        name = self._names[role].format(layer=layer, expert=expert) + ".weight"
        if name not in self._tensors:
            raise UserError(f"{self._model.path}: no tensor {name}: download or convert the model again")
        return self._tensors[name]

    def _check(self, tensor: Tensor, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
        if found != expected:
            raise UserError(
                f"{self._model.path}: {tensor.name} has shape {list(found)}, expected {list(expected)}: "
                "download or convert the model again"
            )

    def _values(self, tensor: Tensor, offset: int, nbytes: int, size: tuple[int, ...]) -> torch.Tensor:
        raw = np.empty(nbytes, np.uint8)
        self._fill(tensor, offset, raw)
        kind = _PLAIN.get(tensor.type)
        if kind is not None and nbytes == prod(size) * kind.itemsize:
            return torch.from_numpy(raw).view(kind).view(size)
        if self._model.format != "GGUF":
            raise UserError(f"{self._model.path}: {tensor.name} is {tensor.type}: expected BF16, F16 or F32")
        try:
            values = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[tensor.type])
        except (KeyError, NotImplementedError):
            raise UserError(
                f"{self._model.path}: {tensor.name} is {tensor.type}, which gguf-py cannot dequantise: "
                "use another quantisation, or update gguf"
            ) from None
        return torch.from_numpy(np.ascontiguousarray(values, np.float32)).view(size)

    def _fill(self, tensor: Tensor, offset: int, raw: np.ndarray) -> None:
        done = 0
        try:
            while done < len(raw):
                count = os.preadv(self._files[tensor.file], [raw[done:]], offset + done)  # type: ignore[list-item]
                if not count:
                    raise UserError(f"{self._model.files[tensor.file]}: ends within {tensor.name}: download it again")
                done += count
        except OSError as error:
            raise UserError(f"{self._model.files[tensor.file]}: cannot be read ({error.strerror})") from None

    def close(self) -> None:
        while self._files:
            os.close(self._files.pop())

    def __enter__(self) -> "TensorSource":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
