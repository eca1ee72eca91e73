"""Weights: every format gives the same numbers, and a damaged or foreign model gives one line."""

import json
import shutil

import gguf
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU tier needs torch (pip install edgemoe[gpu])")
pytest.importorskip("transformers", reason="needs transformers (pip install edgemoe[eval])")

from offload_engines import PROMPT, TINY, generate, make  # noqa: E402

from edgemoe.demo import demo_model  # noqa: E402
from edgemoe.errors import UserError  # noqa: E402
from edgemoe.gpu_offload.hub import resolve  # noqa: E402
from edgemoe.gpu_offload.shape import read_shape  # noqa: E402
from edgemoe.gpu_offload.weights import load_bytes, load_weights  # noqa: E402
from edgemoe.model import read_model  # noqa: E402
from edgemoe.model.synthetic import write_synthetic  # noqa: E402
from edgemoe.training.export import read_gguf, weights_of, write_gguf, write_hf  # noqa: E402
from edgemoe.training.model import ModelConfig, MoEModel  # noqa: E402


@pytest.fixture(scope="module")
def formats(tmp_path_factory):
    """One small random model with the demo's tokenizer, as GGUF and as a safetensors folder."""
    folder = tmp_path_factory.mktemp("formats")
    _, _, tokenizer = read_gguf(demo_model())
    config = ModelConfig(d_model=64, n_layers=2, n_heads=4, n_experts=16, top_k=4, d_expert=32, context=128)
    model = MoEModel(config, seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6 if parameter.dim() > 1 else 1)
    weights = weights_of(model)
    write_gguf(folder / "m.gguf", config, weights, tokenizer, "F32")
    write_hf(folder / "hf", config, weights, tokenizer)
    return folder


def sharded(source, target):
    """The same checkpoint in two files with an index."""
    from safetensors.numpy import load_file, save_file

    shutil.copytree(source, target)
    (target / "model.safetensors").unlink()
    tensors = load_file(source / "model.safetensors")
    names = sorted(tensors)
    index = {}
    for number, part in enumerate((names[::2], names[1::2])):
        file = f"model-0000{number + 1}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, target / file)
        index |= dict.fromkeys(part, file)
    (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return target


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_format_gives_the_same_logits(formats, tmp_path, dtype):
    found = []
    for path in (formats / "m.gguf", formats / "hf", sharded(formats / "hf", tmp_path / "two")):
        with make(path, dtype=dtype) as engine:
            found.append(generate(engine, steps=4))
    assert np.array_equal(found[0], found[1]) and np.array_equal(found[0], found[2])
    assert np.isfinite(found[0]).all() and found[0].std() > 0.1


def test_both_tokenizers_cut_alike(formats):
    text = "def main(self):\n    return 'naïve 👍 words'  # <|endoftext|>".encode()
    with make(formats / "m.gguf") as one, make(formats / "hf") as other:
        tokens = one.tokenize(text)
        assert np.array_equal(tokens, other.tokenize(text))
        assert np.array_equal(one.tokenize(text, special=True), other.tokenize(text, special=True))
        assert len(one.tokenize(text, special=True)) < len(tokens)
        for engine in (one, other):
            assert b"".join(engine.piece(int(token)) for token in tokens) == text
            assert engine.piece(0) == b"" and engine.piece(0, special=True) == b"<|endoftext|>"
        assert (one.bos, one.eos_tokens) == (other.bos, other.eos_tokens) == (0, frozenset({0}))
        assert one.chat_template is None is other.chat_template
        assert one.special_text("eos") == other.special_text("eos") == "<|endoftext|>"
        assert one.n_vocab == other.n_vocab == 8192


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "Q6_K", "F16", "BF16"])
def test_quantised_experts_are_dequantised_into_the_arena(tmp_path, kind):
    sizes = {**TINY, "n_layers": 2, "n_experts": 4, "top_k": 2, "d_model": 256, "d_expert": 256, "n_heads": 4}
    path = write_synthetic(tmp_path / "m.gguf", **sizes, expert_type=kind)[0]
    model = read_model(path)
    steps = []
    weights = load_weights(model, read_shape(model), dtype=torch.float32, threads=2, advance=steps.append)
    assert sum(steps) == load_bytes(model)
    stored = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors}
    for layer, expert in ((0, 0), (1, 3)):
        views = weights.arena.expert(layer, expert)
        for role in ("gate", "up", "down"):
            expected = stored[f"blk.{layer}.ffn_{role}_exps.weight"][expert].astype(np.float32)
            assert np.array_equal(getattr(views, role).numpy(), expected)
    assert np.array_equal(weights.routers[1].numpy(), stored["blk.1.ffn_gate_inp.weight"])
    rounded = load_weights(model, read_shape(model), dtype=torch.bfloat16, threads=2)
    assert torch.equal(rounded.arena.expert(1, 2).down, weights.arena.expert(1, 2).down.to(torch.bfloat16))


