"""Published geometries: parameters as their makers state them, files as llama-quantize makes them."""

from pathlib import Path

import pytest

from edgemoe.errors import UserError
from edgemoe.model import read_model
from edgemoe.model.synthetic import QWEN3_30B_A3B, write_synthetic
from edgemoe.wall.presets import PUBLISHED, is_preset, preset_geometry
from edgemoe.wall.quantise import scheme_type

# Model cards and technical reports: parameters in all, in billions, at the digits they print.
PARAMETERS = {
    "qwen3-235b-a22b": (235, 0),
    "qwen3-30b-a3b": (30.5, 1),
    "olmoe-1b-7b": (6.9, 1),
    "moonlight-16b-a3b": (16, 0),
    "qwen3.6-35b-a3b": (35, 0),
    "gpt-oss-120b": (116.8, 1),
    "deepseek-v3": (671, 0),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_that_the_makers_state(name: str) -> None:
    billions, digits = PARAMETERS[name]
    assert round(preset_geometry(name).parameters / 1e9, digits) == billions


def test_active_parameters_are_those_that_the_makers_state() -> None:
    """22 B of Qwen3-235B-A22B; 37 B of DeepSeek-V3, its 0.9 B of embeddings left out as its report does."""
    assert round(preset_geometry("qwen3-235b-a22b").active_parameters / 1e9) == 22
    deepseek = preset_geometry("deepseek-v3")
    assert round((deepseek.active_parameters - 129_280 * 7168) / 1e9, 1) == 36.6


@pytest.mark.parametrize(
    ("preset", "gigabytes"),
    # Files on Hugging Face: Qwen, allenai, ggml-org, bartowski.
    [("qwen3-30b-a3b:Q4_K_M", 18.6), ("qwen3-30b-a3b:Q8_0", 32.5), ("qwen3-30b-a3b:Q6_K", 25.1),
     ("qwen3-30b-a3b:Q5_K_M", 21.7), ("olmoe-1b-7b:Q4_K_M", 4.21), ("gpt-oss-120b:MXFP4", 63.4)],
)  # fmt: skip
def test_file_sizes_are_those_of_real_files(preset: str, gigabytes: float) -> None:
    assert preset_geometry(preset).file_bytes / 1e9 == pytest.approx(gigabytes, rel=0.004)


def test_a_preset_is_what_info_reads_from_the_file(tmp_path: Path) -> None:
    """The same tensors in the same type, through a GGUF header and through the preset: the same geometry."""
    fields = {**QWEN3_30B_A3B, "expert_type": "F16", "dense_type": "F16"}
    read = read_model(write_synthetic(tmp_path / "m.gguf", hole=True, **fields)[0]).geometry
    preset = preset_geometry("qwen3-30b-a3b:F16")
    assert preset.part_bytes == read.part_bytes
    for name in ("moe_layers", "n_experts", "layer_top_k", "expert_bytes", "kv", "parameters", "d_model", "d_expert"):
        assert getattr(preset, name) == getattr(read, name)


def test_caches_of_the_attention_kinds() -> None:
    assert preset_geometry("qwen3-30b-a3b").kv.per_token == 48 * 2 * 4 * 128 * 2
    deepseek = preset_geometry("deepseek-v3").kv
    assert deepseek.latent and deepseek.per_token == 61 * (512 + 64) * 2
    gpt_oss = preset_geometry("gpt-oss-120b").kv
    assert (gpt_oss.full, gpt_oss.windowed, gpt_oss.window) == (18 * 2048, 18 * 2048, 128)
    delta = preset_geometry("qwen3.6-35b-a3b").kv
    assert (delta.full, delta.recurrent_layers) == (10 * 2 * 2 * 256 * 2, 30)
    # Convolution over queries, keys and values, and a 128 × 128 state for each of 32 heads, in float32.
    assert delta.state == 30 * 4 * (3 * (2 * 16 * 128 + 32 * 128) + 32 * 128 * 128)


def test_quantisation_rules_follow_llama_quantize() -> None:
    def down(layer: int, ne: tuple[int, ...] = (1536, 4096, 128)) -> str:
        return scheme_type("Q4_K_M", f"blk.{layer}.ffn_down_exps.weight", ne, layer, 94, (0, 94))

    assert [down(layer) for layer in (0, 10, 11, 12, 13, 14, 81, 82, 93)] == [
        "Q6_K", "Q6_K", "Q4_K", "Q4_K", "Q6_K", "Q4_K", "Q4_K", "Q6_K", "Q6_K",
    ]  # fmt: skip
    # Rows that 256 does not divide fall back to blocks of 32.
    assert down(0, (1408, 2048, 64)) == "Q8_0" and down(11, (1408, 2048, 64)) == "Q5_0"
    assert scheme_type("Q4_K_M", "output.weight", (4096, 151_936), 0, 94, (0, 94)) == "Q6_K"
    assert scheme_type("Q4_K", "output.weight", (4096, 151_936), 0, 94, (0, 94)) == "Q4_K"
    assert scheme_type("Q8_0", "blk.0.ffn_gate_inp.weight", (4096, 128), 0, 94, (0, 94)) == "F32"
    assert scheme_type("MXFP4", "blk.0.ffn_up_exps.weight", (2880, 2880, 128), 0, 36, (0, 36)) == "MXFP4"
    assert scheme_type("MXFP4", "blk.0.attn_k_b.weight", (128, 512, 16), 0, 36, (0, 36)) == "Q8_0"


def test_names_are_forgiving_and_mistakes_are_not() -> None:
    assert is_preset("Qwen3-235B-A22B:q4_k_m") and not is_preset("qwen3-235b")
    assert preset_geometry("Qwen3-235B-A22B:q4_k_m").name == "qwen3-235b-a22b:Q4_K_M"
    with pytest.raises(UserError, match="no quantisation 'Q9': presets come in F16"):
        preset_geometry("olmoe-1b-7b:q9")
    with pytest.raises(UserError, match="no preset 'gpt-5'"):
        preset_geometry("gpt-5")
