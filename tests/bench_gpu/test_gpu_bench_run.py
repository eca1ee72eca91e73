"""The bench on the CPU: rounds, decisions beside the host's, interrupts, time that is up, rows that cannot run."""

import json
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from gpu_subjects import tiny_subject

from edgemoe.bench.gpu import measure, run, subject
from edgemoe.bench.gpu.against import Split
from edgemoe.bench.gpu.determinism import determinism, verdict
from edgemoe.bench.gpu.limits import Rates
from edgemoe.bench.gpu.pictures import draw
from edgemoe.bench.gpu.report import as_json, bars
from edgemoe.bench.gpu.run import Settings, bench_gpu
from edgemoe.errors import UserError
from edgemoe.policy import preset

FOUND = run._subject  # what tests put a tiny model in the place of
POLICIES = {"exact-lru": preset("exact-lru"), "psr": preset("psr", window=3)}


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.setattr(run, "_subject", lambda settings, watch: tiny_subject())


def settings(**more):
    defaults = {
        "device": "cpu", "policies": POLICIES, "residencies": ("50%",), "rounds": 2, "generate": 3, "determinism": 0,
        "prompt": 0,
    }  # fmt: skip
    return Settings(**{**defaults, **more})


def test_every_row_decides_and_copies_what_the_host_does() -> None:
    told = []
    report = bench_gpu(settings(executors=("cpu", "host")), saved=lambda found: told.append(found.ended.rounds))
    rows = {(row.name, row.executor): row for row in report.rows}
    assert set(rows) == {(name, at) for name in ("resident", *POLICIES) for at in ("cpu", "host")}
    for row in rows.values():
        assert row.problem == "" and row.agrees and len(row.rounds) == 2 and row.tokens == 48
        assert row.mean == pytest.approx(np.mean(row.rounds)) and row.quantiles[0] <= row.p50 <= row.p99
        assert row.quantiles[-1] >= row.p99 and row.timeline_s > 0
    exact, steered = rows["exact-lru", "cpu"], rows["psr", "cpu"]
    assert exact.demand == pytest.approx(exact.decided_demand) and exact.prefetch == 0 and exact.replaced == 0
    assert steered.demand == pytest.approx(steered.decided_demand)
    assert steered.prefetch == pytest.approx(steered.decided_prefetch) and steered.replaced > 0
    assert steered.in_time + steered.unused == pytest.approx(steered.prefetch)
    assert exact.copied_bytes == pytest.approx(exact.demand * report.expert_bytes)
    assert exact.link_s == pytest.approx(exact.copied_bytes / report.rates.link)
    assert rows["resident", "cpu"].copies == 0 and rows["resident", "cpu"].above_floor == pytest.approx(0)
    assert rows["resident", "host"].above_floor == pytest.approx(0)
    assert len({row.config for row in rows.values()}) == 6
    assert {(one.slower, one.faster) for one in report.beside} == set()  # window 3 is no preset's
    assert [one.tokens for one in report.generated] == [3] * 6
    assert len({one.config for one in report.generated} | {row.config for row in rows.values()}) == 12
    assert report.ended.rounds == 2 and report.ended.why == "" and len(told) >= 3
    found = as_json(report)
    assert json.loads(json.dumps(found, allow_nan=False))["rows"][0]["name"] == "resident"
    assert [bar.holds for bar in bars(report)] == [True]


def test_a_limit_is_the_faster_of_what_was_measured_before_and_behind_the_rounds(monkeypatch) -> None:
    given = iter([Rates(1e9, 4e9, 2e9), Rates(3e9, 2e9, 5e9)])
    monkeypatch.setattr(run, "measure_rates", lambda weights, device: next(given))
    told = []
    report = bench_gpu(settings(rounds=1, generate=0), saved=lambda found: told.append(found.rates.link))
    assert report.rates == Rates(3e9, 4e9, 5e9) and told[0] == 1e9 and told[-1] == 3e9
    exact = next(row for row in report.rows if row.name == "exact-lru")
    assert exact.link_s == pytest.approx(exact.copied_bytes / 3e9)


@pytest.mark.parametrize(("executor", "called"), [("physical", "physical cache"), ("throttled", "throttled")])
def test_what_timing_decides_is_held_to_no_decision(executor: str, called: str) -> None:
    report = bench_gpu(settings(executors=(executor,), rounds=1))
    assert [row.label for row in report.rows] == [f"{name}, {called}" for name in ("resident", *POLICIES)]
    assert all(row.mean and row.problem == "" and row.agrees is None for row in report.rows)
    assert all(row.decided_demand is None and row.timeline_s is None for row in report.rows)


