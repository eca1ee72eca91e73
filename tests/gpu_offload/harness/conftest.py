"""Torch on one thread, and transformers without its advice."""

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch", reason="the quality harness needs torch (pip install edgemoe[eval])")
transformers = pytest.importorskip("transformers", reason="needs transformers (pip install edgemoe[eval])")


@pytest.fixture(scope="session", autouse=True)
def quiet_transformers() -> None:
    transformers.utils.logging.set_verbosity_error()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Small products gain nothing from a second thread, and lose much where it has to share its core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
