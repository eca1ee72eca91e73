"""`edgemoe run`: a text, token by token."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgemoe.cli import sampling_options as given
from edgemoe.cli.offload_options import Offload
from edgemoe.cli.option_groups import spread
from edgemoe.cli.policy_options import Streaming
from edgemoe.cli.recording import Recording
from edgemoe.cli.stopping import interrupt_on_sigterm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edgemoe.generation import Writer
    from edgemoe.generation.chat import Message

INTERRUPTED = 130
_MEANINGLESS = "--system and --chat-template mean nothing to a text that is continued as it stands"


@spread
def run(
    model: given.ModelPath,
    sampling: given.Sampling,
    holding: given.Holding,
    experts: Streaming,
    offload: Offload,
    recording: Recording,
    prompt: Annotated[str | None, typer.Option("-p", "--prompt", metavar="TEXT", help="The prompt.")] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "-f", "--file", metavar="FILE", help="Read the prompt from a UTF-8 text. Default: from standard input."
        ),
    ] = None,
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
    parallel: Annotated[
        int | None,
        typer.Option(
            "--parallel",
            metavar="B",
            min=1,
            help='With --ram: every line is a prompt of its own (or JSON, {"prompt": TEXT, "n": N}), and B texts are'
            " written at a time, of -c tokens each; experts that several need are read once.",
        ),
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on where the model would end the text.")] = False,
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
    from edgemoe.cli.figures import print_summary
    from edgemoe.cli.generating import described, loaded, perform
    from edgemoe.cli.recording import inputs_of
    from edgemoe.errors import UserError

    if parallel is not None and offload.device is not None:
        raise UserError("--parallel reads experts from disk, --device holds them all in RAM: leave one out")
    options, streaming = sampling.options(ignore_eos), offload.settings(experts, holding)
    text = _prompt(prompt, file)
    template = given.read_text("--chat-template", chat_template) if chat_template else None
    interrupt_on_sigterm()
    model = offload.resolved(model)
    experts.check_model(model)
    _check_chat(model, chat, system, template)
    if parallel is not None:
        from edgemoe.cli.prompts import run_prompts

        recording.refuse("--parallel")
        templating = chat, system, template
        if run_prompts(model, parallel, text, options, streaming, holding.settings(), templating, quiet=as_json):
            raise typer.Exit(INTERRUPTED)
        return
    with (
        recording.of("run", model, inputs_of(experts, streaming, file, chat_template)) as records,
        loaded(model, as_json, streaming, records, **holding.settings()) as writer,
    ):
        asked = _asked(writer, text, chat, system, template)
        written, summary = perform(writer, asked, options, records, quiet=as_json)
        records.partial = summary.finish == "interrupted"
        how = described(writer)
    if as_json:
        import json

        typer.echo(json.dumps({"text": written, **summary.as_json(), **how, **records.as_json()}, allow_nan=False))
    else:
        typer.echo()
        print_summary(summary, "generated", records)
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


def _check_chat(model: Path, chat: bool | None, system: str | None, template: str | None) -> None:
    """Refuse, before the model is loaded, what its header shows to be impossible."""
    from edgemoe.errors import UserError
    from edgemoe.generation.chat import ChatTemplate

    if chat is False and (system or template):
        raise UserError(_MEANINGLESS)
    if chat or (chat is None and template is not None):
        ChatTemplate.check(model, template)


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
            raise UserError(_MEANINGLESS)
        return text
    writer.template = ChatTemplate.of(writer.engine, template)
    before: list[Message] = [{"role": "system", "content": system}] if system else []
    return [*before, {"role": "user", "content": text}]
