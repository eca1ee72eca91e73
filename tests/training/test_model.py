"""The training model against an expert-by-expert reading of OLMoE, and against what it exports to."""

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the training code needs torch (pip install edgemoe[gpu])")

from tokenizers import Tokenizer, models, pre_tokenizers, trainers  # noqa: E402

from edgemoe.training.export import read_gguf, weights_of, write_gguf, write_hf  # noqa: E402
from edgemoe.training.losses import load_balance, loads  # noqa: E402
from edgemoe.training.model import ModelConfig, MoE, MoEModel, Routing  # noqa: E402

SMALL = ModelConfig(vocab_size=320, d_model=64, n_layers=3, n_heads=2, n_experts=8, top_k=3, d_expert=32, context=64)


@pytest.fixture(scope="module")
def model() -> MoEModel:
    """Weights large enough that every layer matters to the logits."""
    model = MoEModel(SMALL, seed=3)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(5)
    return model


def one_expert_at_a_time(moe: MoE, x: "torch.Tensor") -> "torch.Tensor":
    probs = torch.softmax(x @ moe.gate.T, dim=-1)
    weights, experts = probs.topk(moe.top_k)
    out = torch.zeros_like(x)
    for token in range(len(x)):
        for weight, expert in zip(weights[token], experts[token], strict=True):
            gate, up = (x[token] @ moe.gate_up[expert]).chunk(2)
            out[token] += weight * ((torch.nn.functional.silu(gate) * up) @ moe.down[expert])
    return out


def test_the_grouped_product_is_the_sum_over_experts_and_so_are_its_gradients(model: MoEModel) -> None:
    moe = model.layers[1].mlp
    x = torch.randn(37, SMALL.d_model, generator=torch.Generator().manual_seed(0))
    upstream = torch.randn(37, SMALL.d_model, generator=torch.Generator().manual_seed(1))
    gradients = []
    for run in (lambda y: moe(y)[0], lambda y: one_expert_at_a_time(moe, y)):
        moe.zero_grad()
        leaf = x.clone().requires_grad_()
        out = run(leaf)
        out.backward(upstream)
        gradients.append((out.detach(), leaf.grad, moe.gate.grad, moe.gate_up.grad, moe.down.grad))
    for grouped, looped in zip(*gradients, strict=True):
        torch.testing.assert_close(grouped, looped, rtol=1e-4, atol=1e-5)


def test_an_even_router_has_balance_one_and_a_collapsed_one_has_e() -> None:
    even = Routing(torch.full((8, 4), 0.25), torch.arange(4).repeat(8, 1))
    collapsed = Routing(torch.eye(4)[[0] * 8], torch.zeros(8, 1, dtype=torch.int64))
    assert load_balance(even).item() == pytest.approx(1)
    assert load_balance(collapsed).item() == pytest.approx(4)
    assert loads(collapsed).tolist() == [1, 0, 0, 0]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=SMALL.vocab_size,
        special_tokens=["<|endoftext|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([Path(__file__).read_text()], trainer)
    assert tokenizer.get_vocab_size() == SMALL.vocab_size
    return tokenizer


def test_the_gguf_gives_back_what_was_written(model: MoEModel, tokenizer: Tokenizer, tmp_path: Path) -> None:
    weights = weights_of(model)
    write_gguf(tmp_path / "m.gguf", SMALL, weights, tokenizer, "F32", name="small")
    config, read, rebuilt = read_gguf(tmp_path / "m.gguf")
    assert config.norm_eps == pytest.approx(SMALL.norm_eps)
    assert (config.d_model, config.n_experts, config.top_k) == (SMALL.d_model, SMALL.n_experts, SMALL.top_k)
    assert read.keys() == weights.keys()
    assert all(np.array_equal(read[name], weights[name]) for name in weights)
    text = "def test(x):\n    return 'naïve'  # 12345"
    assert rebuilt.encode(text, add_special_tokens=False).ids == tokenizer.encode(text).ids
    assert rebuilt.decode(rebuilt.encode(text).ids) == text


def test_transformers_computes_the_same_logits(model: MoEModel, tokenizer: Tokenizer, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers (pip install edgemoe[eval])")
    write_hf(tmp_path, SMALL, weights_of(model), tokenizer)
    theirs = transformers.OlmoeForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = torch.randint(0, SMALL.vocab_size, (2, 48), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        torch.testing.assert_close(model.logits(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)
