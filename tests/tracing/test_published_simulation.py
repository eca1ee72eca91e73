"""Simulation against published figures (arXiv 2608.18261), and Algorithm 1 on the scores of a real router."""

from pathlib import Path

import numpy as np
import pytest

from edgemoe.policy import preset
from edgemoe.tracing import load_trace
from edgemoe.tracing.simulate import simulate

ROUTING = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "routing"

pytestmark = pytest.mark.skipif(not ROUTING.is_dir(), reason=f"the published traces are not in {ROUTING}")


def read(name):
    return load_trace(ROUTING / f"{name}.npz")


@pytest.fixture(scope="module")
def table_3():
    """Layer 24 of Qwen3-30B-A3B on code with 13.4% of 128 experts: the paper's Table 3, by policy."""
    policies = ["lru", "lfu", "static-prefix", "belady"]
    return simulate(read("qwen3-30b-a3b.code"), [17], policies, layer=24).set_index("policy")


@pytest.mark.parametrize(
    ("policy", "misses", "relative"),
    [
        ("lru", 2.7255, 1e-9),
        ("lru", 2.724375, 1e-3),  # published: its ties follow the order of a Python set
        ("lfu", 3.195, 5e-3),
        ("static-prefix", 3.26475, 1e-9),
        ("belady", 1.51075, 1e-9),
    ],
)
def test_misses_per_token(table_3, policy, misses, relative):
    assert table_3.loc[policy, "misses_per_token"] == pytest.approx(misses, rel=relative)


@pytest.mark.parametrize(("policy", "hit_rate"), [("lru", 0.659), ("lfu", 0.601), ("static-prefix", 0.592)])
def test_hit_rates_of_table_3(table_3, policy, hit_rate):
    assert round(table_3.loc[policy, "hit_rate"], 3) == hit_rate


def test_published_belady_is_not_the_optimum(table_3):
    """Table 3 says 79.1%, 1.6705 misses: its next use skips those later in the same token."""
    assert table_3.loc["belady", "misses_per_token"] < 1.6705


@pytest.mark.parametrize(
    ("run", "lru_at_quarter", "static_at_half"),
    [("sticky-a-main-s1", 0.494, 0.747), ("sticky-b-main-s1", 0.788, 0.930), ("sticky-c-main-s1", 0.733, 0.991)],
)
def test_hit_rates_of_table_5(run, lru_at_quarter, static_at_half):
    """Averages over the three domains, with 4 and 8 of 16 experts.

    The study's Table 5 updates recency load by load, its Table 3 token by token. Load by load these traces give
    0.4938, 0.7876 and 0.7335, the published figures; our one LRU goes by token, as in Table 3, and gives 0.4967,
    0.7904 and 0.7361.
    """
    domains = [read(f"{run}.{domain}") for domain in ("prose", "code", "math")]
    lru = [simulate(trace, [4], ["lru"])["hit_rate"].item() for trace in domains]
    pinned = [simulate(trace, [8], ["static-oracle"])["hit_rate"].item() for trace in domains]
    assert np.mean(lru) == pytest.approx(lru_at_quarter, abs=5e-3)
    assert np.mean(pinned) == pytest.approx(static_at_half, abs=1e-3)


COLUMNS = ["demand_per_token", "prefetch_per_token", "unused_per_token", "replaced_per_token"]
PSR = {
    "exact-lru": (31.995, 0, 0, 0),
    "cache-prior": (5.516, 0, 0, 27.551),
    "psr": (1.500, 12.600, 1.581, 18.498),
}


@pytest.fixture(scope="module")
def scored():
    return read("olmoe-shaped-16x64.scores")


@pytest.mark.parametrize("policy", PSR)
def test_algorithm_1_on_a_real_router(scored, policy):
    """C = 32, Δ̄ and warm set from the file, no token prior, λ = 0.2, n = 1, w = 8, reset per window."""
    row = simulate(scored, [32], [policy]).iloc[0]
    assert [round(row[column], 3) for column in COLUMNS] == list(PSR[policy])


@pytest.mark.parametrize(
    ("capacity", "copies", "demand"),
    [(32, 6.2, 2.1), (16, 23.2, 12.1)],
)
def test_gated_psr_is_near_its_figures_with_a_token_prior(scored, capacity, copies, demand):
    """The figures were measured with a token prior, which the file has not; the gate's effect is there without it."""
    row = simulate(scored, [capacity], ["psr-gated"]).iloc[0]
    assert row["demand_per_token"] == pytest.approx(demand, rel=0.04)
    assert row["demand_per_token"] + row["prefetch_per_token"] == pytest.approx(copies, rel=0.02)
    assert row["unused_per_token"] < 0.06


def test_psr_at_the_papers_operating_point(scored):
    """λ = 0.3: 13.0 copies per token (the paper's OLMoE, with a token prior: 13.8)."""
    row = simulate(scored, [32], {"psr": preset("psr", lam=0.3)}).iloc[0]
    assert row["demand_per_token"] + row["prefetch_per_token"] == pytest.approx(13.0, abs=0.05)
