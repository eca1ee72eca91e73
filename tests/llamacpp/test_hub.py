"""The native callback copies what ggml computed: held against a plain Python callback, and against odd nodes."""

import ctypes
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from reference import reference_rows

from edgemoe.llamacpp import native
from edgemoe.llamacpp.graph import Reading, Router, find_routers
from edgemoe.llamacpp.hub import Hub, Tap
from edgemoe.llamacpp.layout import TYPE_F16, TYPE_I32, Tensor
from edgemoe.llamacpp.session import Session
from edgemoe.model.synthetic import write_synthetic
from edgemoe.tracing.selfcheck import failures

SHAPES: dict[str, dict[str, Any]] = {
    "olmoe": {"arch": "olmoe"},
    "qwen3moe": {"arch": "qwen3moe", "n_kv_heads": 2, "n_experts": 24, "top_k": 3},
    "deepseek": {"arch": "deepseek2", "leading_dense": 1, "expert_groups": 4, "expert_groups_used": 2},
    "deepseek-softmax": {"arch": "deepseek2", "gating": "softmax", "selection_bias": False, "merged_gate_up": True},
}
TOKENS = np.random.default_rng(3).integers(0, 500, 150).astype(np.int32)


@pytest.fixture(scope="module", params=SHAPES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    [path] = write_synthetic(tmp_path_factory.mktemp("model") / f"{request.param}.gguf", **SHAPES[request.param])
    return path


def survey(session: Session, hub: Hub) -> dict[int, Router]:
    with hub.survey():
        session.decode(TOKENS[:1])
    routers = find_routers(hub.nodes())
    session.clear()
    return routers


def readings(router: Router) -> list[Reading]:
    return [reading for reading in (router.topk, router.scores, router.mask, router.weights) if reading]


@pytest.mark.parametrize("n_ubatch", [512, 32])
def test_native_equals_a_plain_python_callback(model: Path, n_ubatch: int) -> None:
    """150 tokens in ubatches of 32 are five callbacks per layer; the last layer has all of their rows too."""
    hub = Hub()
    with Session(model, n_ctx=512, n_ubatch=n_ubatch, n_threads=1, hub=hub) as session:
        routers = survey(session, hub)
        taps = [Tap(reading) for router in routers.values() for reading in readings(router)]
        hub.install(taps, len(TOKENS))
        with hub.capture():
            session.decode(TOKENS)
        wanted = {f"{tap.at.stem}-{tap.at.layer}": tap.width for tap in taps}
        n_experts = next(iter(routers.values())).n_experts
        expected = reference_rows(model, TOKENS, n_experts, wanted, n_ubatch)
        for i, tap in enumerate(taps):
            assert hub.rows(i).shape == (len(TOKENS), tap.width)
            assert np.array_equal(hub.rows(i), expected[f"{tap.at.stem}-{tap.at.layer}"]), tap


def test_the_paper_s_flat_read_is_caught(model: Path) -> None:
    hub = Hub()
    with Session(model, n_ctx=512, n_threads=1, hub=hub) as session:
        routers = survey(session, hub)
    n_experts = next(iter(routers.values())).n_experts
    wanted = {f"ffn_moe_topk-{layer}": router.top_k for layer, router in routers.items()}
    rows = reference_rows(model, TOKENS, n_experts, wanted)
    windows = np.array([0])
    assert failures([rows[name] for name in wanted], n_experts, windows) == []
    flat = [rows[f"flat:{name}"] for name in wanted]
    assert all(((layer >= 0) & (layer < n_experts)).all() for layer in flat), "ids alone do not give it away"
    found = failures(flat, n_experts, windows)
    assert any("uniform" in line for line in found) and any("chance" in line for line in found)


def test_rows_beyond_the_room_are_an_error(model: Path) -> None:
    hub = Hub()
    with Session(model, n_ctx=512, n_threads=1, hub=hub) as session:
        routers = survey(session, hub)
        hub.install([Tap(router.topk) for router in routers.values()], 10)
        with pytest.raises(Exception, match="more rows than tokens"), hub.capture():
            session.decode(TOKENS[:11])


class Fake:
    """A tensor in our own memory, as the scheduler would hand it to the callback."""

    def __init__(self, name: str, values: np.ndarray) -> None:
        self.values = values
        self.tensor = Tensor()
        self.tensor.type = TYPE_I32
        self.tensor.ne[:] = [*values.shape[::-1], *(1,) * (4 - values.ndim)]
        strides = values.strides[::-1]
        self.tensor.nb[:] = [*strides, *(strides[-1] * values.shape[0],) * (4 - values.ndim)]
        self.tensor.data = values.ctypes.data
        self.tensor.name = name.encode()

    @property
    def address(self) -> int:
        return ctypes.addressof(self.tensor)


def call(hub: Hub, fake: Fake, ask: bool) -> bool:
    function = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)(hub.callback)
    return bool(function(fake.address, ask, hub.state.ctypes.data))


def tapped(**fields: Any) -> Hub:
    hub = Hub()
    hub.install([Tap(Reading("ffn_moe_topk", 3, width=2, span=8, integer=True, **fields))], 16)
    return hub


