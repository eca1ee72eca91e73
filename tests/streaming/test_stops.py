"""A layer's last product is waited for by itself: nothing is computed with slices that have not come."""

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from test_exact import ARCHITECTURES
from test_store import memory, on_disk, queue

from edgemoe.errors import UserError
from edgemoe.llamacpp import native
from edgemoe.llamacpp.resident import ResidentEngine
from edgemoe.model import read_model
from edgemoe.model.synthetic import write_synthetic
from edgemoe.streaming import reads
from edgemoe.streaming import words as w
from edgemoe.streaming.engine import StreamingEngine
from edgemoe.streaming.store import ExpertStore
from edgemoe.units import Residency

TEXT = Path(__file__).read_bytes()[:800]
SMALL = {"residency": Residency.parse("5"), "n_ctx": 128, "n_threads": 1, "chunk": 16}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_synthetic(tmp_path_factory.mktemp("stops") / "m.gguf", d_expert=128)[0]


@pytest.fixture
def engine(path):
    with StreamingEngine(path, readers=2, **SMALL) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(path):
    """Logits after 20 tokens and after 40, from the model in RAM."""
    with ResidentEngine(path, n_ctx=128, n_threads=1, n_ubatch=16, all_rows=True, repack=False) as engine:
        tokens = engine.tokenize(TEXT)[:40]
        return engine.prefill(tokens[:20]), engine.prefill(tokens[20:])


def last_tensors(store):
    """[L, J]: which of a layer's tensors is multiplied by last."""
    return store._places[:, :, reads.LAST] == 1


@pytest.mark.parametrize("case", ARCHITECTURES)
def test_every_architecture_has_such_a_place(tmp_path, case):
    path = write_synthetic(tmp_path / "m.gguf", **ARCHITECTURES[case])[0]
    with StreamingEngine(path, **SMALL) as engine:
        store = engine._store
        assert (engine._decider._rows[:, w.STOPS] - 1).tolist() == list(store.layers)
        for row, last in enumerate(last_tensors(store)):
            names = [tensor.name for tensor, is_last in zip(store.tensors[row], last, strict=False) if is_last]
            assert names == [f"blk.{store.layers[row]}.ffn_down_exps.weight"]


def test_the_last_slices_are_read_last_and_not_waited_for_at_first(path):
    store = ExpertStore(read_model(path), readers=1)
    try:
        names = [tensor.name for tensor in store.tensors[1]]
        last = next(i for i, name in enumerate(names) if "down" in name)
        store.read_last(1, names[last])
        log = store.log(64)
        needed = np.zeros(16, np.uint8)
        needed[[2, 5, 11]] = 1
        queue(store, 1, [2, 5, 11])
        assert reads.wait_for(store.ctl, 1, needed, reads.FIRST)
        assert store.ctl[reads.GROUP] == 0, "a part of a layer's reads is no group of its own"
        for expert in (2, 5, 11):
            both = zip(memory(store, 1, expert), on_disk(store, 1, expert), strict=True)
            assert all(here == there for i, (here, there) in enumerate(both) if i != last)
        assert reads.wait_for(store.ctl, 1, needed, reads.WHOLE) and store.ctl[reads.GROUP] == 1
        assert all(memory(store, 1, expert) == on_disk(store, 1, expert) for expert in (2, 5, 11))
        of = [reads.part(store.ctl, int(read))[1] for read in log[:9, reads.LOG_READ]]
        assert of[6:] == [last] * 3 and last not in of[:6]
    finally:
        store.close()


def test_slices_that_come_late_change_nothing(engine, expected):
    tokens = engine.tokenize(TEXT)[:40]
    engine._store.ctl[reads.DELAY] = 1_000_000
    before = int(engine._store.ctl[reads.GROUP])
    assert np.array_equal(engine.prefill(tokens[:20]), expected[0])
    assert np.array_equal(engine.prefill(tokens[20:]), expected[1])
    waits = int(engine._store.ctl[reads.GROUP]) - before
    assert waits == 4 * len(engine._store.layers), "one per layer and chunk"


def test_a_last_slice_that_cannot_be_read_is_undone(engine, expected):
    tokens = engine.tokenize(TEXT)[:40]
    assert np.array_equal(engine.prefill(tokens[:20]), expected[0])
    places, last = engine._store._places, last_tensors(engine._store)
    kept, empty = places[last, reads.FD].copy(), os.open(os.devnull, os.O_RDONLY)
    places[last, reads.FD] = empty
    with pytest.raises(UserError, match=r"expert \d+ of layer \d cannot be read \(the file ends there\)"):
        engine.prefill(tokens[20:])
    assert engine.position == 20
    places[last, reads.FD] = kept
    os.close(empty)
    assert np.array_equal(engine.prefill(tokens[20:]), expected[1])


def test_an_interrupt_while_last_slices_are_waited_for_is_undone(engine, expected):
    tokens = engine.tokenize(TEXT)[:40]
    engine.prefill(tokens[:20])
    store, before = engine._store, engine.stats()
    ended, pressed = threading.Event(), threading.Event()

    def press():
        while not ended.is_set():
            awaited = int(store.ctl[reads.WAITING]) - 1
            if awaited >= 0 and reads.is_there(store.ctl, awaited, reads.FIRST):
                pressed.set()
                os.kill(os.getpid(), signal.SIGINT)
                return
            time.sleep(0.001)

    person = threading.Thread(target=press, daemon=True)
    store.ctl[reads.DELAY] = 100_000_000
    person.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            engine.prefill(tokens[20:])
    finally:
        ended.set()
        person.join()
        store.ctl[reads.DELAY] = 0
    assert pressed.is_set() and engine.position == 20
    after = engine.stats()
    assert (after.tokens, after.seconds, after.demand_wait_s) == (before.tokens, before.seconds, before.demand_wait_s)
    assert np.array_equal(engine.prefill(tokens[20:]), expected[1])


def test_a_graph_that_does_not_stop_there_is_an_error_and_no_token(engine, expected):
    """As if llama.cpp named its nodes differently for some batches: the decode fails, whatever it computed."""
    tokens = engine.tokenize(TEXT)[:40]
    engine.prefill(tokens[:20])
    table = engine._decider._table
    stops = (table[:, :, native.OWN_TAP] < 0) & (table[:, :, native.INPUT_TAP] < 0) & (table[:, :, native.PERIOD] > 0)
    layers = engine._store.layers
    assert stops.sum() == len(layers)
    for missing in (layers, layers[-1:]):  # noticed by the next layer, or after the last one
        where = stops & np.isin(np.arange(table.shape[1]), missing)
        kept = table[where, native.PERIOD]
        table[where, native.PERIOD] = 0
        with pytest.raises(UserError, match=rf"layer {missing[0]} computed its last product before its experts"):
            engine.prefill(tokens[20:])
        assert engine.position == 20
        table[where, native.PERIOD] = kept
    assert np.array_equal(engine.prefill(tokens[20:]), expected[1])
