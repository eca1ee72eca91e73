"""The demo model under transformers: loaded, calibrated, steered; and what cannot be loaded."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import edgemoe.data
from edgemoe.errors import UserError
from edgemoe.gpu_offload.harness.calibrate import calibrate_model
from edgemoe.gpu_offload.harness.divergence import Setting, divergences, summarise
from edgemoe.gpu_offload.harness.loading import load
from edgemoe.gpu_offload.harness.steer import steer
from edgemoe.gpu_offload.harness.windows import first_token, stacked, text_windows
from edgemoe.policy import Policy, preset
from edgemoe.training.export import read_gguf, write_hf

DATA = Path(edgemoe.data.__file__).parent


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    write_hf(folder, *read_gguf(DATA / "demo-moe-32m-q8_0.gguf"))
    return folder


@pytest.fixture(scope="module")
def demo(checkpoint):
    model, tokenizer = load(checkpoint, dtype="float32")
    held_out = [w for name in ("code", "prose") for w in windows(tokenizer, name, 3)]
    return model, tokenizer, calibrate_model(model, held_out, batch=3)


def windows(tokenizer, name, count):
    return text_windows(tokenizer, (DATA / f"{name}.txt").read_text(), 192, count)


def test_exact_routing_is_the_model(demo):
    model, tokenizer, calibration = demo
    texts = windows(tokenizer, "math", 2)
    assert all(w[0] == first_token(tokenizer) == 0 and len(w) == 192 for w in texts)
    ids = stacked(model, texts)
    with torch.no_grad():
        plain = model(input_ids=ids).logits
        with steer(model, preset("exact-score"), 32, calibration):
            assert torch.equal(model(input_ids=ids).logits, plain)


def test_steering_trades_copies_for_divergence(demo):
    """The direction of every figure of the paper: a larger λ copies less and diverges more, and exact diverges not."""
    model, tokenizer, calibration = demo
    settings = [
        Setting(Policy(), 32),
        Setting(preset("cache-prior", lam=0.1), 32),
        Setting(preset("cache-prior", lam=0.3), 32),
        Setting(preset("psr", lam=0.3), 32),
    ]
    texts = windows(tokenizer, "math", 2)
    parts = [found for _, found in divergences(model, settings, texts, calibration, batch=2)]
    exact, gentle, strong, psr = (summarise(column) for column in zip(*parts, strict=True))
    assert exact["kl"] == 0 and exact["agreement"] == 1 and exact["replaced"] == 0
    assert 0 < gentle["kl"] < strong["kl"] < 1
    assert exact["copies"] > gentle["copies"] > strong["copies"] > 0
    assert psr["prefetch"] > 0 and psr["demand"] < strong["demand"]
    assert exact["perplexity"] < 100 and abs(gentle["excess_nll"]) < 0.1
    assert exact["loads"] == 8 * 8


def test_generation_is_steered(demo):
    model, tokenizer, calibration = demo
    prompt = tokenizer("def fibonacci(n):", return_tensors="pt")
    asked = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 1}
    plain = model.generate(**prompt, **asked)
    with steer(model, Policy(), 8, record="decisions") as exact:
        assert torch.equal(model.generate(**prompt, **asked), plain)
    assert exact.totals[1] > 0
    with steer(model, preset("cache-prior", lam=2.0), 8, calibration, record="decisions") as steered:
        text = model.generate(**prompt, **asked)
    (record,) = steered.take()
    assert len(record.tokens) == text.shape[1] - 1
    misses = [np.mean(one.counts[..., 1]) for one in (record, *exact.take())]
    assert misses[0] < 0.5 * misses[1]


def test_what_cannot_be_loaded_is_refused(checkpoint, tmp_path):
    with pytest.raises(UserError, match=r"no config\.json there"):
        load(tmp_path)
    with pytest.raises(UserError, match="'int8' is not one of float32, bfloat16"):
        load(checkpoint, dtype="int8")
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="sees no CUDA device"):
            load(checkpoint, device="cuda")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(UserError, match="a llama model has no MoE block"):
        load(tmp_path)
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    with pytest.raises(UserError, match="transformers cannot load it") as refusal:
        load(tmp_path)
    assert "\n" not in str(refusal.value)
