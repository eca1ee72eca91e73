"""What several tests of commands need."""

import pytest


@pytest.fixture
def nothing_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is loaded all the same fails the test."""

    def loading(*_: object, **__: object) -> None:
        raise AssertionError("loaded for nothing")

    monkeypatch.setattr("edgemoe.generation.load", loading)
