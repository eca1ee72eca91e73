"""Writing with the experts on disk: the resident engine's text, the same text again, and figures that agree."""

import json
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from edgemoe.cli import commands
from edgemoe.errors import UserError
from edgemoe.generation import load
from edgemoe.generation.summary import Meter
from edgemoe.machine.disk import disk_of
from edgemoe.machine.identity import gpu_uuids, this_host
from edgemoe.machine.profile import Profile, RamRates, Rate, Ssd, SsdPoint, ThreadsRate, save_profile

DEMO = Path(__file__).parents[2] / "edgemoe" / "data" / "demo-moe-32m-q8_0.gguf"
SETTINGS = {"n_ctx": 256, "n_threads": 1}
PROMPT = "And God said, Let there be light: and"


@pytest.fixture
def sigterm() -> Iterator[None]:
    """A command takes SIGTERM for itself: a test that runs one in this process gives it back."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_exact_policies_write_the_resident_engines_text():
    with load(DEMO, repack=False, all_rows=True, n_ubatch=128, **SETTINGS) as resident:
        expected = resident.write(PROMPT, n=24, seed=4)
    for policy in ("exact-lru", "exact-prefetch"):
        with load(DEMO, residency="25%", policy=policy, verify_reads=True, **SETTINGS) as streamed:
            assert streamed.write(PROMPT, n=24, seed=4) == expected, policy


def test_a_steered_policy_writes_the_same_text_again_after_a_reset():
    with load(DEMO, residency="16", policy="psr", **SETTINGS) as writer:
        first = writer.write(PROMPT, n=16, seed=4)
        writer.engine.reset()
        assert writer.write(PROMPT, n=16, seed=4) == first


def test_what_is_counted_agrees():
    with load(DEMO, residency="25%", policy="exact-prefetch", **SETTINGS) as writer:
        meter = Meter(writer.engine)
        meter.begin()
        total = meter.since_last()
        for step in writer.stream(PROMPT, n=12, seed=4):
            meter.step(step)
            total = total + meter.since_last()
        s = meter.summary(seed=4, prompt_tokens=len(writer.prompt), reused_tokens=0, disk_bytes_per_s=1e9)
    assert total.tokens == s.prompt.tokens + s.decode.tokens == len(writer.prompt) + 11
    assert s.decode.loads == 11 * 8 * 8  # eight layers of top-8
    assert 0 < s.decode.hits < s.decode.loads and s.decode.demand_reads > 0
    assert total.demand_bytes == s.prompt.demand_bytes + s.decode.demand_bytes
    assert s.bytes_per_token == pytest.approx(s.decode.read_bytes / 11)
    assert s.share_of_disk == pytest.approx(s.decode.read_bytes / s.decode_s / 1e9)
    parts = s.seconds_per_token
    assert parts["demand_wait"] > 0 and parts["policy"] > 0 and parts["compute"] > 0


def test_the_command_says_how_the_experts_were_held(capsys, sigterm, tmp_path):
    line = ["run", str(DEMO), "-p", PROMPT, "-n", "6", "--seed", "1", "--threads", "1", "-c", "256"]
    metrics = tmp_path / "m.jsonl"
    assert commands.run([*line, "--residency", "25%", "--policy", "psr", "--lambda", "0.1", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["experts"] == "streamed" and said["slots"] == 16 and "lam 0.1" in said["policy"]
    assert 0 < said["decode_phase"]["hit_rate"] < 1 and said["bytes_per_token"] > 0
    assert commands.run([*line, "--residency", "16", "--metrics", str(metrics)]) == 0
    shown = capsys.readouterr()
    assert "16 of 64 experts per layer have a slot in RAM; policy: exact routing" in shown.err
    assert "steered" not in shown.err and "no --calibration" not in shown.err
    assert "hit rate" in shown.err and "demand reads per token" in shown.err
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert all(line["loads"] == 64 for line in lines[1:]) and sum(line["demand_bytes"] for line in lines) > 0


def test_steering_is_said(capsys, sigterm):
    line = ["run", str(DEMO), "-p", PROMPT, "-n", "2", "--threads", "1", "-c", "256"]
    assert commands.run([*line, "--residency", "50%", "--policy", "cache-prior"]) == 0
    shown = capsys.readouterr().err
    assert "steered towards what is in RAM" in shown
    assert "no --calibration: the warm set is experts 0 to 31, the bonus scale is a running mean" in shown


def test_reads_are_set_beside_the_probed_disk(capsys, sigterm, tmp_path, monkeypatch):
    """A profile of this machine whose disk gives 2 GB/s; without one the share is not known."""
    rate = Rate(2e9, 0.01, 5, True)
    points = (SsdPoint("random", 1 << 16, 8, rate), SsdPoint("sequential", 1 << 20, 8, rate))
    disk = disk_of(DEMO.parent).device
    ssd = Ssd(str(DEMO.parent), disk, "ext4", "SSD", "O_DIRECT", "file", 1 << 30, 512, points, False, "a disk")
    threads = (ThreadsRate(1, rate),)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    line = ["run", str(DEMO), "-p", PROMPT, "-n", "6", "--seed", "1", "--threads", "1", "-c", "256"]
    line += ["--residency", "25%", "--json"]
    assert commands.run(line) == 0
    assert json.loads(capsys.readouterr().out)["share_of_disk"] is None
    measured = Profile(this_host(), "2025-01-01T00:00:00+00:00", RamRates(1 << 27, 1 << 25, threads, threads), ssd)
    save_profile(replace(measured, present_gpus=gpu_uuids()))
    assert commands.run(line) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["disk_bytes_per_s"] == pytest.approx(2e9)
    assert said["share_of_disk"] == pytest.approx(said["read_bytes_per_s"] / 2e9) and said["share_of_disk"] > 0


def test_a_policy_without_a_budget_is_refused():
    with pytest.raises(UserError, match="give ram or residency"):
        load(DEMO, policy="psr")


def test_a_file_that_is_no_calibration_is_refused():
    with pytest.raises(UserError, match=r"MODEL_CARD\.md"):
        load(DEMO, residency="50%", calibration=DEMO.parent / "MODEL_CARD.md")
