"""The draw of a token from seed and position."""

import numpy as np
import pytest

from edgemoe.generation.options import Options
from edgemoe.gpu_offload.choice import next_token, philox, uniform


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_its_authors_vectors(counter, key, expected):
    assert philox(counter, key) == expected


def test_draws_are_even_and_differ_by_seed_and_position():
    drawn = np.array([[uniform(seed, position) for position in range(2000)] for seed in (1, 2, 1 << 40)])
    assert drawn.min() >= 0 and drawn.max() < 1
    assert np.abs(drawn.mean(1) - 0.5).max() < 0.03
    assert len(np.unique(drawn)) > 5900
    assert np.abs(np.corrcoef(drawn)[np.triu_indices(3, 1)]).max() < 0.1


def test_tokens_follow_the_distribution_that_the_filters_leave():
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    options = Options(temperature=1, top_k=0, top_p=1, min_p=0, seed=9)
    drawn = np.bincount([next_token(logits, options, position) for position in range(4000)], minlength=4) / 4000
    assert np.abs(drawn - [0.5, 0.3, 0.15, 0.05]).max() < 0.03
    narrow = {next_token(logits, Options(temperature=1, top_k=2, seed=9), position) for position in range(50)}
    assert narrow == {0, 1}
    assert next_token(logits[::-1], Options(temperature=0), 5) == 3
