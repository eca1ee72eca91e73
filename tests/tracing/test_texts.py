"""Texts: domains, limits, windows, and the mistakes that a person makes with files."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edgemoe.errors import UserError
from edgemoe.tracing.texts import Source, Text, cut_windows, read_sources, tokenize_texts


def by_character(text: bytes) -> np.ndarray:
    """A tokenizer: one token per character."""
    return np.array([ord(character) for character in text.decode()], np.int32)


def read_texts(sources: list[Source], tokenize: Callable[[bytes], np.ndarray], max_tokens: int | None) -> list[Text]:
    return tokenize_texts(sources, read_sources(sources), tokenize, max_tokens)


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_sources_are_parsed(tmp_path: Path) -> None:
    assert Source.parse("code=a/b.py") == Source("code", Path("a/b.py"))
    assert Source.parse("a/b.py") == Source("b", Path("a/b.py"))
    assert Source.parse("a/x=y.py") == Source("x=y", Path("a/x=y.py"))
    assert Source.parse("code=x=y") == Source("code", Path("x=y"))
    there = write(tmp_path / "k=v.txt", "text")
    assert Source.parse(str(there)).path == there
    for wrong in ("=a.txt", "code="):
        with pytest.raises(UserError, match="expected FILE or DOMAIN=FILE"):
            Source.parse(wrong)


def test_the_limit_is_per_domain_over_its_files(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", "a" * 40), write(tmp_path / "b", "b" * 40)
    sources = [Source("x", a), Source("y", b), Source("x", b), Source("x", a)]
    texts = read_texts(sources, by_character, 60)
    assert [(text.source.domain, len(text.tokens)) for text in texts] == [("x", 40), ("y", 40), ("x", 20)]
    assert len(texts[0].sha256) == 64 and texts[0].sha256 != texts[1].sha256


def test_a_long_text_is_not_tokenised_whole(tmp_path: Path) -> None:
    sizes = []

    def tokenize(text: bytes) -> np.ndarray:
        sizes.append(len(text))
        return by_character(text)

    long = write(tmp_path / "long", "ñ" * 500_000)
    [text] = read_texts([Source("x", long)], tokenize, 100)
    assert text.tokens.tolist() == [ord("ñ")] * 100
    assert sum(sizes) < 70_000

    def greedy(text: bytes) -> np.ndarray:  # 10,000 characters per token: the first prefix is not enough
        return np.arange(-(-len(text.decode()) // 10_000), dtype=np.int32)

    [text] = read_texts([Source("x", long)], greedy, 40)
    assert text.tokens.tolist() == list(range(40))


def test_texts_that_cannot_be_traced(tmp_path: Path) -> None:
    short = write(tmp_path / "short", "0123456789")
    with pytest.raises(UserError, match="domain 'x': text too short: 10 tokens, a trace needs at least 32"):
        read_texts([Source("x", short)], by_character, None)
    with pytest.raises(UserError, match="too short: 0 tokens"):
        read_texts([Source("x", write(tmp_path / "empty", ""))], by_character, None)
    latin = tmp_path / "latin"
    latin.write_bytes("Größe".encode("latin-1") * 20)
    with pytest.raises(UserError, match=r"latin: not UTF-8 text \(byte 2\)"):
        read_texts([Source("x", latin)], by_character, None)
    with pytest.raises(UserError, match=r"nope: cannot be read \(No such file"):
        read_sources([Source("x", tmp_path / "nope")])
    with pytest.raises(UserError, match=r"cannot be read \(Is a directory"):
        read_sources([Source("x", tmp_path)])
    with pytest.raises(UserError, match="cannot be read"):
        read_sources([Source("x", Path("a\0b"))])
    with pytest.raises(UserError, match="nothing to trace"):
        read_sources([])


def test_a_pipe_is_read_once_and_whole(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    content = "".join(f"line {i}\n" for i in range(20_000)).encode()  # more than one buffer
    writer = threading.Thread(target=pipe.write_bytes, args=(content,))
    writer.start()
    [text] = read_texts([Source("x", pipe)], by_character, None)
    writer.join()
    assert len(text.tokens) == len(content)


@pytest.mark.parametrize(("bos", "lengths"), [(None, [16, 16, 8, 16, 16, 1]), (99, [16, 16, 11, 16, 16, 4])])
def test_windows(tmp_path: Path, bos: int | None, lengths: list[int]) -> None:
    a, b = write(tmp_path / "a", "a" * 40), write(tmp_path / "b", "b" * 33)
    texts = read_texts([Source("x", a), Source("y", b)], by_character, None)
    windows = cut_windows(texts, 16, bos)
    assert [len(window.tokens) for window in windows] == lengths
    assert bos is None or all(window.tokens[0] == bos for window in windows)
    text = np.concatenate([window.tokens[bos is not None :] for window in windows])
    assert text.tolist() == [ord("a")] * 40 + [ord("b")] * 33
    assert [window.domain for window in windows] == ["x"] * 3 + ["y"] * 3
    assert all(window.tokens.dtype == np.int32 for window in windows)
