"""`edgemoe bench gpu` as a person runs it, on the CPU."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from edgemoe.cli import main
from edgemoe.demo import demo_model
from edgemoe.tracing import Trace
from edgemoe.tracing.tracefile import save_trace

SMALL = (
    *("--rounds", 2, "--windows", 2, "--tokens", 6, "--prompt", 8),
    *("--policies", "exact-lru,psr-gated", "--residency", "50%"),
)


@pytest.fixture
def bench(monkeypatch, capsys):
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)

    def run(*arguments, code=0):
        monkeypatch.setattr(sys, "argv", ["edgemoe", "bench", "gpu", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            main()
        said = capsys.readouterr()
        assert stopped.value.code == code, said.err
        return said.out if code != 2 else said.err

    return run


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    scores = rng.standard_normal((3, 24, 64), np.float32)
    experts = np.argsort(-scores, axis=-1)[..., :8].astype(np.int16)
    path = tmp_path / "scores.npz"
    save_trace(
        Trace(
            experts, 64, np.arange(3, dtype=np.int32), np.array([0, 12]), ("a", "b"), "scores", scores=scores,
            pregate=scores, delta=np.full(3, 4, np.float32), warm=np.tile(np.arange(64), (3, 1)),
        ),
        path,
    )  # fmt: skip
    return path


def test_random_weights_by_recorded_routing(bench, trace, tmp_path) -> None:
    narrow = ("--device", "cpu", "--geometry", "olmoe-narrow", "--trace", trace, *SMALL)
    said = bench(*narrow, "--generate", 2, "--determinism", 2, "--pictures", tmp_path / "pictures")
    assert "olmoe-narrow, random weights on CPU" in said and "routing is that of scores" in said
    assert "layers 1 to 2 again to fill 16" in said and "they say nothing of a GPU" in said
    assert "psr-gated" in said and "× least" in said and "the logical cache" in said
    assert said.split("first token, ms")[1].split("free generation")[0].count(" 8 ") >= 3
    assert "NO" not in said.split("takes as long")[0]
    assert sorted(path.name for path in (tmp_path / "pictures").iterdir()) == ["copies.png", "latency.png"]
    found = json.loads(bench(*narrow, "--generate", 0, "--determinism", 0, "--json"))
    assert [row["name"] for row in found["rows"]] == ["resident", "exact-lru", "psr-gated"]
    assert all(row["agrees"] and row["problem"] == "" for row in found["rows"])
    assert found["interrupted"] is False and found["device"] == "cpu" and len(found["beside"]) == 1


def test_what_timing_decides_has_no_other_decisions_beside_it(bench, trace, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    small = ("--device", "cpu", "--geometry", "olmoe-narrow", "--trace", trace, "--rounds", 1, "--windows", 1)
    few = ("--tokens", 6, "--prompt", 0, "--generate", 0, "--determinism", 0, "--residency", "50%")
    said = bench(*small, *few, "--executors", "host,throttled", "--policies", "exact-prefetch:unbounded")
    [timed] = [line for line in said.split("copies per token")[1].splitlines() if "unbounded, throttled" in line]
    [logical] = [line for line in said.split("copies per token")[1].splitlines() if "unbounded, host" in line]
    assert timed.split()[-3:] == ["–", "–", "–"] and logical.split()[-1] == "yes" and "+" in logical


def test_fewer_windows_than_asked_for_are_said(bench, trace) -> None:
    narrow = ("--device", "cpu", "--geometry", "olmoe-narrow", "--trace", trace, *SMALL, "--prompt", 0)
    said = bench(*narrow, "--windows", 3, "--tokens", 16, "--rounds", 1, "--generate", 0, "--determinism", 0)
    assert "3 windows of 16 tokens were asked for; there are 2, of 12 at most" in " ".join(said.split())
    assert "1 round\n" in said


def test_options_that_belong_to_others_are_refused(bench, tmp_path) -> None:
    folder = tmp_path / "not-made"
    assert "--against" in bench("--device", "cpu", "--dir", folder, code=2) and not folder.exists()
    assert "--geometry" in bench("--device", "cpu", "--model", "m.gguf", "--geometry", "olmoe-narrow", code=2)
    (tmp_path / "random.txt").write_bytes(b"a\xff\xfe")
    real = ("--device", "cpu", "--model", demo_model(), "-f", tmp_path / "random.txt")
    assert "random.txt: not UTF-8 text (byte 1)" in bench(*real, code=2)
    assert "no policy preset ''" in bench("--device", "cpu", "--policies", "", code=2)


def test_a_real_model_on_its_texts(bench) -> None:
    found = json.loads(
        bench("--device", "cpu", "--model", demo_model(), *SMALL, "--generate", 2, "--determinism", 0, "--json")
    )
    assert found["subject"] == "edgemoe demo MoE" and found["windows"] == ["prose", "code"]
    assert any("no calibration" in note for note in found["notes"])
    exact, steered = found["rows"][1:]
    assert exact["agrees"] and steered["agrees"] and exact["replaced"] == 0
    assert exact["demand"] == exact["decided_demand"] and steered["policy"]["scale"] == "running"


def test_an_interrupt_prints_what_was_measured(bench, trace, monkeypatch) -> None:
    from edgemoe.bench.gpu import measure

    whole, rounds = measure.one_round, []

    def second_is_interrupted(*arguments):
        rounds.append(1)
        if len(rounds) == 2:
            raise KeyboardInterrupt
        whole(*arguments)

    monkeypatch.setattr(measure, "one_round", second_is_interrupted)
    narrow = ("--device", "cpu", "--geometry", "olmoe-narrow", "--trace", trace, *SMALL)
    found = json.loads(bench(*narrow, "--json", code=130))
    assert found["interrupted"] and found["rounds"] == 1
    assert all(len(row["rounds"]) == 1 for row in found["rows"])


def test_llamacpp_stands_beside_the_rows(bench, trace, monkeypatch) -> None:
    """With llama.cpp on the CPU too, where it is told to offload nothing."""
    pytest.importorskip("llama_cpp")
    from edgemoe.bench.gpu import against

    monkeypatch.setattr(against, "check_llamacpp", lambda: None)
    monkeypatch.setattr(against, "thread_counts", lambda: [1])
    monkeypatch.setattr(against, "_EVERY_LAYER", 0)
    narrow = ("--device", "cpu", "--geometry", "olmoe-narrow", "--trace", trace, *SMALL, "--generate", 0)
    few = (*narrow, "--rounds", 1, "--windows", 1, "--determinism", 0, "--against", "llama.cpp")
    found = json.loads(bench(*few, "--dir", trace.parent, "--json"))
    assert [(one["share"], one["n_cpu_moe"]) for one in found["llama.cpp"]] == [("100%", 0)] + [
        ("50%", number) for number in (8, 12, 16)
    ]
    assert [path.name for path in trace.parent.iterdir()] == ["scores.npz"]
    monkeypatch.setattr(against, "_SPARE", 1 << 60)
    found = json.loads(bench(*few, "--dir", trace.parent, "--json"))
    assert found["llama.cpp"] == [] and len(found["rows"]) == 3
    assert "llama.cpp was not timed" in found["notes"][-1] and "make room" in found["notes"][-1]


def test_without_torch_it_says_what_to_install() -> None:
    lines = ("import sys", "sys.modules['torch'] = None", "sys.argv[1:] = ['bench', 'gpu']")
    program = "; ".join((*lines, "from edgemoe.cli import main", "main()"))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and "pip install edgemoe[gpu]" in done.stderr


def test_what_it_refuses(bench, trace, tmp_path) -> None:
    cpu = ("--device", "cpu")
    assert "expected one of olmoe-1b-7b" in bench(*cpu, "--geometry", "gpt", code=2)
    assert "--lambda" in bench(*cpu, "--lambda", "x", code=2)
    assert "no policy preset" in bench(*cpu, "--policies", "best", code=2)
    assert "give --model" in bench(*cpu, "-f", trace, code=2)
    assert "leave one out" in bench(*cpu, "--model", demo_model(), "--trace", trace, code=2)
    assert "expected llama.cpp" in bench(*cpu, "--against", "vllm", code=2)
    assert "no such trace file" in bench(*cpu, "--geometry", "olmoe-narrow", "--trace", tmp_path / "x.npz", code=2)
    assert "no such" in bench(*cpu, "--quality", tmp_path / "x.json", code=2)
    if not torch.cuda.is_available():
        said = bench(code=2)
        assert "--device cpu --geometry olmoe-narrow" in said and said.count("\n") == 1
    llama = pytest.importorskip("llama_cpp")
    if not llama.llama_supports_gpu_offload():
        said = bench(*cpu, "--against", "llama.cpp", code=2)
        assert "CMAKE_ARGS=-DGGML_CUDA=on" in said and said.count("\n") == 1
