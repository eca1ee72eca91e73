"""The texts to trace: `FILE` or `DOMAIN=FILE`, as tokens, cut into windows."""

import codecs
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgemoe.errors import UserError

MIN_TOKENS = 32  # per domain: less says nothing about routing
# Far more than a token is long, so that a prefix is enough where only so many tokens are wanted.
_BYTES_PER_TOKEN = 32


@dataclass(frozen=True)
class Source:
    """A text file and the domain that its tokens belong to."""

    domain: str
    path: Path

    @classmethod
    def parse(cls, text: str) -> "Source":
        """`code=main.py`, or `main.py` (its domain is then `main`)."""
        domain, equals, name = text.partition("=")
        if not equals or "/" in domain or Path(text).exists():
            return cls(Path(text).stem, Path(text))
        if not domain or not name:
            raise UserError(f"-f {text}: expected FILE or DOMAIN=FILE")
        return cls(domain, Path(name))


@dataclass(frozen=True)
class Text:
    """A source as tokens: without BOS, at most as many as were asked for."""

    source: Source
    sha256: str
    tokens: np.ndarray  # [T] int32


@dataclass(frozen=True)
class Window:
    """Tokens that are decoded from an empty cache: BOS, where there is one, included."""

    domain: str
    tokens: np.ndarray  # [T] int32


def read_sources(sources: Sequence[Source]) -> list[bytes]:
    """The contents of every file, each read once, since a pipe gives them only once.

    Raises `UserError` for the first that cannot be read: before minutes go into loading a model.
    """
    if not sources:
        raise UserError("nothing to trace: give a text with -f FILE or -f DOMAIN=FILE")
    return [_read(source.path) for source in sources]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:  # a NUL in the name
        raise UserError(f"{str(path)!r}: cannot be read ({error})") from None


def tokenize_texts(
    sources: Sequence[Source],
    contents: Sequence[bytes],
    tokenize: Callable[[bytes], np.ndarray],
    max_tokens: int | None,
) -> list[Text]:
    """Tokenise every source, at most `max_tokens` per domain over all of its files.

    Raises `UserError` for a text that is not UTF-8, and for a domain with fewer than `MIN_TOKENS` tokens.
    """
    counts: dict[str, int] = dict.fromkeys((source.domain for source in sources), 0)
    texts = []
    for source, data in zip(sources, contents, strict=True):
        left = None if max_tokens is None else max_tokens - counts[source.domain]
        tokens = _tokens(source, data, tokenize, left)
        counts[source.domain] += len(tokens)
        texts.append(Text(source, hashlib.sha256(data).hexdigest(), tokens))
    for domain, count in counts.items():
        if count < MIN_TOKENS:
            raise UserError(f"domain {domain!r}: text too short: {count} tokens, a trace needs at least {MIN_TOKENS}")
    return [text for text in texts if len(text.tokens)]


def _tokens(source: Source, data: bytes, tokenize: Callable[[bytes], np.ndarray], limit: int | None) -> np.ndarray:
    size = len(data) if limit is None else max(limit * _BYTES_PER_TOKEN, 1 << 16)
    while True:
        decoder = codecs.getincrementaldecoder("utf-8")()
        try:
            text = decoder.decode(data[:size], final=size >= len(data))
        except UnicodeDecodeError as error:
            raise UserError(f"{source.path}: not UTF-8 text (byte {error.start}): convert it first") from None
        tokens = tokenize(text.encode())
        # The cut may split a token, so a prefix must give clearly more than are wanted.
        if limit is None or size >= len(data) or len(tokens) > limit + limit // 8 + 64:
            return tokens if limit is None else tokens[: max(limit, 0)]
        size *= 2


def cut_windows(texts: Sequence[Text], n_ctx: int, bos: int | None) -> list[Window]:
    """Windows of `n_ctx` tokens, each starting with BOS where there is one; a partial last window is kept."""
    start = [] if bos is None else [bos]
    step = n_ctx - len(start)
    return [
        Window(text.source.domain, np.concatenate([start, text.tokens[at : at + step]]).astype(np.int32))
        for text in texts
        for at in range(0, len(text.tokens), step)
    ]
