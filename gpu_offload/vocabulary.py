"""Text and tokens for the GPU tier: llama.cpp's vocabulary of a GGUF file, or a Hugging Face folder's tokenizer."""

import json
import re
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from edgemoe.errors import UserError
from edgemoe.llamacpp.session import quiet
from edgemoe.llamacpp.vocabulary import Vocabulary
from edgemoe.model import Model

_SPACE = "▁"
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # SentencePiece's token for a byte that no other token holds


def open_vocabulary(model: Model) -> "GgufVocabulary | FolderVocabulary":
    return GgufVocabulary(model.files[0]) if model.format == "GGUF" else FolderVocabulary(model.path)


class GgufVocabulary(Vocabulary):
    """The vocabulary in a GGUF file, loaded by llama.cpp without the weights; `close` frees it."""

    def __init__(self, path: Path) -> None:
        lib: Any = quiet()[0]
        params = lib.llama_model_default_params()
        params.vocab_only = True
        loaded = lib.llama_model_load_from_file(str(path).encode(), params)
        if not loaded:
            raise UserError(f"{path}: llama.cpp cannot read its vocabulary: convert the model again")
        super().__init__(loaded)

    def close(self) -> None:
        if self._model:
            self._lib.llama_model_free(self._model)
            self._model = None


class FolderVocabulary:
    """The tokenizer of a Hugging Face folder, read by transformers when it is first needed; like `Vocabulary`.

    Raises `UserError`, one line, where transformers is not installed or the folder has no tokenizer.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @cached_property
    def _tokenizer(self) -> Any:
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise UserError(
                f"{self._folder}: its tokenizer needs transformers: pip install edgemoe[eval], or use a GGUF file"
            ) from None
        if not any((self._folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
            raise UserError(f"{self._folder}: no tokenizer.json there: download the tokenizer's files too")
        try:
            return AutoTokenizer.from_pretrained(self._folder, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise UserError(f"{self._folder}: its tokenizer cannot be read ({reason}): download it again") from None

    @property
    def size(self) -> int:
        return len(self._tokenizer)

    @cached_property
    def bos(self) -> int | None:
        first = self._tokenizer("a")["input_ids"][:1]
        return self._tokenizer.bos_token_id if first == [self._tokenizer.bos_token_id] else None

    @cached_property
    def eos_tokens(self) -> frozenset[int]:
        found = {self._tokenizer.eos_token_id}
        path = self._folder / "generation_config.json"
        if path.exists():
            try:
                stated = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            except (OSError, ValueError, AttributeError):
                raise UserError(f"{path}: not readable JSON: download it again") from None
            found |= set(stated) if isinstance(stated, list) else {stated}
        return frozenset(token for token in found if isinstance(token, int))

    @property
    def chat_template(self) -> str | None:
        template = self._tokenizer.chat_template
        return template if isinstance(template, str) else None

    def special_text(self, name: str) -> str:
        return getattr(self._tokenizer, f"{name}_token") or ""

    def tokenize(self, text: bytes, *, special: bool = False) -> np.ndarray:
        given = text.decode(errors="replace")
        found = self._tokenizer(given, add_special_tokens=False, split_special_tokens=not special)
        return np.asarray(found["input_ids"], np.int32)

    @cached_property
    def _bytes_of(self) -> dict[str, int]:
        """GPT-2's characters for bytes, backwards."""
        from edgemoe.model.byte_bpe import byte_bpe

        return {character: byte for byte, character in enumerate(byte_bpe(300).tokens[:256])}

    @cached_property
    def _is_sentencepiece(self) -> bool:
        """Whether tokens are text whose spaces are written ▁, and not characters that stand for bytes: there ▁ itself
        is three of them."""
        return any(_SPACE in text for text, token in self._tokenizer.get_vocab().items() if token not in self._added)

    @cached_property
    def _added(self) -> dict[int, Any]:
        added: dict[int, Any] = self._tokenizer.added_tokens_decoder
        return added

    def piece(self, token: int, *, special: bool = False) -> bytes:
        if token in self._added:
            entry = self._added[token]
            return b"" if entry.special and not special else str(entry.content).encode()
        text = self._tokenizer.convert_ids_to_tokens(token) if 0 <= token < self.size else None
        if text is None:  # padding of the output matrix
            return b""
        if self._is_sentencepiece:
            byte = _BYTE.fullmatch(text)
            return bytes([int(byte[1], 16)]) if byte else str(text).replace(_SPACE, " ").encode()
        if all(character in self._bytes_of for character in text):
            return bytes(self._bytes_of[character] for character in text)
        return str(text).encode()

    def close(self) -> None:
        """Nothing to free."""
