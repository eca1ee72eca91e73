"""`edgemoe probe` as a person runs it: the whole of it once, its refusals, and what it leaves when interrupted."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from edgemoe.machine.disk import disk_of
from edgemoe.machine.profile import load_profile

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "edgemoe" / "data" / "demo-moe-32m-q8_0.gguf"
COMMAND = [sys.executable, "-m", "edgemoe.cli", "probe"]


def run(*arguments: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=900)


@pytest.fixture(scope="module")
def on_a_disk() -> None:
    found = disk_of(DEMO)
    if found.caches or not found.block_device:
        pytest.skip(f"this copy of the project is on no disk: {found.label}")


@pytest.mark.slow
def test_quick_measures_everything_and_saves_a_profile_that_loads(tmp_path: Path, on_a_disk: None) -> None:
    target, picture = tmp_path / "new" / "profile.json", tmp_path / "curve.png"
    result = run("--quick", "--json", "--model", DEMO, "--profile", target, "--plot", picture)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    printed = json.loads(result.stdout)
    assert printed.pop("path") == str(target)
    assert printed == json.loads(target.read_text())
    profile = load_profile(target, DEMO)
    assert profile.quick and profile.ssd and profile.ssd.source == DEMO.name
    assert float(profile.ram.best_load) > profile.ssd.random_expert(4096, depth=1) > 0
    assert {rate.type for rate in profile.cpu_experts} >= {"Q8_0", "Q4_K"} and profile.cpu_dense and profile.cpu_nodes
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--dir", "/dev/shm"), "tmpfs keeps its files in RAM"),
        (("--dir", "/nowhere"), "No such file"),
        (("--dir", "/", "--model", DEMO), "give one"),
        (("--model", __file__), "GGUF"),
        (("--model", "/nowhere.gguf"), "nowhere.gguf"),
        (("--profile", "/proc/self/p.json"), "cannot write /proc/self/p.json"),
        (("--plot", "/proc/self/x.png"), "cannot write /proc/self/x.png"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(tmp_path: Path, arguments: tuple[object, ...], said: str) -> None:
    target = tmp_path / "profile.json"
    result = run("--quick", *(() if "--profile" in arguments else ("--profile", target)), *arguments)
    assert result.returncode == 2 and result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if not re.match(r"reading the disk: \d", line)]
    assert len(lines) == 1 and said in lines[0]
    assert not target.exists()


def test_a_sparse_model_is_refused(tmp_path: Path) -> None:
    skeleton = tmp_path / "skeleton.gguf"
    with skeleton.open("wb") as file:
        file.write(DEMO.read_bytes()[: 4 << 20])
        file.truncate(DEMO.stat().st_size)
    result = run("--quick", "--json", "--model", skeleton, "--profile", tmp_path / "p.json")
    assert (result.returncode, result.stdout) == (2, "")
    assert "sparse" in result.stderr and len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_leaves_nothing(tmp_path: Path, on_a_disk: None, number: signal.Signals) -> None:
    process = subprocess.Popen(
        [*COMMAND, "--dir", str(tmp_path), "--profile", str(tmp_path / "p.json"), "--quick"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert process.stderr.readline().startswith("reading the disk")
    process.send_signal(number)
    output, errors = process.communicate(timeout=900)
    assert output == "" and list(tmp_path.iterdir()) == []
    if number == signal.SIGINT:
        assert process.returncode == 130 and "Traceback" not in errors, errors
    else:
        assert process.returncode == -signal.SIGTERM


def test_the_tables_show_every_figure_with_its_spread_and_rounds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from edgemoe.cli.probe_tables import show
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
    )

    def rate(median: float, spread: float = 0.02, rounds: int = 5, stable: bool = True) -> Rate:
        return Rate(median * 1e9, spread, rounds, stable)

    points = (SsdPoint("random", 1 << 20, 8, rate(2.41, 0.03, 7)), SsdPoint("sequential", 1 << 24, 1, rate(3.19)))
    disk = Ssd("/m", "serial", "xfs", "SSD", "O_DIRECT", "a.gguf", 10**10, 512, points, False, "SSD nvme0n1", ("seen",))
    copies = (Transfer(12 << 20, rate(24.6)),)
    gpu = GpuRates(
        "GPU-1", "A [fast] GPU", 24 * 10**9, copies, copies, (ZeroCopy(1 << 20, 8, rate(19.5)),), copies, rate(941),
        Overlap(4, rate(20), rate(18)),
    )  # fmt: skip
    ram = RamRates(1 << 27, 1 << 25, (ThreadsRate(1, rate(33.5)),), (ThreadsRate(1, rate(30.25)),))
    experts = (ExpertRate("Q4_0", True, 2, rate(21.6, stable=False)), ExpertRate("Q8_0", False, 1, rate(11.5)))
    profile = Profile(this_host(), "now", ram, disk, experts, (), (), (gpu,), ("GPU-1",), notes=("a note",))
    show(profile, tmp_path / "profile.json", None)
    printed = capsys.readouterr().out
    for figure in ("2.41 ±3%", "3.19 ±2%", "33.50 ±2%", "30.25 ±2%", "21.60 ±2%~", "24.60 ±2%", "19.50", "941 ±2%"):
        assert figure in printed
    for text in ("SSD nvme0n1", "seen", "Q4_0, repacked", "A [fast] GPU", "a note", str(tmp_path / "profile.json")):
        assert text in printed
    assert "11.50" not in printed  # fewer threads than the most
    assert "had not settled" in printed and "\x1b" not in printed and os.linesep in printed
