"""The executor that a host drives: it decides what the CPU's decides, whatever its copies do."""

import json

import numpy as np
import pytest

pytest.importorskip("torch", reason="the GPU tier needs torch (pip install edgemoe[gpu])")

import torch
from offload_engines import POLICIES, TINY, made_up_calibration
from programs import run

from edgemoe.errors import UserError
from edgemoe.generation import Options
from edgemoe.gpu_offload.arena import Arena
from edgemoe.gpu_offload.cpu import CpuExecutor
from edgemoe.gpu_offload.decisions import Decisions
from edgemoe.gpu_offload.executor import Counters
from edgemoe.gpu_offload.host_driven import HostDrivenExecutor
from edgemoe.gpu_offload.host_driven_copies import Copies
from edgemoe.gpu_offload.shape import read_shape
from edgemoe.gpu_offload.slots import Slots
from edgemoe.gpu_offload.weights import Layer, Weights, load_weights
from edgemoe.model import read_model
from edgemoe.model.synthetic import write_synthetic
from edgemoe.policy import LogicalCache, preset

TOKENS = np.random.default_rng(0).integers(0, 500, 48)
GREEDY = Options(temperature=0.0)
UNBOUNDED = preset("psr", window=6, budget="unbounded", lam=0.4)
EXACT_UNBOUNDED = preset("exact-prefetch", window=6, budget="unbounded")


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    [path] = write_synthetic(tmp_path_factory.mktemp("host") / "tiny.gguf", **TINY)
    model = read_model(path)
    torch.set_num_threads(1)
    return load_weights(model, read_shape(model), dtype=torch.float32, threads=1)


def decisions(weights, policy):
    shape, known = weights.shape, made_up_calibration()
    cache = LogicalCache(
        policy,
        n_layers=shape.n_layers,
        n_experts=shape.n_experts,
        top_k=shape.top_k,
        capacity=8,
        delta=known.delta,
        warm=known.warm,
    )
    return Decisions(cache, 32, known if policy.uses_prior else None)


def host_driven(weights, policy, **options):
    return HostDrivenExecutor(weights, decisions(weights, policy), n_ctx=64, **options)


def drive(executor, decodes=10):
    """A prompt, tokens, another prompt, text, a step back and the text again: logits, executed experts, residents."""
    logits, executed = [], []

    def step(first, last):
        logits.append(executor.step(TOKENS[first:last], first, all_rows=True))
        executed.append(executor.record(last - first)["executed"])
        executor.verify()

    step(0, 9)
    for at in range(9, 9 + decodes):
        step(at, at + 1)
    step(9 + decodes, 16 + decodes)
    kept, position = executor.snapshot(), 16 + decodes
    texts = []
    for _ in range(2):
        texts.append(list(executor.extend(3, position, 4, GREEDY, frozenset())))
        residents = executor.slot_of() >= 0
        executor.restore(kept)
        executor.verify()
    assert texts[0] == texts[1]
    executor.reset()
    executor.verify()
    executor.close()
    return np.concatenate(logits), np.concatenate(executed, axis=1), residents, texts[0]


@pytest.mark.parametrize("name", ["exact-lru", "psr-gated", "speculative", "tau", "token-prior", "top-j", "elided"])
def test_it_decides_what_the_cpu_s_executor_decides(weights, name):
    policy = POLICIES[name]
    cpu = CpuExecutor(weights, decisions(weights, policy), n_ctx=64)
    host = host_driven(weights, policy)
    a, b = drive(cpu), drive(host)
    assert np.abs(a[0] - b[0]).max() < 2e-6 * np.abs(a[0]).max()
    assert np.array_equal(a[1], b[1]) and np.array_equal(a[2], b[2]) and a[3] == b[3]
    names = ("loads", "misses", "demand", "prefetch", "in_time", "unused")
    assert [getattr(cpu.counters, one) for one in names] == [getattr(host.counters, one) for one in names]


@pytest.fixture(scope="module")
def undelayed(weights):
    return drive(host_driven(weights, UNBOUNDED))


@pytest.mark.parametrize(
    "timing",
    [
        {"in_flight": 1, "delay_s": 0.004},
        {"in_flight": 2, "delay_s": 0.001, "seed": 1},
        {"in_flight": 4, "link_gbps": 0.01},
        {"in_flight": 8, "link_gbps": 0.1, "delay_s": 0.001},
    ],
    ids=str,
)
def test_timing_changes_nothing_but_time(weights, undelayed, timing):
    """Routing on the logical cache (paper, Table 1): the same bits, although prefetches come late."""
    slowed = host_driven(weights, UNBOUNDED, **timing)
    found = drive(slowed)
    assert all(np.array_equal(a, b) for a, b in zip(undelayed, found, strict=True))
    c = slowed.counters
    assert c.late > 0 and c.wait_s > 0 and c.policy_s > 0
    assert c.prefetch == c.in_time + c.late + c.unused


