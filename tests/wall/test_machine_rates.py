"""Rates of a machine: written by a person, taken from a profile, labelled where they come from, refused in one line."""

from dataclasses import replace
from pathlib import Path

import pytest
from wall_fixtures import small_geometry

from edgemoe.errors import UserError
from edgemoe.machine.identity import this_host
from edgemoe.machine.profile import (
    ExpertRate,
    GpuRates,
    Profile,
    RamRates,
    Rate,
    Ssd,
    SsdPoint,
    ThreadsRate,
    Transfer,
    save_profile,
)
from edgemoe.wall.rates import (
    CPU_SHARE,
    find_profile,
    format_range,
    machine_from,
    measured,
    parse_budget,
    parse_rate,
    parse_share,
)

G = small_geometry()  # one matrix of at most 1500 bytes: pieces of 500


def rate(value: float) -> Rate:
    return Rate(value, 0.01, 5, True)


def profile(**changes: object) -> Profile:
    ram = RamRates(
        10**9, 10**7, (ThreadsRate(1, rate(20e9)), ThreadsRate(2, rate(30e9))), (ThreadsRate(2, rate(25e9)),)
    )
    points = tuple(
        SsdPoint(pattern, size, 8, rate(value))
        for pattern, size, value in (("random", 500, 1e9), ("random", 10**6, 2e9), ("sequential", 10**6, 3e9))
    )
    ssd = Ssd("/nowhere", "dev", "ext4", "SSD", "O_DIRECT", "a file", 10**9, 512, points, False, "SSD nvme0n1")
    experts = (ExpertRate("Q8_0", False, 2, rate(15e9)), ExpertRate("Q4_0", True, 2, rate(11e9)))
    return replace(Profile(this_host(), "2026-01-01T00:00:00", ram, ssd, experts), **changes)


GPU = GpuRates(
    "GPU-1", "RTX", 8 * 10**9, (Transfer(500, rate(5e9)), Transfer(10**8, rate(25e9))), (), (), (), rate(448e9)
)


def test_a_profile_gives_the_rates_of_this_models_requests() -> None:
    m = measured(G, profile(gpus=(GPU,)))
    assert m.ssd is not None and (m.ssd.low, m.ssd.high) == (1e9, 3e9) and "SSD nvme0n1" in m.ssd.source
    assert m.ram is not None and m.ram.high == 30e9
    assert m.cpu is not None and (m.cpu.low, m.cpu.high) == (15e9, 15e9), "the model's own type"
    assert m.pcie is not None and (m.pcie.low, m.pcie.high) == (5e9, 25e9)
    assert (m.vram_bytes, m.vram_source) == (8 * 10**9, "profile: RTX")
    assert all("profile" in speed.source for speed in m.speeds.values())


def test_a_type_that_was_not_measured_takes_the_range_of_those_that_were_and_says_so() -> None:
    other = replace(G, expert_types={"Q6_K": 1})
    cpu = measured(other, profile()).cpu
    assert cpu is not None and (cpu.low, cpu.high) == (11e9, 15e9) and "nothing measured for Q6_K" in cpu.source
    assert measured(G, profile(cpu_experts=())).cpu is None and measured(G, profile(ssd=None)).ssd is None


def test_what_a_person_says_comes_first_and_is_labelled() -> None:
    m = machine_from(G, profile(), {"ssd": "5GB/s"}, ram="2GB")
    assert m.ssd is not None and (m.ssd.low, m.ssd.high, m.ssd.source) == (5e9, 5e9, "given: --ssd")
    assert m.cpu is not None and m.cpu.low == 15e9, "the profile's, since --ram-bandwidth is not given"
    assert (m.ram_bytes, m.ram_source) == (2 * 10**9, "given: --ram")


def test_experts_on_the_cpu_take_a_labelled_share_of_ram_bandwidth() -> None:
    cpu = machine_from(G, None, {"ram": "50GB/s"}).cpu
    assert cpu is not None and (cpu.low, cpu.high) == (CPU_SHARE[0] * 50e9, CPU_SHARE[1] * 50e9)
    assert cpu.source.startswith("default:")
    own = machine_from(G, None, {"ram": "50GB/s", "cpu": "20GB/s"}).cpu
    assert own is not None and own.source == "given: --cpu-experts"


@pytest.mark.parametrize(
    ("text", "message"),
    [("2.4", "not a rate"), ("2.4GB", "not a rate"), ("2.4Gb/s", "small b means bits"), ("2.4gb/s", "means bits"),
     ("0GB/s", "more than nothing"), ("-1GB/s", "not a rate"), ("fast", "not a rate"), ("2.4GB/h", "not a rate"),
     ("GB/s", "not a rate")],
)  # fmt: skip
def test_rates_in_wrong_units_are_refused(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        parse_rate("--ssd", text)
    assert str(error.value).startswith(f"--ssd {text}")


def test_units() -> None:
    assert parse_rate("--ssd", "2.4GB/s") == 2.4e9 and parse_rate("--ssd", " 900 MiB / s ") == 900 * 2**20
    assert parse_share("--hit-rate", "65.9%") == pytest.approx(0.659)
    assert format_range(2.4e9, 2.4e9) == "2.40 GB" and format_range(2e9, 3e9) == "2.00–3.00 GB"
    assert format_range(9e8, 3e9) == "900 MB–3.00 GB"
    for wrong in ("0.659", "101%", "-1%", "most"):
        with pytest.raises(UserError, match="not a share"):
            parse_share("--hit-rate", wrong)
    for wrong in ("18", "-18GB", "18GB/s", "50%", "lots"):
        with pytest.raises(UserError, match=r"--ram .*: not a size"):
            parse_budget("--ram", wrong)


def test_budgets_beyond_the_profiled_machine_are_refused() -> None:
    with pytest.raises(UserError, match="--ram 900TB: the profiled machine has"):
        machine_from(G, profile(), {}, ram="900TB")
    with pytest.raises(UserError, match="--vram 8GB: the profiled machine has 0 B"):
        machine_from(G, profile(), {}, vram="8GB")
    assert machine_from(G, None, {"ssd": "1GB/s"}, ram="900TB").ram_bytes == 9 * 10**14, "another machine"


def test_nothing_known_of_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with pytest.raises(UserError, match=r"edgemoe probe.*or say what the machine has"):
        find_profile(None, {})
    with pytest.raises(UserError, match="run `edgemoe probe`, or say what it has"):
        machine_from(G, find_profile("none", {}), {})
    assert find_profile(None, {"ssd": "1GB/s"}) is None and find_profile("none", {"ssd": "1GB/s"}) is None
    with pytest.raises(UserError, match="no such machine profile"):
        find_profile(str(tmp_path / "none.json"), {"ssd": "1GB/s"})


def test_profiles_are_found_and_those_of_other_machines_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr("edgemoe.machine.profile.gpu_uuids", lambda: ())
    save_profile(profile())
    assert find_profile(None, {}) == profile()
    other = save_profile(profile(host=replace(this_host(), id="another", cpu="Other CPU")), tmp_path / "o.json")
    with pytest.raises(UserError, match="profile of another machine") as error:
        find_profile(str(other), {})
    assert "\n" not in str(error.value)
