"""Options of the commands that run texts through a model and watch its routers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

MoePath = Annotated[
    Path, typer.Argument(metavar="MODEL", help="A Mixture-of-Experts GGUF file; any shard of a split one.")
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


@dataclass(frozen=True)
class Windows:
    """How the texts are cut, and what runs them."""

    ctx: Ctx = 512
    max_tokens: MaxTokens = None
    n_gpu_layers: GpuLayers = 0
    threads: Threads = None
