"""The saved profile: what is read is what was written, and what is not this machine's is refused in one line."""

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgemoe.errors import UserError
from edgemoe.machine import profile as profiles
from edgemoe.machine.disk import disk_of
from edgemoe.machine.identity import this_host
from edgemoe.machine.profile import (
    ExpertRate,
    GpuRates,
    Overlap,
    Profile,
    RamRates,
    Rate,
    Ssd,
    SsdPoint,
    ThreadsRate,
    Transfer,
    ZeroCopy,
    load_profile,
    profile_path,
    save_profile,
)

GB = 1e9


def rate(median: float = GB, stable: bool = True) -> Rate:
    return Rate(median, 0.01, 5, stable)


def ssd(directory: Path, *points: SsdPoint, device: str | None = None) -> Ssd:
    every = points or (SsdPoint("random", 4096, 1, rate()), SsdPoint("sequential", 4096, 1, rate(2 * GB)))
    device = device or disk_of(directory).device
    return Ssd(
        str(directory), device, "ext4", "SSD", "O_DIRECT", "temporary file", 1 << 30, 512, every, False, "a disk"
    )


def profile(directory: Path, **changes: object) -> Profile:
    gpu = GpuRates(
        uuid="GPU-1",
        name="a GPU",
        vram_bytes=24 * 10**9,
        h2d_pinned=(Transfer(1 << 20, rate(20 * GB)), Transfer(1 << 22, rate(24 * GB))),
        h2d_pageable=(Transfer(1 << 20, rate(6 * GB)),),
        zero_copy=(ZeroCopy(1 << 20, 8, rate(19 * GB)),),
        d2h=(Transfer(1 << 20, rate(21 * GB)),),
        vram_read=rate(900 * GB),
        ram_while_h2d=Overlap(4, rate(20 * GB), rate(18 * GB)),
    )
    threads = (ThreadsRate(1, rate(10 * GB)), ThreadsRate(2, rate(20 * GB)))
    measured = Profile(
        host=this_host(),
        created="2025-01-01T00:00:00+00:00",
        ram=RamRates(1 << 27, 1 << 25, threads, threads),
        ssd=ssd(directory),
        cpu_experts=(ExpertRate("Q8_0", False, 2, rate()),),
        gpus=(gpu,),
    )
    return dataclasses.replace(measured, **changes)


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    written = profile(tmp_path, notes=("naïve – ok",))
    path = save_profile(written, tmp_path / "deep" / "profile.json")
    assert load_profile(path) == written
    assert [file.name for file in path.parent.iterdir()] == ["profile.json"]


def test_by_default_it_lies_in_the_configuration_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with pytest.raises(UserError, match=r"no such machine profile: .*edgemoe probe"):
        load_profile()
    written = profile(tmp_path, present_gpus=profiles.gpu_uuids())
    assert save_profile(written) == profile_path() == next((tmp_path / "edgemoe").iterdir())
    assert load_profile() == written
    other = dataclasses.replace(this_host(), id="0" * 16)
    assert profile_path(other) != profile_path()
    assert len({profile_path(uuids=uuids) for uuids in [(), ("GPU-1",), ("GPU-2",), ("GPU-1", "GPU-2")]}) == 4


def refusal(path: Path, model: Path | None = None) -> str:
    with pytest.raises(UserError) as caught:
        load_profile(path, model)
    line = str(caught.value)
    assert "\n" not in line and "edgemoe probe" in line
    return line


def test_another_host_is_refused(tmp_path: Path) -> None:
    other = dataclasses.replace(this_host(), id="0123456789abcdef", cpu="Another CPU")
    assert "another machine" in refusal(save_profile(profile(tmp_path, host=other), tmp_path / "p.json"))


def test_other_gpus_are_refused(tmp_path: Path) -> None:
    gone = profile(tmp_path, present_gpus=(*profiles.gpu_uuids(), "GPU-that-left"))
    assert "other GPUs" in refusal(save_profile(gone, tmp_path / "p.json"))


def test_another_disk_is_refused(tmp_path: Path) -> None:
    swapped = profile(tmp_path, ssd=ssd(tmp_path, device="another serial"))
    assert "another disk" in refusal(save_profile(swapped, tmp_path / "p.json"))


def test_a_model_on_another_disk_is_refused(tmp_path: Path) -> None:
    path = save_profile(profile(tmp_path), tmp_path / "p.json")
    if not Path("/dev/shm").is_dir():
        pytest.skip("no /dev/shm to be another disk")
    assert load_profile(path, tmp_path).ssd
    assert "another disk" in refusal(path, Path("/dev/shm"))


