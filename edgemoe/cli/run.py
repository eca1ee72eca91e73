"""`edgemoe run`: a text, token by token."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgemoe.cli import policy_options as held
from edgemoe.cli import sampling_options as given
from edgemoe.cli.stopping import interrupt_on_sigterm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edgemoe.generation import Writer
    from edgemoe.generation.chat import Message

INTERRUPTED = 130


def run(
    model: given.ModelPath,
    prompt: Annotated[str | None, typer.Option("-p", "--prompt", metavar="TEXT", help="The prompt.")] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "-f", "--file", metavar="FILE", help="Read the prompt from a UTF-8 text. Default: from standard input."
        ),
    ] = None,
    n: given.Count = None,
    ctx: given.Ctx = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Put the prompt to the model as a user's turn, by its chat template, or let it continue the text as it"
            " stands. Default: --chat where the model has a template.",
        ),
    ] = None,
    system: given.System = None,
    chat_template: given.Template = None,
    temperature: given.Temperature = 0.8,
    greedy: given.Greedy = False,
    top_k: given.TopK = 40,
    top_p: given.TopP = 0.95,
    min_p: given.MinP = 0.05,
    seed: given.Seed = None,
    stop: given.Stop = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on where the model would end the text.")] = False,
    threads: given.Threads = None,
    n_gpu_layers: given.GpuLayers = 0,
    kv_type: given.KvType = "f16",
    ram: held.Ram = None,
    residency: held.ExpertsHeld = None,
    policy: held.PolicyName = None,
    routing: held.Routing = None,
    eviction: held.Eviction = None,
    prefetch: held.Prefetch = None,
    lam: held.Lambda = None,
    budget: held.Budget = None,
    window: held.Window = None,
    gate: held.Gate = None,
    calibration: held.CalibrationFile = None,
    readers: held.Readers = None,
    chunk: held.Chunk = None,
    verify_reads: held.VerifyReads = False,
    metrics: Annotated[
        Path | None, typer.Option("--metrics", metavar="FILE.jsonl", help="Write a line of figures per token.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object (text and figures) and nothing else.")
    ] = False,
) -> None:
    """Generate text from a prompt, token by token, and say how fast it was and why.

    Standard output gets the text and nothing else; progress and the summary go to standard error. One line break at the
    end of a file or of standard input is no part of the prompt. Top-k, top-p, min-p and the temperature apply in this
    order.

    Exit code 130 if Ctrl-C or SIGTERM ended it: the text so far and the summary are printed all the same.
    """
    from edgemoe.cli.generating import Metrics, described, loaded, perform, print_summary
    from edgemoe.cli.options import writable_file

    options = given.sampling(n, temperature, greedy, top_k, top_p, min_p, seed, stop, ignore_eos)
    streaming = held.streaming(
        ram,
        residency,
        policy,
        routing,
        eviction,
        prefetch,
        lam,
        budget,
        window,
        gate,
        calibration,
        readers,
        chunk,
        verify_reads,
    )
    text = _prompt(prompt, file)
    template = given.read_text("--chat-template", chat_template) if chat_template else None
    writable_file("--metrics", metrics)
    interrupt_on_sigterm()
    settings = {"n_ctx": ctx, "n_threads": threads, "kv_type": kv_type}
    with loaded(model, as_json, streaming, n_gpu_layers, **settings) as writer, Metrics(metrics) as lines:
        asked = _asked(writer, text, chat, system, template)
        written, summary = perform(writer, asked, options, lines, quiet=as_json)
        how = described(writer)
    if as_json:
        import json

        typer.echo(json.dumps({"text": written, **summary.as_json(), **how}, allow_nan=False))
    else:
        typer.echo()
        print_summary(summary, "generated")
    if summary.finish == "interrupted":
        raise typer.Exit(INTERRUPTED)


def _prompt(prompt: str | None, file: Path | None) -> str:
    from edgemoe.errors import UserError

    if prompt is not None and file is not None:
        raise UserError("-p and -f both give the prompt: give one")
    if prompt is not None:
        text = prompt
    elif file is not None:
        text = given.read_text("-f", file).removesuffix("\n")
    elif sys.stdin.isatty():
        raise UserError("no prompt: give one with -p or -f, pipe it in, or converse with edgemoe chat")
    else:
        try:
            text = sys.stdin.buffer.read().decode().removesuffix("\n")
        except UnicodeDecodeError as error:
            raise UserError(f"standard input is not UTF-8 text (byte {error.start:,}): convert it first") from None
    if not text:
        raise UserError("the prompt is empty: give some text")
    return text


def _asked(
    writer: Writer, text: str, chat: bool | None, system: str | None, template: str | None
) -> str | Sequence[Message]:
    """The text as it is, or as a user's turn."""
    from edgemoe.errors import UserError
    from edgemoe.generation.chat import ChatTemplate

    if chat is None:
        chat = writer.engine.chat_template is not None or template is not None
    if not chat:
        if system or template:
            raise UserError("--system and --chat-template mean nothing to a text that is continued as it stands")
        return text
    writer.template = ChatTemplate.of(writer.engine, template)
    before: list[Message] = [{"role": "system", "content": system}] if system else []
    return [*before, {"role": "user", "content": text}]
