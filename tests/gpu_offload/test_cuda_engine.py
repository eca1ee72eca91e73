"""The engine on a GPU, with the demo model: the CPU's logits, teacher-forced; its text; what timing may not change.

Each test runs in seconds on a machine with a CUDA device, and is skipped elsewhere. Some fill the GPU's memory or look
at what is left of it, so they run one after the other: `pytest -m gpu`.
"""

import gc
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU tier needs torch (pip install edgemoe[gpu])")
pytest.importorskip("triton", reason="the GPU tier needs Triton (pip install edgemoe[gpu])")

from offload_engines import made_up_calibration, make  # noqa: E402

from edgemoe.data import DOMAINS  # noqa: E402
from edgemoe.demo import demo_file, demo_model  # noqa: E402
from edgemoe.errors import UserError  # noqa: E402
from edgemoe.generation import Options, Writer  # noqa: E402
from edgemoe.gpu_offload import engine as engine_module  # noqa: E402
from edgemoe.gpu_offload.device import DeviceExecutor  # noqa: E402
from edgemoe.gpu_offload.engine import OffloadEngine  # noqa: E402
from edgemoe.gpu_offload.memory import Room  # noqa: E402
from edgemoe.gpu_offload.program import Tuning  # noqa: E402
from edgemoe.gpu_offload.target import Target  # noqa: E402
from edgemoe.policy import preset  # noqa: E402
from edgemoe.units import Residency  # noqa: E402

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device that torch can use"),
]
PROMPT, WINDOW = 40, 64
GATED = preset("psr-gated", scale="running")
GREEDY = {"temperature": 0.0, "ignore_eos": True}
VARIED = Options(seed=3, temperature=1.5, top_k=0, top_p=1.0, min_p=0.0)  # what is likeliest repeats itself
TEXT = "In the beginning there was"


def demo(device: str = DEVICE, **more: object) -> OffloadEngine:
    options = {"residency": Residency.parse("25%"), "dtype": "float32", "policy": GATED, "n_ctx": 256, "chunk": None}
    return make(demo_model(), device=device, **{**options, **more})


@pytest.fixture
def engine() -> Iterator[OffloadEngine]:
    with demo() as engine:
        yield engine


def forced(engine: OffloadEngine) -> tuple[np.ndarray, np.ndarray]:
    """Logits [T, V] and experts [L, T, k] of windows of the demo's texts: a prompt, then a token at a time."""
    logits = []
    for domain in DOMAINS:
        window = engine.tokenize(demo_file(f"{domain}.txt").read_bytes()[:3000])[:WINDOW]
        engine.reset()
        logits += [engine.rows(window[:PROMPT]), *(engine.decode(int(token))[None] for token in window[PROMPT:])]
    return np.concatenate(logits), np.concatenate([record["executed"] for record in engine.records], axis=1)


@pytest.mark.parametrize("executor", ["device", "host"])
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-3), ("bfloat16", 2e-2)])
@pytest.mark.parametrize("name", ["exact-lru", "psr-gated"])
def test_logits_are_the_cpu_s(name: str, dtype: str, bound: float, executor: str) -> None:
    """As `test_offload_accuracy` holds the CPU's to llama.cpp's. bfloat16 turns near-ties of the router, and what
    follows attends to the rows where it did: rows are compared up to the first one in which other experts ran."""
    policy = GATED if name == "psr-gated" else preset(name)
    with demo("cpu", dtype=dtype, policy=policy, record=True, verify_slots=False) as engine:
        b, theirs = forced(engine)
    with demo(dtype=dtype, policy=policy, record=True, executor=executor) as engine:
        a, ours = forced(engine)
    alike = (np.sort(ours, -1) == np.sort(theirs, -1)).all(axis=(0, 2))
    so_far = np.logical_and.accumulate(alike.reshape(len(DOMAINS), -1), axis=1).reshape(-1)
    error = np.linalg.norm(a - b, axis=1) / np.linalg.norm(b, axis=1)
    assert np.median(error[so_far]) < bound / 2 and error[so_far].max() < bound
    assert so_far.mean() > (0.99 if dtype == "float32" else 0.02)
    gap = b.max(1) - b[np.arange(len(a)), a.argmax(1)]
    assert (gap <= 2 * np.abs(a - b).max(1)).all()


