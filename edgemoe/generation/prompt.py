"""A prompt as tokens: plain text to continue, or the turns of a conversation."""

from collections.abc import Sequence

from edgemoe.errors import UserError
from edgemoe.generation.chat import ChatTemplate, Message
from edgemoe.generation.engine import Engine


def plain_prompt(engine: Engine, text: str) -> list[int]:
    """The text as it stands, after BOS where the model wants one. `UserError` for an empty one."""
    if not text:
        raise UserError("the prompt is empty: give some text")
    start = [] if engine.bos is None else [engine.bos]
    return start + engine.tokenize(text.encode()).tolist()


def chat_prompt(engine: Engine, template: ChatTemplate, messages: Sequence[Message]) -> list[int]:
    """The conversation up to the opening of the assistant's turn. BOS comes once, whether the template writes it or
    not. What looks like a special token in a message is one: messages are not a boundary of trust."""
    tokens = engine.tokenize(template.render(messages).encode(), special=True).tolist()
    if engine.bos is not None and tokens[:1] != [engine.bos]:
        tokens.insert(0, engine.bos)
    return tokens
