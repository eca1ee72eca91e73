"""Ratios, the frontier at equal KL, names of rows, and llama.cpp's splits."""

from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from gpu_subjects import TINY

from edgemoe.bench.gpu.against import against_llamacpp, fields_of, splits_of, written
from edgemoe.bench.gpu.choices import DEFAULT, parse_lambdas, parse_policies
from edgemoe.bench.gpu.frontier import at_equal_kl, family_of, read_quality
from edgemoe.bench.gpu.rows import Row, beside, executors_beside, is_preset
from edgemoe.errors import UserError
from edgemoe.evaluation.results import Header, Item, ModelId, Task
from edgemoe.evaluation.writer import ResultWriter
from edgemoe.policy import preset
from edgemoe.progress import no_progress

NOTHING = dict.fromkeys(
    [
        *("demand", "prefetch", "in_time", "late", "unused", "copied_bytes", "decided_demand", "decided_prefetch"),
        *("replaced", "agrees", "link_s", "memory_s", "timeline_s", "above_floor", "per_copy", "reset_s"),
    ]
)


def row(policy, rounds, kl=None, slots=32, executor="device", name="row"):
    return Row(
        name=name, share="50%", slots=slots, executor=executor, policy=asdict(policy), policy_hash=policy.hash,
        config="c", rounds=tuple(rounds), tokens=10, mean=float(np.mean(rounds)), p50=None, p99=None, quantiles=(),
        kl=kl, problem="", **NOTHING,
    )  # fmt: skip


def test_ratios_pair_rounds_of_the_same_slots_and_executor() -> None:
    fast = row(preset("psr"), [1.0, 1.1, 0.9], name="psr")
    slow = row(preset("exact-lru"), [2.0, 2.2, 1.8], name="exact-lru")
    others = [replace(slow, slots=16), replace(slow, executor="host"), replace(slow, rounds=(2.0, 2.2))]
    [found] = beside([fast, slow, *others])
    assert (found.slower, found.faster) == ("exact-lru", "psr") and found.ratio.ratio == pytest.approx(2)
    assert found.ratio.low == pytest.approx(2) and "2.2" in found.paper
    assert beside([replace(fast, rounds=(1.0,)), replace(slow, rounds=(2.0,))]) == []
    [host] = executors_beside([fast, replace(fast, executor="host", rounds=(3.0, 3.3, 2.7))])
    assert host.ratio.ratio == pytest.approx(3) and (host.slower, host.faster) == ("psr, host-driven", "psr")


def test_a_preset_is_one_wherever_its_scale_comes_from() -> None:
    assert is_preset(row(preset("psr", scale="running"), [1.0]), "psr")
    assert not is_preset(row(preset("psr", lam=0.3), [1.0]), "psr")
    assert not is_preset(row(preset("psr-gated"), [1.0]), "psr")


def test_equal_kl_interpolates_the_best_family_in_every_round() -> None:
    def prior(lam, kl, rounds, **more):
        return row(preset("cache-prior", lam=lam, **more), rounds, kl)

    steered = row(preset("psr-gated"), [3.0, 3.3, 2.7], kl=0.02)
    lru = [prior(0.1, 0.01, [8.0, 8.0, 8.0]), prior(0.3, 0.03, [2.0, 2.0, 2.0])]  # 4 between them, on a log scale
    score = [
        prior(0.1, 0.01, [6.0, 6.6, 5.4], eviction="score"),
        prior(0.3, 0.03, [1.5, 1.65, 1.35], eviction="score"),  # 3, 3.3, 2.7
    ]
    beyond = [prior(0.5, 0.03, [0.1] * 3, top_j=2), prior(0.6, 0.05, [0.1] * 3, top_j=2)]
    [found] = at_equal_kl([steered, *lru, *score, *beyond])
    assert found.family == "cache-prior score J=0"
    assert found.ratio.ratio == pytest.approx(1.0)
    [alone] = at_equal_kl([steered, *lru])
    assert alone.ratio.ratio == pytest.approx(4 / np.exp(np.log([3, 3.3, 2.7]).mean()))
    assert at_equal_kl([replace(steered, kl=0.5), *lru]) == [] and at_equal_kl([replace(steered, kl=None), *lru]) == []


def test_kl_is_read_by_policy_and_slots(tmp_path: Path) -> None:
    policy = preset("psr-gated")

    def written_as(path, kind, config):
        header = Header(kind, ModelId("m", "f", "t"), config, {"text": Task("nll", "q", 2)})
        with ResultWriter(path, header) as writer:
            for at, kl in enumerate((0.01, 0.03)):
                metrics = dict.fromkeys(("nll_exact", "nll", "top1", "replaced", "demand", "prefetch", "unused"), 1.0)
                writer.add(Item("text", str(at), metrics | {"kl": kl}))
            writer.finish()
        return path

    found = read_quality([written_as(tmp_path / "a.json", "divergence", {"policy": asdict(policy), "slots": 32})])
    assert found.kl == {(policy.hash, 32): pytest.approx(0.02)} and found.models == ("m",)
    with pytest.raises(UserError, match="not a result of edgemoe eval divergence"):
        read_quality([written_as(tmp_path / "b.json", "tasks", {"policy": asdict(policy), "slots": 32})])


def test_policies_are_named() -> None:
    found = parse_policies(DEFAULT)
    assert len(found) == 10 and found["cache-prior:score:J1"] == preset("cache-prior", eviction="score", top_j=1)
    assert family_of(asdict(found["cache-prior:score:J1"])) == "cache-prior score J=1"
    several = parse_policies("exact-lru,psr:n2:w4", parse_lambdas("0.1,0.3"))
    assert list(several) == ["exact-lru", "psr:n2:w4 λ0.1", "psr:n2:w4 λ0.3"]
    assert several["psr:n2:w4 λ0.3"] == preset("psr", budget=2, window=4, lam=0.3)
    assert family_of(asdict(several["psr:n2:w4 λ0.3"])) == "psr n=2 w=4"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nonsense", "no policy preset"),
        ("psr:x", "changes nothing"),
        ("psr:J", "changes nothing"),
        ("exact-lru:n1", "no meaning without prefetch"),
    ],
)
def test_what_is_no_policy(text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        parse_policies(text)


@pytest.mark.parametrize("text", ["", "a", "0", "0.1,0.1", "inf", "nan"])
def test_what_is_no_lambda(text: str) -> None:
    with pytest.raises(UserError, match="--lambda"):
        parse_lambdas(text)


def test_splits_hold_no_more_experts_on_the_gpu_than_the_residency() -> None:
    assert splits_of(16, 0.5) == [8, 12, 16] and splits_of(16, 0.25) == [12, 14, 16] and splits_of(16, 1.0)[0] == 0
    for share in (0.1, 0.3, 0.49):
        assert (16 - splits_of(16, share)[0]) / 16 <= share


def test_llamacpp_runs_what_is_written_for_it(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")

    def watch(*_):
        return nullcontext(no_progress)

    shape = replace(TINY, n_vocab=512)
    assert fields_of(shape)["expert_type"] == "BF16"
    with written(shape, tmp_path, watch) as path:
        found = against_llamacpp(path, 3, {"50%": 0.5}, position=4, watch=watch, n_gpu_layers=0, threads=[1])
    assert [(split.share, split.n_cpu_moe) for split in found] == [("100%", 0), ("50%", 2), ("50%", 3)]
    assert all(split.token_s > 0 for split in found) and [split.share for split in found if split.best] == [
        "100%",
        "50%",
    ]
    assert list(tmp_path.iterdir()) == []
