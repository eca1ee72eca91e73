"""Text and tokens of a loaded model: its tokenizer, the tokens that end a turn, and its chat template."""

import ctypes
from functools import cached_property
from typing import Any

import numpy as np

from edgemoe.errors import UserError
from edgemoe.llamacpp.session import quiet


class Vocabulary:
    """The vocabulary of the model behind a `llama_model` pointer; valid as long as that is."""

    def __init__(self, model: Any) -> None:
        self._lib: Any = quiet()[0]
        self._model = model
        self._vocab = self._lib.llama_model_get_vocab(model)

    @cached_property
    def size(self) -> int:
        return int(self._lib.llama_vocab_n_tokens(self._vocab))

    @cached_property
    def bos(self) -> int | None:
        """The token that a text starts with, where the model wants one."""
        return int(self._lib.llama_vocab_bos(self._vocab)) if self._lib.llama_vocab_get_add_bos(self._vocab) else None

    @cached_property
    def eos_tokens(self) -> frozenset[int]:
        """Every token that ends a text or a turn (`<|endoftext|>`, `<|im_end|>`, …)."""
        return frozenset(token for token in range(self.size) if self._lib.llama_vocab_is_eog(self._vocab, token))

    @cached_property
    def chat_template(self) -> str | None:
        """The Jinja template in the model file, if it has one."""
        template = self._lib.llama_model_chat_template(self._model, None)
        return template.decode(errors="replace") if template else None

    def special_text(self, name: str) -> str:
        """The text of the `bos` or `eos` token, as chat templates write it; empty where there is none."""
        token = int(getattr(self._lib, f"llama_vocab_{name}")(self._vocab))
        return self.piece(token, special=True).decode(errors="replace") if token >= 0 else ""

    def tokenize(self, text: bytes, *, special: bool = False) -> np.ndarray:
        """Token ids, [T] int32, without BOS; `special` reads `<|im_end|>` and the like as the tokens they name."""
        tokens = np.empty(len(text) + 16, np.int32)
        pointer = tokens.ctypes.data_as(ctypes.POINTER(self._lib.llama_token))
        count = self._lib.llama_tokenize(self._vocab, text, len(text), pointer, len(tokens), False, special)
        if count < 0:
            raise UserError(f"the model's tokenizer fails on a text of {len(text)} bytes")
        return tokens[:count].copy()

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes that a token adds to a text: nothing for control tokens, their names if `special`."""
        if not 0 <= token < self.size:
            raise ValueError(f"no token {token}: the vocabulary has {self.size}")
        buffer = ctypes.create_string_buffer(64)
        size = self._lib.llama_token_to_piece(self._vocab, token, buffer, len(buffer), 0, special)
        if size < 0:
            buffer = ctypes.create_string_buffer(-size)
            size = self._lib.llama_token_to_piece(self._vocab, token, buffer, len(buffer), 0, special)
        return buffer.raw[:size]


class Speaker:
    """The part of an engine that is its model's vocabulary: an engine sets `_vocabulary` once the model is loaded."""

    _vocabulary: Vocabulary

    @property
    def n_vocab(self) -> int:
        return self._vocabulary.size

    @property
    def bos(self) -> int | None:
        return self._vocabulary.bos

    @property
    def eos_tokens(self) -> frozenset[int]:
        return self._vocabulary.eos_tokens

    @property
    def chat_template(self) -> str | None:
        return self._vocabulary.chat_template

    def special_text(self, name: str) -> str:
        return self._vocabulary.special_text(name)

    def tokenize(self, text: bytes, *, special: bool = False) -> np.ndarray:
        return self._vocabulary.tokenize(text, special=special)

    def piece(self, token: int, *, special: bool = False) -> bytes:
        return self._vocabulary.piece(token, special=special)
