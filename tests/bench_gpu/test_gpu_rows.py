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
from edgemoe.bench.gpu.frontier import Quality, at_equal_kl, family_of, read_quality
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


def test_ratios_are_of_one_lambda() -> None:
    """Exact routing stands beside every steered row; what has a λ beside those of the same."""
    exact = row(preset("exact-lru"), [4.0, 4.2], name="exact")
    psr = [row(preset("psr", lam=lam), [2.0, 2.1], name=f"psr {lam:g}") for lam in (0.2, 0.3)]
    prior = row(preset("cache-prior", lam=0.3), [3.0, 3.1], name="prior 0.3")
    found = {(one.slower, one.faster): one.paper for one in beside([exact, *psr, prior])}
    assert list(found) == [("exact", "psr 0.2"), ("exact", "psr 0.3"), ("prior 0.3", "psr 0.3")]
    assert all(found.values())


def test_a_preset_is_one_wherever_its_scale_comes_from() -> None:
    assert is_preset(row(preset("psr", scale="running"), [1.0]), "psr")
    assert not is_preset(row(preset("psr", lam=0.3), [1.0]), "psr")
    assert not is_preset(row(preset("psr-gated"), [1.0]), "psr")


def prior(lam, kl, rounds, **more):
    return row(preset("cache-prior", lam=lam, **more), rounds, kl, name=f"prior {lam:g}")


def test_equal_kl_interpolates_the_best_family_in_every_round() -> None:
    steered = row(preset("psr-gated"), [3.0, 3.3, 2.7], kl=0.02)
    # On log scales 0.02 is the middle of 0.01 and 0.04, and 4 that of 8 and 2.
    lru = [prior(0.1, 0.01, [8.0, 8.0, 8.0]), prior(0.3, 0.04, [2.0, 2.0, 2.0])]
    score = [
        prior(0.1, 0.01, [6.0, 6.6, 5.4], eviction="score"),
        prior(0.3, 0.04, [1.5, 1.65, 1.35], eviction="score"),  # 3, 3.3, 2.7
    ]
    beyond = [prior(0.5, 0.03, [0.1] * 3, top_j=2), prior(0.6, 0.05, [0.1] * 3, top_j=2)]
    [found] = at_equal_kl([steered, *lru, *score, *beyond])
    assert found.family == "cache-prior score J=0" and found.between_kl == (0.01, 0.04)
    assert found.ratio.ratio == pytest.approx(1.0) and found.with_kl is None
    assert found.families == pytest.approx({"cache-prior score J=0": 3.0, "cache-prior lru J=0": 4.0})
    [alone] = at_equal_kl([steered, *lru])
    assert alone.ratio.ratio == pytest.approx(4 / np.exp(np.log([3, 3.3, 2.7]).mean()))
    assert at_equal_kl([replace(steered, kl=0.5), *lru]) == [] and at_equal_kl([replace(steered, kl=None), *lru]) == []


def test_equal_kl_takes_the_rows_next_to_it_and_those_at_the_very_ends() -> None:
    three = [prior(0.1, 0.01, [8.0, 8.0]), prior(0.2, 0.02, [4.0, 4.0]), prior(0.3, 0.04, [1.0, 1.0])]
    for kl, ratio, between in ((0.01, 8, ("0.1", "0.2")), (0.02, 4, ("0.1", "0.2")), (0.04, 1, ("0.2", "0.3"))):
        [found] = at_equal_kl([row(preset("psr-gated"), [1.0, 1.0], kl=kl), *three])
        assert found.ratio.ratio == pytest.approx(ratio) and found.between == tuple(f"prior {lam}" for lam in between)
    [inside] = at_equal_kl([row(preset("psr-gated"), [1.0, 1.0], kl=0.03), *three])
    assert inside.ratio.ratio == pytest.approx(4 * 0.25 ** (np.log(1.5) / np.log(2)))


def test_between_two_rows_what_lies_above_everything_resident_is_a_power_of_kl() -> None:
    """Copies of 1 ms each above 1 ms: 8, 4 and 2 of them at a KL of 0.01, 0.02 and 0.04."""
    resident = row(preset("exact-lru"), [1.0, 1.0], slots=64, name="resident")
    two = [prior(0.1, 0.01, [9.0, 9.0]), prior(0.3, 0.04, [3.0, 3.0])]
    steered = row(preset("psr-gated"), [2.5, 2.5], kl=0.02)
    [found] = at_equal_kl([resident, steered, *two])
    assert found.ratio.ratio == pytest.approx(5 / 2.5)
    [elsewhere] = at_equal_kl([replace(resident, executor="host"), steered, *two])
    assert elsewhere.ratio.ratio == pytest.approx(27**0.5 / 2.5)
    slow = replace(resident, rounds=(4.0, 4.0))  # a clock that says so is no floor
    assert at_equal_kl([slow, steered, *two]) == [elsewhere]


