"""The store alone: slices arrive whole in their natural place, neighbours keep theirs, pages go and come."""

import ctypes
import mmap
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgemoe.errors import UserError
from edgemoe.machine.disk import disk_of
from edgemoe.machine.identity import gpu_uuids, this_host
from edgemoe.machine.profile import Profile, RamRates, Rate, Ssd, SsdPoint, ThreadsRate, save_profile
from edgemoe.model import read_model
from edgemoe.model.synthetic import write_synthetic
from edgemoe.streaming import reads
from edgemoe.streaming.engine import StreamingEngine
from edgemoe.streaming.store import ExpertStore, readers_for


def bring(store, row, experts, kind=reads.DEMAND):
    """Queue and await experts of a layer; whether all came."""
    needed = np.zeros(store.model.geometry.n_experts, np.uint8)
    needed[experts] = 1
    absent = [expert for expert in experts if store.states()[row, expert] == reads.ABSENT]
    queue(store, row, absent, kind)
    return reads.wait_for(store.ctl, row, needed, reads.WHOLE)


def queue(store, row, experts, kind=reads.DEMAND):
    reads.lock(store.ctl)
    assert reads.put(store.ctl, kind, row, np.array(experts, np.int64)) == len(experts)
    reads.unlock(store.ctl)
    reads.wake(store.ctl)


def memory(store, row, expert):
    """The bytes of an expert where llama.cpp would look for them."""
    n = store.model.geometry.n_experts
    out = []
    for tensor in store.tensors[row]:
        length = tensor.nbytes // n
        out.append(ctypes.string_at(store.addresses[tensor.name] + expert * length, length))
    return out


def on_disk(store, row, expert):
    parts = {s.tensor: s for s in store.model.expert_slices(store.layers[row], expert)}
    out = []
    for tensor in store.tensors[row]:
        s = parts[tensor.name]
        with store.model.files[s.file].open("rb") as file:
            file.seek(s.offset)
            out.append(file.read(s.length))
    return out


