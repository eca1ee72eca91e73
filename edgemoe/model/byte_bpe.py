"""A byte-level BPE vocabulary of any size ≥ 257, for synthetic models: every text can be tokenised.

256 byte tokens, one special token, then strings of frequent letters, each with the merge that makes it, so that the
vocabulary and its merges look like a real tokenizer's to a parser and to llama.cpp (pre-tokenizer "gpt-2").
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice, product

END_OF_TEXT = "<|endoftext|>"
N_BYTES = 256
_LETTERS = "etaoinshrdlucmfwypvbgkjqxz"
_SPACE = "Ġ"  # how byte-level BPE writes a space


@dataclass(frozen=True)
class ByteBpe:
    """Tokens in id order, their GGUF types (1 normal, 3 control), and the merges in rank order."""

    tokens: list[str]
    types: list[int]
    merges: list[str]
    end_of_text: int = N_BYTES


def byte_bpe(n_vocab: int) -> ByteBpe:
    """The vocabulary with exactly `n_vocab` tokens; ids 0–255 are the bytes, 256 is `<|endoftext|>`."""
    if n_vocab <= N_BYTES + 1:
        raise ValueError(f"n_vocab is {n_vocab}; 256 bytes, a special token and a merge need at least {N_BYTES + 2}")
    words = list(islice(_words(), n_vocab - N_BYTES - 1))
    return ByteBpe(
        tokens=[*_byte_characters(), END_OF_TEXT, *words],
        types=[1] * N_BYTES + [3] + [1] * len(words),
        merges=[f"{word[:-1]} {word[-1]}" for word in words],
    )


def _byte_characters() -> list[str]:
    """GPT-2's printable character for each byte: itself where printable, else the next from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    spare = count(256)
    return [chr(byte if byte in printable else next(spare)) for byte in range(N_BYTES)]


def _words() -> Iterator[str]:
    """Strings of letters, shortest first, with or without a leading space; each is a shorter one plus a letter."""
    for length in count(1):
        for rest in product(_LETTERS, repeat=length):
            word = "".join(rest)
            yield _SPACE + word
            if length > 1:
                yield word
