"""Capture on real (random) models through stock llama.cpp: what lands in the trace file."""

import hashlib
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from edgemoe.errors import UserError
from edgemoe.llamacpp.session import Session
from edgemoe.model.synthetic import write_synthetic
from edgemoe.progress import no_progress
from edgemoe.tracing import Trace, load_trace
from edgemoe.tracing.capture import Report, Settings, capture
from edgemoe.tracing.texts import Source

TEXT = (Path(__file__).parent.parent.parent / "pyproject.toml").read_text() * 2
SHAPES: dict[str, dict[str, Any]] = {
    "olmoe": {"arch": "olmoe"},
    "groups": {"arch": "deepseek2", "leading_dense": 1, "expert_groups": 4, "expert_groups_used": 2},
    "softmax-groups": {
        "arch": "deepseek2",
        "gating": "softmax",
        "selection_bias": False,
        "expert_groups": 4,
        "expert_groups_used": 3,
    },
    "softmax-bias": {"arch": "deepseek2", "gating": "softmax"},
}


def run(model: Path, out: Path, sources: list[Source], **settings: Any) -> tuple[Report, Trace]:
    report = capture(
        model, sources, out, Settings(**{"n_threads": 1, **settings}), watch=lambda total: nullcontext(no_progress)
    )
    return report, load_trace(out)


@pytest.fixture
def text(tmp_path: Path) -> Source:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return Source("code", path)


