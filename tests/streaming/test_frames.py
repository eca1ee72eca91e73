"""Memory that moves from expert to expert: the bytes are right, the limit holds, and nothing depends on the kernel."""

import mmap

import numpy as np
import pytest
from test_store import bring, memory, on_disk, resident

from edgemoe.errors import UserError
from edgemoe.llamacpp.reserve import Reserve
from edgemoe.model import read_model
from edgemoe.model.synthetic import write_synthetic
from edgemoe.streaming import frames, reads
from edgemoe.streaming.frames import Frames
from edgemoe.streaming.replay_reads import ReadLog, replay
from edgemoe.streaming.store import ExpertStore

# 80 KiB and a bit per tensor: 20 pages or 19, never at a page's start
SHAPE = {"expert_type": "F16", "d_expert": 160, "d_model": 264, "n_layers": 3}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return read_model(write_synthetic(tmp_path_factory.mktemp("frames") / "m.gguf", **SHAPE)[0])


@pytest.mark.parametrize("how", ["moved", "tidied", "no moving", "a limit that is too small"])
def test_experts_are_whole_in_pages_that_others_left(model, how):
    store = ExpertStore(model, readers=3, verify=True)
    try:
        control = store.frames.control
        store.allow(50_000 if how.startswith("a limit") else 6 * 3 * store.bytes_of(0))
        control[frames.TIDY] = how == "tidied"
        control[frames.BROKEN] = how == "no moving"
        rng, held, most = np.random.default_rng(2), [[] for _ in range(3)], 0
        for _ in range(150):
            row = int(rng.integers(3))
            wanted = [int(e) for e in rng.choice(16, 2, replace=False)]
            for expert in [e for e in held[row] if e not in wanted][: max(len({*held[row], *wanted}) - 6, 0)]:
                reads.release(store.ctl, row, expert)
                held[row].remove(expert)
            assert bring(store, row, wanted)
            held[row] = list(dict.fromkeys([*held[row], *wanted]))
            for expert in held[row]:
                assert memory(store, row, expert) == on_disk(store, row, expert)
            most = max(most, resident(store))
        assert most <= 6 * 3 * store.bytes_of(0)
        assert store.frames.held <= most
        assert (store.frames.moves > 150) == (how != "no moving")
        if how == "a limit that is too small":
            in_use = sum(map(len, held)) * 3 * 19 * mmap.PAGESIZE
            assert store.frames.held == in_use
    finally:
        store.close()


def test_a_kernel_that_refuses_to_move_pages_costs_speed_only(model):
    """mremap is asked to move to an address that is no page's, as an old kernel would refuse the flag: EINVAL."""
    store = ExpertStore(model, readers=1, verify=True)
    try:
        where = store.frames._tables[1]
        where += 8
        assert bring(store, 0, [3])
        where -= 8
        assert store.frames.control[frames.BROKEN] == 1 and store.frames.moves == 0
        assert bring(store, 1, [3, 4]) and memory(store, 1, 4) == on_disk(store, 1, 4)
        assert memory(store, 0, 3) == on_disk(store, 0, 3)
        reads.release(store.ctl, 1, 4)
        reads.release(store.ctl, 1, 3)
        reads.release(store.ctl, 0, 3)
        assert resident(store) == 0
    finally:
        store.close()


def test_free_frames_of_one_size_make_room_for_another():
    """Layers of other types have other slices: what a chunk leaves behind in one must not add to the next's."""
    page, n_experts = mmap.PAGESIZE, 8
    lengths = np.array([[20 * page], [30 * page]])
    memory_of = Reserve(n_experts * 50 * page)
    starts = np.array([[memory_of.address], [memory_of.address + n_experts * 20 * page]])
    pool = Frames(starts, lengths, n_experts)
    try:
        pool.allow(8 * 20 * page)
        for slice_ in range(8):
            frames.hold(pool.control, slice_)
        for slice_ in range(8):
            frames.leave(pool.control, slice_)
        assert pool.held == 8 * 20 * page
        for slice_ in range(8, 13):  # five of the larger kind, which are 150 pages of 160
            frames.hold(pool.control, slice_)
        assert pool.held == 150 * page
        for slice_ in range(8):  # these are wanted all the same, whatever the limit
            frames.hold(pool.control, slice_)
        assert pool.held == (150 + 160) * page
        for slice_ in range(13):
            frames.leave(pool.control, slice_)
        assert pool.held <= 8 * 20 * page
    finally:
        pool.close()
        memory_of.close()


def test_tensors_of_one_shape_share_frames_wherever_they_begin():
    """One begins at a page and has a whole page more per slice than the other: they must not take turns clearing."""
    page, n_experts = mmap.PAGESIZE, 8
    lengths = np.array([[20 * page], [20 * page]])
    memory_of = Reserve(n_experts * 41 * page)
    starts = np.array([[memory_of.address], [memory_of.address + n_experts * 20 * page + 32]])
    pool = Frames(starts, lengths, n_experts)
    try:
        pool.allow(8 * 19 * page)
        for row in (0, 1, 0, 1):
            for slice_ in range(8 * row, 8 * row + 8):
                frames.hold(pool.control, slice_)
            assert pool.held == 8 * 19 * page
            for slice_ in range(8 * row, 8 * row + 8):
                frames.leave(pool.control, slice_)
        assert pool.moves == 4 * 8 and pool.control[frames.CURSOR] == 8 * 19 * page
    finally:
        pool.close()
        memory_of.close()


def test_a_recorded_run_can_be_read_again_bare(model, tmp_path):
    store = ExpertStore(model, readers=2)
    try:
        recorder = ReadLog.begin(store)
        for row, experts in ((0, [1, 2]), (1, [5]), (2, [0, 15])):
            assert bring(store, row, experts)
        log = recorder.end()
        assert bring(store, 0, [9])
    finally:
        store.close()
    assert len(log.number) == 15 and log.group.tolist() == [0] * 6 + [1] * 3 + [2] * 6
    assert (log.queued_ns <= log.begun_ns).all() and (log.begun_ns < log.done_ns).all()
    assert (log.offset % mmap.PAGESIZE == 0).all() and log.nbytes >= 5 * model.geometry.expert_bytes[0]
    asked = {(s.offset // mmap.PAGESIZE) for e in (1, 2) for s in model.expert_slices(model.geometry.moe_layers[0], e)}
    assert asked == set((log.offset[:6] // mmap.PAGESIZE).tolist())
    spans = [(log.queued_ns[log.group == g].min(), log.done_ns[log.group == g].max()) for g in range(3)]
    assert log.busy_s == pytest.approx(sum(end - start for start, end in spans) / 1e9)
    assert 0 < log.first(2).busy_s <= log.busy_s and log.first(0).busy_s == 0
    log.save(tmp_path / "log.npz")
    again = ReadLog.load(tmp_path / "log.npz")
    assert again.paths == log.paths and np.array_equal(again.offset, log.offset)
    for options in ({}, {"spread": 1 << 20}, {"grouped": False}):
        assert replay(again, readers=2, **options) > 0
    assert replay(again.first(0), readers=2) == 0
    with pytest.raises(UserError, match="a read failed"):
        empty = tmp_path / "empty"
        empty.touch()
        replay(ReadLog(**{**vars(again), "paths": (empty,)}), readers=1)


def test_more_reads_than_a_log_has_room_for_are_an_error(model):
    store = ExpertStore(model, readers=2)
    try:
        recorder = ReadLog.begin(store, room=3)
        assert bring(store, 0, [1, 2])
        with pytest.raises(UserError, match="give more room"):
            recorder.end()
    finally:
        store.close()
