"""Options of the commands that run texts through a model and watch its routers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from edgemoe.model import Model

MoePath = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL",
        help="A Mixture-of-Experts GGUF file (any shard of a split one), for llama.cpp, or a Hugging Face folder, for"
        " transformers.",
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing OUT, once the new one is whole.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Ctx = Annotated[
    int, typer.Option("--ctx", metavar="N", min=2, help="Tokens per window. The cache is cleared before each.")
]
MaxTokens = Annotated[
    int | None, typer.Option("--max-tokens", metavar="N", min=1, help="At most so many tokens of each domain.")
]
GpuLayers = Annotated[
    int, typer.Option("--n-gpu-layers", metavar="N", help="Layers to put on the GPU; -1 is all of them.")
]
Threads = Annotated[
    int | None, typer.Option("--threads", metavar="N", min=1, help="CPU threads. Default: the physical cores.")
]


DType = Annotated[
    str | None,
    typer.Option("--dtype", metavar="NAME", help="Of a folder's weights: bfloat16 (the default) or float32."),
]
Device = Annotated[
    str | None,
    typer.Option("--device", metavar="NAME", help="Where a folder runs: cpu (the default), cuda, cuda:1, ... or auto."),
]


@dataclass(frozen=True)
class Loading:
    """How a Hugging Face folder is loaded."""

    dtype: DType = None
    device: Device = None

    def folder(self, path: Path) -> Model | None:
        """The model of a folder; None for a file, which has no use for these options.

        Raises `UserError` for options that mean nothing, and where transformers is not installed.
        """
        from importlib.util import find_spec

        from edgemoe.errors import UserError
        from edgemoe.model import read_model

        if not path.is_dir():
            for name, value in vars(self).items():
                if value is not None:
                    raise UserError(f"--{name} is about a Hugging Face folder, {path} is none: leave it out")
            return None
        for needed in ("torch", "transformers"):
            if find_spec(needed) is None:
                raise UserError(f"{path}: a folder needs {needed}: pip install edgemoe[eval], or give a GGUF file")
        return read_model(path)


@dataclass(frozen=True)
class Windows:
    """How the texts are cut, and what runs them."""

    ctx: Ctx = 512
    max_tokens: MaxTokens = None
    n_gpu_layers: GpuLayers = 0
    threads: Threads = None
