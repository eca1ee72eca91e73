"""Time along each path: bytes over rates by hand, ends of the range, what is missing, more memory never hurts."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wall_fixtures import machine, small_geometry, small_trace, wall_of

from edgemoe.model.memory import memory_needs
from edgemoe.wall.paths import paths
from edgemoe.wall.tiers import Path, Wall, best

BIG = 10**9
RATES = {"ssd": (500.0, 1000.0), "ram": 10_000.0, "cpu": (5000.0, 8000.0), "pcie": 2000.0, "vram": 100_000.0}
G = small_geometry()
NEED = {need.way: need for need in memory_needs(G, 10)}
REST = 3000 + 80 + 100 + 80  # output, attention, a row of the embeddings, the cache of 10 tokens


def way(wall: Wall, name: str) -> Path:
    return next(path for path in paths(wall) if path.name == name)


def test_everything_in_vram_is_bandwidth_over_bytes() -> None:
    path = way(wall_of(machine(BIG, BIG, **RATES)), "all in VRAM")
    assert path.tokens_per_s == pytest.approx((100_000 / (REST + 7000),) * 2)
    assert path.bound == "VRAM" and path.shares() == {"vram": 1.0}


def test_experts_on_the_cpu_wait_for_the_gpu() -> None:
    """Attention comes before experts in every layer: nothing overlaps even at best."""
    path = way(wall_of(machine(BIG, BIG, **RATES)), "experts on the CPU")
    assert (path.slow, path.fast) == pytest.approx((REST / 1e5 + 7000 / 5000, REST / 1e5 + 7000 / 8000))
    assert path.bound == "CPU"


def test_the_cpu_alone_reads_other_weights_at_ggmls_rate_at_worst() -> None:
    path = way(wall_of(machine(BIG, **RATES)), "all in RAM")
    assert (path.slow, path.fast) == pytest.approx(((REST + 7000) / 5000, REST / 1e4 + 7000 / 8000))


def test_streaming_adds_misses_at_worst_and_hides_the_shorter_at_best() -> None:
    wall = wall_of(machine(NEED["ssd-to-ram"].ram + 2 * 3500, **RATES), [small_trace()])
    path = way(wall, "slots in RAM")
    assert path.slots == (4, 4, 4) and path.hit is not None
    least, most = path.hit.copied
    computing = REST / 1e4 + 7000 / 8000
    assert path.slow == pytest.approx((REST + 7000) / 5000 + most / 500)
    assert path.fast == pytest.approx(max(computing, least / 1000))
    assert sum(path.shares().values()) == pytest.approx(1) and set(path.shares()) == {"ram", "cpu", "ssd"}
    assert any("hit rate" in reason for reason in path.reasons) and any("SSD" in reason for reason in path.reasons)


def test_slots_in_vram_read_misses_over_the_link() -> None:
    wall = wall_of(machine(BIG, NEED["ram-to-vram"].vram, **RATES), rate=0.75)
    path = way(wall, "slots in VRAM")
    assert path.slots == (2, 2, 2)
    assert path.slow == pytest.approx((REST + 7000) / 1e5 + 0.25 * 7000 / 2000)
    assert path.fast == pytest.approx(0.25 * 7000 / 2000) and path.bound == "PCIe"


def test_placed_experts_work_side_by_side_at_best() -> None:
    """Some loads in VRAM, the rest in RAM: the GPU and the CPU each execute theirs."""
    wall = wall_of(machine(BIG, NEED["experts-in-ram"].vram + 2 * 3500, **RATES), [small_trace()])
    path, hit = way(wall, "placed"), wall.caching.pinned.at([2, 2, 2])
    least, most = hit.copied
    assert 0 < least < most < 7000
    assert path.slow == pytest.approx((REST + 7000 - most) / 1e5 + most / 5000)
    assert path.fast == pytest.approx(REST / 1e5 + least / 8000) and "ssd" not in path.shares()
    assert "does not say" in way(wall_of(wall.machine, rate=0.5), "placed").missing


def test_what_is_not_bytes_slows_the_cpu_at_worst_only() -> None:
    from dataclasses import replace

    wall = wall_of(machine(BIG, **RATES))
    plain, paid = way(wall, "all in RAM"), way(replace(wall, cpu_extra=0.5), "all in RAM")
    assert paid.slow == pytest.approx(plain.slow + 0.5) and paid.fast == plain.fast
    assert any("not bytes" in reason for reason in paid.reasons)


def test_a_way_says_what_it_lacks() -> None:
    little = {path.name: path.missing for path in paths(wall_of(machine(1000, **RATES)))}
    assert all(little.values()) and "of RAM, there is 1.00 kB" in little["slots in RAM"]
    assert "of VRAM, there is none" in little["all in VRAM"]
    unknown = {path.name: path.missing for path in paths(wall_of(machine(BIG, BIG, ssd=1000.0)))}
    assert unknown["all in RAM"] == "rate not known: give --ram-bandwidth and --cpu-experts"
    assert unknown["slots in VRAM"] == "rate not known: give --vram-bandwidth and --pcie"
    assert best(paths(wall_of(machine(1000)))) is None


@settings(max_examples=40)
@given(st.integers(0, 80_000), st.integers(0, 20_000), st.booleans())
def test_more_memory_never_slows_a_way_down(budget: int, more: int, traced: bool) -> None:
    texts = [small_trace(tokens=120)] if traced else []
    base = NEED["ssd-to-ram"].ram
    small, large = (wall_of(machine(base + size, base + size, **RATES), texts) for size in (budget, budget + more))
    for before, after in zip(paths(small), paths(large), strict=True):
        assert before.possible <= after.possible
        if before.possible:
            assert after.slow <= before.slow * (1 + 1e-9)
            assert after.fast <= after.slow * (1 + 1e-9)


@settings(max_examples=40)
@given(st.integers(0, 60_000), st.integers(0, 60_000))
def test_times_and_shares_are_those_of_the_legs(ram: int, vram: int) -> None:
    for path in paths(wall_of(machine(NEED["ssd-to-ram"].ram + ram, vram, **RATES), [small_trace(tokens=80)])):
        if path.possible:
            assert sum(path.times(slow=True).values()) == pytest.approx(path.slow)
            assert sum(path.shares().values()) == pytest.approx(1)
            assert path.tokens_per_s == pytest.approx((1 / path.slow, 1 / path.fast))
            assert path.bound.split(" or ")[0] in ("SSD", "RAM", "CPU", "PCIe", "VRAM")
