"""What `edgemoe run --device cuda` says of a GPU. The CPU's executor stands in for one: the words are the command's."""

import io
import json
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the GPU tier needs torch (pip install edgemoe[gpu])")

from edgemoe.cli import commands, generating  # noqa: E402
from edgemoe.demo import demo_model  # noqa: E402
from edgemoe.gpu_offload import engine as engine_module  # noqa: E402
from edgemoe.gpu_offload.cpu import CpuExecutor  # noqa: E402
from edgemoe.gpu_offload.decisions import Decisions  # noqa: E402
from edgemoe.gpu_offload.memory import Room  # noqa: E402
from edgemoe.gpu_offload.target import Target  # noqa: E402
from edgemoe.gpu_offload.weights import Weights  # noqa: E402
from edgemoe.machine import profile  # noqa: E402
from edgemoe.policy import LogicalCache  # noqa: E402

RUN = ["run", str(demo_model()), "--device", "cuda", "-p", "In the beginning", "-n", "6", "--threads", "1", "--greedy"]
GB = 10**9


class CpuAsGpu(Target):
    """A GPU, as far as the command sees."""

    is_gpu, uuid, held = True, "GPU-pretended", GB

    def room(self) -> Room:
        return Room(8 * GB, 16 * GB, shared=False)

    def use(self) -> AbstractContextManager[None]:
        return nullcontext()

    def release(self) -> None: ...

    def open(self, weights: Weights, cache: LogicalCache, *, n_ctx: int, chunk: int) -> CpuExecutor:
        return CpuExecutor(weights, Decisions(cache, chunk), n_ctx=n_ctx)


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """A GPU for the engine; what it was asked for. A command takes SIGTERM for itself: it is given back."""
    found: list[Any] = []

    def find(*arguments: Any) -> Target:
        found.append(arguments)
        return CpuAsGpu(torch.device("cpu", 1), arguments[2] or "device", "NVIDIA Pretended", "a word about the driver")

    monkeypatch.setattr(engine_module, "find_target", find)
    before = signal.getsignal(signal.SIGTERM)
    yield found
    signal.signal(signal.SIGTERM, before)


def test_json_names_the_gpu_and_knows_what_it_does_not_know(
    asked: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.run([*RUN, "--gpu", "1", "--json", "--residency", "50%"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert asked == [("cuda", 1, None)]
    described = {"device": "cuda", "gpu": "NVIDIA Pretended", "gpu_index": 1, "executor": "device", "dtype": "bfloat16"}
    assert {name: out[name] for name in described} == described
    assert out["first_token_s"] > 0 and out["load_s"] > 0 and out["share_of_disk"] is None
    assert sorted(out["seconds_per_token"]) == ["device", "other"]
    phase = out["decode_phase"]
    assert [phase[name] for name in ("compute_s", "demand_wait_s", "policy_s")] == [None] * 3
    assert phase["vram_bytes"] == GB and phase["demand_reads"] > 0 and phase["tokens"] == 5
    assert commands.run([*RUN, "--executor", "host", "--json", "--residency", "50%"]) == 0
    host = json.loads(capsys.readouterr().out)
    assert asked[1] == ("cuda", None, "host") and host["text"] == out["text"]
    assert host["decode_phase"]["demand_wait_s"] > 0 and host["config_hash"] == out["config_hash"]


def test_kernels_that_take_their_time_to_compile_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, said = CpuAsGpu.open, threading.Event()

    def slow(self: CpuAsGpu, *arguments: Any, **more: Any) -> CpuExecutor:
        assert said.wait(60)
        return opened(self, *arguments, **more)

    class Told(io.StringIO):
        def write(self, text: str) -> int:
            if "compiling the GPU's kernels" in text:
                said.set()
            return super().write(text)

    monkeypatch.setattr(CpuAsGpu, "open", slow)
    monkeypatch.setattr(generating, "_NOTICED_S", 0.01)
    monkeypatch.setattr(sys, "stderr", Told())
    assert commands.run([*RUN, "--residency", "50%"]) == 0
    assert "compiling the GPU's kernels: once on this machine" in sys.stderr.getvalue()  # type: ignore[attr-defined]


def test_people_read_what_drives_it_and_how_fast_its_copies_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = [
        SimpleNamespace(uuid="GPU-other", h2d=lambda _: 1.0),
        SimpleNamespace(uuid="GPU-pretended", h2d=lambda _: 1e9),
    ]
    monkeypatch.setattr(profile, "load_profile", lambda: SimpleNamespace(gpus=gpus))
    assert commands.run([*RUN, "--vram", "650MB"]) == 0
    err = " ".join(capsys.readouterr().err.split())
    assert "note loaded in" in err and "s for NVIDIA Pretended, which decides for itself note a word about the" in err
    assert "experts per layer have a slot in VRAM" in err
    assert "device" in err and "demand copies per token" in err
    assert "of what `edgemoe probe` measured" in err and "of RAM and 1.00 GB of VRAM held" in err
