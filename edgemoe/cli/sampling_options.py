"""Options of the commands that generate text: how tokens are chosen, and how the model is held."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from typing import Any

    from edgemoe.generation import Options

ModelPath = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL",
        help="A GGUF file; any shard of a split one. With --device also a safetensors folder or a Hugging Face name.",
    ),
]
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
    typer.Option(
        "--kv-type",
        metavar="TYPE",
        help="The context: f16, bf16, q8_0, q5_1, q5_0, q4_1, q4_0 or iq4_nl.",
    ),
]
GpuLayers = Annotated[
    int, typer.Option("--n-gpu-layers", "-ngl", metavar="N", help="Layers to put on the GPU; -1 is all of them.")
]
Template = Annotated[
    Path | None,
    typer.Option("--chat-template", metavar="FILE", help="A Jinja chat template to use instead of the model's own."),
]
System = Annotated[str | None, typer.Option("--system", metavar="TEXT", help="Instructions that precede the chat.")]


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen, and when the text ends."""

    n: Count = None
    temperature: Temperature = 0.8
    greedy: Greedy = False
    top_k: TopK = 40
    top_p: TopP = 0.95
    min_p: MinP = 0.05
    seed: Seed = None
    stop: Stop = None

    def options(self, ignore_eos: bool = False) -> Options:
        """As generation takes them. Raises `UserError` for one that is out of range."""
        from edgemoe.generation import Options

        return Options(
            n=self.n,
            temperature=0.0 if self.greedy else self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            stop=tuple(self.stop or ()),
            ignore_eos=ignore_eos,
        )


@dataclass(frozen=True)
class Holding:
    """How llama.cpp holds the model and its context."""

    ctx: Ctx = None
    threads: Threads = None
    n_gpu_layers: GpuLayers = 0
    kv_type: KvType = "f16"

    def settings(self) -> dict[str, Any]:
        """What `edgemoe.generation.load` is given."""
        return {
            "n_ctx": self.ctx,
            "n_threads": self.threads,
            "n_gpu_layers": self.n_gpu_layers,
            "kv_type": self.kv_type,
        }


def read_text(option: str, path: Path) -> str:
    """A UTF-8 text file; `UserError` where it is missing or none."""
    from edgemoe.errors import UserError

    try:
        return path.read_bytes().decode()
    except OSError as error:
        raise UserError(f"{option} {path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{option} {path}: not UTF-8 text (byte {error.start:,}): convert it first") from None
