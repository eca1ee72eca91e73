"""Torch on one thread for the tests here."""

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Small products gain nothing from a second thread, and lose much where it has to share its core."""
    torch = sys.modules.get("torch")  # imported by the test modules that need it
    if torch is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
