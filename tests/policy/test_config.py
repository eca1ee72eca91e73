"""A policy is checked once, at the edge, with one line that says what to do."""

import subprocess
import sys

import pytest

from edgemoe.errors import UserError
from edgemoe.policy import PRESETS, LogicalCache, Policy, preset


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"routing": "psr"}, "not one of exact, cache-prior"),
        ({"eviction": "belady"}, "not one of lru"),
        ({"lam": 0.2}, "no meaning for exact routing"),
        ({"routing": "cache-prior", "lam": float("nan")}, "out of range"),
        ({"routing": "cache-prior", "lam": -0.1}, "out of range"),
        ({"scale": "running"}, "without a bonus"),
        ({"top_j": 2}, "belongs to cache-prior"),
        ({"routing": "tau"}, "0 < tau < 1"),
        ({"routing": "tau", "tau": 1.0}, "0 < tau < 1"),
        ({"tau": 0.5}, "others none"),
        ({"elide": 0.5}, "gate threshold"),
        ({"window": 8}, "without prefetch"),
        ({"gate": "predicted"}, "without prefetch"),
        ({"prefetch": "pre-gate"}, "at least 1 candidate"),
        ({"prefetch": "pre-gate", "window": 2, "budget": 3}, "exceeds the window"),
        ({"prefetch": "pre-gate", "window": 2, "budget": -1}, "not a count"),
        ({"prefetch": "token-prior", "window": 2, "gate": "predicted"}, "need the pre-gate"),
        ({"routing": "speculative"}, "needs prefetch pre-gate"),
    ],
)
def test_refuses_what_means_nothing(fields, says):
    with pytest.raises(UserError, match=says) as refusal:
        Policy(**fields)
    assert "\n" not in str(refusal.value)


def test_what_a_calibration_would_give_is_made_up_for_or_refused():
    prior = preset("exact-score", prefetch="token-prior")
    for there in ((False,), (True, False)):
        with pytest.raises(UserError, match="the token prior of a calibration: give --calibration, from edgemoe"):
            prior.completed(*there)
    assert prior.completed(True) == prior == prior.completed(False, True)
    for policy in PRESETS.values():
        assert policy.completed(True) == policy
        assert policy.completed(False).scale == ("running" if policy.uses_bonus else "fixed")


@pytest.mark.parametrize(
    ("name", "geometry", "says"),
    [
        ("exact-lru", (64, 8, 7), "cannot hold the 8 experts"),
        ("psr", (64, 4, 7), "window of 8"),
        ("exact-lru", (64, 8, 65), "64 experts"),
    ],
)
def test_refuses_a_capacity_that_algorithm_1_is_not_defined_for(name, geometry, says):
    with pytest.raises(UserError, match=says):
        preset(name).check(*geometry)


def test_top_j_beyond_k_is_refused():
    with pytest.raises(UserError, match="top-J"):
        preset("cache-prior", top_j=3).check(8, 2, 4)


def test_a_fixed_bonus_needs_its_scale():
    with pytest.raises(UserError, match="Δ̄"):
        LogicalCache(preset("cache-prior"), n_layers=1, n_experts=8, top_k=2, capacity=4)


def test_unbounded_is_the_window_and_stays_unbounded():
    assert preset("psr", budget="unbounded") == preset("psr", budget=8)
    assert preset("speculative", window=4).budget == 4
    assert preset("psr", window=4).budget == 1


def test_an_unknown_preset_names_the_known_ones():
    with pytest.raises(UserError, match="exact-lru"):
        preset("lru")


def test_hash_names_a_configuration_in_every_process():
    assert len({policy.hash for policy in PRESETS.values()}) == len(PRESETS)
    program = "from edgemoe.policy.config import preset; print(preset('psr', lam=0.3).hash)"
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
    assert other == preset("psr", lam=0.3).hash != preset("psr").hash
