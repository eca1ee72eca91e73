"""ggml's products as the probe measures them: the fit of costs, the plan, and a whole probe of small weights."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgemoe.errors import UserError
from edgemoe.llamacpp.graph_run import CpuGraph, Weights
from edgemoe.machine import ggml_probe
from edgemoe.machine.caches import FALLBACK, last_level_cache
from edgemoe.machine.ggml_probe import ProductPlan, n_rounds, probe_products, quick_plan, thread_counts
from edgemoe.machine.memory import Ram
from edgemoe.machine.product_cost import Timed, fit_cost
from edgemoe.machine.profile import ExpertRate, NodeCost, ProductCost, Rate
from edgemoe.machine.record import from_json, to_json
from edgemoe.machine.rounds import Effort

MB = 1 << 20
SHAPES = ((150_000, 2048), (4_700_000, 16_384), (2_400_000, 4096), (9_400_000, 8192))
SMALL = ProductPlan(("Q8_0", "Q4_0"), True, (1, 2), Effort(1, 2, 0.0), 4 * MB)


@given(st.floats(0, 2e-5), st.floats(0, 2e-8), st.floats(2e-11, 1e-9))
def test_a_cost_is_found_again_from_what_it_takes(per_node: float, per_row: float, per_byte: float) -> None:
    true = ProductCost(per_node, per_row, per_byte, 0.0)
    found = fit_cost([Timed(nbytes, rows, true.seconds(nbytes, rows)) for nbytes, rows in SHAPES])
    assert found.residual < 1e-6
    for nbytes, rows in ((1_000_000, 1000), (20_000_000, 40_000)):
        assert found.seconds(nbytes, rows) == pytest.approx(true.seconds(nbytes, rows), rel=1e-5)


@given(st.lists(st.floats(0.5, 2), min_size=len(SHAPES), max_size=len(SHAPES)))
def test_no_noise_makes_a_cost_negative(noise: list[float]) -> None:
    true = ProductCost(5e-6, 1e-8, 3e-11, 0.0)
    measured = [
        Timed(nbytes, rows, true.seconds(nbytes, rows) * factor)
        for (nbytes, rows), factor in zip(SHAPES, noise, strict=True)
    ]
    found = fit_cost(measured)
    assert found.per_node >= 0 and found.per_row >= 0 and found.per_byte > 0
    worst = max(abs(found.seconds(one.nbytes, one.rows) / one.seconds - 1) for one in measured)
    assert found.residual == pytest.approx(worst)


def test_one_product_is_all_bytes() -> None:
    found = fit_cost([Timed(1000, 10, 1e-6)])
    assert (found.per_node, found.per_row) == (0, 0)
    assert found.per_byte == pytest.approx(1e-9)


def cache(cpus: Path, cpu: int, index: int, level: int, shared: str, size: str, kind: str = "Unified") -> None:
    place = cpus / f"cpu{cpu}/cache/index{index}"
    place.mkdir(parents=True)
    for name, text in (("level", str(level)), ("shared_cpu_list", shared), ("size", size), ("type", kind)):
        (place / name).write_text(text + "\n")


def test_each_shared_cache_counts_once(tmp_path: Path) -> None:
    for cpu in range(4):
        cache(tmp_path, cpu, 0, 1, str(cpu), "32K", "Data")
        cache(tmp_path, cpu, 1, 1, str(cpu), "64K", "Instruction")
        cache(tmp_path, cpu, 2, 2, str(cpu), "1024K")
        cache(tmp_path, cpu, 3, 3, "0-1" if cpu < 2 else "2-3", "32M")
    assert last_level_cache(tmp_path) == 2 * 32 * MB
    for cpu in range(4):
        (tmp_path / f"cpu{cpu}/cache/index3/size").unlink()
    assert last_level_cache(tmp_path) == 4 * MB, "without a third level the second is the last"
    assert last_level_cache(tmp_path / "nowhere") == FALLBACK


@pytest.mark.parametrize(("most", "counts"), [(1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8))])
def test_threads_are_doubled_up_to_all(most: int, counts: tuple[int, ...]) -> None:
    assert thread_counts(most) == counts


def test_a_whole_probe() -> None:
    told: list[int] = []
    found = probe_products(SMALL, told.append)
    assert sum(told) == n_rounds(SMALL)
    states = {(rate.type, rate.repacked) for rate in found.experts}
    assert {("Q8_0", False), ("Q4_0", False)} <= states
    assert {rate.type for rate in found.dense} == {"Q8_0", "Q4_0", "F32"}, "routers are F32"
    for rate in (*found.experts, *found.dense):
        assert rate.threads in (1, 2) and rate.bytes_per_s.median > 1e6
        assert rate.cost is not None and rate.cost.per_byte > 0
    assert len({(rate.type, rate.repacked, rate.threads) for rate in found.experts}) == len(found.experts)
    assert [node.threads for node in found.nodes] == [1, 2]
    assert all(node.per_node > 0 and node.per_attention > 0 for node in found.nodes)


def test_costs_survive_the_profile() -> None:
    rate = Rate(1e9, 0.01, 5, True)
    for record in (
        ExpertRate("Q8_0", False, 2, rate, ProductCost(1e-6, 2e-9, 3e-11, 0.1)),
        NodeCost(2, 1e-6, 0.0, 1e-10),
    ):
        assert from_json(type(record), to_json(record)) == record


@pytest.mark.parametrize("broken", [(-1e-6, 0.0, 1e-10), (0.0, -1.0, 1e-10), (0.0, 0.0, 0.0)])
def test_a_cost_that_cannot_be_is_refused(broken: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="is no cost"):
        ProductCost(*broken, residual=0.0)


def test_a_rate_can_be_measured_again() -> None:
    rate = ExpertRate("Q8_0", False, 1, Rate(1e9, 0.0, 1, False))
    with ggml_probe.again(rate, expert=False) as measure:
        assert measure() > 1e8
    elsewhere = ExpertRate("Q8_0", True, 1, Rate(1e9, 0.0, 1, False))
    if ("Q8_0", True) not in {(kind.type, kind.buffer != "CPU") for kind in ggml_probe._kinds(SMALL)}:
        with pytest.raises(UserError, match="keeps Q8_0 otherwise"), ggml_probe.again(elsewhere, expert=True):
            pass


def test_the_quick_plan_is_small() -> None:
    plan = quick_plan()
    assert not plan.both_states and len(plan.threads) == 1
    assert n_rounds(plan) < n_rounds(ProductPlan()) / 4
    assert plan.working_set == 4 * last_level_cache()


def test_mistakes_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"Q4_X is no type of this llama.cpp build"):
        ProductPlan(("Q8_0", "Q4_X"))
    monkeypatch.setattr(ggml_probe, "ram", lambda: Ram(8 * MB, 2 * MB, False))
    with pytest.raises(UserError, match=r"takes 4\.19 MB of weights, and 2\.10 MB of RAM are free"):
        probe_products(SMALL)


def test_weights_that_do_not_fit_together_are_measured_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ggml_probe, "ram", lambda: Ram(80 * MB, 14 * MB, False))
    batches = list(ggml_probe._batches(SMALL))
    assert [len({kind.stored for kind in batch}) for batch in batches[:1]] == [2]
    kinds = [kind for batch in batches for kind in batch]
    assert len(kinds) == len(set(kinds)) and set(kinds) == set(ggml_probe._kinds(SMALL))
    if len({kind.stored for kind in kinds}) > 2:
        assert len(batches) > 1


def test_every_expert_is_read_once_before_any_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[list[int]] = []
    monkeypatch.setattr(CpuGraph, "choose", lambda _, experts: chosen.extend([list(each) for each in experts]))
    kind, shape = ggml_probe._Kind("Q8_0", "CPU", True), ggml_probe.EXPERT_SHAPES[0]
    with Weights("Q8_0", 8 * MB) as weights, CpuGraph(1024) as graph:
        count = ggml_probe._add_experts(graph, kind, shape, weights)
    assert count == len(chosen) and count * kind.read(shape) <= weights.nbytes
    hands = ggml_probe.N_EXPERTS // ggml_probe.TOP_K
    for first in range(0, count, hands):
        dealt = [expert for hand in chosen[first : first + hands] for expert in hand]
        assert sorted(dealt) == list(range(ggml_probe.N_EXPERTS)) and dealt != sorted(dealt)
