"""What may enter the corpus: the same cleaning, quality bounds and duplicate keys for every document."""

import hashlib
import re
from collections import Counter

SHORTEST = 400
"""Documents with fewer characters are dropped: they teach boundaries, not language."""

SPECIALS = ("<|endoftext|>", "<|pad|>")

_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufeff\ufffd\ud800-\udfff]")
_ENGLISH = re.compile(r"\b(?:the|of|and|to|is|in|a|for|or|that)\b", re.I)


def clean(text: str) -> str:
    """Unix line ends, no control characters or special tokens, no unbroken runs (base64), at most two blank lines."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\t", "    ")
    text = re.sub(r"[^\n]\x08", "", text)
    for special in SPECIALS:
        text = text.replace(special, "")
    text = re.sub(r"^.*\S{160,}.*\n?", "", _CONTROL.sub("", text), flags=re.M)
    text = re.sub(r"([-=_*#~+.])\1{11,}", r"\1\1\1\1\1\1\1\1\1\1\1\1", text)
    text = re.sub(r"[ ]+$", "", text, flags=re.M)
    return re.sub(r"\n{4,}", "\n\n\n", text).strip("\n") + "\n"


def acceptable(text: str, domain: str) -> bool:
    """Long enough, made of words rather than numbers, and, where the domain is language, English."""
    if len(text) < SHORTEST:
        return False
    solid = len(re.sub(r"\s+", "", text))
    letters = sum(map(str.isalpha, text))
    digits = sum(map(str.isdigit, text))
    foreign = sum(character > "\u024f" for character in text) if not text.isascii() else 0
    if digits > 0.18 * solid or foreign > (0.3 if domain == "math" else 0.08) * solid:
        return False
    if letters < (0.3 if domain == "math" else 0.55) * solid:
        return False
    return domain in ("code", "math") or len(_ENGLISH.findall(text)) * 120 > len(text)


def pieces(text: str, longest: int) -> list[str]:
    """`text` cut at blank lines (or line ends, in a long paragraph) into pieces of about `longest` characters."""
    if len(text) <= longest:
        return [text]
    found, start = [], 0
    while len(text) - start > longest:
        cut = text.rfind("\n\n", start + longest // 2, start + longest)
        cut = cut if cut > 0 else text.rfind("\n", start + longest // 2, start + longest)
        cut = cut if cut > 0 else start + longest
        found.append(text[start:cut].strip("\n") + "\n")
        start = cut
    return [*found, text[start:].strip("\n") + "\n"]


def drop_repeated_lines(texts: list[str], share: float = 0.4) -> list[str]:
    """`texts` without the lines that more than `share` of them have: a site's navigation, a licence, a footer."""
    if len(texts) < 20:
        return texts
    common = Counter(line for text in texts for line in {line.strip() for line in text.split("\n")} if line)
    boilerplate = {line for line, count in common.items() if count > share * len(texts)}
    return ["\n".join(line for line in text.split("\n") if line.strip() not in boilerplate) for text in texts]


def exact_key(text: str) -> str:
    """SHA-256 of the document: its identity in splitting, ordering and deduplication."""
    return hashlib.sha256(text.encode()).hexdigest()


def near_key(text: str) -> str:
    """Digest of the letters alone, so that versions, dates, white space and punctuation do not tell copies apart."""
    return hashlib.sha1(re.sub(r"[\W\d_]+", "", text.lower()).encode(), usedforsecurity=False).hexdigest()
