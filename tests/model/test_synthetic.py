"""Synthetic models are models: stock llama.cpp loads and decodes each of them."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from llama_cpp import Llama

from edgemoe.model.byte_bpe import byte_bpe
from edgemoe.model.synthetic import Synthetic, write_synthetic

TEXT = "The quick brown fox – ñandú, 東京 🦊 – jumps.\n".encode()


def logits(path: Path) -> np.ndarray:
    """Next-token logits after every token of TEXT, [T, vocabulary]."""
    model = Llama(str(path), n_ctx=128, n_batch=128, n_threads=1, logits_all=True, verbose=False)
    tokens = model.tokenize(TEXT, add_bos=False)
    assert model.detokenize(tokens) == TEXT
    model.eval(tokens)
    values = np.array(model.scores[: len(tokens)])
    model.close()
    return values


@pytest.mark.parametrize(
    ("arch", "shape"),
    [
        ("olmoe", {}),
        ("qwen3moe", {"n_kv_heads": 2, "head_dim": 32}),
        ("gpt-oss", {"n_kv_heads": 2}),
        ("deepseek2", {"leading_dense": 1, "shared_experts": 2, "expert_groups": 4}),
        ("deepseek2", {"merged_gate_up": True, "gating": "softmax", "selection_bias": False}),
        ("llama", {"n_kv_heads": 2}),
    ],
)
def test_llama_cpp_decodes_it(tmp_path: Path, arch: str, shape: dict[str, Any]) -> None:
    [path] = write_synthetic(tmp_path / "model.gguf", arch, **shape)
    values = logits(path)
    assert np.isfinite(values).all()
    assert values.std(axis=1).min() > 0.1
    assert np.abs(values[1:] - values[:-1]).max() > 0.1, "every position has the same logits"


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0", "Q4_K", "MXFP4"])
def test_expert_types_differ_by_rounding_alone(tmp_path: Path, kind: str) -> None:
    shape = {"d_model": 256, "d_expert": 256, "n_layers": 1, "n_experts": 4, "top_k": 4}
    exact = logits(write_synthetic(tmp_path / "exact.gguf", **shape)[0])
    rounded = logits(write_synthetic(tmp_path / "rounded.gguf", expert_type=kind, dense_type="F16", **shape)[0])
    error = np.linalg.norm(rounded - exact) / np.linalg.norm(exact)
    assert 0 < error < 0.15


def test_shards_are_the_same_model(tmp_path: Path) -> None:
    whole = write_synthetic(tmp_path / "whole.gguf")
    split = write_synthetic(tmp_path / "split.gguf", shards=3)
    assert [path.name for path in split] == [f"split-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    assert np.array_equal(logits(whole[0]), logits(split[0]))


def test_seed_decides_the_weights(tmp_path: Path) -> None:
    first, again, other = (
        write_synthetic(tmp_path / f"{i}.gguf", seed=seed, n_layers=1)[0].read_bytes()
        for i, seed in enumerate((1, 1, 2))
    )
    assert first == again != other


def test_hole_has_the_size_but_no_data(tmp_path: Path) -> None:
    shape = {"d_model": 512, "d_expert": 512, "n_experts": 64, "expert_type": "Q8_0"}
    counted: list[int] = []
    [full] = write_synthetic(tmp_path / "full.gguf", advance=counted.append, **shape)
    [hole] = write_synthetic(tmp_path / "hole.gguf", hole=True, **shape)
    assert hole.stat().st_size == full.stat().st_size > sum(counted) > 100_000_000
    assert hole.stat().st_blocks * 512 < 1_000_000


def test_no_two_experts_are_the_same_even_beyond_the_pool(tmp_path: Path) -> None:
    [path] = write_synthetic(
        tmp_path / "large.gguf", n_layers=1, d_model=512, d_expert=512, n_experts=80, expert_type="Q4_0"
    )
    for tensor in gguf.GGUFReader(path).tensors:
        if "_exps" in tensor.name:
            assert len({expert.tobytes() for expert in tensor.data}) == 80


@pytest.mark.parametrize(
    "shape",
    [
        {"arch": "gpt2"},
        {"top_k": 17},
        {"leading_dense": 1},
        {"arch": "deepseek2", "expert_groups": 3},
        {"d_model": 60, "n_heads": 4},
    ],
)
def test_impossible_shapes_are_refused(shape: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"none of|exceeds|has no|divide|even"):
        Synthetic(**shape)


def test_vocabulary_is_consistent() -> None:
    vocabulary = byte_bpe(20_000)
    assert len(vocabulary.tokens) == len(set(vocabulary.tokens)) == len(vocabulary.types) == 20_000
    known = set(vocabulary.tokens[:257])
    for merge in vocabulary.merges:
        left, right = merge.split(" ")
        assert left in known and right in known
        known.add(left + right)
    assert known == set(vocabulary.tokens)
