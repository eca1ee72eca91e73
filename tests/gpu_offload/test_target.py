"""Which GPU and which executor, what is wrong with them in one line, and memory that is refused on the way.

What only a GPU can say is put in at the boundary: functions of `torch.cuda`.
"""

import sys
import weakref
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU tier needs torch (pip install edgemoe[gpu])")

from offload_engines import POLICIES, PROMPT, TINY, made_up_calibration, make  # noqa: E402

from edgemoe.calibration import TokenPrior  # noqa: E402
from edgemoe.errors import UserError  # noqa: E402
from edgemoe.gpu_offload import arena, target  # noqa: E402
from edgemoe.gpu_offload import engine as engine_module  # noqa: E402
from edgemoe.gpu_offload.arena import Arena  # noqa: E402
from edgemoe.gpu_offload.executor import memory_full  # noqa: E402
from edgemoe.gpu_offload.memory import Room  # noqa: E402
from edgemoe.gpu_offload.shape import read_shape  # noqa: E402
from edgemoe.gpu_offload.target import Target, find_target  # noqa: E402
from edgemoe.machine.gpus import Gpu  # noqa: E402
from edgemoe.model import read_model  # noqa: E402
from edgemoe.model.synthetic import write_synthetic  # noqa: E402
from edgemoe.policy import LogicalCache, Policy  # noqa: E402

GB = 10**9
FULL = torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMany lines follow")


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """torch with CUDA, and two GPUs of an RTX 4090's abilities."""
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "get_device_name": lambda device: "NVIDIA GeForce RTX 4090",
        "get_device_capability": lambda device: (8, 9),
        "get_device_properties": lambda device: SimpleNamespace(is_integrated=0, uuid="1-2", total_memory=24 * GB),
        "device": lambda device: nullcontext(),
        "empty_cache": lambda: None,
        "synchronize": lambda: None,
        "mem_get_info": lambda device: (20 * GB, 24 * GB),
        "memory_reserved": lambda device: 3 * GB,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(target, "_attribute", lambda index, attribute: 1)
    monkeypatch.setattr(target, "_add_one", lambda device: None)
    monkeypatch.setattr(target.platform, "release", lambda: "6.8.0-45-generic")
    return monkeypatch


def test_heads_that_the_device_cannot_split_are_refused_at_once(two_gpus: pytest.MonkeyPatch, tmp_path: Path) -> None:
    [path] = write_synthetic(tmp_path / "m.gguf", **{**TINY, "d_model": 48, "n_heads": 2})
    shape = read_shape(read_model(path))
    assert shape.d_head == 24
    with pytest.raises(UserError, match=r"width 24.*--executor host"):
        find_target("cuda").check(shape)
    find_target("cuda", executor="host").check(shape)
    with pytest.raises(UserError, match="width 24"):
        make(path, device="cuda")


