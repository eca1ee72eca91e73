"""Attention of one token: every number of splits that have a block, one block and more of each, against torch."""

import json

import pytest
from programs import run

torch = pytest.importorskip("torch")
pytest.importorskip("triton")


def test_a_token_attends_to_what_there_is() -> None:
    found = json.loads(run("attending.py"))
    assert len(found) == 11 and max(found.values()) < 1e-6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device that torch can use")
@pytest.mark.parametrize(("splits", "block"), [(15, 64), (16, 64), (31, 32)])
def test_a_token_attends_to_what_there_is_on_a_gpu(splits: int, block: int) -> None:
    from attending import errors, far

    assert max(errors(far(splits, block), "cuda").values()) < 5e-6
