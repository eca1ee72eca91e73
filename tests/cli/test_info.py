"""`edgemoe info` as a person meets it."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from edgemoe.model.synthetic import QWEN3_30B_A3B, write_synthetic


def info(*arguments: str | Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "edgemoe.cli", "info", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env={**os.environ, **environment})


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The header of Qwen3-30B-A3B: 579 tensors, a vocabulary of 152k; its 18 GB of data are a hole."""
    return write_synthetic(tmp_path_factory.mktemp("qwen") / "qwen3-30b.gguf", hole=True, **QWEN3_30B_A3B)[0]


def test_what_a_person_reads(qwen: Path) -> None:
    result = info(qwen, COLUMNS="80")
    assert result.returncode == 0 and result.stderr == ""
    for expected in (
        "30.5 B parameters, 3.35 B per token",
        "all 48 layers MoE · 128 experts, top-8 · softmax gating",
        "2,048 × 768 in Q4_K, 2.65 MB",
        "routed experts",
        "16.3 GB",
        "90.7%",
        "4,096 tokens × 98.3 kB, F16",
        "slots in RAM, experts on SSD",
        f"edgemoe trace {qwen} -f TEXT -o trace.npz",
    ):
        assert expected in result.stdout
    assert "\x1b" not in result.stdout, "piped output is plain"
    assert max(len(line) for line in result.stdout.splitlines()[:-1]) <= 80


def test_json_is_one_object_with_the_same_numbers(qwen: Path) -> None:
    result = info(qwen, "--json", "--ctx", "1024")
    report = json.loads(result.stdout)
    assert result.returncode == 0 and result.stderr == "" and result.stdout.count("\n") == 1
    assert report["layers"] == len(report["moe_layers"]) == len(report["bytes"]["expert_by_layer"]) == 48
    assert (report["experts"], report["top_k"], report["gating"]) == (128, 8, "softmax")
    assert report["bytes"]["file"] == qwen.stat().st_size
    assert report["bytes"]["expert_by_layer"][0] == 3 * 2048 * 768 // 256 * 144
    assert report["bytes"]["active_per_token"] == (
        report["bytes"]["always_read_per_token"] + 48 * 8 * report["bytes"]["expert_by_layer"][0]
    )
    assert report["kv"]["at_context"] == 1024 * report["kv"]["per_token"] == 1024 * 48 * 2 * 4 * 128 * 2
    assert [way["way"] for way in report["memory"]["ways"]] == [
        "vram", "ram-to-vram", "experts-in-ram", "ram", "ssd-to-ram",
    ]  # fmt: skip


def test_a_header_of_full_size_takes_little_more_than_a_small_one(qwen: Path, tmp_path: Path) -> None:
    """Processor time of both in turns, the least of three: a vocabulary that is read word by word takes seconds."""
    [small] = write_synthetic(tmp_path / "small.gguf", "qwen3moe")
    spent = [(_processor_time(qwen), _processor_time(small)) for _ in range(3)]
    whole, little = (min(times) for times in zip(*spent, strict=True))
    assert whole <= 2 * little


def _processor_time(model: Path) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert info(model).returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_deepseek_and_dense_models(tmp_path: Path) -> None:
    [deepseek] = write_synthetic(
        tmp_path / "d.gguf", "deepseek2", leading_dense=1, shared_experts=2, expert_groups=4, merged_gate_up=True
    )
    shown = info(deepseek, COLUMNS="120").stdout
    for expected in ("3 of 4 layers MoE (1-3)", "sigmoid gating", "selection bias", "2 of 4 groups", "2 shared"):
        assert expected in shown
    assert "gate and up merged" in shown and "latent attention" in shown
    dense = info(write_synthetic(tmp_path / "l.gguf", "llama")[0]).stdout
    assert "all but embeddings" in dense and "no experts to trace" in dense and "slots" not in dense.lower()


def test_names_from_the_file_are_not_markup(tmp_path: Path) -> None:
    folder = tmp_path / "[b]" / "[" / "x]"
    folder.mkdir(parents=True)
    [path] = write_synthetic(folder / "[red]x[nope].gguf")
    result = info(path)
    assert result.returncode == 0 and str(path) in result.stdout


def test_on_a_narrow_terminal_words_and_the_command_to_copy_stay_whole(tmp_path: Path) -> None:
    folder = tmp_path / ("long-" * 12)
    folder.mkdir()
    [path] = write_synthetic(folder / "m.gguf")
    shown = info(path, COLUMNS="60").stdout
    assert f"  edgemoe trace {path} -f TEXT -o trace.npz\n" in shown


def test_mistakes_are_one_line_and_exit_code_2(tmp_path: Path) -> None:
    [path] = write_synthetic(tmp_path / "m.gguf")
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(path.read_bytes()[:-5])
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(path.read_bytes()[:2000])
    text = tmp_path / "notes.txt"
    text.write_text("not a model")
    for bad, message in {
        tmp_path / "none.gguf": "no such file",
        tmp_path: "no config.json there",
        text: "expected a GGUF file",
        broken: "not a readable GGUF file",
        cut: "truncated",
    }.items():
        for flags in ((), ("--json",)):
            result = info(bad, *flags)
            assert (result.returncode, result.stdout) == (2, "")
            assert message in result.stderr and result.stderr.count("\n") == 1
