"""What is run: the shape of a size, a file that is really there, recorded routing in the order of steps."""

from pathlib import Path

import numpy as np
import pytest

from edgemoe.bench.loads import LEAST_BYTES, LEAST_FILE, checked, fit_trace, forced_ids, shape_of, written
from edgemoe.errors import UserError
from edgemoe.model.synthetic import QWEN3_30B_A3B
from edgemoe.tracing import Trace
from edgemoe.wall.batch import interleave


def trace_of(layers=3, tokens=40, k=2, experts=6):
    rng = np.random.default_rng(5)
    chosen = np.stack([[rng.permutation(experts)[:k] for _ in range(tokens)] for _ in range(layers)])
    return Trace(
        experts=chosen.astype(np.int16),
        n_experts=experts,
        layers=np.arange(layers, dtype=np.int32),
        windows=np.zeros(1, np.int64),
        domains=("x",),
        name="x",
    )


@pytest.fixture
def small(monkeypatch):
    """A shape of 2 MB: quantising what people may ask for takes seconds."""
    monkeypatch.setattr("edgemoe.bench.loads.LEAST_BYTES", 0)
    monkeypatch.setattr("edgemoe.bench.loads.LEAST_FILE", 0)
    return shape_of(2_000_000, n_experts=4, top_k=2)


@pytest.mark.parametrize("size", [4_000_000_000, 8_000_000_000])
def test_a_model_of_gigabytes_has_the_real_widths(size):
    shape = shape_of(size)
    assert shape.real_widths and abs(shape.nbytes / size - 1) < 0.06
    for name in ("n_experts", "top_k", "d_model", "d_expert", "n_heads", "n_kv_heads", "expert_type"):
        assert shape.fields[name] == QWEN3_30B_A3B[name]


@pytest.mark.parametrize("n_experts", [8, 64, 128])
def test_the_smallest_is_large_enough_to_probe_the_disk_by(n_experts):
    assert shape_of(LEAST_BYTES, n_experts).nbytes >= LEAST_FILE


def test_a_small_one_has_narrower_experts_and_enough_layers():
    shape = shape_of(300_000_000)
    assert not shape.real_widths and shape.fields["n_layers"] >= 4 and abs(shape.nbytes / 3e8 - 1) < 0.15


@pytest.mark.parametrize("size", [0, 15_999_999, 100_000_000_001])
def test_sizes_that_make_no_sense_are_refused(size):
    with pytest.raises(UserError, match=r"expected 16\.0 MB to 100 GB"):
        shape_of(size)


def test_the_file_is_whole_and_goes_or_stays_as_asked(tmp_path, small):
    shape, told = small, []
    with written(shape, tmp_path, keep=False, advance=told.append) as model:
        status = model.files[0].stat()
        assert 512 * status.st_blocks >= 0.98 * status.st_size >= 0.98 * shape.nbytes
        assert sum(told) == shape.nbytes
        assert [path.name for path in tmp_path.iterdir()] == [shape.name]
    assert not any(tmp_path.iterdir())
    with written(shape, tmp_path, keep=True):
        pass
    before = (tmp_path / shape.name).stat().st_mtime_ns
    with written(shape, tmp_path, keep=False) as model:  # kept by an earlier run: used again, and not ours to remove
        assert model.files[0].stat().st_mtime_ns == before
    assert (tmp_path / shape.name).exists()


def test_an_interrupt_while_writing_leaves_nothing(tmp_path):
    def interrupt(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), written(shape_of(16_000_000), tmp_path, keep=True, advance=interrupt):
        raise AssertionError("it was written")
    assert not any(tmp_path.iterdir())


def test_no_room_is_said_before_writing(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    with (
        pytest.raises(UserError, match=r"1\.00 kB are free.*lower --size"),
        written(shape_of(16_000_000), tmp_path, False),
    ):
        raise AssertionError("it was written")


def test_a_folder_that_cannot_be_written(tmp_path):
    with pytest.raises(UserError, match="--dir"), written(shape_of(16_000_000), tmp_path / "file" / "x", False):
        raise AssertionError("it was written")


def test_a_file_with_holes_is_refused(tmp_path):
    from edgemoe.model.synthetic import write_synthetic

    [path] = write_synthetic(Path(tmp_path) / "holes.gguf", hole=True, n_experts=64, d_expert=512)
    with pytest.raises(UserError, match="sparse"):
        checked(path)


def test_layers_are_mapped_by_index_and_again_from_the_start():
    trace = trace_of()
    fewer, more = fit_trace(trace, 2), fit_trace(trace, 7)
    assert np.array_equal(fewer.experts, trace.experts[:2])
    assert np.array_equal(more.experts, trace.experts[[0, 1, 2, 0, 1, 2, 0]])


def test_streams_take_the_windows_whose_union_the_wall_counts():
    trace = trace_of(tokens=80)
    ids, union = forced_ids(trace, 4), interleave(trace, 4).experts
    assert ids.shape == (20, 3, 4, 2) and ids.dtype == np.int32 and ids.flags.c_contiguous
    for step in range(20):
        for layer in range(3):
            assert set(ids[step, layer].ravel().tolist()) == set(union[layer, step].tolist()) - {-1}


def test_layers_of_several_k_cannot_be_replayed():
    trace = trace_of()
    trace.experts[1, :, 1] = -1
    with pytest.raises(UserError, match="cannot be replayed"):
        forced_ids(trace, 1)
