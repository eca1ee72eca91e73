"""The reference of the device's sampling against known answers, and against what the host's sampler keeps."""

import numpy as np
import pytest

from edgemoe.errors import UserError
from edgemoe.generation.options import Options
from edgemoe.generation.sampling import candidates
from edgemoe.gpu_offload.kernels import draw


def test_philox_gives_the_published_words():
    """Random123's known answers for philox4x32-10: the first two words, low word first."""
    assert draw.philox(0, 0) == 0xE169C58D6627E8D5
    assert draw.philox(2**64 - 1, 2**64 - 1) != draw.philox(2**64 - 1, 2**64 - 2)


def test_weights_are_the_exponential():
    x = np.linspace(-21.9, 0, 20_001).astype(np.float32)
    exact = np.exp(x.astype(np.float64)) * 2**31
    assert np.all(np.abs(draw.weights(x) - exact) <= 3e-7 * exact + 1)
    assert draw.weights(np.array([0, -22.5, -1000, -np.inf], np.float32)).tolist() == [2**31, 0, 0, 0]


@pytest.mark.parametrize(
    "options",
    [
        Options(),
        Options(top_k=5, top_p=0.6, min_p=0),
        Options(top_k=0, top_p=0.9, min_p=0, temperature=1.5),
        Options(top_k=0, top_p=1, min_p=0.1, temperature=0.5),
    ],
)
def test_tokens_are_drawn_as_often_as_the_host_s_sampler_would(options):
    logits = (np.random.default_rng(3).normal(size=40) * 2).astype(np.float32)
    tokens, probabilities = candidates(logits, options)
    n = 4000
    drawn = np.bincount([draw.choose(logits, options, 11, at) for at in range(n)], minlength=len(logits))
    assert set(np.flatnonzero(drawn)) <= set(tokens.tolist())
    spread = np.sqrt(n * probabilities * (1 - probabilities))
    assert np.all(np.abs(drawn[tokens] - n * probabilities) < 5 * spread + 1)


def test_a_token_depends_on_its_position_and_nothing_before():
    logits = np.random.default_rng(0).normal(size=(50, 30)).astype(np.float32)
    forward = [draw.choose(row, Options(), 7, at) for at, row in enumerate(logits)]
    backward = [draw.choose(logits[at], Options(), 7, at) for at in reversed(range(50))]
    assert forward == backward[::-1]
    assert forward != [draw.choose(row, Options(), 8, at) for at, row in enumerate(logits)]


def test_ties_go_to_the_lower_id_and_broken_logits_are_an_error():
    assert draw.choose(np.array([0, 2, 2, 1], np.float32), Options(temperature=0), 0, 0) == 1
    only = Options(top_k=1)
    assert {draw.choose(np.array([0, 2, 2, 1], np.float32), only, 0, at) for at in range(20)} == {1}
    for wrong in (np.nan, np.inf):
        with pytest.raises(UserError, match="not finite"):
            draw.choose(np.array([0, wrong], np.float32), Options(), 0, 0)
