"""A prompt as tokens: plain text to continue, or the turns of a conversation."""

from dataclasses import dataclass

from edgemoe.errors import UserError
from edgemoe.generation.engine import Language


def plain_prompt(engine: Language, text: str) -> list[int]:
    """The text as it stands, after BOS where the model wants one. `UserError` for an empty one."""
    if not text:
        raise UserError("the prompt is empty: give some text")
    start = [] if engine.bos is None else [engine.bos]
    return start + engine.tokenize(text.encode()).tolist()


@dataclass
class Said:
    """What the model was given and what it answered: as text, and as the tokens that it saw."""

    text: bytes
    tokens: list[int]

    def add(self, piece: bytes, token: int) -> None:
        self.text += piece
        self.tokens.append(token)


def chat_prompt(engine: Language, rendered: str, said: Said | None = None) -> list[int]:
    """A rendered conversation as tokens; BOS comes once, whether the template writes it or not.

    Where it goes on from what was `said` by a control token (`<|im_end|>`), the tokens so far are those that the model
    saw: tokenising its answer again can cut it elsewhere, and what the memory holds would be lost. What looks like a
    special token in a message is one: messages are not a boundary of trust.
    """
    text = rendered.encode()
    if said and text.startswith(said.text):
        rest = engine.tokenize(text[len(said.text) :], special=True).tolist()
        if rest and not engine.piece(rest[0]):
            return said.tokens + rest
    tokens = engine.tokenize(text, special=True).tolist()
    if engine.bos is not None and tokens[:1] != [engine.bos]:
        tokens.insert(0, engine.bos)
    return tokens
