"""Options that the commands which measure quality share: the model, how much of it is held, and how it is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

INTERRUPTED = 130

ModelOrFolder = Annotated[
    Path, typer.Argument(metavar="MODEL", help="A Mixture-of-Experts GGUF file, or a Hugging Face model folder.")
]
Held = Annotated[
    str,
    typer.Option("--residency", metavar="AMOUNT", help="Experts held: a share (50%), slots per layer (32) or bytes."),
]
Threads = Annotated[
    int | None, typer.Option("--threads", metavar="N", min=1, help="CPU threads. Default: the physical cores.")
]
DType = Annotated[
    str | None,
    typer.Option("--dtype", metavar="NAME", help="torch, offload: weights as bfloat16 (the default) or float32."),
]
Device = Annotated[
    str | None, typer.Option("--device", metavar="NAME", help="torch: cpu (the default), cuda, cuda:1, ... or auto.")
]
