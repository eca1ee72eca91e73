"""The self-check passes what a router may do and fails what only a misread tensor does."""

import numpy as np
import pytest

from edgemoe.tracing.selfcheck import failures

RNG = np.random.default_rng(5)
WINDOWS = np.array([0, 100])


def random_experts(n_tokens: int, k: int, n_experts: int, skew: float = 0.0) -> np.ndarray:
    """Independent choices without replacement, [T, k] int16; `skew` favours low ids."""
    noise = RNG.gumbel(size=(n_tokens, n_experts)) - skew * np.arange(n_experts)
    return np.argsort(-noise, axis=1)[:, :k].astype(np.int16)


def flat_read(n_tokens: int, k: int, n_experts: int) -> np.ndarray:
    """Whole argsort rows read as if they were top-k rows."""
    rows = np.argsort(RNG.random((n_tokens * k // n_experts + 1, n_experts)), axis=1)
    return rows.reshape(-1)[: n_tokens * k].reshape(n_tokens, k).astype(np.int16)


@pytest.mark.parametrize("skew", [0.0, 0.1])
@pytest.mark.parametrize(("n_tokens", "k", "n_experts"), [(32, 8, 64), (200, 2, 8), (1000, 8, 128), (200, 1, 4)])
def test_random_routers_pass(n_tokens: int, k: int, n_experts: int, skew: float) -> None:
    windows = np.array([0, n_tokens // 2])
    for _ in range(50):
        layers = [random_experts(n_tokens, k, n_experts, skew) for _ in range(4)]
        assert failures(layers, n_experts, windows) == []


def test_sticky_routers_pass() -> None:
    layer = np.repeat(random_experts(20, 4, 32), 10, axis=0)
    assert failures([layer], 32, WINDOWS) == []


@pytest.mark.parametrize(("n_tokens", "k", "n_experts"), [(40, 8, 64), (200, 2, 16), (2000, 8, 128)])
def test_a_flat_read_fails_twice(n_tokens: int, k: int, n_experts: int) -> None:
    found = failures([flat_read(n_tokens, k, n_experts) for _ in range(4)], n_experts, np.array([0]))
    assert len(found) == 2
    assert "uniform" in found[0] and "fewer experts than chance" in found[1]


def test_a_flat_read_of_one_layer_fails() -> None:
    assert failures([flat_read(500, 8, 64)], 64, np.array([0]))


def test_impossible_ids_name_the_layer() -> None:
    sound = random_experts(200, 4, 16)
    high, low, twice = sound.copy(), sound.copy(), sound.copy()
    high[7, 2], low[7, 2], twice[7, 2] = 16, -5, twice[7, 1]
    assert "layer 9: expert ids from 0 to 16" in failures([sound, high], 16, WINDOWS, [8, 9])[0]
    assert "layer 1: expert ids from -5" in failures([sound, low], 16, WINDOWS)[0]
    assert "token 7 chooses an expert twice (1 such" in failures([twice], 16, WINDOWS)[0]


def test_padding_is_no_expert() -> None:
    narrow = np.pad(random_experts(200, 2, 16), ((0, 0), (0, 2)), constant_values=-1)
    assert failures([random_experts(200, 4, 16), narrow], 16, WINDOWS) == []
    holed = narrow.copy()
    holed[3, 0] = -1
    assert failures([holed], 16, WINDOWS)


def test_all_experts_every_time_is_no_suspicion() -> None:
    assert failures([np.tile(np.arange(4, dtype=np.int16), (200, 1))], 4, WINDOWS) == []


def test_window_starts_are_not_neighbours() -> None:
    """Alternating halves would be below chance; with a window per token there are no neighbours."""
    layer = np.array([[0, 1], [2, 3]] * 100, np.int16)
    assert failures([layer], 4, np.array([0]))
    assert failures([layer], 4, np.arange(200)) == []


@pytest.mark.parametrize("length", [2, 3, 4, 8])
def test_windows_that_all_start_with_the_same_token_are_no_suspicion(length: int) -> None:
    """BOS chooses what no other token does. It is most of the neighbours and none of the likeness of short windows."""
    layers = []
    for _ in range(4):
        experts = random_experts(1200, 2, 16) % 12
        experts[:, 1] = np.where(experts[:, 0] == experts[:, 1], (experts[:, 0] + 1) % 12, experts[:, 1])
        experts[::length] = [14, 15]
        layers.append(experts)
    assert failures(layers, 16, np.arange(0, 1200, length)) == []


def test_a_flat_read_of_short_windows_still_fails() -> None:
    found = failures([flat_read(2000, 8, 64) for _ in range(4)], 64, np.arange(0, 2000, 10))
    assert len(found) == 2


@pytest.mark.parametrize("period", [2, 9, 40])
def test_a_text_that_repeats_itself_is_no_suspicion(period: int) -> None:
    """A router that only looks at the token: every repetition tells the same again, and no token follows itself."""
    for _ in range(30):
        layers = [np.tile(random_experts(period, 4, 16), (3000 // period, 1)) for _ in range(4)]
        tokens = np.tile(np.arange(period), 3000 // period)
        assert failures(layers, 16, np.array([0]), tokens=tokens) == []


def test_a_flat_read_of_a_text_still_fails() -> None:
    tokens = RNG.integers(0, 300, 2000)
    found = failures([flat_read(2000, 8, 64) for _ in range(4)], 64, np.array([0]), tokens=tokens)
    assert len(found) == 2
