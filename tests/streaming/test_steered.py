"""Steered policies: the tier decides what a replay of its recorded scores decides, whatever the disk's timing."""

from pathlib import Path

import numpy as np
import pytest

from edgemoe.calibration import Calibration, TokenPrior
from edgemoe.demo import demo_model
from edgemoe.model.synthetic import write_synthetic
from edgemoe.policy import LogicalCache, preset
from edgemoe.streaming.engine import StreamingEngine
from edgemoe.tracing import Trace
from edgemoe.tracing.simulate import simulate
from edgemoe.units import Residency

TEXT = Path(__file__).read_bytes()[:1500]
PRESETS = {
    "psr": preset("psr"),
    "psr-gated": preset("psr-gated"),
    "cache-prior": preset("cache-prior"),
    "speculative": preset("speculative"),
    "tau": preset("exact-lru", routing="tau", tau=0.3),
    "exact-prefetch": preset("exact-prefetch"),
    "exact-gated": preset("psr-gated", routing="exact"),
}


def generate(engine, steps=20, n_tokens=50):
    tokens = engine.tokenize(TEXT)[:n_tokens]
    logits = [engine.prefill(tokens)]
    for _ in range(steps):
        logits.append(engine.decode(int(logits[-1].argmax())))
    return np.stack(logits)


def make(path=None, **more):
    options = {"residency": Residency.parse("16"), "n_ctx": 128, "n_threads": 1, "chunk": 24, "record": True}
    return StreamingEngine(path or demo_model(), **{**options, **more})


def joined(engine):
    """The records of all decodes, one after the other along the tokens."""
    return {
        name: np.concatenate([record[name] for record in engine.records], axis=0 if name == "tokens" else 1)
        for name in engine.records[0]
    }


@pytest.mark.parametrize("name", PRESETS)
def test_decisions_are_those_of_a_replay(name):
    with make(policy=PRESETS[name]) as engine:
        generate(engine)
        record, policy, has_pregate = joined(engine), engine.policy, engine.has_pregate
    n_layers, n_tokens, n_experts = record["scores"].shape
    assert has_pregate.tolist() == [False] + [policy.needs_pregate] * 7
    cache = LogicalCache(policy, n_layers=n_layers, n_experts=n_experts, top_k=8, capacity=16)
    for t in range(n_tokens):
        cache.begin_token()
        for layer in range(n_layers):
            first = cache.prefetch(layer, record["pregate"][layer, t]) if has_pregate[layer] else []
            if policy.needs_scores:
                executed, second = cache.select(layer, record["scores"][layer, t])
            else:
                executed = record["executed"][layer, t].tolist()
                second = cache.observe(layer, executed)
            assert record["executed"][layer, t].tolist() == executed
            for part, copies in enumerate((first, second)):
                count = record["counts"][layer, t, part]
                assert record["copies"][layer, t, part, :count].tolist() == [copy.expert for copy in copies]


def made_up_calibration(n_vocab, layers=8, experts=64):
    rng = np.random.default_rng(3)
    cells = [np.sort(rng.choice(layers * experts, 12, replace=False)) for _ in range(n_vocab)]
    prior = TokenPrior(
        (layers, experts),
        np.arange(n_vocab, dtype=np.int32),
        np.full(n_vocab, 9, np.uint32),
        np.arange(0, 12 * n_vocab + 1, 12, dtype=np.int64),
        np.concatenate(cells).astype(np.uint32),
        rng.integers(1, 10, 12 * n_vocab).astype(np.uint32),
    )
    warm = np.stack([rng.permutation(experts) for _ in range(layers)]).astype(np.int16)
    delta = rng.uniform(2, 4, layers).astype(np.float32)
    return Calibration(np.arange(layers, dtype=np.int32), experts, delta, warm, prior, "demo", ("",))


def test_a_calibration_decides_too():
    """Warm set, bonus scale and token prior, in the tier as in a cache that Python drives."""
    with make(policy=PRESETS["psr"]) as plain:
        uncalibrated, known = generate(plain), made_up_calibration(plain.n_vocab)
    with make(policy=PRESETS["psr"], calibration=known) as engine:
        assert engine.policy.scale == "fixed"
        assert not np.array_equal(generate(engine), uncalibrated)
        record = joined(engine)
    shape = {"n_layers": 8, "n_experts": 64, "top_k": 8, "capacity": 16}
    cache = LogicalCache(PRESETS["psr"], **shape, delta=known.delta, warm=known.warm)
    cache.prior = np.zeros((8, 1, 64), np.float32)
    for t, token in enumerate(record["tokens"].tolist()):
        cache.prior[:, 0] = known.prior_row(token)
        cache.begin_token(0)
        for layer in range(8):
            if layer:
                cache.prefetch(layer, record["pregate"][layer, t])
            assert cache.select(layer, record["scores"][layer, t]).experts == record["executed"][layer, t].tolist()


