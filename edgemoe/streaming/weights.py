"""Single weights of a model file, as float32: the routers that pre-gates are made of."""

import gguf
import numpy as np

from edgemoe.errors import UserError
from edgemoe.model import Model


def load_weight(model: Model, name: str) -> np.ndarray:
    """A tensor by name, dequantised, in its own shape (row length last); a `UserError` if the file has none."""
    entry = next((tensor for tensor in model.tensors if tensor.name == name), None)
    if entry is None:
        raise UserError(f"{model.path}: no tensor {name}, which its graph routes by: use a policy without pre-gate")
    with model.files[entry.file].open("rb") as file:
        file.seek(entry.offset)
        raw = np.frombuffer(file.read(entry.nbytes), np.uint8)
    values = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[entry.type])
    return np.ascontiguousarray(values, np.float32).reshape(entry.shape)