def test_a_calibration_decides_alike() -> None:
    """Warm set, bonus scale and token prior, in chunks of a prompt and in decodes."""
    known = made_up_calibration(8192, 8, 64)
    found = []
    for device in ("cpu", DEVICE):
        with demo(device, policy=preset("psr"), calibration=known, chunk=16, record=True, verify_slots=False) as engine:
            found.append(forced(engine)[1])
    assert (np.sort(found[0], -1) == np.sort(found[1], -1)).all(axis=(0, 2)).mean() > 0.99


@pytest.mark.parametrize(
    "options", [GREEDY, {"seed": 5, "ignore_eos": True}, {"seed": 6, "top_k": 0, "ignore_eos": True}]
)
def test_the_same_prompt_gives_the_same_text(
    engine: OffloadEngine, options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice, after another one, and token by token."""
    writer = Writer(engine)
    first = writer.write(TEXT, n=60, **options)
    assert writer.write(TEXT, n=60, **options) == first
    writer.write("Something else entirely, 0123456789", n=5)
    assert writer.write(TEXT, n=60, **options) == first
    monkeypatch.setattr(engine_module, "BLOCK", 1)
    assert writer.write(TEXT, n=60, **options) == first


def test_a_rewind_repeats_bit_for_bit(engine: OffloadEngine) -> None:
    prompt = engine.tokenize(demo_file("prose.txt").read_bytes()[:3000])[:PROMPT]
    logits = engine.prefill(prompt)
    block = engine.extend(int(logits.argmax()), 16, Options(**GREEDY))  # type: ignore[arg-type]
    after = engine.decode(block[-1])
    assert engine.rewind(PROMPT) == 0
    assert np.array_equal(engine.prefill(prompt), logits)
    assert engine.extend(int(logits.argmax()), 16, Options(**GREEDY)) == block  # type: ignore[arg-type]
    assert engine.rewind(PROMPT + 10) == PROMPT + 10
    for token in block[9:-1]:
        engine.decode(token)
    assert np.array_equal(engine.decode(block[-1]), after)
    engine.verify()


TIMINGS = [
    *({}, {"copy_blocks": 4}, {"copy_blocks": 64}, {"copy_blocks": 1, "delay": 3000}, {"delay": 20_000}),
    *({"early": False}, {"early": False, "copy_blocks": 64, "delay": 3000}, {"copy_blocks": 2, "delay": 500}),
]


def test_timing_changes_nothing_but_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy blocks, delays in copies, kernels that begin early or not, repeated runs, other streams: the same tokens and
    the same slots. Torch hands its streams out in turns: with 40 taken, an executor's own have been had before."""
    found, taken = [], []
    for timing in [*TIMINGS, {}]:
        if timing == {"early": False}:
            taken += [torch.cuda.Stream() for _ in range(40)]

        def opened(self: Target, weights, cache, *, n_ctx, chunk, timing=timing):  # type: ignore[no-untyped-def]
            return DeviceExecutor(weights, cache, n_ctx=n_ctx, chunk=chunk, tuning=replace(Tuning(), **timing))

        monkeypatch.setattr(Target, "open", opened)
        with demo() as engine:
            logits = engine.prefill(engine.tokenize(TEXT.encode()))
            block = engine.extend(7, 96, replace(VARIED, ignore_eos=True))
            engine.verify()
            after, resident = engine.decode(block[-1]), engine.executor.slot_of() >= 0
            c = engine.executor.counters
            assert c.in_time + c.late + c.unused == c.prefetch > 0
            found.append((logits, block, after, resident, c.loads, c.misses))
    assert len(taken) == 40
    for other in found[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_a_reset_drains_what_was_under_way(engine: OffloadEngine) -> None:
    """In the middle of a text, with prefetches that no token has needed yet: every slot holds what it should."""
    prompt = engine.tokenize(TEXT.encode())
    first = engine.prefill(prompt)
    for length in (1, 3, 16):
        engine.extend(7, length, Options(**GREEDY))  # type: ignore[arg-type]
        engine.reset()
        engine.verify()
        assert (engine.executor.slots.held >= 0).all()  # type: ignore[attr-defined]
        assert np.array_equal(engine.prefill(prompt), first)


def test_more_options_than_have_graphs_give_the_same_texts(engine: OffloadEngine) -> None:
    texts: dict[float, list[int]] = {}
    prompt = engine.tokenize(TEXT.encode())
    for temperature in 2 * (0.5, 0.7, 0.9, 1.1, 1.3, 1.5):
        engine.reset()
        token = int(engine.prefill(prompt).argmax())
        text = engine.extend(token, 16, replace(VARIED, temperature=temperature, ignore_eos=True))
        assert texts.setdefault(temperature, text) == text
    assert len({tuple(text) for text in texts.values()}) > 1


def test_a_text_that_ends_within_a_block_ends_there(engine: OffloadEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays behind the end do nothing: context, logical cache and slots are those of the end."""
    prompt = engine.tokenize(TEXT.encode())
    engine.prefill(prompt)
    monkeypatch.setattr(OffloadEngine, "eos_tokens", frozenset())
    block = engine.extend(7, 16, VARIED)
    at = next(i for i in range(1, 16) if block[i] not in block[:i])
    engine.reset()
    engine.prefill(prompt)
    for token in [7, *block[:at]]:
        engine.decode(token)
    resident, after = engine.executor.slot_of() >= 0, engine.decode(block[at])
    engine.reset()
    engine.prefill(prompt)
    monkeypatch.setattr(OffloadEngine, "eos_tokens", frozenset({block[at]}))
    ended = engine.extend(7, 16, VARIED)
    assert ended == block[: at + 1] and engine.position == len(prompt) + at + 1
    assert np.array_equal(engine.executor.slot_of() >= 0, resident)
    engine.verify()
    assert np.array_equal(engine.decode(block[at]), after)


def allocated() -> int:
    """Bytes of tensors, once the libraries have what they keep: their workspaces count as tensors."""
    with demo(chunk=512, n_ctx=1024) as engine:
        engine.prefill(np.arange(512))
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def test_the_memory_is_what_was_said_and_is_given_back() -> None:
    before, free = allocated(), torch.cuda.mem_get_info()[0]
    with demo(chunk=128) as engine:
        said = engine.need.device(engine.capacity)
        engine.prefill(np.arange(128))
        engine.extend(1, 16)
        assert 0 < free - torch.cuda.mem_get_info()[0] < said
        assert 0 < engine.stats().vram_bytes < said
    gc.collect()
    assert torch.cuda.memory_allocated() == before


def test_a_full_gpu_is_refused_and_left_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before loading, while loading, and while a prompt is read."""
    before = allocated()

    def fill(left: int) -> torch.Tensor:
        torch.cuda.empty_cache()
        return torch.empty(torch.cuda.mem_get_info()[0] - left, dtype=torch.uint8, device=DEVICE)

    rest = fill(64 << 20)
    full = torch.cuda.memory_allocated()  # the allocator's own: it rounds
    assert full - before >= rest.nbytes
    with pytest.raises(UserError, match="are free"):
        demo()
    with monkeypatch.context() as patched:
        patched.setattr(Target, "room", lambda self: Room(1 << 50, 1 << 50, shared=False))
        with pytest.raises(UserError, match="memory is full"):
            demo(n_ctx=16_384)
    gc.collect()
    assert torch.cuda.memory_allocated() == full
    del rest
    tokens = np.random.default_rng(0).integers(0, 8000, 512)
    with demo(chunk=512, n_ctx=1024) as engine:
        logits = engine.prefill(tokens)
        engine.reset()
        rest = fill(4 << 20)
        with pytest.raises(UserError, match="memory is full"):
            engine.prefill(tokens)
        del rest
        torch.cuda.empty_cache()
        engine.verify()
        assert engine.position == 0 and np.array_equal(engine.prefill(tokens), logits)


def test_a_gpu_that_is_not_there_is_named() -> None:
    with pytest.raises(UserError, match="--gpu 99: this process sees"):
        demo(gpu=99)
