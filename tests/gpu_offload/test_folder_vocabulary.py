"""Pieces of a Hugging Face folder's tokens: joined, they are the text, whichever kind of tokenizer cut it."""

from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs transformers (pip install edgemoe[eval])")

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from edgemoe.generation.text import TextStream
from edgemoe.gpu_offload.vocabulary import FolderVocabulary

TEXT = "The café’s menu:\n\t• crème brûlée — 7 €\n🙂 end"


def saved(folder: Path, tokenizer: Tokenizer) -> FolderVocabulary:
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    return FolderVocabulary(folder)


def sentencepiece(folder: Path) -> FolderVocabulary:
    """As Mixtral's: spaces are ▁, characters that have no token are their bytes."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    pieces = [*(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"Thecafsmnur:bldé’", "▁c", "é’", "en"]
    for piece in pieces:
        vocabulary.setdefault(piece, len(vocabulary))
    merges = [("▁", "c"), ("é", "’"), ("e", "n")]
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Replace(" ", "▁")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens([AddedToken(name, special=True) for name in ("<s>", "</s>")])
    return saved(folder, made)


def byte_level(folder: Path) -> FolderVocabulary:
    vocabulary = {character: at for at, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, special=True) for name in ("<s>", "</s>")])
    made.add_tokens(["<0x41> ▁"])  # an added token is the text that it is
    return saved(folder, made)


@pytest.mark.parametrize("kind", [sentencepiece, byte_level])
def test_pieces_joined_are_the_text(tmp_path: Path, kind) -> None:
    words = kind(tmp_path)
    tokens = words.tokenize(TEXT.encode()).tolist()
    assert len(tokens) > 30
    assert b"".join(words.piece(token) for token in tokens).decode() == TEXT
    shown = TextStream()
    assert "".join(shown.feed(words.piece(token)) for token in tokens) + shown.finish() == TEXT


def test_sentencepiece_bytes_and_letters(tmp_path: Path) -> None:
    words = sentencepiece(tmp_path)
    pieces = {words.piece(token, special=True): token for token in range(words.size)}
    assert {b"\n", b"\xf0", b" c", "é".encode(), "é’".encode(), b"</s>"} <= pieces.keys()
    assert words.piece(pieces[b"</s>"]) == b"" and words.eos_tokens == {pieces[b"</s>"]}


def test_an_added_token_of_a_byte_level_tokenizer_is_its_own_text(tmp_path: Path) -> None:
    words = byte_level(tmp_path)
    (token,) = words.tokenize("<0x41> ▁".encode()).tolist()
    assert words.piece(token) == "<0x41> ▁".encode()
