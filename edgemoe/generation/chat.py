"""Chat templates: the turns of a conversation as the text that a model was trained on."""

from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from edgemoe.errors import UserError
from edgemoe.generation.engine import Language

_KEY = "tokenizer.chat_template"


class Message(TypedDict):
    """One turn; `role` is system, user or assistant."""

    role: str
    content: str


class ChatTemplate:
    """A Jinja template, run in llama-cpp-python's sandbox with the extensions that published templates use."""

    def __init__(self, source: str, *, bos: str = "", eos: str = "") -> None:
        from jinja2 import TemplateError
        from llama_cpp.llama_chat_format import Jinja2ChatFormatter

        try:
            self._format = Jinja2ChatFormatter(source, eos_token=eos, bos_token=bos)
        except TemplateError as error:
            raise UserError(f"the chat template is no valid Jinja template: {_first_line(error)}") from None

    @classmethod
    def of(cls, engine: Language, source: str | None = None) -> "ChatTemplate":
        """The model's own template, or `source` in its place. Raises `UserError` where there is neither."""
        source = source if source is not None else engine.chat_template
        if source is None:
            raise _missing()
        return cls(source, bos=engine.special_text("bos"), eos=engine.special_text("eos"))

    @classmethod
    def check(cls, model: str | Path, source: str | None = None) -> None:
        """Raise what `of` would raise for an engine on this model, before it is loaded; a folder is not asked."""
        from edgemoe.llamacpp.header import read_header
        from edgemoe.model import read_model

        if source is None:
            found = read_model(model)
            if found.format != "GGUF":
                return
            stated = read_header(found.files[0]).values.get(_KEY)
            if not isinstance(stated, str) or not stated:
                raise _missing()
            source = stated
        cls(source)

    def render(self, messages: Sequence[Message]) -> str:
        """The conversation so far and the opening of the assistant's turn.

        Raises `UserError` where the template refuses it (some know no system turn), with the template's own words.
        """
        try:
            return str(self._format(messages=list(messages)).prompt)
        # A template is a program from a model file: whatever it raises is about this conversation, and one line.
        except Exception as error:
            raise UserError(f"the chat template refuses this conversation: {_first_line(error)}") from None


def _missing() -> UserError:
    return UserError(
        "this model has no chat template (a base model, not trained to converse): use edgemoe run, or give one with"
        " --chat-template"
    )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
