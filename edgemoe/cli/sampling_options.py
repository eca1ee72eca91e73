"""Options of the commands that generate text: how tokens are chosen, and how the model is held."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from edgemoe.generation import Options

ModelPath = Annotated[Path, typer.Argument(metavar="MODEL", help="A GGUF file; any shard of a split one.")]
Count = Annotated[
    int | None,
    typer.Option(
        "-n",
        "--n-predict",
        metavar="N",
        help="Generate at most so many tokens. Default: until the model ends the text, or the context is full.",
    ),
]
Ctx = Annotated[
    int | None,
    typer.Option(
        "-c",
        "--ctx",
        metavar="N",
        min=1,
        help="Tokens that the context holds, prompt included. Default: 4096, or what the model was trained for.",
    ),
]
Temperature = Annotated[
    float, typer.Option("--temperature", "--temp", metavar="X", help="How freely tokens are drawn; 0 is greedy.")
]
Greedy = Annotated[bool, typer.Option("--greedy", help="Always the likeliest token: short for --temperature 0.")]
TopK = Annotated[int, typer.Option("--top-k", metavar="K", help="Draw from the K likeliest tokens; 0: from all.")]
TopP = Annotated[
    float, typer.Option("--top-p", metavar="P", help="Draw from the likeliest tokens that reach probability P; 1: all.")
]
MinP = Annotated[
    float,
    typer.Option("--min-p", metavar="P", help="Draw from tokens at least P times as likely as the best; 0: all."),
]
Seed = Annotated[
    int | None,
    typer.Option(
        "--seed",
        metavar="N",
        help="Same model, settings, prompt and seed: same text. Default: a new one each time, shown in the summary.",
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option("--stop", metavar="TEXT", help="End before this text; may be given again."),
]
Threads = Annotated[
    int | None, typer.Option("--threads", metavar="N", min=1, help="CPU threads. Default: the physical cores.")
]
KvType = Annotated[
    str,
    typer.Option("--kv-type", metavar="TYPE", help="How the context is stored: f16, bf16, q8_0 or q4_0."),
]
GpuLayers = Annotated[
    int, typer.Option("--n-gpu-layers", "-ngl", metavar="N", help="Layers to put on the GPU; -1 is all of them.")
]
Template = Annotated[
    Path | None,
    typer.Option("--chat-template", metavar="FILE", help="A Jinja chat template to use instead of the model's own."),
]
System = Annotated[str | None, typer.Option("--system", metavar="TEXT", help="Instructions that precede the chat.")]


def sampling(
    n: int | None,
    temperature: float,
    greedy: bool,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int | None,
    stop: list[str] | None,
    ignore_eos: bool = False,
) -> Options:
    """The options as one value. Raises `UserError` for one that is out of range."""
    from edgemoe.generation import Options

    return Options(
        n=n,
        temperature=0.0 if greedy else temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
    )


def read_text(option: str, path: Path) -> str:
    """A UTF-8 text file; `UserError` where it is missing or none."""
    from edgemoe.errors import UserError

    try:
        return path.read_bytes().decode()
    except OSError as error:
        raise UserError(f"{option} {path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{option} {path}: not UTF-8 text (byte {error.start:,}): convert it first") from None