@pytest.mark.parametrize("name", ["psr", "psr-gated", "cache-prior"])
def test_counts_are_those_of_edgemoe_simulate(name):
    with make(policy=PRESETS[name]) as engine:
        generate(engine)
        record, stats = joined(engine), engine.stats()
    own = np.argsort(-record["scores"], axis=2, kind="stable")[:, :, :8].astype(np.int16)
    n_layers, n_tokens, n_experts = record["scores"].shape
    trace = Trace(
        experts=own,
        n_experts=n_experts,
        layers=np.arange(n_layers, dtype=np.int32),
        windows=np.zeros(1, np.int64),
        domains=("text",),
        name="recorded",
        scores=record["scores"],
        pregate=record.get("pregate"),
    )
    [row] = simulate(trace, [16], {name: PRESETS[name]}).to_dict("records")
    assert row["demand_per_token"] * n_tokens == pytest.approx(stats.loads - stats.hits)
    assert row["prefetch_per_token"] * n_tokens == pytest.approx(record["counts"][:, :, 0].sum())
    replaced = sum(
        len(set(a) - set(b)) for a, b in zip(record["executed"].reshape(-1, 8), own.reshape(-1, 8), strict=True)
    )
    assert row["replaced_per_token"] * n_tokens == pytest.approx(replaced)
    assert replaced > 0


@pytest.mark.parametrize("name", ["psr", "psr-gated", "speculative"])
def test_timing_changes_nothing(name):
    """Readers, delays and repetition: the same logits, bit for bit, and the same decisions."""
    runs = []
    for more in ({"readers": 1}, {"readers": 7, "verify_reads": True}, {"readers": 2, "read_delay": 0.001}):
        with make(policy=PRESETS[name], **more) as engine:
            runs.append((generate(engine), joined(engine)))
            if more["readers"] == 7:
                engine.reset()
                assert np.array_equal(runs[0][0], generate(engine))
    for logits, record in runs[1:]:
        assert np.array_equal(logits, runs[0][0])
        assert all(np.array_equal(record[member], runs[0][1][member]) for member in record)


def test_steering_changes_the_output_and_saves_reads():
    with make(policy=preset("exact-lru")) as exact, make(policy=PRESETS["psr-gated"]) as steered:
        assert not np.array_equal(generate(exact), generate(steered))
        assert steered.stats().hits > exact.stats().hits
        assert 0 < steered.stats().demand_reads < exact.stats().demand_reads


def test_pregates_are_the_next_router_on_this_layer_s_input():
    """Where the input does not change from layer to layer, pre-gate and scores are the same: the last rows of it."""
    with make(policy=PRESETS["psr"]) as engine:
        generate(engine)
        record = joined(engine)
    for layer in range(1, 8):
        pregate, scores = record["pregate"][layer], record["scores"][layer]
        together = np.mean([np.corrcoef(a, b)[0, 1] for a, b in zip(pregate, scores, strict=True)])
        assert together > 0.5
        top = np.argsort(-pregate, axis=1)[:, :8], np.argsort(-scores, axis=1)[:, :8]
        assert np.mean([len(set(a) & set(b)) for a, b in zip(*top, strict=True)]) > 3


GATES = {
    "sigmoid, bias, groups": {"expert_groups": 4, "expert_groups_used": 2},
    "softmax and groups": {"gating": "softmax", "selection_bias": False, "expert_groups": 4, "expert_groups_used": 3},
    "softmax and bias": {"gating": "softmax"},
}


@pytest.mark.parametrize("case", GATES)
def test_every_kind_of_gate_is_formed_as_tracing_forms_it(tmp_path, case):
    from edgemoe.llamacpp.graph import find_routers
    from edgemoe.llamacpp.hub import Hub
    from edgemoe.llamacpp.session import Session
    from edgemoe.model import read_model
    from edgemoe.tracing.recorder import Recorder

    path = write_synthetic(tmp_path / "m.gguf", arch="deepseek2", leading_dense=1, **GATES[case])[0]
    policy = preset("exact-prefetch", window=4)
    with make(path, policy=policy, residency=Residency.parse("8"), chunk=32) as engine:
        tokens = engine.tokenize(TEXT)[:32]
        engine.prefill(tokens)
        [record] = engine.records
    hub = Hub()
    with Session(path, n_ctx=128, n_batch=32, n_threads=1, hub=hub) as session:
        with hub.survey():
            session.decode([0])
        routers = find_routers(hub.nodes())
        session.clear()
        recorder = Recorder(hub, read_model(path), list(routers.values()), True, False, True)
        recorder.verify(session, tokens)
        with hub.capture():
            session.decode(tokens)
        members = recorder._members(32)
    ours, theirs = record["pregate"][1:], np.stack(members["pregate"][1:])
    assert (np.isneginf(ours) == np.isneginf(theirs)).mean() > 0.98
    finite = np.isfinite(ours) & np.isfinite(theirs)
    assert np.allclose(ours[finite], theirs[finite], atol=1e-3)
    assert np.isneginf(ours).any() == ("groups" in case)
