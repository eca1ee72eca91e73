"""The GPU probe: its kernels in Triton's interpreter, what it says where nothing can be measured; on a GPU, rates."""

import importlib.util
import os
import subprocess
import sys

import numpy as np
import pytest

from edgemoe.machine import gpu_probe, overlap
from edgemoe.machine.gpus import Gpu

INTERPRETED = """
import torch
from edgemoe.machine import gpu_kernels

words = torch.randint(-(2**62), 2**62, (5, 1000))
order = torch.tensor([3, 0, 4], dtype=torch.int32)
for ctas in (1, 3):
    target = torch.zeros(4, 1000, dtype=torch.int64)
    gpu_kernels.gather_pieces[(ctas,)](words, target, order, N=3, WORDS=1000, CTAS=ctas, BLOCK=128)
    assert torch.equal(target[:3], words[[3, 0, 4]]), "pieces differ"
    assert not target[3].any(), "written beyond the pieces"

sums = torch.zeros(4, dtype=torch.int64)
gpu_kernels.add_up[(4,)](words, sums, N=4999, CTAS=4, BLOCK=256)
assert sums.sum() == words.flatten()[:4999].sum(), "sums differ"
print("fine")
"""


def has_gpu() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def test_the_kernels_copy_the_pieces_named_and_add_up_every_word() -> None:
    for name in ("torch", "triton"):
        pytest.importorskip(name)
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", INTERPRETED], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "fine", done.stderr


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_probe, "nvidia_gpus", lambda: [Gpu("NVIDIA Something", 1, 1, "GPU-1")])


@pytest.mark.usefixtures("one_gpu")
def test_without_torch_the_gpu_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    rates, notes = gpu_probe.probe_gpus()
    assert rates == ()
    assert notes == ("NVIDIA Something was not measured: torch is not installed: pip install 'edgemoe[gpu]'",)


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.skipif(has_gpu(), reason="torch can use a GPU here")
def test_a_torch_that_cannot_use_the_gpu_is_named() -> None:
    torch = pytest.importorskip("torch")
    rates, notes = gpu_probe.probe_gpus(quick=True)
    assert rates == ()
    assert len(notes) == 1 and torch.__version__ in notes[0]


def test_without_gpus_there_is_nothing_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_probe, "nvidia_gpus", lambda: [])
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert gpu_probe.probe_gpus() == ((), ())


def test_the_expected_sum_wraps_as_the_device_s_does() -> None:
    words = 5_000_000_000
    exact = words * (words - 1) // 2
    assert gpu_probe._wrapped(exact) == np.array([exact & ((1 << 64) - 1)], np.uint64).view(np.int64)[0]
    assert gpu_probe._wrapped(-1) == -1


@pytest.mark.parametrize("with_numba", [True, False])
def test_every_word_is_loaded(with_numba: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not with_numba:
        torch = pytest.importorskip("torch")
        threads = torch.get_num_threads()
        monkeypatch.setitem(sys.modules, "edgemoe.machine.ram_probe", None)
    array = np.arange(100_003, dtype=np.int64)
    assert overlap._loader()(array) == array.sum()
    if not with_numba:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("kind", ["h2d", "pageable", "d2h"])
@pytest.mark.parametrize("size", [64 << 10, 3 << 20])
def test_copies_are_counted_and_wrong_bytes_are_noticed(kind: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same code over host memory, with a clock that says one second."""
    torch = pytest.importorskip("torch")
    content = torch.randint(-(2**62), 2**62, (1 << 20,))
    buffers = gpu_probe.Buffers(content, content, content.clone(), content.clone(), content.clone(), content, 0)

    def clock(run) -> float:
        run()
        return 1.0

    monkeypatch.setattr(gpu_probe, "_timed", clock)
    assert gpu_probe._copy(buffers, kind, size) == (8 << 20) // size * size
    monkeypatch.setattr(gpu_probe, "_timed", lambda run: 1.0)
    with pytest.raises(RuntimeError, match="other bytes"):
        gpu_probe._copy(buffers, kind, size)


@pytest.mark.gpu
@pytest.mark.skipif(not has_gpu(), reason="needs a CUDA device that torch can use")
def test_a_gpu_has_all_its_rates() -> None:
    rounds: list[int] = []
    measured, notes = gpu_probe.probe_gpus(quick=True, advance=rounds.append)
    assert notes == () and sum(rounds) == gpu_probe.n_rounds(quick=True)
    for gpu in measured:
        assert gpu.uuid.startswith(("GPU-", "MIG-")) and gpu.vram_bytes > 0
        assert [point.bytes for point in gpu.h2d_pinned] == list(gpu_probe.QUICK.sizes)
        assert {point.ctas for point in gpu.zero_copy} == set(gpu_probe.QUICK.ctas)
        bulk = float(gpu.h2d_pinned[-1].bytes_per_s)
        assert 1e9 < bulk < float(gpu.vram_read)
        assert all(float(point.bytes_per_s) < 1.1 * bulk for point in gpu.zero_copy)
        assert gpu.ram_while_h2d is not None and float(gpu.ram_while_h2d.h2d) < 1.1 * bulk


def test_kernels_are_only_imported_by_the_probe() -> None:
    """Importing the probe must not need torch or Triton, which `edgemoe probe` does without."""
    script = "import sys, edgemoe.machine.gpu_probe; print({'torch', 'triton', 'numba'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
