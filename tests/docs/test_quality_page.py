"""docs/quality.md is true: its example runs on the demo model, and it names the models that can be steered."""

import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the quality harness needs torch (pip install edgemoe[eval])")
pytest.importorskip("transformers", reason="needs transformers (pip install edgemoe[eval])")

import edgemoe.data  # noqa: E402
from edgemoe.gpu_offload.harness.families import FAMILIES  # noqa: E402
from edgemoe.policy.replay import DEMAND  # noqa: E402
from edgemoe.training.export import read_gguf, write_hf  # noqa: E402

PAGE = (Path(__file__).parents[2] / "docs" / "quality.md").read_text()
DATA = Path(edgemoe.data.__file__).parent


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    write_hf(tmp_path / "checkpoint", *read_gguf(DATA / "demo-moe-32m-q8_0.gguf"))
    for name, source in (("held-out", "prose"), ("text", "code")):
        (tmp_path / f"{name}.txt").write_text((DATA / f"{source}.txt").read_text())
    [example] = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(example, "quality.md", "exec"), names)
    torch.set_num_threads(before)
    assert len(re.findall(r"KL 0\.\d{4}, \d+\.\d copies per token", capsys.readouterr().out)) == 2
    assert names["records"][0].counts[..., DEMAND].any()  # type: ignore[index]
    assert (tmp_path / "generated.npz").is_file()


def test_every_family_is_named() -> None:
    spelled = {"olmoe": "OLMoE", "mixtral": "Mixtral", "qwen2_moe": "Qwen2-MoE", "qwen3_moe": "Qwen3-MoE"}
    spelled |= {"qwen3_next": "Qwen3-Next", "qwen3_5_moe_text": "Qwen3.5/3.6-MoE"}
    spelled |= {"deepseek_v3": "DeepSeek-V3", "glm4_moe": "GLM-4-MoE"}
    assert spelled.keys() == FAMILIES.keys()
    [models] = re.findall(r"\*\*Models\.\*\* (.*?)\n\n", PAGE, flags=re.DOTALL)
    assert all(name in models for name in spelled.values())
