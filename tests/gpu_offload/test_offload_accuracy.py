"""Logits against llama.cpp and transformers, teacher-forced, in both storage types."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU tier needs torch (pip install edgemoe[gpu])")
transformers = pytest.importorskip("transformers", reason="needs transformers (pip install edgemoe[eval])")

from offload_engines import make  # noqa: E402

from edgemoe.data import DOMAINS  # noqa: E402
from edgemoe.demo import demo_file, demo_model  # noqa: E402
from edgemoe.policy import preset  # noqa: E402
from edgemoe.training.export import read_gguf, write_gguf  # noqa: E402
from edgemoe.units import Residency  # noqa: E402

WINDOW, PROMPT = 64, 40


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The demo model with the values of its Q8_0 weights stored as F32: to llama.cpp, nothing is rounded."""
    path = tmp_path_factory.mktemp("f32") / "f32.gguf"
    write_gguf(path, *read_gguf(demo_model()), "F32")
    return path


@pytest.fixture(scope="module")
def reference(exported):
    """Windows that start with BOS, llama.cpp's logits (F32 weights and KV) and experts of each."""
    from exact_llamacpp import exact_runs

    from edgemoe.llamacpp.session import Session

    with Session(exported, n_ctx=32, n_threads=1) as session:
        texts = [session.tokenize(demo_file(f"{domain}.txt").read_bytes()[:3000]) for domain in DOMAINS]
        windows = [[session.bos, *text[: WINDOW - 1].tolist()] for text in texts]
    return windows, list(exact_runs(exported, windows))


def decoded(engine, window):
    """The logits after every token: a prompt in chunks, then one token at a time."""
    engine.reset()
    return np.concatenate([engine.rows(window[:PROMPT]), [engine.decode(token) for token in window[PROMPT:]]])


@pytest.mark.parametrize(("dtype", "stored", "bound"), [("float32", "F32", 1e-3), ("bfloat16", "Q8_0", 2e-2)])
def test_exact_routing_is_llama_cpp(exported, reference, dtype, stored, bound):
    """Relative error: ‖a − b‖ / ‖b‖ over the vocabulary, of all rows together and of the median row. Where a near-tie
    of the router goes the other way, a row and those that attend to it run another expert: with rounded weights such
    rows are few, without there are none. An argmax may differ where the gap of the two logits is within twice the
    row's largest error."""
    windows, runs = reference
    path = exported if stored == "F32" else demo_model()
    policy = preset("exact-prefetch")
    with make(path, dtype=dtype, policy=policy, residency=Residency.parse("25%"), record=True) as engine:
        ours = [decoded(engine, window) for window in windows]
        records, size = engine.records, engine.shape.n_layers
    a, b = np.concatenate(ours), np.concatenate([logits for logits, _ in runs])
    executed = np.concatenate([record["executed"] for record in records], axis=1)
    theirs = np.concatenate([experts for _, experts in runs], axis=1)
    assert executed.shape == theirs.shape == (size, len(a), 8)
    alike = (np.sort(executed, -1) == np.sort(theirs, -1)).all(axis=(0, 2))
    error = np.linalg.norm(a - b, axis=1) / np.linalg.norm(b, axis=1)
    whole = np.linalg.norm(a - b) / np.linalg.norm(b)
    assert whole < bound and np.median(error) < bound / 4
    assert np.quantile(error[alike], 0.95) < bound
    assert alike.mean() > (0.99 if dtype == "float32" else 0.75)
    rows = np.arange(len(a))
    gap = b.max(1) - b[rows, a.argmax(1)]
    assert (gap <= 2 * np.abs(a - b).max(1)).all()
    assert (a.argmax(1) == b.argmax(1)).mean() > 0.9


VARIANTS = {
    "grouped queries": {"num_key_value_heads": 2},
    "clamped": {"clip_qkv": 0.4},
    "renormalised": {"norm_topk_prob": True},
    "tied": {"tie_word_embeddings": True},
    "another rotation": {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}, "rms_norm_eps": 1e-3},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_are_those_of_transformers(tmp_path, name):
    settings = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 64,
    }
    torch.manual_seed(1)
    config = transformers.OlmoeConfig(**{**settings, **VARIANTS[name]})
    model = transformers.OlmoeForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2) if parameter.dim() > 1 else parameter.uniform_(0.5, 1.5)
    model.save_pretrained(tmp_path)
    tokens = np.random.default_rng(0).integers(0, 96, 24)
    with torch.no_grad():
        expected = model(torch.from_numpy(tokens)[None]).logits[0].numpy()
    with make(tmp_path, dtype="float32", residency=Residency.parse("4"), n_ctx=32, chunk=8) as engine:
        found = np.concatenate([engine.rows(tokens[:16]), [engine.decode(int(token)) for token in tokens[16:]]])
    assert np.linalg.norm(found - expected) < 1e-4 * np.linalg.norm(expected)