def test_the_same_run_has_the_same_configurations() -> None:
    first, again = (bench_gpu(settings(rounds=1, generate=0)) for _ in range(2))
    assert [row.config for row in first.rows] == [row.config for row in again.rows]


def test_a_row_that_cannot_run_says_why_and_leaves_the_others() -> None:
    report = bench_gpu(settings(policies={"exact-lru": preset("exact-lru"), "psr": preset("psr")}, generate=0))
    problem = {row.name: row.problem for row in report.rows}
    assert "window of 8" in problem["psr"] and problem["exact-lru"] == problem["resident"] == ""
    assert {row.name: row.mean is None for row in report.rows} == {"resident": False, "exact-lru": False, "psr": True}


def test_where_no_row_can_run_there_is_no_report() -> None:
    with pytest.raises(UserError, match=r"no row can run: .*window of 8"):
        bench_gpu(settings(policies={"psr": preset("psr")}))


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"dtype": "int4"}, "--dtype int4: expected bfloat16 or float32"),
        ({"seconds": float("nan")}, "--seconds nan"),
        ({"seconds": 0.0}, "--seconds 0: expected"),
        ({"residencies": ("50%", "abc")}, "'abc' is not a residency"),
    ],
)
def test_settings_that_cannot_be_are_refused_at_once(wrong, said) -> None:
    with pytest.raises(UserError, match=said):
        settings(**wrong)


def test_slots_that_a_geometry_has_not_are_refused_before_any_work(monkeypatch) -> None:
    monkeypatch.setattr(subject, "demo_recording", lambda *_: pytest.fail("the demo model was traced"))
    monkeypatch.setattr(run, "_subject", FOUND)
    with pytest.raises(UserError, match="residency 100 is 100 slots per layer"):
        bench_gpu(settings(geometry="olmoe-narrow", residencies=("50%", "100")))


def interrupting(part, after):
    @contextmanager
    def watch(what, total, unit):
        seen = 0

        def advance(count):
            nonlocal seen
            seen += count
            if what == part and seen > after:
                raise KeyboardInterrupt

        yield advance

    return watch


def test_an_interrupt_keeps_whole_rounds() -> None:
    report = bench_gpu(settings(rounds=3), interrupting("decoding", 3 * 24 + 24))
    assert report.interrupted and report.ended.rounds == 1 and report.ended.why == "interrupted"
    assert [len(row.rounds) for row in report.rows] == [1, 1, 1] and report.generated == []


def test_an_interrupt_of_the_first_round_keeps_the_rows_that_were_timed() -> None:
    report = bench_gpu(settings(), interrupting("decoding", 30))
    assert report.interrupted and report.ended.rounds == 0
    assert [len(row.rounds) for row in report.rows] == [1, 1, 0] and report.rows[2].mean is None
    json.dumps(as_json(report), allow_nan=False)


def test_an_interrupt_after_the_rounds_keeps_them() -> None:
    report = bench_gpu(settings(), interrupting("free generation", 0))
    assert report.interrupted and report.ended.rounds == 2 and all(row.mean for row in report.rows)


def test_no_round_begins_when_time_is_up() -> None:
    report = bench_gpu(settings(rounds=50, seconds=1e-3, generate=0))
    assert report.ended.rounds == 1 and "after 1 of 50 rounds" in report.ended.why


def test_timing_changes_text_on_the_physical_cache_alone() -> None:
    """On a link of which a copy takes longer than a token, where it is slowed: 31 ms."""
    found = determinism(tiny_subject(), 3, 1e6, 24)
    logical, physical = ([one for one in found if one.cache == cache] for cache in ("logical", "physical"))
    assert all(one.same and one.problem == "" and len(one.tokens) == 24 for one in logical) and len(logical) == 8
    assert len({one.config for one in found}) == len(found) - 3  # each executor and cache once again
    [slowed] = [one for one in physical if one.how.startswith("link slowed")]
    assert not slowed.same
    assert verdict(found) == {"logical": True, "physical": False}
    assert verdict([logical[0], replace(logical[1], same=False)])["logical"] is False
    assert verdict([]) == {"logical": None, "physical": None}


