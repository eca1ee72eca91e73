"""Which model ran, and how: what names a result, so that like is compared with like."""

import hashlib
import json
import platform
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn

from edgemoe.gpu_offload.harness.families import Router


def fingerprint(model: nn.Module, routers: list[Router]) -> str:
    """SHA-256 that stands for `header_sha256` of a model without GGUF: of its geometry, router weights and norms.

    Names and shapes of all parameters, and the float32 values of the routers and of all vectors. Loading the same
    checkpoint in another precision that holds these values exactly gives the same fingerprint.
    """
    content = hashlib.sha256(model.config.get_text_config().model_type.encode())
    for name, parameter in sorted(model.named_parameters()):
        content.update(f"{name}{tuple(parameter.shape)}".encode())
        if parameter.dim() == 1:
            content.update(_bytes(parameter))
    for router in routers:
        content.update(_bytes(router.weight))
    return content.hexdigest()


def _bytes(values: torch.Tensor) -> bytes:
    array: np.ndarray = values.detach().float().cpu().numpy()
    return array.tobytes()


def numerics(model: nn.Module) -> dict[str, Any]:
    """What decides the last bits of a result beside the policy: precision, kernels, libraries, threads."""
    config, device = model.config.get_text_config(), next(model.parameters()).device
    return {
        "engine": "transformers",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "attention": getattr(config, "_attn_implementation", None),
        "experts": getattr(config, "_experts_implementation", None),
        "float32_products": torch.get_float32_matmul_precision(),
        "threads": torch.get_num_threads(),
    }


def config_hash(decides: dict[str, Any]) -> str:
    """Twelve hex digits that name all that decides a result."""
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:12]
