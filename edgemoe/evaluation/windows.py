"""Texts as windows of token ids, all of one length, so that every window counts alike."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from edgemoe.errors import UserError
from edgemoe.evaluation.results import fingerprint
from edgemoe.tracing.texts import Source

SELFGEN = "selfgen"


class Words(Protocol):
    """What cutting needs of a vocabulary: `edgemoe.gpu_offload.vocabulary.open_vocabulary` gives one."""

    @property
    def bos(self) -> int | None: ...

    def tokenize(self, text: bytes, *, special: bool = False) -> np.ndarray: ...


def text_windows(
    sources: Sequence[Source], contents: Sequence[bytes], words: Words, count: int, length: int
) -> dict[str, list[np.ndarray]]:
    """By domain, its first `count` windows [length] int64: BOS where the model wants one, then consecutive text.

    Raises `UserError` for a text that is not UTF-8, and for a domain that does not fill `count` windows.
    """
    if count < 2:
        raise UserError(f"--windows {count}: an interval needs at least 2")
    if length < 8:
        raise UserError(f"--ctx {length}: a window needs at least 8 tokens")
    start = [] if words.bos is None else [words.bos]
    step = length - len(start)
    found: dict[str, list[np.ndarray]] = {source.domain: [] for source in sources}
    held = dict.fromkeys(found, 0)
    for source, data in zip(sources, contents, strict=True):
        if source.domain == SELFGEN:
            raise UserError(f"-f {source.domain}={source.path}: {SELFGEN} is what the model writes, name it otherwise")
        tokens = words.tokenize(_utf8(source, data)).astype(np.int64)
        held[source.domain] += len(tokens)
        whole = [tokens[at : at + step] for at in range(0, len(tokens) - step + 1, step)]
        found[source.domain] += [np.concatenate([start, part]).astype(np.int64) for part in whole]
    for domain, windows in found.items():
        if not windows:
            raise UserError(
                f"{domain}: text too short, {held[domain]:,} tokens, for a window of {length:,}: give more text, or a "
                "smaller --ctx"
            )
        if len(windows) < count:
            raise UserError(
                f"{domain}: its text fills {len(windows):,} windows of {length:,} tokens, {count:,} were asked for: "
                "give more text, a smaller --ctx or fewer --windows"
            )
        del windows[count:]
    return found


def fingerprint_of(windows: Sequence[np.ndarray]) -> str:
    """What two results must share to be compared: the very tokens, window by window."""
    return fingerprint(np.asarray(window, "<i8").tobytes() for window in windows)


def _utf8(source: Source, data: bytes) -> bytes:
    try:
        data.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{source.path}: not UTF-8 text (byte {error.start}): convert it first") from None
    return data