@pytest.fixture(scope="module", params=SHAPES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_synthetic(tmp_path_factory.mktemp("m") / f"{request.param}.gguf", **SHAPES[request.param])[0]


@pytest.fixture(scope="module")
def olmoe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_synthetic(tmp_path_factory.mktemp("m") / "olmoe.gguf", add_bos=True)[0]


def test_members_fit_together(model: Path, text: Source, tmp_path: Path) -> None:
    """Experts are the head of the scores' order; weights are gathered from the router's own probabilities."""
    report, trace = run(model, tmp_path / "t.npz", [text], max_tokens=300, scores=True, weights=True, pregate=True)
    assert not report.failures and not report.partial and trace.meta["self_check"] == "passed"
    assert trace.scores is not None and trace.weights is not None and trace.pregate is not None
    assert trace.n_tokens == 300 and trace.scores.shape == (trace.n_layers, 300, 16)
    chosen = np.take_along_axis(trace.scores, trace.experts.astype(np.int64), axis=2)
    assert (np.diff(chosen, axis=2) <= 1e-6).all(), "rank order"
    rest = trace.scores.copy()
    np.put_along_axis(rest, trace.experts.astype(np.int64), -np.inf, axis=2)
    assert (rest.max(axis=2) <= chosen[:, :, -1] + 1e-6).all()
    assert (trace.weights > 0).all() and trace.weights.dtype == np.float32
    if "groups" in model.name:
        used = 2 if model.stem == "groups" else 3
        allowed = np.isfinite(trace.scores).reshape(trace.n_layers, 300, 4, 4)
        assert (allowed.all(axis=3) == allowed.any(axis=3)).all()
        assert (allowed.any(axis=3).sum(axis=2) == used).all()
        assert (np.isfinite(trace.pregate[1:]).sum(axis=2) == 4 * used).all()


def test_softmax_weights_are_the_probabilities_of_the_scores(olmoe: Path, text: Source, tmp_path: Path) -> None:
    _, trace = run(olmoe, tmp_path / "t.npz", [text], max_tokens=100, scores=True, weights=True)
    assert trace.scores is not None and trace.weights is not None
    powers = np.exp(trace.scores - trace.scores.max(axis=2, keepdims=True))
    probabilities = powers / powers.sum(axis=2, keepdims=True)
    expected = np.take_along_axis(probabilities, trace.experts.astype(np.int64), axis=2)
    assert np.allclose(trace.weights, expected, rtol=1e-4, atol=1e-6)


def test_pregate_is_the_next_router_on_this_layer_s_input(olmoe: Path, text: Source, tmp_path: Path) -> None:
    """Scores are W_l·x_l with x of 64 dimensions and 16 experts: x cannot be solved for, so take it from the graph."""
    _, trace = run(olmoe, tmp_path / "t.npz", [text], max_tokens=64, scores=True, pregate=True)
    assert trace.tokens is not None and trace.pregate is not None and trace.scores is not None
    inputs = router_inputs(olmoe, trace.tokens)
    reader = gguf.GGUFReader(olmoe)
    weights = {tensor.name: np.array(tensor.data, np.float32) for tensor in reader.tensors}
    for layer in range(4):
        router = weights[f"blk.{layer}.ffn_gate_inp.weight"]
        assert np.allclose(trace.scores[layer], inputs[layer] @ router.T, atol=1e-3)
        if layer:
            assert np.allclose(trace.pregate[layer], inputs[layer - 1] @ router.T, atol=1e-3)
    assert not trace.pregate[0].any() and trace.has_pregate.tolist() == [False, True, True, True]


def router_inputs(path: Path, tokens: np.ndarray) -> list[np.ndarray]:
    """`ffn_norm-<layer>` of every token, read by llama-cpp-python's own callback type in Python."""
    import ctypes

    from edgemoe.llamacpp.libraries import ggml_base

    base: Any = ctypes.CDLL(ggml_base()._name)
    base.ggml_get_name.restype, base.ggml_get_name.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
    base.ggml_get_data.restype, base.ggml_get_data.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    found: dict[str, np.ndarray] = {}

    def on_node(tensor: int, ask: bool, _: object) -> bool:
        name = base.ggml_get_name(tensor).decode()
        wanted = name.startswith("ffn_norm-")
        if wanted and not ask:
            data = (ctypes.c_float * (64 * len(tokens))).from_address(base.ggml_get_data(tensor))
            found[name] = np.array(data).reshape(len(tokens), 64)
        return wanted

    class PythonHub:
        callback = 0
        state = np.zeros(1, np.int64)

    from edgemoe.llamacpp.libraries import llama

    function = llama().ggml_backend_sched_eval_callback(on_node)
    hub: Any = PythonHub()
    hub.callback = ctypes.cast(function, ctypes.c_void_p).value
    with Session(path, n_threads=1, hub=hub) as session:
        session.decode(tokens)
    return [found[f"ffn_norm-{layer}"] for layer in range(4)]


def test_token_by_token_routes_like_batches_up_to_near_ties(olmoe: Path, text: Source, tmp_path: Path) -> None:
    _, batched = run(olmoe, tmp_path / "a.npz", [text], max_tokens=200, n_ctx=128, scores=True)
    _, single = run(olmoe, tmp_path / "b.npz", [text], max_tokens=200, n_ctx=128, scores=True, decode=True)
    assert batched.tokens is not None and np.array_equal(batched.tokens, single.tokens)
    assert batched.scores is not None and single.scores is not None
    ordered = -np.sort(-batched.scores, axis=2)
    margin = ordered[:, :, 3] - ordered[:, :, 4]
    differ = (np.sort(batched.experts, axis=2) != np.sort(single.experts, axis=2)).any(axis=2)
    moved = np.abs(batched.scores - single.scores).max(axis=2)
    assert differ.mean() < 0.03
    assert (margin[differ] <= 2 * moved[differ] + 1e-6).all(), "sets differ by more than their scores do"
    assert np.median(moved) < 1e-2


def test_windows_bos_domains_and_a_partial_last_window(olmoe: Path, text: Source, tmp_path: Path) -> None:
    _, trace = run(olmoe, tmp_path / "t.npz", [text, Source("again", text.path)], max_tokens=100, n_ctx=64)
    assert trace.windows.tolist() == [0, 64, 102, 166] and trace.n_tokens == 204
    assert trace.domains == ("code", "code", "again", "again")
    assert trace.tokens is not None and trace.meta["bos"] is not None
    assert (trace.tokens[trace.windows] == trace.meta["bos"]).all()
    first, second = trace.only("code"), trace.only("again")
    assert np.array_equal(first.experts, second.experts), "a window depends on nothing before it"


def test_layers_are_the_model_s_own_ids(tmp_path: Path, text: Source) -> None:
    [path] = write_synthetic(tmp_path / "m.gguf", "deepseek2", n_layers=6, leading_dense=2)
    _, whole = run(path, tmp_path / "all.npz", [text], max_tokens=64, pregate=True)
    assert whole.layers.tolist() == [2, 3, 4, 5]
    _, some = run(path, tmp_path / "some.npz", [text], max_tokens=64, layers=(3, 5), pregate=True)
    assert some.layers.tolist() == [3, 5]
    assert np.array_equal(some.experts, whole.experts[[1, 3]])
    assert not some.has_pregate.any() and some.pregate is not None and not some.pregate.any()
    for unknown in (1, 6):
        with pytest.raises(UserError, match=f"layer {unknown} is no MoE layer: they are 2-5"):
            run(path, tmp_path / "x.npz", [text], layers=(3, unknown))


def test_shards_and_provenance(tmp_path: Path, text: Source) -> None:
    [whole] = write_synthetic(tmp_path / "w.gguf")
    shards = write_synthetic(tmp_path / "s.gguf", shards=3)
    _, one = run(whole, tmp_path / "one.npz", [text], max_tokens=64)
    _, split = run(shards[1], tmp_path / "split.npz", [text], max_tokens=64)
    assert np.array_equal(one.experts, split.experts)
    assert one.meta["texts"][0]["sha256"] == hashlib.sha256(text.path.read_bytes()).hexdigest()
    start = gguf.GGUFReader(whole).data_offset
    assert one.meta["header_sha256"] == [hashlib.sha256(whole.read_bytes()[:start]).hexdigest()]
    assert len(split.meta["header_sha256"]) == 3
    assert one.meta["llama_cpp"]["package"] == "0.3.36" and one.meta["architecture"] == "olmoe"
    assert one.meta["settings"]["n_ctx"] == 512 and one.meta["partial"] is False
    shards[2].unlink()
    with pytest.raises(UserError, match=r"s-00003-of-00003\.gguf is missing"):
        run(shards[0], tmp_path / "x.npz", [text])


def test_an_interrupt_keeps_whole_tokens_and_says_partial(olmoe: Path, text: Source, tmp_path: Path) -> None:
    """The callback interrupts after 70 tokens of --decode: in the second window of 64."""
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if done == 70:
            raise KeyboardInterrupt

    settings = Settings(n_ctx=64, max_tokens=300, decode=True, n_threads=1, scores=True)
    out = tmp_path / "t.npz"
    report = capture(olmoe, [text], out, settings, watch=lambda total: nullcontext(advance))
    assert report.partial and report.n_tokens == 70 and report.planned_tokens > 300
    trace = load_trace(out)
    assert trace.meta["partial"] is True and trace.n_tokens == 70 and trace.windows.tolist() == [0, 64]
    _, whole = run(olmoe, tmp_path / "w.npz", [text], n_ctx=64, max_tokens=300, decode=True, scores=True)
    assert np.array_equal(trace.experts, whole.experts[:, :70])
    assert sorted(path.name for path in tmp_path.glob("t.npz*")) == ["t.npz"]


def test_an_interrupt_before_the_first_token_leaves_nothing(olmoe: Path, text: Source, tmp_path: Path) -> None:
    class Interrupts(nullcontext):
        def __enter__(self) -> Any:
            raise KeyboardInterrupt

    out = tmp_path / "t.npz"
    report = capture(olmoe, [text], out, Settings(n_threads=1), watch=lambda total: Interrupts())
    assert report.path is None and report.partial and not list(tmp_path.glob("t.npz*"))


def test_a_pregate_that_does_not_fit_is_refused(olmoe: Path, text: Source, tmp_path: Path) -> None:
    """A router on disk that is not the one that ran: recomputing its scores shows it, before anything is captured."""
    from edgemoe.tracing import pregate

    original = pregate._tensor
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pregate, "_tensor", lambda model, name: original(model, name)[::-1])
        with pytest.raises(UserError, match=r"--pregate does not fit this model \(layer 0: its scores cannot be"):
            run(olmoe, tmp_path / "t.npz", [text], pregate=True)
    assert not list(tmp_path.glob("t.npz*"))