def damaged(formats, tmp_path, how):
    folder = tmp_path / "hf"
    shutil.copytree(formats / "hf", folder)
    how(folder)
    return folder


def renamed(folder, old, new):
    """Another name of the same length in the header."""
    file = folder / "model.safetensors"
    data = file.read_bytes()
    assert old in data
    file.write_bytes(data.replace(old, new))


def configured(**more):
    def change(folder):
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **more}))

    return change


DAMAGE = {
    "no tensor model.layers.1.mlp.gate.weight": lambda f: renamed(
        f, b"layers.1.mlp.gate.weight", b"layers.1.mlp.gota.weight"
    ),
    "a tensor model.layers.1.self_attn.q_bias": lambda f: renamed(
        f, b"layers.1.self_attn.q_norm.weight", b"layers.1.self_attn.q_bias.weight"
    ),
    "truncated": lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-1000]),
    "a rotation of type yarn is not implemented": configured(rope_parameters={"rope_type": "yarn", "factor": 4.0}),
    "biases in its attention": configured(attention_bias=True),
    "has shape \\[64, 64\\], expected \\[32, 64\\]": configured(num_key_value_heads=2),
    "architecture mixtral": configured(model_type="mixtral"),
}


@pytest.mark.parametrize("complaint", DAMAGE)
def test_a_damaged_or_foreign_model_is_one_line(formats, tmp_path, complaint):
    if "no tensor" in complaint or "q_bias" in complaint:
        # Either the name that is missing or the one that is not known is complained about.
        complaint_now = "no tensor|a tensor model.layers.1"
    else:
        complaint_now = complaint
    folder = damaged(formats, tmp_path, DAMAGE[complaint])
    with pytest.raises(UserError, match=complaint_now) as caught:
        make(folder)
    assert "\n" not in str(caught.value)


def test_a_shard_that_shrinks_under_the_loader_is_one_line(formats, tmp_path, monkeypatch):
    from edgemoe.gpu_offload.tensors import TensorSource

    folder = damaged(formats, tmp_path, lambda f: None)
    model = read_model(folder)
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(200_000)
    with pytest.raises(UserError, match="ends within"), TensorSource(model) as source:
        for layer in range(2):
            source.dense("q", layer, (64, 64))
            source.dense("router", layer, (16, 64))
            for expert in range(16):
                source.expert("down", layer, expert, (64, 32))


@pytest.mark.parametrize("arch", ["qwen3moe", "deepseek2", "gpt-oss", "llama"])
def test_another_architecture_is_refused(tmp_path, arch):
    path = write_synthetic(tmp_path / "m.gguf", arch=arch)[0]
    with pytest.raises(UserError, match=f"architecture {arch}: the GPU tier runs OLMoE's"):
        make(path)


def test_weights_that_are_no_numbers_are_noticed(formats, tmp_path):
    def spoil(folder):
        from safetensors.numpy import load_file, save_file

        file = folder / "model.safetensors"
        tensors = load_file(file)
        tensors["model.layers.1.self_attn.o_proj.weight"][3, 5] = np.nan
        save_file(tensors, file, metadata={"format": "pt"})

    with make(damaged(formats, tmp_path, spoil)) as engine:
        with pytest.raises(UserError, match="the scores of layer 1 are not finite"):
            engine.prefill(PROMPT)
        assert engine.position == 0


def test_a_folder_without_a_tokenizer_still_computes(formats, tmp_path):
    folder = damaged(formats, tmp_path, lambda f: [path.unlink() for path in f.glob("tokenizer*")])
    with make(folder) as engine:
        engine.prefill(PROMPT)
        with pytest.raises(UserError, match=r"no tokenizer\.json there"):
            engine.tokenize(b"x")


def test_hub_names_are_looked_up_or_said_to_be_out_of_reach(tmp_path, monkeypatch):
    import huggingface_hub

    assert resolve(tmp_path) == tmp_path
    assert str(resolve("no/such/path")) == "no/such/path"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="no such file here, and huggingface_hub could not get it") as caught:
        resolve("allenai/OLMoE-of-no-kind")
    assert "\n" not in str(caught.value)
    asked = []
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, allow_patterns: asked.append(name) or str(tmp_path)
    )
    assert resolve("allenai/OLMoE-1B-7B-0924") == tmp_path and asked == ["allenai/OLMoE-1B-7B-0924"]