IDS = np.arange(24, dtype=np.int32).reshape(3, 8)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("ffn_moe_topk-3", True),
        ("CUDA0#ffn_moe_topk-3#0", True),
        ("CUDA0#ffn_moe_topk-3", True),
        ("Vulkan-1#ffn_moe_topk-3#2", True),
        ("ffn_moe_topk-33", False),
        ("ffn_moe_topk-2", False),
        ("ffn_moe_topk-", False),
        ("ffn_moe_topk", False),
        ("ffn_moe_topk-3 (view)", False),
        ("ffn_moe_topk_x-3", False),
        ("ffn_moe_top-3", False),
        ("", False),
        ("#", False),
        ("x" * 63, False),
    ],
)
def test_names(name: str, wanted: bool) -> None:
    hub = tapped()
    fake = Fake(name, IDS[:, :2])
    with hub.capture():
        assert call(hub, fake, True) is wanted
        if wanted:
            assert call(hub, fake, False)
            assert np.array_equal(hub.rows(0), IDS[:, :2])
    assert call(hub, fake, True) is False, "outside a capture nothing is wanted"


def test_a_warm_up_run_is_ignored() -> None:
    hub = tapped()
    with hub.capture():
        warm_up = Fake("ffn_moe_topk-3", IDS)
        assert call(hub, warm_up, True) and call(hub, warm_up, False)
        assert len(hub.rows(0)) == 0 and hub.ignored == 1


def test_the_second_choice_of_a_layer_is_left_alone() -> None:
    hub = tapped(pick=0, period=2)
    first, second = Fake("ffn_moe_topk-3", IDS[:, :2]), Fake("ffn_moe_topk-3", IDS[:, 4:6])
    with hub.capture():
        for _ in range(2):  # two ubatches
            assert call(hub, first, True) and call(hub, first, False)
            assert not call(hub, second, True)
        assert np.array_equal(hub.rows(0), np.concatenate([IDS[:, :2], IDS[:, :2]]))


def test_no_rows_and_other_types() -> None:
    hub = tapped()
    with hub.capture():
        empty = Fake("ffn_moe_topk-3", IDS[:0, :2])
        assert call(hub, empty, True) and call(hub, empty, False)
        assert len(hub.rows(0)) == 0
    half = Fake("ffn_moe_topk-3", IDS[:, :2])
    half.tensor.type = TYPE_F16
    with pytest.raises(Exception, match="neither F32 nor I32"), hub.capture():
        call(hub, half, True)
        call(hub, half, False)


def test_stop_ends_a_graph_in_every_mode() -> None:
    hub = tapped()
    fake = Fake("anything", IDS)
    hub.stop()
    assert call(hub, fake, True) and not call(hub, fake, False)
    hub.go_on()
    assert not call(hub, fake, True)


class BufferType(ctypes.Structure):
    """ggml-backend-impl.h, `struct ggml_backend_buffer_type`: without `is_host`, memory that only it can read."""

    _fields_: ClassVar = [("functions", ctypes.c_void_p * 6), ("device", ctypes.c_void_p), ("context", ctypes.c_void_p)]


class Buffer(ctypes.Structure):
    """ggml-backend-impl.h, `struct ggml_backend_buffer`; `get_tensor` is its sixth function."""

    _fields_: ClassVar = [
        ("functions", ctypes.c_void_p * 11),
        ("type", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
        ("size", ctypes.c_size_t),
        ("usage", ctypes.c_int),
    ]


@pytest.mark.parametrize("is_view", [False, True])
def test_device_memory_is_read_through_its_backend(is_view: bool) -> None:
    """Addresses on a device are not ours to follow: this one's would crash. One transfer per node, not per row."""
    transfers = []

    def get(_: int, __: int, out: int, offset: int, size: int) -> None:
        transfers.append(size)
        ctypes.memmove(out, IDS.ctypes.data + offset, size)

    signature = ctypes.CFUNCTYPE(None, *(ctypes.c_void_p,) * 3, ctypes.c_size_t, ctypes.c_size_t)
    function = signature(lambda buffer, tensor, out, offset, size: get(buffer, tensor, out, offset or 0, size))
    kind, buffer = BufferType(), Buffer()
    buffer.functions[5] = ctypes.cast(function, ctypes.c_void_p).value
    buffer.type = ctypes.addressof(kind)
    fake, whole = Fake("CUDA0#ffn_moe_topk-3#0", IDS[:, :2]), Fake("argsort", IDS)
    fake.tensor.data = whole.tensor.data = 0x1000
    holder = whole if is_view else fake
    holder.tensor.buffer = ctypes.addressof(buffer)
    if is_view:
        fake.tensor.view_src = whole.address
    hub = tapped()
    with hub.capture():
        assert call(hub, fake, True) and call(hub, fake, False)
    assert np.array_equal(hub.rows(0), IDS[:, :2])
    assert transfers == [2 * 32 + 8]


def test_the_callback_is_compiled_once() -> None:
    assert native.callback() is native.callback() and native.callback().address == Hub().callback
