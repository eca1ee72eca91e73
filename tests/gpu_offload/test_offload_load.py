"""`edgemoe.generation.load` from Python: what it refuses, alike for experts on disk and in RAM."""

import pytest

torch = pytest.importorskip("torch", reason="the GPU tier needs torch (pip install edgemoe[gpu])")

from edgemoe.demo import demo_model  # noqa: E402
from edgemoe.errors import UserError  # noqa: E402
from edgemoe.generation import load  # noqa: E402
from edgemoe.policy import preset  # noqa: E402

TIERS = [{}, {"device": "cpu"}]


@pytest.mark.parametrize("tier", TIERS, ids=["disk", "device"])
def test_a_token_prior_that_nothing_gives_is_refused(tier):
    policy = preset("exact-score", prefetch="token-prior")
    with pytest.raises(UserError, match="needs the token prior of a calibration") as refusal:
        load(demo_model(), residency="25%", policy=policy, n_threads=1, n_ctx=64, **tier)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("tier", TIERS, ids=["disk", "device"])
@pytest.mark.parametrize("residency", [50, 0.5, b"50%"])
def test_a_residency_that_is_no_text_says_what_is(tier, residency):
    with pytest.raises(UserError, match=r"is no text: write a share \('50%'\), slots per layer \('32'\) or bytes"):
        load(demo_model(), residency=residency, n_threads=1, **tier)
