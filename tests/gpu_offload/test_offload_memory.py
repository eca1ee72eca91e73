"""Memory is computed before it is allocated, right, and a refusal says what would fit."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="the GPU tier needs torch (pip install edgemoe[gpu])")

from offload_engines import POLICIES, TINY, made_up_calibration, make  # noqa: E402

from edgemoe.bench.gpu.geometry import GEOMETRIES  # noqa: E402
from edgemoe.errors import UserError  # noqa: E402
from edgemoe.gpu_offload.memory import GPU_RESERVE, Room, choose_slots, need, prior_bytes  # noqa: E402
from edgemoe.gpu_offload.shape import read_shape  # noqa: E402
from edgemoe.model.synthetic import write_synthetic  # noqa: E402
from edgemoe.policy import LogicalCache, Policy, preset  # noqa: E402
from edgemoe.units import Residency  # noqa: E402

OLMOE = GEOMETRIES["olmoe-1b-7b"]
GB = 10**9


def slots(policy=None, *, free=80 * GB, host=64 * GB, residency=None, vram=None, shared=False, n_ctx=4096):
    needed = need(OLMOE, itemsize=2, n_ctx=n_ctx, chunk=128, prior_bytes=0, threads=8)
    return choose_slots(
        "olmoe",
        OLMOE,
        policy or Policy(),
        needed,
        residency=Residency.parse(residency) if residency else None,
        vram=vram,
        room=Room(free, host, shared),
    )


def test_olmoe_needs_what_its_geometry_says():
    """12.58 MB per expert in bf16 (paper §6.1), 12.9 GB of them; dense parts are the rest of 6.9 B parameters."""
    needed = need(OLMOE, itemsize=2, n_ctx=4096, chunk=128, prior_bytes=5, threads=8)
    assert needed.slot == 16 * 12_582_912 and needed.arena == 64 * needed.slot
    assert needed.kv == 2 * 16 * 4096 * 2048 * 2 and needed.prior == 5
    assert 6.9 * GB < (needed.arena + needed.dense) / 2 < 6.95 * GB
    assert needed.device(32) - needed.device(31) == needed.slot


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_formula_is_what_is_allocated(tmp_path, dtype):
    path = write_synthetic(tmp_path / "m.gguf", **TINY, n_kv_heads=2)[0]
    known = made_up_calibration()
    with make(path, dtype=dtype, policy=POLICIES["psr"], calibration=known, n_ctx=64) as engine:
        w, executor, needed = engine._weights, engine.executor, engine.need
        layers = [value for layer in w.layers for value in vars(layer).values()]
        dense = [w.embedding, w.norm, w.output, w.routers, *layers]
        assert needed.dense == sum(tensor.nbytes for tensor in dense)
        assert needed.kv == executor._keys.nbytes + executor._values.nbytes
        assert needed.arena == w.arena.bytes.nbytes
        assert needed.slot * engine.capacity == executor.slots.bytes.nbytes
        assert needed.prior == known.prior.nbytes


def test_a_gpu_s_prior_is_counted_as_it_is_stored():
    from edgemoe.gpu_offload.kernels.state import DevicePrior

    known = made_up_calibration()
    assert prior_bytes(known, gpu=True) == DevicePrior.from_prior(known, "cpu").nbytes
    assert prior_bytes(known, gpu=False) == known.prior.nbytes
    assert prior_bytes(None, gpu=True) == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_gpu_s_buffers_fit_into_what_is_said_of_them(tmp_path, dtype):
    """Slots with their records exactly; the rest with what a chunk works on, and without what CUDA takes for itself."""
    pytest.importorskip("triton")
    from edgemoe.gpu_offload.device import DeviceExecutor
    from edgemoe.gpu_offload.weights import DTYPES, load_weights
    from edgemoe.model import read_model

    model = read_model(write_synthetic(tmp_path / "m.gguf", **TINY, n_kv_heads=2)[0])
    kind, shape = DTYPES[dtype], read_shape(model)
    weights = load_weights(model, shape, dtype=kind)
    sizes = {"itemsize": kind.itemsize, "n_ctx": 64, "chunk": 8, "prior_bytes": 0, "threads": 1, "gpu": True}
    needed = need(shape, **sizes)
    cache = LogicalCache(Policy(), n_layers=4, n_experts=16, top_k=4, capacity=9)
    executor = DeviceExecutor(weights, cache, n_ctx=64, chunk=8, concurrent=False)
    records, program, prompt = executor.records, executor._program, executor._prompt
    kept = [records.claims, records.done, records.after, records.experts, records.current, records.asked]
    assert needed.slot * 9 == executor.slots.bytes.nbytes + sum(tensor.nbytes for tensor in kept)
    assert needed.kv == program.keys.nbytes + program.values.nbytes
    parts = (program, prompt, prompt._layers, prompt._products, prompt._staging)
    others = [
        *(value for part in parts for value in vars(part).values() if isinstance(value, torch.Tensor)),
        *(tensor for decided in prompt._decided for tensor in decided.tensors),
        *(executor.slots.staging, *executor._policy.state.tensors, *executor._policy.decisions.tensors),
    ]
    held = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in others}
    kv = [tensor.untyped_storage().data_ptr() for tensor in (program.keys, program.values)]
    assert 0 < sum(size for place, size in held.items() if place not in kv) < needed.work - GPU_RESERVE


def test_the_choices_that_a_gpu_keeps_are_counted(monkeypatch):
    pytest.importorskip("triton")
    from edgemoe.generation import Options
    from edgemoe.gpu_offload import memory
    from edgemoe.gpu_offload.kernels.sampling import MOST, DeviceSampler

    sizes = {"itemsize": 2, "n_ctx": 4096, "chunk": 8, "prior_bytes": 0, "threads": 1, "gpu": True}
    sampler = DeviceSampler(Options(top_k=MOST), OLMOE.n_vocab, 4096, ends=(3, 5), device="cpu")
    held = sum(value.nbytes for value in vars(sampler).values() if isinstance(value, torch.Tensor))
    counted = need(OLMOE, **sizes).work
    monkeypatch.setattr(memory, "CHOICES", 0)
    assert 8 * 4096 < held <= (counted - need(OLMOE, **sizes).work) / 4


def test_a_tied_output_is_held_once():
    sizes = {"itemsize": 2, "n_ctx": 64, "chunk": 8, "prior_bytes": 0, "threads": 1}
    tied = need(replace(OLMOE, tied_output=True), **sizes)
    assert need(OLMOE, **sizes).dense - tied.dense == 50304 * 2048 * 2


def test_vram_and_residency_choose_the_slots():
    assert slots() == 64  # all fit
    assert slots(residency="50%") == 32
    assert slots(residency="6GB") == 29
    eight = slots(vram=8 * GB)
    assert 25 <= eight < 40
    assert slots(free=8 * GB) == eight == slots(free=20 * GB, vram=8 * GB)
    assert slots(vram=8 * GB, n_ctx=512) > eight  # a smaller context leaves more


def test_a_refusal_says_what_would_fit():
    with pytest.raises(UserError, match=r"64 slots per layer.*8\.00 GB are free: --residency \d+ fits") as caught:
        slots(free=8 * GB, residency="100%")
    fits = int(str(caught.value).split("--residency ")[1].split()[0])
    assert slots(free=8 * GB, residency=str(fits)) == fits
    with pytest.raises(UserError, match="are allowed"):
        slots(vram=8 * GB, residency=str(fits + 1))
    with pytest.raises(UserError, match=r"even 8 slots, .* give a smaller context"):
        slots(free=3 * GB)
    with pytest.raises(UserError, match=r"its experts take 12\.9 GB of RAM .* 8\.00 GB are free"):
        slots(host=8 * GB)
    with pytest.raises(UserError, match="are free"):
        slots(shared=True, free=16 * GB, host=16 * GB, residency="50%")  # arena and slots share what is free
    assert slots(shared=True, free=24 * GB, host=24 * GB, residency="50%") == 32


def test_capacity_must_hold_a_token_and_a_window():
    with pytest.raises(UserError, match="cannot hold the 8 experts"):
        slots(residency="7")
    with pytest.raises(UserError, match="a window of 12 candidates"):
        slots(preset("psr", window=12), residency="10")
    assert slots(preset("psr", window=12), vram=8 * GB) >= 12
    with pytest.raises(UserError, match="even 40 slots"):
        slots(preset("psr", window=40), vram=8 * GB)


def test_nothing_is_allocated_before_the_refusal(tmp_path, monkeypatch):
    from edgemoe.gpu_offload import engine as module
    from edgemoe.gpu_offload import target
    from edgemoe.machine.memory import Ram

    path = write_synthetic(tmp_path / "m.gguf", **TINY)[0]
    monkeypatch.setattr(target, "ram", lambda: Ram(2_000_000, 1_000_000, True))
    monkeypatch.setattr(module, "load_weights", lambda *_, **__: pytest.fail("it was loaded"))
    with pytest.raises(UserError, match="are free"):
        make(path)
