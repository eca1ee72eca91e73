"""Training on a tiny corpus: it learns, and an interrupted run ends where an uninterrupted one does."""

import itertools
import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the training code needs torch (pip install edgemoe[gpu])")

from edgemoe.errors import UserError  # noqa: E402
from edgemoe.training import loop  # noqa: E402
from edgemoe.training.data import DOMAINS, load_corpus, training_batch, validation_batches  # noqa: E402
from edgemoe.training.loop import TrainConfig, train  # noqa: E402
from edgemoe.training.model import ModelConfig  # noqa: E402

CONFIG = TrainConfig(
    model=ModelConfig(vocab_size=64, d_model=32, n_layers=2, n_heads=2, n_experts=4, top_k=2, d_expert=16, context=32),
    steps=30,
    batch=8,
    warmup=5,
    peak_lr=1e-2,
    valid_tokens=256,
    validate_every=10,
)


@pytest.fixture
def corpus_dir(tmp_path: Path) -> Path:
    """Each domain counts upwards from its own start: fully predictable text."""
    for index, domain in enumerate(DOMAINS):
        for split, length in (("train", 4000), ("valid", 400)):
            (np.arange(length) % (8 + index) + 2).astype("<u2").tofile(tmp_path / f"{domain}.{split}.bin")
    (tmp_path / "manifest.json").write_text("{}")
    return tmp_path


def test_a_batch_is_a_function_of_seed_and_step(corpus_dir: Path) -> None:
    corpus = load_corpus(corpus_dir, "cpu")
    first, again, other = (training_batch(corpus, step, 8, 32, seed=1) for step in (5, 5, 6))
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0], other[0])


def test_windows_open_with_bos_and_targets_are_the_next_tokens(corpus_dir: Path) -> None:
    inputs, targets = training_batch(load_corpus(corpus_dir, "cpu"), 0, 8, 32, seed=1)
    assert inputs.shape == targets.shape == (8, 32)
    assert (inputs[:, 0] == 0).all()
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_validation_covers_the_stream_once(corpus_dir: Path) -> None:
    corpus = load_corpus(corpus_dir, "cpu")
    batches = validation_batches(corpus, "code", 5, 32, limit=10**9)
    targets = torch.cat([targets for _, targets in batches]).flatten()
    assert torch.equal(targets, corpus.valid["code"][1 : 1 + len(targets)].long())
    assert len(targets) == 12 * 32


def interrupting(step: Callable[..., object], after: int) -> Callable[..., object]:
    """`step`, with Ctrl-C pressed during its `after`-th call."""
    calls = itertools.count(1)

    def run(*arguments: object) -> object:
        if next(calls) == after:
            os.kill(os.getpid(), signal.SIGINT)
        return step(*arguments)

    return run


def test_it_learns_and_resumes_to_the_same_weights(
    corpus_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = load_corpus(corpus_dir, "cpu")
    whole = train(CONFIG, corpus, tmp_path / "whole", "cpu")
    result = json.loads((tmp_path / "whole" / "result.json").read_text())
    assert all(domain["ratio"] < 0.5 for domain in result["domains"].values())

    saved = torch.load(tmp_path / "whole" / "checkpoint.pt", weights_only=True)
    assert saved["step"] == CONFIG.steps

    interrupted = tmp_path / "parts"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loop, "_step", interrupting(loop._step, after=12))
        train(CONFIG, corpus, interrupted, "cpu")
    assert torch.load(interrupted / "checkpoint.pt", weights_only=True)["step"] == 12
    resumed = train(CONFIG, corpus, interrupted, "cpu")
    for ours, theirs in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_checkpoint_of_other_settings_is_refused(corpus_dir: Path, tmp_path: Path) -> None:
    corpus = load_corpus(corpus_dir, "cpu")
    train(replace(CONFIG, steps=2), corpus, tmp_path / "run", "cpu")
    with pytest.raises(UserError, match="other settings"):
        train(replace(CONFIG, steps=3), corpus, tmp_path / "run", "cpu")


def test_a_missing_corpus_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="build_corpus"):
        load_corpus(tmp_path, "cpu")