def test_what_the_device_s_kernels_cannot_count_is_refused_at_once(
    two_gpus: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    device, host = find_target("cuda"), find_target("cuda", executor="host")
    [path] = write_synthetic(tmp_path / "m.gguf", **{**TINY, "n_layers": 1, "n_experts": 513})
    two_gpus.setattr(engine_module, "load_weights", lambda *_, **__: pytest.fail("it was loaded"))
    with pytest.raises(UserError, match=r"^513 experts per layer: .* 512 at most: give --executor host$"):
        make(path, device="cuda")
    many, few = read_shape(read_model(path)), replace(read_shape(read_model(path)), n_experts=512)
    device.check(few)
    device.check(replace(few, top_k=256))
    with pytest.raises(UserError, match=r"^257 experts per token: .* 256 at most: give --executor host$"):
        device.check(replace(few, top_k=257))
    host.check(replace(many, top_k=257))


def test_a_token_prior_that_the_device_cannot_count_is_refused_at_once(
    two_gpus: pytest.MonkeyPatch, tiny: Path
) -> None:
    """Arrays of 2³¹ entries that take no memory."""

    def of(entries: int, tokens: int) -> TokenPrior:
        counts, ids = np.broadcast_to(np.uint32(1), entries), np.broadcast_to(np.int32(1), tokens)
        return TokenPrior((4, 16), ids, ids, ids, counts, counts)

    shape = read_shape(read_model(tiny))
    find_target("cuda").check(shape, of(2**31 - 1, 2**29 - 1))
    for prior in (of(2**31, 1), of(1, 2**29)):
        with pytest.raises(UserError, match=r"^a token prior of 2,147,483,648 entries: .*: give --executor host$"):
            find_target("cuda").check(shape, prior)
        find_target("cuda", executor="host").check(shape, prior)
    two_gpus.setattr(engine_module, "load_weights", lambda *_, **__: pytest.fail("it was loaded"))
    two_gpus.setattr(target, "MOST_ENTRIES", 6143)
    with pytest.raises(UserError, match=r"^a token prior of 6,144 entries: .* 6,143 at most: give --executor host$"):
        make(tiny, device="cuda", policy=POLICIES["psr"], calibration=made_up_calibration())
    with pytest.raises(pytest.fail.Exception, match="it was loaded"):  # without the prior
        make(tiny, device="cuda", policy=POLICIES["exact-lru"], calibration=made_up_calibration())


@pytest.mark.parametrize(("experts", "executed", "takes"), [(512, 256, True), (513, 4, False), (512, 257, False)])
def test_the_kernels_take_what_the_check_lets_pass(experts: int, executed: int, takes: bool) -> None:
    pytest.importorskip("triton")
    from edgemoe.gpu_offload.kernels.device_policy import DevicePolicy

    cache = LogicalCache(Policy(), n_layers=1, n_experts=experts, top_k=executed, capacity=experts)
    with nullcontext() if takes else pytest.raises(ValueError, match="too many"):
        DevicePolicy(cache, device="cpu")


def refused(*arguments: Any) -> str:
    with pytest.raises(UserError) as caught:
        find_target(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_gpu_is_driven_from_the_device(two_gpus: pytest.MonkeyPatch) -> None:
    found = find_target("cuda")
    assert (found.device, found.executor, found.note) == (torch.device("cuda", 0), "device", "")
    assert found.name == "NVIDIA GeForce RTX 4090" and found.uuid == "GPU-1-2" and found.held == 3 * GB
    assert find_target("cuda", 1).device == torch.device("cuda", 1)
    assert find_target("cuda", 1, "host").executor == "host"
    room = found.room()
    assert room.device == 20 * GB and not room.shared and 0 < room.host < 20 * GB * 1000


def test_a_triton_that_is_too_old_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Target(torch.device("cuda"), "device", "")
    monkeypatch.setitem(sys.modules, "edgemoe.gpu_offload.device", SimpleNamespace(__spec__=None))
    with pytest.raises(UserError, match=r"needs \w+: pip install -U edgemoe\[gpu\], or give --executor host$"):
        there.open(None, None, n_ctx=8, chunk=8)  # type: ignore[arg-type]


def test_windows_driver_is_driven_from_the_host(two_gpus: pytest.MonkeyPatch) -> None:
    two_gpus.setattr(target.platform, "release", lambda: "5.15.153.1-microsoft-standard-WSL2")
    found = find_target("cuda")
    assert found.executor == "host" and "Windows' driver: the host drives the GPU" in found.note
    assert find_target("cuda", None, "device") == Target(found.device, "device", found.name)


def test_the_cpu_is_one_place() -> None:
    found = find_target("cpu")
    assert (found.executor, found.name, found.is_gpu, found.held, found.uuid) == ("cpu", "cpu", False, 0, "")
    assert found.room().shared
    assert "--gpu is about --device cuda" in refused("cpu", 0)
    assert "not one of cpu, cuda" in refused("tpu")
    assert "not one of device, host" in refused("cuda", 0, "both")


def test_what_a_gpu_lacks_is_one_line(two_gpus: pytest.MonkeyPatch) -> None:
    assert "--gpu 2: this process sees 2 (0: NVIDIA GeForce RTX 4090, 1: NVIDIA" in refused("cuda", 2)
    two_gpus.setattr(target, "_attribute", lambda index, attribute: 0)
    assert "no unified addressing, by which kernels read host memory: give --executor host" in refused("cuda", 1)
    assert find_target("cuda", 1, "host").executor == "host"
    two_gpus.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "GPU 0 (NVIDIA GeForce RTX 4090) has compute capability 7.5" in refused("cuda")

    def busy(device: object) -> None:
        raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable\nCUDA kernel errors might …")

    two_gpus.setattr(target, "_add_one", busy)
    assert "GPU 1 (NVIDIA GeForce RTX 4090) cannot be used: CUDA error: all" in refused("cuda", 1, "host")


def test_no_gpu_says_why_and_what_runs_without(two_gpus: pytest.MonkeyPatch) -> None:
    two_gpus.setattr(torch.cuda, "is_available", lambda: False)

    def old() -> None:
        raise RuntimeError(
            "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU …"
        )

    two_gpus.setattr(torch.cuda, "init", old)
    words = refused("cuda")
    assert "(The NVIDIA driver on your system is too old (found version 11040))" in words
    assert "--device cpu runs the same policies in RAM" in words and "--ram from disk" in words
    two_gpus.setattr(torch.cuda, "init", lambda: None)
    assert "CUDA_VISIBLE_DEVICES hides all" in refused("cuda")
    two_gpus.setattr(torch.version, "cuda", None)
    two_gpus.setattr(target, "nvidia_gpus", lambda: [Gpu("NVIDIA RTX A2000", 12 * GB, 11 * GB)])
    assert "is not built for CUDA, the driver shows NVIDIA RTX A2000: install a torch that is" in refused("cuda")
    two_gpus.setattr(target, "nvidia_gpus", list)
    assert "is not built for CUDA): --device cpu" in refused("cuda")


class Tensor:
    """Something that a frame holds."""


@pytest.mark.parametrize("error", [FULL, RuntimeError("Triton Error [CUDA]: out of memory")])
def test_memory_that_is_refused_is_one_line_and_let_go(two_gpus: pytest.MonkeyPatch, error: Exception) -> None:
    emptied: list[int] = []
    two_gpus.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    two_gpus.setattr(torch.cuda, "mem_get_info", lambda device: (GB, 24 * GB))
    held = []

    def work() -> None:
        tensor = Tensor()
        held.append(weakref.ref(tensor))
        try:
            raise error
        finally:
            assert tensor is held[0]()

    with pytest.raises(UserError) as caught, find_target("cuda").use():
        work()
    assert "GPU 0 (NVIDIA GeForce RTX 4090): its memory is full (1.00 GB of 24.0 GB are free now)" in str(caught.value)
    assert "--residency" in str(caught.value) and "\n" not in str(caught.value)
    assert held[0]() is None and emptied


def test_torch_s_paragraph_is_a_line() -> None:
    words = (
        "CUDA out of memory. Tried to allocate 34.00 MiB. GPU 0 has a total capacity of 139 GiB of which 2 are free."
    )
    assert "memory is full: 34.00 MiB more are needed: close" in str(memory_full(torch.cuda.OutOfMemoryError(words)))
    assert "memory is full: close" in str(memory_full(RuntimeError("CUDA error: out of memory")))


def test_what_is_no_refusal_goes_through(two_gpus: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="illegal"), find_target("cuda").use():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(UserError, match="watchdog ended a kernel"), find_target("cuda").use():
        raise RuntimeError("CUDA error: the launch timed out and was terminated")


class CpuAsGpu(Target):
    """The CPU's executor where an engine sees a GPU: what it does about a GPU's refusals is the engine's own."""

    @property
    def is_gpu(self) -> bool:
        return True

    def room(self) -> Room:
        return Room(20 * GB, 60 * GB, shared=False)


@pytest.fixture
def pretended(two_gpus: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    found = CpuAsGpu(torch.device("cpu"), "cpu", "pretended")
    two_gpus.setattr(engine_module, "find_target", lambda *_: found)
    return two_gpus


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_synthetic(tmp_path_factory.mktemp("tiny") / "tiny.gguf", **TINY, add_bos=True)[0]


def test_a_gpu_that_is_full_at_load_leaves_nothing(tiny: Path, pretended: pytest.MonkeyPatch) -> None:
    loaded, load = [], engine_module.load_weights

    def remembered(*arguments: Any, **more: Any) -> Any:
        weights = load(*arguments, **more)
        loaded.append(weakref.ref(weights.arena))
        return weights

    def full(*_: object, **__: object) -> None:
        raise FULL

    pretended.setattr(engine_module, "load_weights", remembered)
    pretended.setattr(CpuAsGpu, "open", full)
    with pytest.raises(UserError, match="its memory is full"):
        make(tiny, device="cuda")
    assert len(loaded) == 1 and loaded[0]() is None


@pytest.mark.parametrize("tokens", [24, 1])
def test_a_gpu_that_is_full_midway_goes_on(tiny: Path, pretended: pytest.MonkeyPatch, tokens: int) -> None:
    with make(tiny, device="cuda", policy=POLICIES["psr"]) as engine:
        engine.prefill(PROMPT[:24])
        part = PROMPT[24 : 24 + tokens]
        expected = engine.prefill(part)
        engine.reset()
        engine.prefill(PROMPT[:24])
        step = engine.executor.step

        def full(*arguments: Any, **more: Any) -> np.ndarray:
            step(*arguments, **more)
            raise FULL

        pretended.setattr(engine.executor, "step", full)
        with pytest.raises(UserError, match="its memory is full"):
            engine.prefill(part)
        assert engine.position == 24
        pretended.setattr(engine.executor, "step", step)
        assert np.array_equal(engine.prefill(part), expected)
        engine.verify()
        assert engine.stats().vram_bytes == 3 * GB


def test_a_gpu_s_need_is_refused_before_loading(tiny: Path, pretended: pytest.MonkeyPatch) -> None:
    pretended.setattr(engine_module, "load_weights", lambda *_, **__: pytest.fail("it was loaded"))
    pretended.setattr(CpuAsGpu, "room", lambda self: Room(GB // 2, 60 * GB, shared=False))
    with pytest.raises(UserError, match=r"are needed .* 500 MB are free"):
        make(tiny, device="cuda")
    pretended.setattr(CpuAsGpu, "room", lambda self: Room(20 * GB, GB // 4000, shared=False))
    with pytest.raises(UserError, match="of RAM and loading them"):
        make(tiny, device="cuda")


def test_page_locking_that_is_refused_says_the_limits(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def register(address: int, size: int, flags: int) -> int:
        asked.append(size)
        return 2

    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=register))
    monkeypatch.setattr(arena, "_launch", lambda: None)
    monkeypatch.setattr(arena, "_lock_limit", lambda: "8.39 MB")
    shape = read_shape(read_model(tiny))
    with pytest.raises(UserError) as caught:
        Arena(shape, torch.bfloat16, pinned=True)
    assert asked == [shape.n_layers * shape.n_experts * shape.expert_values * 2]
    assert "cannot be page-locked for the GPU (cudaHostRegister: error 2;" in str(caught.value)
    assert "`ulimit -l` is 8.39 MB" in str(caught.value) and "\n" not in str(caught.value)


def test_experts_begin_with_a_page_or_are_refused(tiny: Path) -> None:
    """Kernels read host memory in lines of 128 bytes. No machine has the memory of 2⁵⁰ of experts."""
    shape = read_shape(read_model(tiny))
    held = Arena(shape, torch.bfloat16, pinned=False)
    assert held.bytes.data_ptr() % 4096 == 0 and held.bytes.shape[:2] == (shape.n_layers, shape.n_experts)
    held.bytes.fill_(7)
    assert int(held.bytes.min()) == 7
    with pytest.raises(UserError, match=r"of RAM for the experts are refused"):
        Arena(replace(shape, n_experts=2**50 // shape.expert_values), torch.bfloat16, pinned=False)
