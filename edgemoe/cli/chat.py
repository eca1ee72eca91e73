"""`edgemoe chat`: a conversation, whose memory is kept from turn to turn."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from edgemoe.cli import sampling_options as given
from edgemoe.cli.offload_options import Offload
from edgemoe.cli.option_groups import spread
from edgemoe.cli.policy_options import Streaming
from edgemoe.cli.recording import Recording
from edgemoe.cli.stopping import interrupt_on_sigterm

if TYPE_CHECKING:
    from typing import Any

    from edgemoe.cli.recording import Records
    from edgemoe.errors import UserError
    from edgemoe.generation import Options, Writer
    from edgemoe.generation.chat import Message
    from edgemoe.generation.summary import Summary

INTERRUPTED = 130
_NOT_TEXT = "this line is not UTF-8 text: convert it first"
_HELP = "/reset starts a new conversation, /exit (or Ctrl-D) ends; a line that ends in \\ goes on in the next"


@spread
def chat(
    model: given.ModelPath,
    sampling: given.Sampling,
    holding: given.Holding,
    experts: Streaming,
    offload: Offload,
    recording: Recording,
    system: given.System = None,
    chat_template: given.Template = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object (every turn, with figures) at the end.")
    ] = False,
) -> None:
    """Converse with a model that has a chat template. A turn reads only what is new: the context is kept.

    Each line of standard input is a turn, so a conversation can be piped in. Ctrl-C ends a reply, and at the prompt
    the conversation; then the exit code is 130. A turn that cannot be had ends a piped one: what was said before is
    printed all the same.
    """
    from edgemoe.cli.generating import described, loaded
    from edgemoe.cli.recording import inputs_of
    from edgemoe.generation.chat import ChatTemplate

    options, streaming = sampling.options(), offload.settings(experts, holding)
    template = given.read_text("--chat-template", chat_template) if chat_template else None
    interrupt_on_sigterm()
    model = offload.resolved(model)
    experts.check_model(model)
    ChatTemplate.check(model, template)
    with (
        recording.of("chat", model, inputs_of(experts, streaming, chat_template)) as records,
        loaded(model, as_json, streaming, records, **holding.settings()) as writer,
    ):
        writer.template = ChatTemplate.of(writer.engine, template)
        conversation = _Conversation(writer, options, system, records, quiet=as_json)
        interrupted = conversation.hold()
        records.partial = interrupted or conversation.failure is not None
        how = described(writer)
    _report(conversation, how, records, as_json)
    if conversation.failure is not None:
        raise conversation.failure
    if interrupted:
        raise typer.Exit(INTERRUPTED)


def _report(conversation: _Conversation, how: dict[str, Any], records: Records, as_json: bool) -> None:
    """The turns that were had, and how they went. There is nothing to say of a first one that was refused."""
    from edgemoe.cli.figures import print_summary
    from edgemoe.cli.output import counted

    turns, failure = conversation.record, conversation.failure
    if as_json:
        import json

        if turns or failure is None:
            error = {} if failure is None else {"error": str(failure)}
            typer.echo(json.dumps({"turns": turns, **error, **how, **records.as_json()}, allow_nan=False))
    elif conversation.total:
        print_summary(conversation.total, counted(len(turns), "turn"), records)
    elif failure is None and str(records):
        _hint(str(records))


class _Conversation:
    """Turns, until there are no more; what was said and how it went."""

    def __init__(self, writer: Writer, options: Options, system: str | None, records: Records, quiet: bool) -> None:
        self.writer, self.options, self.records, self.quiet = writer, options, records, quiet
        self.opening: list[Message] = [{"role": "system", "content": system}] if system else []
        self.messages: list[Message] = list(self.opening)
        self.record: list[dict[str, Any]] = []
        self.total: Summary | None = None
        self.failure: UserError | None = None
        """Why a piped conversation ended before its end."""

    def hold(self) -> bool:
        """Whether Ctrl-C ended it."""
        from edgemoe.errors import UserError

        person = sys.stdin.isatty()
        if person and not self.quiet:
            name = self.writer.engine.description.replace(" ?B", "")  # a size that llama.cpp has no name for
            _hint(f"{name}. {_HELP}")
        try:
            for line in _turns(person):
                if line == "/exit":
                    break
                if line == "/reset":
                    self.messages = list(self.opening)
                    self.writer.reset()
                elif line in ("/help", "/?"):
                    _hint(_HELP)
                else:
                    self._say(line, person)
        except KeyboardInterrupt:
            return True
        except UserError as error:  # a person was told of it, and goes on
            self.failure = error
        # A person who stops a reply goes on talking; a script that is stopped has been stopped.
        return not person and bool(self.record) and self.record[-1]["finish"] == "interrupted"

    def _say(self, line: str, person: bool) -> None:
        from edgemoe.errors import UserError

        try:
            _check_text(line)
            reply, summary = self._reply(line)
        except UserError as error:
            if not person:
                raise
            print(f"edgemoe: {error}; or /reset", file=sys.stderr)  # noqa: T201
            return
        if not self.quiet:
            typer.echo()
            _print_turn(summary)
        self.messages += [{"role": "user", "content": line}, {"role": "assistant", "content": reply}]
        self.record.append({"user": line, "assistant": reply, **summary.as_json()})
        self.total = self.total.then(summary) if self.total else summary
        if summary.finish == "interrupted" and not person:
            raise KeyboardInterrupt

    def _reply(self, line: str) -> tuple[str, Summary]:
        from edgemoe.cli.generating import perform

        asked: list[Message] = [*self.messages, {"role": "user", "content": line}]
        return perform(self.writer, asked, self.options, self.records, self.quiet, turn=len(self.record))


def _turns(person: bool) -> Iterator[str]:
    """What a person types, or the lines of standard input; empty ones are no turns."""
    if person:
        import readline  # noqa: F401  (gives `input` a line editor and a history)
    while True:
        try:
            line = _line("> " if person else "")
            while line.endswith("\\"):
                line = line[:-1] + "\n" + _line("… " if person else "")
        except EOFError:
            return
        if line.strip():
            yield line


def _check_text(line: str) -> None:
    """Bytes that are no text come as lone surrogates where the locale lets them through."""
    from edgemoe.errors import UserError

    try:
        line.encode()
    except UnicodeEncodeError:
        raise UserError(_NOT_TEXT) from None


def _line(ask: str) -> str:
    from edgemoe.errors import UserError

    if ask:
        return input(ask)
    try:
        line = sys.stdin.readline()
    except UnicodeDecodeError:
        raise UserError(_NOT_TEXT) from None
    if not line:
        raise EOFError
    return line.removesuffix("\n")


def _hint(text: str) -> None:
    from edgemoe.cli.output import errors, say

    say(errors(), text)


def _print_turn(summary: Summary) -> None:
    from rich.text import Text

    from edgemoe.cli.output import counted, errors, say

    parts = [counted(summary.generated_tokens, "token")]
    if summary.tokens_per_s:
        parts.append(f"{summary.tokens_per_s:.1f} tok/s")
    if summary.decode.hit_rate is not None:
        parts.append(f"hit rate {summary.decode.hit_rate:.0%}")
    parts.append(f"context {summary.context_tokens:,} of {summary.n_ctx:,}")
    if summary.finish in ("context", "interrupted"):
        parts.append({"context": "the context is full: /reset", "interrupted": "interrupted"}[summary.finish])
    say(errors(), Text(" · ".join(parts), style="dim"))
