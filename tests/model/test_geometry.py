"""Geometry of GGUF models: counts and bytes against what was written, and against llama.cpp itself."""

import ctypes
import re
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
import pytest
from llama_cpp._logger import llama_log_callback as quiet

from edgemoe.errors import UserError
from edgemoe.model import Part, read_model
from edgemoe.model.memory import memory_needs, work_bytes
from edgemoe.model.synthetic import write_synthetic

DEEPSEEK = {"leading_dense": 1, "shared_experts": 2, "expert_groups": 4}
SHAPES: list[tuple[str, dict[str, Any]]] = [
    ("olmoe", {}),
    ("olmoe", {"n_vocab": 20_000, "d_model": 512, "d_expert": 512, "n_layers": 2}),
    ("qwen3moe", {"n_kv_heads": 2, "head_dim": 32}),
    ("qwen3moe", {"n_vocab": 2000, "d_model": 512, "d_expert": 768, "n_layers": 2, "top_k": 8, "n_heads": 16}),
    ("deepseek2", DEEPSEEK),
    ("gpt-oss", {"n_kv_heads": 2, "window": 100, "n_layers": 5}),
    ("llama", {"n_kv_heads": 2}),
]


def test_counts_of_a_softmax_model(tmp_path: Path) -> None:
    g = read_model(write_synthetic(tmp_path / "m.gguf", "qwen3moe", n_kv_heads=2, expert_type="Q8_0")[0]).geometry
    assert (g.architecture, g.n_layers, g.moe_layers, g.n_experts, g.top_k) == ("qwen3moe", 4, (0, 1, 2, 3), 16, 4)
    assert (g.gating, g.selection_bias, g.expert_groups, g.n_shared_experts) == ("softmax", False, 0, 0)
    assert (g.d_model, g.d_expert, g.n_ctx, g.n_vocab) == (64, 32, 4096, 512)
    assert g.expert_bytes == (3 * 64 * 32 * 34 // 32,) * 4
    assert g.kv.per_token == 4 * 2 * (2 * 16) * 2  # layers × (K and V) × kv width × two bytes
    assert g.expert_parameters == 4 * 16 * 3 * 64 * 32
    assert g.expert_types == {"Q8_0": g.routed_bytes} and g.routed_bytes == 16 * sum(g.expert_bytes)


def test_counts_of_a_deepseek_model(tmp_path: Path) -> None:
    g = read_model(write_synthetic(tmp_path / "m.gguf", "deepseek2", merged_gate_up=True, **DEEPSEEK)[0]).geometry
    assert (g.moe_layers, g.n_layers, g.n_shared_experts) == ((1, 2, 3), 4, 2)
    assert (g.gating, g.selection_bias, g.expert_groups, g.expert_groups_used) == ("sigmoid", True, 4, 2)
    assert g.merged_gate_up and g.kv.latent
    assert g.expert_bytes == (3 * 64 * 32 * 4,) * 3
    assert g.part_bytes[Part.SHARED] == 3 * 2 * 3 * 64 * 32 * 4
    assert g.part_bytes[Part.DENSE] == 3 * 64 * 128 * 4
    assert g.part_bytes[Part.ROUTER] == 3 * (64 * 16 + 16) * 4


def test_dense_model_has_no_experts(tmp_path: Path) -> None:
    model = read_model(write_synthetic(tmp_path / "m.gguf", "llama")[0])
    assert not model.geometry.is_moe and model.geometry.expert_bytes == () and model.geometry.top_k == 0
    assert model.geometry.active_bytes == model.geometry.always_read_bytes
    assert [need.way for need in memory_needs(model.geometry)] == ["vram", "ram"]
    with pytest.raises(UserError, match="the model is dense"):
        model.expert_slices(0, 0)


@pytest.mark.parametrize(("arch", "shape"), SHAPES)
def test_parts_add_up_to_the_file(tmp_path: Path, arch: str, shape: dict[str, Any]) -> None:
    model = read_model(write_synthetic(tmp_path / "m.gguf", arch, hole=True, **shape)[0])
    g = model.geometry
    assert sum(g.part_bytes.values()) == sum(g.type_bytes.values()) == sum(t.nbytes for t in model.tensors)
    assert 0 < g.file_bytes - sum(g.part_bytes.values()) < 1_000_000  # header and padding
    row = g.embedding_bytes // g.n_vocab
    assert g.always_read_bytes == g.non_expert_bytes - g.embedding_bytes + row
    assert g.active_bytes == g.always_read_bytes + g.top_k * sum(g.expert_bytes)


@pytest.mark.parametrize(("arch", "shape"), SHAPES)
@pytest.mark.parametrize("n_ctx", [1000, 4096])
def test_cache_and_work_buffers_are_what_llama_cpp_allocates(
    tmp_path: Path, arch: str, shape: dict[str, Any], n_ctx: int
) -> None:
    [path] = write_synthetic(tmp_path / "m.gguf", arch, hole=True, **shape)
    geometry = read_model(path).geometry
    kv, work = allocated(path, n_ctx)
    assert geometry.kv.at(n_ctx) / 2**20 == pytest.approx(kv, abs=0.01)
    assert 0.95 * work <= work_bytes(geometry, n_ctx) / 2**20 <= 1.5 * work


def allocated(path: Path, n_ctx: int) -> tuple[float, float]:
    """MiB of KV cache and compute buffer that llama.cpp says it allocated."""
    lines: list[str] = []
    log = llama_cpp.llama_log_callback(lambda _level, text, _data: lines.append(text.decode(errors="replace")))
    llama_cpp.llama_log_set(log, ctypes.c_void_p(0))
    try:
        model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.swa_full = n_ctx, 2048, 512, False
        context = llama_cpp.llama_init_from_model(model, params)
        llama_cpp.llama_free(context)
        llama_cpp.llama_model_free(model)
    finally:
        llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    text = "".join(lines)

    def of(what: str) -> float:
        return sum(map(float, re.findall(rf"{what} buffer size = +([0-9.]+) MiB", text)))

    return of("KV"), of("compute")


@pytest.mark.parametrize(
    ("arch", "shape"),
    [("olmoe", {"expert_type": "Q4_0"}), ("deepseek2", DEEPSEEK), ("deepseek2", {"merged_gate_up": True})],
)
@pytest.mark.parametrize("shards", [1, 3])
def test_expert_slices_hold_the_experts(tmp_path: Path, arch: str, shape: dict[str, Any], shards: int) -> None:
    """The bytes at each slice are the expert's, as gguf-py reads them."""
    files = write_synthetic(tmp_path / "m.gguf", arch, shards=shards, **shape)
    model = read_model(files[-1])
    assert model.files == tuple(files)
    weights = {t.name: t.data for file in files for t in gguf.GGUFReader(file).tensors}
    for layer, size in zip(model.geometry.moe_layers, model.geometry.expert_bytes, strict=True):
        for expert in (0, 7, 15):
            slices = model.expert_slices(layer, expert)
            assert sum(s.length for s in slices) == size
            assert {s.projection for s in slices} in ({"gate", "up", "down"}, {"gate_up", "down"})
            for piece in slices:
                with model.files[piece.file].open("rb") as file:
                    file.seek(piece.offset)
                    assert file.read(piece.length) == weights[piece.tensor][expert].tobytes()
    with pytest.raises(UserError, match="no expert 16"):
        model.expert_slices(model.geometry.moe_layers[0], 16)
    with pytest.raises(UserError, match="layer 99 has no experts"):
        model.expert_slices(99, 0)


def rewrite(path: Path, change: dict[str, Any], tensors: dict[str, np.ndarray], arch: str = "olmoe") -> Path:
    """A bare GGUF with these keys and tensors: for architectures that no synthetic model has."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in change.items():
        {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}[
            type(value)
        ](key, value)
    for name, data in tensors.items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, dtype=np.float32)


def test_sliding_windows_biases_and_prediction_layers(tmp_path: Path) -> None:
    """gpt-oss: every other layer forgets, experts have biases; a layer for multi-token prediction does not count."""
    tensors = {"token_embd.weight": zeros(32, 8), "output.weight": zeros(32, 8)}
    for layer in range(5):
        block = f"blk.{layer}."
        tensors |= {f"{block}attn_k.weight": zeros(16, 8), f"{block}attn_v.weight": zeros(16, 8)}
        for name, shape in (("gate", (4, 6, 8)), ("up", (4, 6, 8)), ("down", (4, 8, 6))):
            tensors |= {
                f"{block}ffn_{name}_exps.weight": zeros(*shape),
                f"{block}ffn_{name}_exps.bias": zeros(*shape[:2]),
            }
    keys = {
        "gpt-oss.block_count": 5,
        "gpt-oss.nextn_predict_layers": 1,
        "gpt-oss.expert_count": 4,
        "gpt-oss.expert_used_count": [2, 2, 1, 2, 2],
        "gpt-oss.attention.head_count": 2,
        "gpt-oss.attention.sliding_window": 128,
    }
    model = read_model(rewrite(tmp_path / "m.gguf", keys, tensors, "gpt-oss"))
    g = model.geometry
    assert (g.moe_layers, g.layer_top_k, g.top_k, g.d_expert) == ((0, 1, 2, 3), (2, 2, 1, 2), 2, 6)
    assert g.gating == "softmax of the chosen"
    assert g.expert_bytes == (4 * (3 * 48 + 6 + 6 + 8),) * 4
    assert g.active_expert_bytes == 7 * g.expert_bytes[0]
    assert {s.projection for s in model.expert_slices(2, 1)} == {
        "gate", "up", "down", "gate.bias", "up.bias", "down.bias",
    }  # fmt: skip
    assert (g.kv.full, g.kv.windowed, g.kv.window) == (2 * 2 * 32, 2 * 2 * 32, 128)
    assert g.kv.at(100_000) < 0.6 * 100_000 * g.kv.per_token
    assert g.part_bytes[Part.UNUSED] == 4 * g.expert_bytes[0] + 2 * 16 * 8 * 4


def test_recurrent_layers_keep_a_state_instead_of_a_cache(tmp_path: Path) -> None:
    tensors = {"token_embd.weight": zeros(32, 8)}
    tensors |= {f"blk.{i}.ssm_out.weight": zeros(8, 8) for i in range(3)} | {"blk.3.attn_k.weight": zeros(16, 8)}
    # Gated DeltaNet calls its input projection as others call fused queries, keys and values.
    tensors |= {f"blk.{i}.attn_qkv.weight": zeros(24, 8) for i in range(3)}
    keys = {
        "qwen3next.block_count": 4,
        "qwen3next.attention.head_count": 2,
        "qwen3next.attention.head_count_kv": 2,
        "qwen3next.ssm.conv_kernel": 4,
        "qwen3next.ssm.inner_size": 64,
        "qwen3next.ssm.state_size": 16,
        "qwen3next.ssm.group_count": 2,
    }
    g = read_model(rewrite(tmp_path / "m.gguf", keys, tensors, "qwen3next")).geometry
    assert (g.kv.recurrent_layers, g.kv.per_token) == (3, 64)  # values are the keys
    assert g.kv.state == 3 * 4 * (3 * (64 + 2 * 2 * 16) + 64 * 16)
    assert g.tied_output and g.always_read_bytes >= g.embedding_bytes


def test_layers_may_be_quantised_differently(tmp_path: Path) -> None:
    [small] = write_synthetic(tmp_path / "s.gguf", n_layers=1, expert_type="Q4_0")
    [large] = write_synthetic(tmp_path / "l.gguf", n_layers=2, expert_type="Q8_0")
    mixed = {t.name: t for file in (large, small) for t in gguf.GGUFReader(file).tensors}
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "olmoe")
    for key, value in (("block_count", 2), ("expert_count", 16), ("expert_used_count", 4)):
        writer.add_uint32(f"olmoe.{key}", value)
    for tensor in mixed.values():
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    g = read_model(tmp_path / "m.gguf").geometry
    assert g.expert_bytes == (3 * 64 * 32 // 32 * 18, 3 * 64 * 32 // 32 * 34)
    assert g.expert_sizes == {3456: 1, 6528: 1} and g.expert_type == "Q8_0"


HOSTILE = {
    "no layers": ({}, "says it has 0 layers"),
    "absurdly many": ({"olmoe.block_count": 2**32 - 1}, "says it has 4294967295 layers"),
    "only prediction layers": ({"olmoe.block_count": 1, "olmoe.nextn_predict_layers": 2}, "says it has -1 layers"),
    "count is text": ({"olmoe.block_count": "four"}, "expected a count"),
    "experts unstated": ({"olmoe.block_count": 1}, "0 experts"),
    "more chosen than there are": (
        {"olmoe.block_count": 1, "olmoe.expert_count": 4, "olmoe.expert_used_count": 5},
        "4 experts and top-k 5",
    ),
    "top-k for too few layers": (
        {"olmoe.block_count": 3, "olmoe.expert_count": 4, "olmoe.expert_used_count": [2]},
        "not a count for each of 3 layers",
    ),
    "negative": ({"olmoe.block_count": 1, "olmoe.expert_count": -1.0}, "expected a count"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_contradictions_are_one_line(tmp_path: Path, case: str) -> None:
    keys, message = HOSTILE[case]
    tensors = {f"blk.{layer}.ffn_down_exps.weight": zeros(4, 8, 6) for layer in (0, 2)}
    with pytest.raises(UserError, match=message) as error:
        read_model(rewrite(tmp_path / "m.gguf", keys, tensors))
    assert "\n" not in str(error.value)


def test_a_vocabulary_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="without weights"):
        read_model(rewrite(tmp_path / "m.gguf", {"olmoe.block_count": 4}, {}))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    files = write_synthetic(tmp_path / "m.gguf", shards=3)
    files[1].unlink()
    with pytest.raises(UserError, match=r"m-00002-of-00003\.gguf is missing"):
        read_model(files[0])


def test_shards_of_different_models_are_refused(tmp_path: Path) -> None:
    files = write_synthetic(tmp_path / "m.gguf", shards=3)
    other = write_synthetic(tmp_path / "n.gguf", shards=3, n_layers=6)
    other[2].replace(files[2])
    with pytest.raises(UserError, match="different models"):
        read_model(files[0])
    files[0].rename(tmp_path / "renamed.gguf")
    with pytest.raises(UserError, match="not named like one"):
        read_model(tmp_path / "renamed.gguf")
    write_synthetic(tmp_path / "m.gguf", shards=3)
    files[1].replace(files[2])
    write_synthetic(tmp_path / "o.gguf", shards=3)[1].replace(files[1])
    with pytest.raises(UserError, match="another shard than its name"):
        read_model(files[0])


def test_memory_needs_follow_their_formulas(tmp_path: Path) -> None:
    g = read_model(write_synthetic(tmp_path / "m.gguf", "deepseek2", **DEEPSEEK)[0]).geometry
    needs = {need.way: need for need in memory_needs(g, 2048)}
    top = g.kv.at(2048) + work_bytes(g, 2048)
    assert needs["ram"].ram == g.routed_bytes + g.non_expert_bytes + top
    assert needs["vram"].vram + needs["vram"].ram == needs["ram"].ram
    assert needs["experts-in-ram"].vram == needs["vram"].vram - g.routed_bytes
    assert needs["ssd-to-ram"].ram == g.non_expert_bytes + top + g.top_k * sum(g.expert_bytes)
    assert needs["ram-to-vram"].ram == g.routed_bytes
    assert needs["ram-to-vram"].slots == g.top_k and needs["ram-to-vram"].per_slot == sum(g.expert_bytes)