def test_routing_on_the_physical_cache_depends_on_timing(weights, undelayed):
    """A copy takes 6 ms here, a layer less than one: the link and the number in flight change which experts run."""
    slow = {"link_gbps": weights.arena.expert_bytes / 6e6}
    there = drive(host_driven(weights, UNBOUNDED, physical=True), decodes=4)
    assert np.array_equal(there[1][:, :13], undelayed[1][:, :13])  # whose copies are over at once
    arrived = drive(host_driven(weights, UNBOUNDED, physical=True, **slow), decodes=4)
    one, four = (
        drive(host_driven(weights, UNBOUNDED, physical="issued", in_flight=m, **slow), decodes=4) for m in (1, 4)
    )
    for a, b in ((there, arrived), (one, four)):
        assert not np.array_equal(a[1], b[1]) and not np.array_equal(a[0], b[0])


def test_throttled_prefetch_changes_residents_and_under_exact_routing_nothing_else(weights):
    """Six candidates would be prefetched. The link has room for all of them, for two, or for hardly any."""
    slow = {"link_gbps": weights.arena.expert_bytes / 6e6}
    logical = drive(host_driven(weights, EXACT_UNBOUNDED))
    residents = []
    for timing in ({"in_flight": 8}, {"in_flight": 2}, {"in_flight": 2, **slow}):
        throttled = host_driven(weights, EXACT_UNBOUNDED, throttled=True, **timing)
        found = drive(throttled)
        assert np.array_equal(found[1], logical[1]) and found[3] == logical[3]
        c = throttled.counters
        assert c.prefetch == c.in_time + c.late + c.unused  # none was dropped: what was inserted was sent
        residents.append(found[2])
    assert np.array_equal(residents[0], logical[2])
    assert not np.array_equal(residents[0], residents[1]) and not np.array_equal(residents[1], residents[2])


def test_throttled_prefetch_changes_what_steered_routing_executes(weights):
    there, slow = (
        drive(host_driven(weights, UNBOUNDED, throttled=True, in_flight=2, **timing))
        for timing in ({}, {"link_gbps": weights.arena.expert_bytes / 6e6})
    )
    assert not np.array_equal(there[1], slow[1]) and not np.array_equal(there[0], slow[0])


def test_a_throttled_prefetch_is_sent_when_it_is_decided(weights):
    """One in flight on a link that takes 6 ms for an expert: until it is there nothing else is inserted."""
    executor = host_driven(
        weights, EXACT_UNBOUNDED, throttled=True, in_flight=1, link_gbps=weights.arena.expert_bytes / 6e6
    )
    executor.step(TOKENS[:9], 0)
    for at in range(9, 14):
        executor.step(TOKENS[at : at + 1], at)
        assert executor._copies.queued() == []
        assert (executor.record(1)["counts"][:, 0, 0] <= 1).all()
    executor.close()


def test_decodes_follow_recorded_routing(weights):
    shape, policy = weights.shape, POLICIES["psr-gated"]
    recorded = np.random.default_rng(5).normal(size=(12, shape.n_layers, 2, shape.n_experts)).astype(np.float32)
    executor = host_driven(weights, policy, recorded=torch.from_numpy(recorded))
    alone = decisions(weights, policy)
    for at in range(12):
        executor.step(TOKENS[at : at + 1], at)
        alone.begin(TOKENS[at : at + 1])
        for layer in range(shape.n_layers):
            alone.part1(layer, recorded[at, layer - 1, 1] if layer else None)
            alone.part2(layer, recorded[at, layer, 0])
        assert np.array_equal(executor.record(1)["executed"], alone.record(1)["executed"])
    executor.verify()


def test_an_interrupted_step_did_not_happen(weights, monkeypatch):
    executor = host_driven(weights, POLICIES["psr"], delay_s=0.002)
    executor.step(TOKENS[:9], 0)
    kept = executor.snapshot()
    expected = executor.step(TOKENS[9:10], 9), executor.step(TOKENS[10:11], 10)
    executor.restore(kept)
    send = Copies._send

    def interrupted(self, layer, expert, slot):
        arrival = send(self, layer, expert, slot)
        if layer == 2:
            raise KeyboardInterrupt
        return arrival

    monkeypatch.setattr(Copies, "_send", interrupted)
    with pytest.raises(KeyboardInterrupt):
        for at in range(9, 30):
            executor.step(TOKENS[at : at + 1], at)
    monkeypatch.undo()
    executor.restore(kept)
    executor.verify()
    assert np.array_equal(executor.step(TOKENS[9:10], 9), expected[0])
    assert np.array_equal(executor.step(TOKENS[10:11], 10), expected[1])
    executor.close()


def test_a_link_without_prefetches_is_refused(weights):
    with pytest.raises(UserError, match="at least 1"):
        host_driven(weights, POLICIES["psr"], in_flight=0)


class LinkOfLetters:
    """Notes what is sent; everything arrives when told."""

    def __init__(self, arena):
        self.sent, self.over, self._begin, self._size = [], set(), arena.bytes.data_ptr(), arena.expert_bytes

    def send(self, source, target, after=None):
        expert = (source.data_ptr() - self._begin) // self._size
        self.sent.append(expert)
        link = self

        class Arrival:
            def done(self):
                return expert in link.over

        return Arrival()

    def drain(self):
        self.over.update(self.sent)