def test_a_gpu_that_fails_keeps_the_rounds_before(monkeypatch) -> None:
    whole, rounds = measure.one_round, []

    def fails_in_the_third(*arguments):
        rounds.append(1)
        if len(rounds) > 2:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")
        whole(*arguments)

    monkeypatch.setattr(measure, "one_round", fails_in_the_third)
    report = bench_gpu(settings(rounds=4))
    assert report.ended.rounds == 2 and report.ended.why.startswith("the GPU failed: CUDA error: an illegal")
    assert all(len(row.rounds) == 2 for row in report.rows)
    with pytest.raises(UserError, match="start again"):
        bench_gpu(settings(rounds=4))  # in its first round, this time


def test_pictures_are_drawn(tmp_path: Path) -> None:
    report = bench_gpu(settings(generate=0))
    report.rows = [replace(row, kl=0.01 * at) for at, row in enumerate(report.rows)]
    drawn = draw(report, tmp_path)
    assert [path.name for path in drawn] == ["latency.png", "copies.png", "frontier.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)


def test_what_is_refused() -> None:
    with pytest.raises(UserError, match="at least 1"):
        Settings(rounds=0)
    with pytest.raises(UserError, match="--executors tpu"):
        Settings(executors=("tpu",))
    with pytest.raises(UserError, match="at least one policy"):
        Settings(policies={})
    with pytest.raises(UserError, match="--device tpu"):
        bench_gpu(settings(device="tpu"))
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="--device cpu") as refused:
            bench_gpu(settings(device="cuda"))
        assert "\n" not in str(refused.value)


def test_a_prompt_brings_what_is_not_resident_once() -> None:
    report = bench_gpu(settings(executors=("cpu", "host"), rounds=1, generate=0, prompt=40))
    assert [(one.label, one.slots, one.tokens) for one in report.prompts] == [
        ("resident", 8, 40), ("exact-lru", 4, 40), ("psr", 4, 40),
    ]  # fmt: skip
    resident, *others = report.prompts
    assert len({one.config for one in report.prompts} | {row.config for row in report.rows}) == 3 + len(report.rows)
    assert resident.union_bytes == resident.copied_bytes == 0 and resident.over_limit == pytest.approx(1)
    for one in others:
        # 40 tokens with two experts each execute all 8: the half that is not warm comes, in each of 3 layers.
        assert one.union_bytes == 3 * 4 * report.expert_bytes <= one.copied_bytes
        assert one.link_s == pytest.approx(one.union_bytes / report.rates.link)
        assert len(one.rounds) == 4 and one.compute_s == resident.first_token_s
        assert one.over_limit == pytest.approx(one.first_token_s / max(one.link_s, one.compute_s))
    assert as_json(report)["prompts"][1]["over_limit"] == others[0].over_limit
    assert [bar.holds for bar in bars(report)] == [True]  # the CPU is held to no time
    slow = replace(others[0], executor="device", rounds=(9.0,), link_s=6.0)
    on_gpu = replace(report, device="cuda", prompts=[slow, replace(slow, link_s=8.0)])
    assert [(bar.value, bar.holds) for bar in bars(on_gpu) if bar.what.startswith("prompt")] == [
        (1.5, False), (1.125, True),
    ]  # fmt: skip


def test_rows_are_held_against_the_best_of_llamacpp_s_splits() -> None:
    report = bench_gpu(settings(policies={"psr-gated": preset("psr-gated", window=4)}, rounds=1, generate=0))
    resident, gated = (replace(row, executor="device", mean=0.002) for row in report.rows)
    gated = replace(gated, policy=asdict(preset("psr-gated")))
    splits = [Split("100%", 0, 1, 0.003, 6, best=True), Split("100%", 0, 2, 0.009, 6)]
    splits += [Split("50%", 2, 1, 0.006, 6, best=True)]
    on_gpu = replace(report, device="cuda", rows=[resident, gated], against=splits)
    held = {bar.what: (bar.value, bar.holds) for bar in bars(on_gpu) if "llama.cpp" in bar.what}
    assert held == {
        "everything resident: times llama.cpp": (pytest.approx(1.5), True),
        "psr-gated at 50%: times llama.cpp at equal expert memory": (pytest.approx(3), False),
    }


def test_prompts_are_one_chunk() -> None:
    for length in (1, 513):
        with pytest.raises(UserError, match="--prompt"):
            settings(prompt=length)