def test_another_version_is_refused(tmp_path: Path) -> None:
    path = save_profile(profile(tmp_path), tmp_path / "p.json")
    path.write_text(path.read_text().replace('"version": 1', '"version": 99'))
    assert "99" in refusal(path)


DAMAGE = [
    ("not JSON", lambda text: text[: len(text) // 2]),
    ("version", lambda text: "[]"),
    ("no field created", lambda text: text.replace(' "created": "2025-01-01T00:00:00+00:00",', "")),
    ("unknown field extra", lambda text: text.replace('"created":', '"extra": 1,\n "created":')),
    ("ssd.points[0].request_bytes", lambda text: text.replace('"request_bytes": 4096', '"request_bytes": "4096"', 1)),
    ("not a whole number", lambda text: text.replace('"rounds": 5', '"rounds": true', 1)),
    ("not a number", lambda text: text.replace('"spread": 0.01', '"spread": NaN', 1)),
    ("is not a rate", lambda text: text.replace('"median": 1000000000.0', '"median": -1.0', 1)),
    ("page cache", lambda text: text.replace('"cached": false', '"cached": true')),
    ("no random reads", lambda text: text.replace('"random"', '"sequential"')),
    ("not a kind of read", lambda text: text.replace('"random"', '"backwards"')),
]


@pytest.mark.parametrize(("said", "damage"), DAMAGE, ids=[said for said, _ in DAMAGE])
def test_a_damaged_profile_is_refused_by_what_is_wrong(tmp_path: Path, said: str, damage) -> None:
    path = save_profile(profile(tmp_path), tmp_path / "p.json")
    before = path.read_text()
    path.write_text(damage(before))
    assert path.read_text() != before
    assert said in refusal(path)


def test_where_it_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for target in (tmp_path / "file" / "p.json", tmp_path):
        with pytest.raises(UserError, match="cannot write"):
            profiles.check_writable(target)
        with pytest.raises(UserError, match="cannot write"):
            save_profile(profile(tmp_path), target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def points(*figures: tuple[int, int, float]) -> tuple[SsdPoint, ...]:
    both = [SsdPoint("random", size, depth, rate(value)) for size, depth, value in figures]
    return (*both, SsdPoint("sequential", 4096, 1, rate()))


def test_rates_between_the_measured_sizes(tmp_path: Path) -> None:
    disk = ssd(tmp_path, *points((4096, 1, 1e8), (4096, 8, 4e8), (1 << 20, 1, 1e9), (1 << 20, 8, 3e9)))
    assert disk.random_expert(1 << 20) == pytest.approx(3e9)
    assert disk.random_expert(1 << 20, depth=1) == pytest.approx(1e9)
    assert disk.random_expert(1 << 20, depth=7) == pytest.approx(1e9)  # what 7 in flight give at least
    assert disk.random_expert(1 << 16, depth=1) == pytest.approx((1e8 * 1e9) ** 0.5)  # the middle of 2^12 and 2^20
    assert disk.random_expert(1) == pytest.approx(4e8)
    assert disk.random_expert(1 << 30) == pytest.approx(3e9)
    assert float(disk.sequential) == GB
    with pytest.raises(ValueError, match="not a read"):
        disk.random_expert(0)


@given(st.integers(1, 1 << 40), st.lists(st.floats(1e6, 1e11), min_size=3, max_size=3))
def test_an_interpolated_rate_lies_between_its_neighbours(size: int, rates: list[float]) -> None:
    disk = ssd(Path("/"), *points(*((4096 << (8 * at), 1, value) for at, value in enumerate(rates))))
    assert min(rates) * 0.999 <= disk.random_expert(size) <= max(rates) * 1.001


def test_one_unsettled_figure_makes_the_profile_unstable(tmp_path: Path) -> None:
    assert not profile(tmp_path).unstable
    unsettled = (ExpertRate("Q8_0", False, 2, rate(stable=False)),)
    assert profile(tmp_path, cpu_experts=unsettled).unstable


def test_the_host_is_told_by_a_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from edgemoe.machine import identity

    here = this_host()
    assert here == this_host() and here.cores >= 1 and here.ram_bytes > 0
    monkeypatch.setattr(identity, "MACHINE_ID", tmp_path / "machine-id")
    (tmp_path / "machine-id").write_text("0123456789abcdef0123456789abcdef\n")
    other = this_host()
    assert other.id != here.id and "0123456789abcdef" not in json.dumps(dataclasses.asdict(other))