@pytest.fixture
def scheduled(weights):
    """The copies of one layer with experts 0 … 7 in slots 0 … 7, one prefetch in flight."""
    slots = Slots(Arena(weights.shape, torch.float32, pinned=False), 8, torch.device("cpu"))
    slots.held[:] = np.arange(8)
    slot_of = np.full((4, 16), -1)
    slot_of[:, :8] = np.arange(8)
    link = LinkOfLetters(slots.arena)
    return Copies(slots, slot_of, link, 1, Counters()), slot_of[0], link


def replaced(slot_of, *pairs):
    """Let each expert have its slot."""
    for expert, slot in pairs:
        slot_of[slot_of == slot] = -1
        slot_of[expert] = slot
    return list(pairs)


def test_demand_goes_before_queued_prefetches(scheduled):
    copies, slot_of, link = scheduled
    copies.predict(0, replaced(slot_of, (8, 0), (9, 1), (10, 2)))
    copies.boundary()
    assert link.sent == [8]  # one in flight
    waits = copies.need(0, replaced(slot_of, (11, 3)), [4, 8, 9, 11])
    assert link.sent == [8, 11, 9] and len(waits) == 3  # 9 was queued: promoted
    copies.boundary()
    assert link.sent == [8, 11, 9]
    link.over.add(8)
    copies.boundary()
    assert link.sent == [8, 11, 9, 10]  # its layer has passed
    c = copies._counters
    assert (c.demand, c.prefetch, c.in_time, c.late, c.unused) == (2, 2, 0, 1, 1)


def test_a_prefetch_whose_slot_was_given_away_is_dropped(scheduled):
    copies, slot_of, link = scheduled
    copies.predict(0, replaced(slot_of, (8, 0), (9, 1)))
    copies.boundary()
    link.over.add(8)
    waits = copies.need(0, replaced(slot_of, (10, 1)), [8, 10])
    assert len(waits) == 1 and copies._counters.in_time == 1
    copies.boundary()
    assert link.sent == [8, 10] and not copies.queued()


def test_an_expert_that_returns_to_its_bytes_needs_no_copy(scheduled):
    copies, slot_of, link = scheduled
    copies.predict(0, replaced(slot_of, (8, 0), (9, 1)))
    copies.boundary()
    assert copies.need(0, replaced(slot_of, (1, 1)), [1]) == []  # 9 was never sent: slot 1 still holds 1
    assert link.sent == [8] and copies._counters.demand == 0


def test_what_is_absent_is_what_has_not_been_issued_or_has_not_arrived(scheduled):
    copies, slot_of, link = scheduled
    copies.predict(0, replaced(slot_of, (8, 0), (9, 1)))
    copies.boundary()
    assert np.flatnonzero(copies.absent(0, arrived=False)).tolist() == [9]
    assert np.flatnonzero(copies.absent(0, arrived=True)).tolist() == [8, 9]
    link.over.add(8)
    assert np.flatnonzero(copies.absent(0, arrived=True)).tolist() == [9]


def test_the_kernels_compute_what_torch_computes():
    pytest.importorskip("triton")
    found = json.loads(run("interpreted_experts.py"))
    assert len(found) == 4 and max(found.values()) < 1e-6, found


def on_gpu(weights):
    arena = Arena(weights.shape, weights.dtype, pinned=True)
    arena.bytes.copy_(weights.arena.bytes)
    layers = tuple(Layer(**{name: tensor.cuda() for name, tensor in vars(layer).items()}) for layer in weights.layers)
    dense = {name: getattr(weights, name).cuda() for name in ("embedding", "norm", "output", "routers")}
    return Weights(weights.shape, weights.dtype, **dense, layers=layers, arena=arena)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device that torch can use")
@pytest.mark.parametrize("name", ["exact-lru", "psr-gated"])
def test_graphs_and_streams_decide_what_the_cpu_decides(weights, name):
    there = on_gpu(weights)
    expected = drive(CpuExecutor(weights, decisions(weights, POLICIES[name]), n_ctx=64))
    first = None
    for timing in ({}, {"in_flight": 1}, {"in_flight": 4, "delay_s": 0.002}):
        found = drive(host_driven(there, POLICIES[name], **timing))
        assert np.abs(expected[0] - found[0]).max() < 1e-4 * np.abs(expected[0]).max()
        assert np.array_equal(expected[1], found[1]) and expected[3] == found[3]
        first = first or found
        assert np.array_equal(first[0], found[0])
    there.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device that torch can use")
def test_what_a_gpu_s_link_throttles_changes_nothing_under_exact_routing(weights):
    there = on_gpu(weights)
    expected = drive(CpuExecutor(weights, decisions(weights, EXACT_UNBOUNDED), n_ctx=64))
    for timing in ({"in_flight": 1}, {"in_flight": 2, "delay_s": 0.002}):
        throttled = host_driven(there, EXACT_UNBOUNDED, throttled=True, **timing)
        found = drive(throttled)
        assert np.array_equal(expected[1], found[1]) and expected[3] == found[3]
        c = throttled.counters
        assert 0 < c.prefetch == c.in_time + c.late + c.unused
    there.close()
