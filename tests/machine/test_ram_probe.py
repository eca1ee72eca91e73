"""RAM: the arrays are too large for the caches, and the figures are those of a memory."""

import numpy as np
import pytest

from edgemoe.errors import UserError
from edgemoe.machine import ram_probe
from edgemoe.machine.memory import Ram
from edgemoe.machine.ram_probe import n_rounds, probe_ram, quick_thread_counts, thread_counts
from edgemoe.machine.rounds import Effort


def test_loads_and_copies_by_number_of_threads() -> None:
    told: list[int] = []
    effort = Effort(1, 2, 0)
    found = probe_ram(effort, advance=told.append)
    assert (
        tuple(point.threads for point in found.load) == tuple(point.threads for point in found.copy) == thread_counts()
    )
    assert found.array_bytes >= 4 * found.cache_bytes > 0
    assert all(1e8 < float(point.bytes_per_s) < 1e13 for point in (*found.load, *found.copy))
    assert sum(told) == n_rounds(effort) and found.best_load.median == max(float(p.bytes_per_s) for p in found.load)


def test_the_load_kernel_reads_every_word_every_time() -> None:
    array = np.arange(1 << 16, dtype=np.uint64)
    assert int(ram_probe.load_sum(array, 3)) == 3 * int(array.sum())
    array[-1] += np.uint64(1)
    assert int(ram_probe.load_sum(array, 1)) == int(array.sum())


def test_too_little_ram_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ram_probe, "ram", lambda: Ram(10**9, 10**8, True))
    with pytest.raises(UserError, match="100 MB are free: close other programs"):
        probe_ram(Effort(1, 1, 0))


@pytest.mark.parametrize(("cores", "counts"), [(1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8))])
def test_threads_double_up_to_all_cores(monkeypatch: pytest.MonkeyPatch, cores: int, counts: tuple[int, ...]) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    assert thread_counts() == counts
    assert quick_thread_counts() == tuple(sorted({1, cores}))
