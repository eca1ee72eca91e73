"""The demo model as shipped, Q8_0 in llama.cpp: a language model whose experts all work, and a card that is true."""

import hashlib
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the training code needs torch (pip install edgemoe[gpu])")

import edgemoe.data  # noqa: E402
from edgemoe.llamacpp.session import Session  # noqa: E402
from edgemoe.model import read_model  # noqa: E402
from edgemoe.tracing.capture import Settings, capture  # noqa: E402
from edgemoe.tracing.texts import Source, cut_windows, read_sources, tokenize_texts  # noqa: E402
from edgemoe.tracing.tracefile import Trace, load_trace  # noqa: E402
from edgemoe.training.card import write_card  # noqa: E402
from edgemoe.training.data import DOMAINS  # noqa: E402
from edgemoe.training.loop import TrainConfig  # noqa: E402
from edgemoe.training.model import ModelConfig  # noqa: E402

DATA = Path(edgemoe.data.__file__).parent
DEMO = DATA / "demo-moe-32m-q8_0.gguf"
SOURCES = [Source(domain, DATA / f"{domain}.txt") for domain in DOMAINS]
EVERY = 5  # of the samples' windows, one in so many is enough


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    return json.loads((DATA / "demo.json").read_text())


@pytest.fixture(scope="module")
def cross_entropy() -> dict[str, float]:
    """Nats per token of each sample, in windows of 512 that start with BOS."""
    losses: dict[str, list[np.ndarray]] = {domain: [] for domain in DOMAINS}
    with Session(DEMO, n_ctx=512, n_threads=1) as session:
        texts = tokenize_texts(SOURCES, read_sources(SOURCES), session.tokenize, None)
        for window in cut_windows(texts, session.n_ctx, session.bos)[::EVERY]:
            session.clear()
            session.decode(window.tokens)
            logits = torch.from_numpy(session.logits(len(window.tokens)))
            targets = torch.from_numpy(window.tokens[1:]).long()
            loss = torch.nn.functional.cross_entropy(logits[:-1], targets, reduction="none")
            losses[window.domain].append(loss.numpy())
    return {domain: float(np.concatenate(parts).mean()) for domain, parts in losses.items()}


@pytest.mark.parametrize("domain", DOMAINS)
def test_it_predicts_every_domain(cross_entropy: dict[str, float], facts: dict[str, Any], domain: str) -> None:
    recorded = facts["result"]["domains"][domain]
    assert cross_entropy[domain] <= 0.6 * recorded["unigram_entropy"]
    # Other documents than the card's, in shorter windows, quantised: near its figure, not equal to it.
    assert abs(cross_entropy[domain] - recorded["cross_entropy"]) < 0.5


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    out = tmp_path_factory.mktemp("demo") / "demo.npz"
    settings = Settings(max_tokens=4096, n_threads=1)
    report = capture(DEMO, SOURCES, out, settings, watch=lambda total: nullcontext(lambda done: None))
    assert not report.failures
    return load_trace(out)


def test_no_expert_is_dead(trace: Trace) -> None:
    assert set(trace.domains) == set(DOMAINS)
    shares = np.stack([np.bincount(layer.ravel(), minlength=64) / layer.size for layer in trace.experts])  # [L, E]
    assert shares.shape == (8, 64)
    assert shares.min() > 0.001


def test_domains_use_experts_differently(trace: Trace) -> None:
    """What the demo is there to show: routing depends on the text."""
    loads = [np.bincount(part.experts[-1].ravel(), minlength=64) for _, part in trace.by_domain()]
    prose, code = loads[DOMAINS.index("prose")], loads[DOMAINS.index("code")]
    assert np.dot(prose, code) / (np.linalg.norm(prose) * np.linalg.norm(code)) < 0.5


def test_the_card_is_what_the_records_say(facts: dict[str, Any], tmp_path: Path) -> None:
    config = TrainConfig(**{**facts["config"], "model": ModelConfig(**facts["config"]["model"])})
    write_card(tmp_path, config, facts["corpus"], facts["result"], facts["gpu"])
    for name in ("MODEL_CARD.md", "demo.json"):
        assert (tmp_path / name).read_text() == (DATA / name).read_text()


def test_the_file_has_the_geometry_on_the_card(facts: dict[str, Any]) -> None:
    geometry, model = read_model(DEMO).geometry, facts["config"]["model"]
    assert geometry.architecture == "olmoe"
    assert (geometry.n_experts, geometry.top_k) == (model["n_experts"], model["top_k"]) == (64, 8)
    assert len(geometry.moe_layers) == model["n_layers"] == 8
    assert DEMO.stat().st_size <= 36e6


def test_validation_reached_the_goal(facts: dict[str, Any]) -> None:
    result = facts["result"]
    assert set(result["domains"]) == set(DOMAINS)
    for domain, recorded in result["domains"].items():
        assert recorded["ratio"] == pytest.approx(recorded["cross_entropy"] / recorded["unigram_entropy"])
        assert recorded["ratio"] <= 0.6
        assert recorded["unigram_entropy"] == pytest.approx(
            facts["corpus"]["domains"][domain]["unigram_entropy_nats"], abs=1e-4
        )
    assert min(result["least_load"]) > 0.001


@pytest.mark.parametrize("domain", DOMAINS)
def test_samples_are_those_that_the_corpus_held_out(facts: dict[str, Any], domain: str) -> None:
    data = (DATA / f"{domain}.txt").read_bytes()
    assert 80_000 <= len(data) <= 120_000
    assert hashlib.sha256(data).hexdigest() == facts["corpus"]["files"][f"samples/{domain}.txt"]
