"""Batches from a tokenised corpus: seeded random windows, the domains in fixed shares.

A batch is a function of (seed, step) alone, so a resumed run sees what an uninterrupted one would have seen.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from edgemoe.data import DOMAINS
from edgemoe.errors import UserError

BOS = 0  # <|endoftext|> opens every document and every window, in training as in llama.cpp


@dataclass(frozen=True)
class Corpus:
    """Token streams of each domain on one device. Documents are joined; each begins with BOS."""

    train: dict[str, Tensor]  # domain → [N] int16, ids below 2¹⁵
    valid: dict[str, Tensor]
    unigram_entropy: dict[str, float]  # nats per token
    manifest: dict[str, Any]


def load_corpus(directory: Path, device: str) -> Corpus:
    """Read what `scripts/build_corpus` wrote; a `UserError` names what is missing."""
    try:
        manifest = json.loads((directory / "manifest.json").read_text())
        streams = {
            split: {domain: _stream(directory / f"{domain}.{split}.bin", device) for domain in DOMAINS}
            for split in ("train", "valid")
        }
    except FileNotFoundError as missing:
        raise UserError(f"{missing.filename}: not found; run scripts/build_corpus first") from None
    entropy = {domain: _entropy(streams["train"][domain], streams["valid"][domain]) for domain in DOMAINS}
    return Corpus(streams["train"], streams["valid"], entropy, manifest)


def _stream(path: Path, device: str) -> Tensor:
    return torch.from_numpy(np.fromfile(path, dtype="<u2").astype(np.int16)).to(device)


def _entropy(*streams: Tensor) -> float:
    counts = torch.bincount(torch.cat(streams).long()).double()
    probs = counts[counts > 0] / counts.sum()
    return float(-(probs * probs.log()).sum())


def training_batch(corpus: Corpus, step: int, batch: int, context: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets [batch, context] int64: batch // 4 windows of each domain, at random places."""
    rng = np.random.default_rng([seed, step])
    windows = []
    for domain in DOMAINS:
        stream = corpus.train[domain]
        starts = torch.from_numpy(rng.integers(0, len(stream) - context - 1, batch // len(DOMAINS)))
        windows.append(_windows(stream, starts, context))
    return _inputs_and_targets(torch.cat(windows))


def validation_batches(
    corpus: Corpus, domain: str, batch: int, context: int, limit: int
) -> list[tuple[Tensor, Tensor]]:
    """The domain's held-out stream in consecutive windows, at most `limit` tokens of it."""
    stream = corpus.valid[domain]
    count = min(limit, len(stream) - 1) // context
    if count < 1:
        raise UserError(f"the {domain} validation text has {len(stream)} tokens, fewer than one window of {context}")
    starts = torch.arange(count) * context
    return [_inputs_and_targets(_windows(stream, part, context)) for part in starts.split(batch)]


def _windows(stream: Tensor, starts: Tensor, context: int) -> Tensor:  # [n, context + 1]
    if stream.is_cuda:  # pinned, so that the copy does not wait for the step before it
        starts = starts.pin_memory().to(stream.device, non_blocking=True)
    return stream[starts[:, None] + torch.arange(context + 1, device=stream.device)].long()


def _inputs_and_targets(windows: Tensor) -> tuple[Tensor, Tensor]:
    inputs, targets = windows[:, :-1].clone(), windows[:, 1:].contiguous()
    inputs[:, 0] = BOS
    return inputs, targets
