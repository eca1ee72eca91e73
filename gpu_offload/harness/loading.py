"""A Hugging Face checkpoint and its tokenizer, or one line that says why not."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from edgemoe.errors import UserError
from edgemoe.gpu_offload.harness.families import check_supported, find_routers

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load(path: str | Path, *, dtype: str = "bfloat16", device: str = "cpu") -> tuple[nn.Module, Any]:
    """(model, tokenizer) of a checkpoint directory, ready to be steered: weights as `dtype`, on `device`.

    device: "cpu", "cuda", "cuda:1", …, or "auto" to spread the model over the GPUs (needs accelerate). Router scores
    are float32 whatever `dtype` is. Raises `UserError`, before the weights are read, for what is no checkpoint or
    has no MoE block that can be steered.
    """
    import transformers

    directory = Path(path)
    if not (directory / "config.json").is_file():
        raise UserError(f"{path}: no config.json there: give a Hugging Face model directory")
    if dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"{device} was asked for, but torch sees no CUDA device: use cpu")
    try:
        config = transformers.AutoConfig.from_pretrained(directory)
        check_supported(config)
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=DTYPES[dtype], device_map="auto" if device == "auto" else None
        )
        model = model.eval() if device == "auto" else model.eval().to(device)
    except UserError as refusal:
        raise UserError(f"{path}: {refusal}") from None
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"{path}: transformers cannot load it ({said})") from None
    find_routers(model)
    return model, tokenizer