def test_the_wider_interval_is_that_of_rounds_and_of_windows_together() -> None:
    """Baselines without a spread of their own: the row's KL moves the ratio by slope times its share."""
    steered = row(preset("psr-gated"), [3.0, 3.3, 2.7], kl=0.02)
    lru = [prior(0.1, 0.01, [8.0, 8.0, 8.0]), prior(0.3, 0.04, [2.0, 2.0, 2.0])]
    spread = {"a": np.array([0.012, 0.028, 0.02]), "b": np.array([0.018, 0.022, 0.02])}
    windows = {(steered.policy_hash, 32): spread}
    windows |= {(one.policy_hash, 32): dict.fromkeys("ab", np.full(3, one.kl)) for one in lru}
    [found] = at_equal_kl([steered, *lru], Quality({}, (), windows))
    ratio, (low, high) = found.ratio, found.with_kl
    clock = np.log([3, 3.3, 2.7]).std(ddof=1) / 3**0.5
    kl = np.hypot(*(values.std(ddof=1) / 3**0.5 / 0.02 for values in spread.values())) / 2  # its slope is −1
    scipy = pytest.importorskip("scipy.stats")
    df = (clock**2 + kl**2) ** 2 / (clock**4 / 2 + (kl**2) ** 2 / welch(spread))
    assert np.log(high / low) / 2 == pytest.approx(scipy.t.ppf(0.975, df) * np.hypot(clock, kl))
    assert np.sqrt(low * high) == pytest.approx(ratio.ratio) and low < ratio.low and ratio.high < high
    shares = dict(zip(windows, (1, 0.5, 2), strict=True))
    alike = {key: dict.fromkeys("ab", spread["a"] * share) for key, share in shares.items()}
    [same] = at_equal_kl([steered, *lru], Quality({}, (), alike))  # windows that move all three alike move nothing
    assert same.with_kl == pytest.approx((ratio.low, ratio.high))
    [unknown] = at_equal_kl([steered, *lru], Quality({}, (), {(steered.policy_hash, 32): spread}))
    assert unknown.with_kl is None


def welch(spread: dict[str, np.ndarray]) -> float:
    """Degrees of freedom of a mean over texts of three windows each."""
    variances = [values.var(ddof=1) for values in spread.values()]
    return sum(variances) ** 2 / sum(one**2 / 2 for one in variances)


def test_kl_is_read_by_policy_and_slots(tmp_path: Path) -> None:
    policy = preset("psr-gated")

    def written_as(path, kind="divergence", questions="q", slots=32):
        tasks = {"text": Task("nll", questions, 2), "own": Task("nll", "s", 2, in_mean=False)}
        header = Header(kind, ModelId("m", "f", "t"), {"policy": asdict(policy), "slots": slots}, tasks)
        with ResultWriter(path, header) as writer:
            for task, kls in (("text", (0.01, 0.03)), ("own", (0.5, 0.6))):
                for at, kl in enumerate(kls):
                    metrics = dict.fromkeys(("nll_exact", "nll", "top1", "replaced", "demand", "prefetch", "unused"), 1)
                    writer.add(Item(task, str(at), {**metrics, "kl": kl}))
            writer.finish()
        return path

    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(UserError, match="no result of edgemoe eval divergence in this folder"):
        read_quality([folder])
    written_as(folder / "a.json"), written_as(folder / "b.json", slots=16)
    found = read_quality([folder])
    assert found.kl == {(policy.hash, slots): pytest.approx(0.02) for slots in (32, 16)} and found.models == ("m",)
    assert {name: list(values) for name, values in found.windows[policy.hash, 16].items()} == {"text": [0.01, 0.03]}
    assert found.kl == read_quality([folder / "a.json", folder / "b.json"]).kl
    with pytest.raises(UserError, match="measured on other windows than"):
        read_quality([folder, written_as(tmp_path / "c.json", questions="others")])
    with pytest.raises(UserError, match="not a result of edgemoe eval divergence"):
        read_quality([written_as(tmp_path / "d.json", "tasks")])


def test_policies_are_named() -> None:
    found = parse_policies(DEFAULT)
    assert len(found) == 10 and found["cache-prior:score:J1"] == preset("cache-prior", eviction="score", top_j=1)
    assert family_of(asdict(found["cache-prior:score:J1"])) == "cache-prior score J=1"
    several = parse_policies("exact-lru,psr:n2:w4", parse_lambdas("0.1,0.3"))
    assert list(several) == ["exact-lru", "psr:n2:w4 λ0.1", "psr:n2:w4 λ0.3"]
    assert several["psr:n2:w4 λ0.3"] == preset("psr", budget=2, window=4, lam=0.3)
    assert family_of(asdict(several["psr:n2:w4 λ0.3"])) == "psr n=2 w=4"
    steered = preset("psr-gated", top_j=2, eviction="lru")
    assert family_of(asdict(steered)) == "psr-gated lru J=2 n=1 w=8"
    own = parse_policies("cache-prior:λ0.15:J2,psr", parse_lambdas("0.1,0.3"))
    assert list(own) == ["cache-prior:J2 λ0.15", "psr λ0.1", "psr λ0.3"]
    assert own["cache-prior:J2 λ0.15"] == preset("cache-prior", lam=0.15, top_j=2)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nonsense", "no policy preset"),
        ("psr:x", "changes nothing"),
        ("psr:J", "changes nothing"),
        ("exact-lru:n1", "no meaning without prefetch"),
        ("exact-lru:λ0.1", "no meaning for exact routing"),
        ("psr:λ", "--policies psr:λ: expected numbers"),
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
        found = against_llamacpp(path, 3, {"50%": 0.5}, position=4, watch=watch, n_gpu_layers=0, threads=[2, 1])
    splits = [(split.share, split.n_cpu_moe, split.threads) for split in found]
    assert splits == [(*one, threads) for one in [("100%", 0), ("50%", 2), ("50%", 3)] for threads in (2, 1)]
    assert all(split.token_s > 0 for split in found)
    assert [split.share for split in found if split.best] == ["100%", "50%"]
    assert list(tmp_path.iterdir()) == []