SHAPES = {
    "many per page": {"expert_type": "Q4_0"},
    "pages and a bit": {"expert_type": "F16", "d_expert": 96, "d_model": 96},
    "merged": {"arch": "deepseek2", "merged_gate_up": True, "expert_type": "Q8_0"},
    "split": {"shards": 3, "expert_type": "Q8_0", "d_expert": 160},
    "longer than a piece": {"expert_type": "F32", "d_expert": 608, "d_model": 512, "n_layers": 2, "n_experts": 4},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_slices_come_whole_and_neighbours_stay(tmp_path, shape):
    model = read_model(write_synthetic(tmp_path / "m.gguf", **SHAPES[shape])[0])
    store = ExpertStore(model, readers=3, verify=True)
    try:
        rng = np.random.default_rng(1)
        n_layers, n_experts = len(store.layers), model.geometry.n_experts
        held = [set() for _ in range(n_layers)]
        for _ in range(60):
            row = int(rng.integers(n_layers))
            wanted = [int(e) for e in rng.choice(n_experts, 2, replace=False)]
            for expert in [e for e in held[row] if e not in wanted and rng.random() < 0.5]:
                reads.release(store.ctl, row, expert)
                held[row].remove(expert)
            assert bring(store, row, wanted)
            held[row].update(wanted)
            for expert in held[row]:
                assert memory(store, row, expert) == on_disk(store, row, expert)
        assert store.direct or not hasattr(os, "O_DIRECT")
        present = store.states() == reads.PRESENT
        assert present.sum() == sum(len(h) for h in held) > 0
    finally:
        store.close()


def test_released_pages_are_given_back(tmp_path):
    model = read_model(write_synthetic(tmp_path / "m.gguf", d_model=256, d_expert=256, n_layers=2)[0])
    store = ExpertStore(model, readers=2)
    try:
        assert bring(store, 0, list(range(16)))
        assert resident(store) > 0.99 * 16 * model.geometry.expert_bytes[0]
        for expert in range(0, 16, 2):
            reads.release(store.ctl, 0, expert)
        assert resident(store) <= 8 * store.bytes_of(0)
        for expert in range(1, 16, 2):
            assert memory(store, 0, expert) == on_disk(store, 0, expert)
            reads.release(store.ctl, 0, expert)
        assert resident(store) == 0
    finally:
        store.close()


@pytest.mark.parametrize("shape", ["many per page", "pages and a bit"])
def test_a_read_writes_no_byte_of_a_neighbour(tmp_path, shape):
    """Not even the same: a disk that decrypts in place would show other bytes there for a moment."""
    store = ExpertStore(read_model(write_synthetic(tmp_path / "m.gguf", **SHAPES[shape])[0]), readers=2)
    try:
        assert bring(store, 0, [4])
        for tensor in store.tensors[0]:
            length = tensor.nbytes // 16
            ctypes.memset(store.addresses[tensor.name] + 4 * length, 0xA5, length)
        assert bring(store, 0, [3, 5])
        assert all(set(part) == {0xA5} for part in memory(store, 0, 4))
        for expert in (3, 5):
            assert memory(store, 0, expert) == on_disk(store, 0, expert)
    finally:
        store.close()


def resident(store):
    pages = np.zeros(store._reserve.size // mmap.PAGESIZE, np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    address, size = ctypes.c_void_p(store._reserve.address), ctypes.c_size_t(store._reserve.size)
    assert libc.mincore(address, size, ctypes.c_void_p(pages.ctypes.data)) == 0
    return int((pages & 1).sum()) * mmap.PAGESIZE


def test_a_truncated_file_is_an_error_and_the_rest_still_reads(tmp_path):
    model = read_model(write_synthetic(tmp_path / "m.gguf", expert_type="F16", d_expert=128, d_model=128)[0])
    store = ExpertStore(model, readers=2)
    try:
        assert bring(store, 0, [0, 1])
        os.truncate(model.path, model.expert_slices(3, 5)[0].offset + 100)
        with pytest.raises(UserError, match="changed while it was in use"):
            store.check_files()
        assert not bring(store, 3, [5])
        error = store.settle()
        assert error is not None and "expert 5 of layer 3 cannot be read (the file ends there)" in str(error)
        assert (store.states()[3] == reads.ABSENT).all()
        assert bring(store, 0, [1, 2]) and memory(store, 0, 2) == on_disk(store, 0, 2)
    finally:
        store.close()


def test_a_disk_error_is_an_error(tmp_path):
    """Reads of a directory's descriptor fail with EISDIR: the kernel's own error, at the very call."""
    model = read_model(write_synthetic(tmp_path / "m.gguf")[0])
    store = ExpertStore(model, readers=2)
    try:
        directory = os.open(tmp_path, os.O_RDONLY)
        os.dup2(directory, store._files[0][0])
        os.close(directory)
        assert not bring(store, 1, [3])
        assert "expert 3 of layer 1 cannot be read (the disk reports an error)" in str(store.settle())
    finally:
        store.close()


def test_bytes_that_differ_the_second_time_are_an_error(tmp_path):
    [path] = write_synthetic(tmp_path / "m.gguf")
    [other] = write_synthetic(tmp_path / "other.gguf", seed=1)
    store = ExpertStore(read_model(path), readers=1, verify=True)
    try:
        fd = os.open(other, os.O_RDONLY)
        os.dup2(fd, store._files[0][0])
        os.close(fd)
        assert not bring(store, 0, [3])
        assert "reads differently the second time" in str(store.settle())
    finally:
        store.close()


def test_a_replaced_file_is_still_the_one_that_was_opened(tmp_path):
    [path] = write_synthetic(tmp_path / "m.gguf")
    [other] = write_synthetic(tmp_path / "other.gguf", seed=1)
    store = ExpertStore(read_model(path), readers=1)
    try:
        before = on_disk(store, 0, 3)
        shutil.move(other, path)
        assert bring(store, 0, [3]) and memory(store, 0, 3) == before != on_disk(store, 0, 3)
        store.check_files()
    finally:
        store.close()


def test_demand_overtakes_prefetch_and_withdrawn_reads_are_not_done(tmp_path):
    model = read_model(write_synthetic(tmp_path / "m.gguf")[0])
    store = ExpertStore(model, readers=1)
    try:
        log = store.log(64)
        reads.lock(store.ctl)
        reads.put(store.ctl, reads.PREFETCH, 1, np.arange(4))
        reads.put(store.ctl, reads.DEMAND, 1, np.array([9]))
        reads.withdraw(store.ctl, 1, 2)
        reads.unlock(store.ctl)
        reads.wake(store.ctl)
        needed = np.zeros(16, np.uint8)
        needed[9] = 1
        assert reads.wait_for(store.ctl, 1, needed, reads.WHOLE)
        assert log[0, reads.LOG_READ] // 65536 == 1 * 16 + 9, "the one that is waited for is read first"
        deadline = time.monotonic() + 300
        while (store.states()[1] == reads.PRESENT).sum() < 4 and time.monotonic() < deadline:
            time.sleep(0.005)
        assert np.flatnonzero(store.states()[1] == reads.PRESENT).tolist() == [0, 1, 3, 9]
    finally:
        store.close()


def test_readers_out_of_range_are_refused(tmp_path):
    model = read_model(write_synthetic(tmp_path / "m.gguf")[0])
    for readers in (0, 129):
        with pytest.raises(UserError, match="expected 1 to 128"):
            ExpertStore(model, readers=readers)
    assert Path(model.path).exists()


def test_the_number_of_readers_is_what_the_probed_disk_wants(tmp_path, monkeypatch):
    model = read_model(write_synthetic(tmp_path / "m.gguf")[0])
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert readers_for(model) == 8, "a disk that nobody probed"

    def rate(gigabytes):
        return Rate(gigabytes * 1e9, 0.01, 5, True)

    points = [SsdPoint("random", 1 << 16, depth, rate(at)) for depth, at in ((1, 0.5), (4, 1.99), (16, 2), (32, 1.5))]
    points.append(SsdPoint("sequential", 1 << 20, 32, rate(3)))
    device = disk_of(tmp_path).device
    ssd = Ssd(str(tmp_path), device, "ext4", "SSD", "O_DIRECT", "file", 1 << 30, 512, tuple(points), False, "a disk")
    ram = RamRates(1 << 27, 1 << 25, (ThreadsRate(1, rate(9)),), (ThreadsRate(1, rate(9)),))
    profile = Profile(this_host(), "2025-01-01T00:00:00+00:00", ram, ssd)
    save_profile(replace(profile, present_gpus=gpu_uuids()))
    assert readers_for(model) == 4
    with StreamingEngine(model.path, n_ctx=64, n_threads=1) as engine:
        assert len(engine._store._threads) == 4
