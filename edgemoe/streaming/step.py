"""One layer's turn inside llama.cpp's eval callback: decide, queue reads, look one layer ahead, wait for the bytes.

`on_node` is the base callback of `edgemoe.llamacpp.native` (it copies the rows of wanted nodes) with `turn` after it,
at the node that holds a layer's choice. llama.cpp executes that layer's experts when it returns. Exact routing never
writes into the graph; the others overwrite the chosen ids, and the mixing weights are gathered from the router's own
probabilities all the same.

A turn waits for all slices but those of the layer's last product, which are read while llama.cpp computes the others.
The node that the last product multiplies is where those are waited for. Each stop has llama.cpp start its threads anew,
so it is asked for only if something is missing when ggml asks for it, which is right after the turn.

A decode has rows of one or several streams; each row is decided by its stream's logical cache, in order, and each
expert that any row executes is read once. Where every stream has one row, the next layer's step (priorities, part 1 of
Algorithm 1, prefetch reads) is prepared as soon as its pre-gate can be formed. Where a stream has several, a chunk of a
prompt, they go through both parts in turn, layer by layer.
"""

import functools
from typing import Any

import numpy as np
from numba import carray, types

from edgemoe.llamacpp import native
from edgemoe.llamacpp.layout import Tensor
from edgemoe.llamacpp.native import _SRC, _TENSOR_WORDS, _ask, _copy, _find, _pointer, _set, _words
from edgemoe.policy import algorithm1
from edgemoe.policy._jit import c_callback
from edgemoe.policy.state import EXACT, NO_PREFETCH, PRE_GATE
from edgemoe.streaming import keeping, reads
from edgemoe.streaming import words as w
from edgemoe.streaming.jit import SOURCES, kernel
from edgemoe.streaming.pregate import pregate

STREAM = native.STATE_WORDS  # the word of the hub's state that holds the address of `ctl`
STATE_WORDS = native.STATE_WORDS + 1

_NB = Tensor.nb.offset // 8
_OFF, _TAPS, _STOP, _MODE, _TABLE, _ERROR = (
    native.OFF,
    native.TAPS,
    native.STOP,
    native.MODE,
    native.TABLE,
    native.ERROR,
)


@kernel
def _row(ctl, layer):  # type: ignore[no-untyped-def]
    return _words(ctl[w.ROWS] + 8 * w.ROW_WORDS * layer, w.ROW_WORDS)


@kernel
def _tap(state, index):  # type: ignore[no-untyped-def]
    return _words(state[_TAPS] + index * native.TAP_WORDS * 8, native.TAP_WORDS)


@kernel
def _tap_row(state, index, t):  # type: ignore[no-untyped-def]
    """The values of tap `index` for token t, float32."""
    tap = _tap(state, index)
    width = tap[native.WIDTH]
    return carray(_pointer(tap[native.DESTINATION] + 4 * width * t), (width,), np.float32)


@kernel
def _grid_row(address, ctl, layer, t, width):  # type: ignore[no-untyped-def]
    """Row (layer, t) of a float32 or int32 grid [L, CAPACITY, width]: its address."""
    return address + 4 * width * (layer * ctl[w.CAPACITY] + t)


@kernel
def _scores(state, row, t):  # type: ignore[no-untyped-def]
    """What selection ranks for token t, group mask included."""
    z = _tap_row(state, row[w.SCORES_TAP], t)
    if row[w.MASK_TAP] >= 0:
        masked = _tap_row(state, row[w.MASK_TAP], t)
        for e in range(len(z)):
            if masked[e] == -np.inf:
                z[e] = -np.inf
    return z


@kernel
def _begin(ctl, state, c, layer, t):  # type: ignore[no-untyped-def]
    """Freeze the priorities of a layer for token t, and part 1. Returns how many experts it inserted."""
    experts = ctl[w.EXPERTS]
    if ctl[w.PRIOR] != 0:
        prior = carray(_pointer(ctl[w.PRIOR]), (ctl[w.CAPACITY], ctl[w.LAYERS], experts), np.float32)
        for e in range(experts):
            c.prior[layer, e] = prior[t, layer, e]
    algorithm1.freeze(c, layer)
    if c.prefetch == NO_PREFETCH:
        return 0
    if c.prefetch == PRE_GATE:
        row = _row(ctl, layer)
        if row[w.WEIGHT] == 0:
            return 0
        place = _grid_row(ctl[w.PREGATE_OUT], ctl, layer, t, experts)
        g = carray(_pointer(place), (experts,), np.float32)
        pregate(row, _tap_row(state, _row(ctl, layer - 1)[w.INPUT_TAP], t), g)
        algorithm1.prefetch(c, layer, g)
    else:
        algorithm1.prefetch(c, layer, c.biased)
    _note_copies(ctl, c, layer, t, 0)
    return c.n_copies[0]


@kernel
def _note_copies(ctl, c, layer, t, part):  # type: ignore[no-untyped-def]
    """For the record: how many copies part 1 (0) or part 2 (1) made, and of which experts."""
    if ctl[w.COPIES_OUT] == 0:
        return
    counts = carray(_pointer(_grid_row(ctl[w.COUNTS_OUT], ctl, layer, t, 2)), (2,), np.int32)
    counts[part] = c.n_copies[0]
    experts = ctl[w.EXPERTS]
    copies = carray(_pointer(_grid_row(ctl[w.COPIES_OUT], ctl, layer, t, 2 * experts)), (2 * experts,), np.int32)
    for i in range(c.n_copies[0]):
        copies[part * experts + i] = c.copy_expert[i]


@kernel
def _decide(ctl, state, c, layer, t, ids):  # type: ignore[no-untyped-def]
    """Part 2 for token t, whose chosen ids are `ids` [k] int32; changes them where the policy steers."""
    row = _row(ctl, layer)
    k = row[w.TOP_K]
    if ctl[w.MODE] == w.SELECT:
        m = algorithm1.select(c, layer, _scores(state, row, t))
        if c.routing == EXACT:
            m = k
    else:
        algorithm1.observe(c, layer, ids)
        m = k
    _note_copies(ctl, c, layer, t, 1)
    ctl[w.LOADS] += m
    ctl[w.MISSES] += c.n_copies[0]
    if c.routing != EXACT:
        for i in range(m):
            ids[i] = c.executed[i]
    if ctl[w.ROUTING_OUT] != 0:
        out = carray(_pointer(_grid_row(ctl[w.ROUTING_OUT], ctl, layer, t, ctl[w.MOST])), (k,), np.int32)
        for i in range(k):
            out[i] = ids[i]


@kernel
def _mirror(ctl, layer, needed, asked):  # type: ignore[no-untyped-def]
    """Let the store follow: queue what is needed and not there, drop what is queued for nobody."""
    store, experts = _words(ctl[w.STORE], reads.CTL_WORDS), ctl[w.EXPERTS]
    at = reads.table(store, reads.STATE)[layer * experts : (layer + 1) * experts]
    size = _row(ctl, layer)[w.EXPERT_BYTES]
    held = keeping.holders(ctl, layer)
    chosen, count = _words(ctl[w.CHOSEN], experts), 0
    reads.lock(store)
    for e in range(experts):
        if asked[e]:  # prefetched for this step
            if needed[e] == 0:
                ctl[w.UNUSED] += 1
            elif at[e] == reads.PRESENT:
                ctl[w.IN_TIME] += 1
            elif at[e] == reads.READING:
                ctl[w.LATE] += 1
        if needed[e] and (at[e] == reads.ABSENT or at[e] == reads.QUEUED):
            if at[e] == reads.QUEUED:  # promoted: a demand read after all
                ctl[w.PREFETCH_READS] -= 1
                ctl[w.PREFETCH_BYTES] -= size
            chosen[count] = e
            count += 1
            ctl[w.DEMAND_READS] += 1
            ctl[w.DEMAND_BYTES] += size
        elif at[e] == reads.QUEUED and needed[e] == 0 and held[e] == 0:
            reads.withdraw(store, layer, e)
            ctl[w.PREFETCH_READS] -= 1
            ctl[w.PREFETCH_BYTES] -= size
            if asked[e]:
                ctl[w.UNUSED] -= 1
        asked[e] = 0
    reads.put(store, reads.DEMAND, layer, chosen[:count])
    reads.unlock(store)


@kernel
def _prepare(ctl, state, layer, streams, wanted, asked):  # type: ignore[no-untyped-def]
    """The next layer's priorities and part 1 for each row, one layer early, and its reads behind all that is needed."""
    store, experts = _words(ctl[w.STORE], reads.CTL_WORDS), ctl[w.EXPERTS]
    at = reads.table(store, reads.STATE)[layer * experts : (layer + 1) * experts]
    _words(ctl[w.PREPARED], ctl[w.LAYERS])[layer] = 1
    wanted[:] = 0
    inserted = 0
    for t in range(ctl[w.TOKENS]):
        c = keeping.cache_of(ctl, streams[t])
        count = _begin(ctl, state, c, layer, t)
        inserted += count
        for i in range(count):
            wanted[c.copy_expert[i]] = 1
    if inserted == 0:
        return
    size = _row(ctl, layer)[w.EXPERT_BYTES]
    surplus = keeping.make_room(ctl, layer, ctl[w.KEEP], wanted) - ctl[w.KEEP]
    chosen, count = _words(ctl[w.CHOSEN], experts), 0
    reads.lock(store)
    for t in range(ctl[w.TOKENS]):
        c = keeping.cache_of(ctl, streams[t])
        for i in range(c.n_copies[0]):
            e = c.copy_expert[i]
            if at[e] != reads.ABSENT or asked[e] != 0:
                continue
            if surplus > 0:
                surplus -= 1
            else:
                asked[e] = 1
                chosen[count] = e
                count += 1
    queued = reads.put(store, reads.PREFETCH, layer, chosen[:count])
    reads.unlock(store)
    asked[chosen[queued:count]] = 0
    ctl[w.PREFETCH_READS] += queued
    ctl[w.PREFETCH_BYTES] += queued * size


@kernel
def _decide_rows(ctl, state, layer, tensor, streams, needed):  # type: ignore[no-untyped-def]
    """Both parts for each row of a layer in turn; `needed` [E] becomes what they execute. False: do not go on."""
    row, fields = _row(ctl, layer), _words(tensor, _TENSOR_WORDS)
    k, experts = row[w.TOP_K], ctl[w.EXPERTS]
    # Of the graph's own ids there is a copy in RAM; the tensor may lie on a GPU, and ggml writes back to it there.
    chosen = _tap(state, row[w.TOPK_TAP])[native.DESTINATION]
    prepared = _words(ctl[w.PREPARED], ctl[w.LAYERS])
    needed[:] = 0
    for t in range(ctl[w.TOKENS]):
        ids = carray(_pointer(chosen + 4 * k * t), (k,), np.int32)
        for i in range(k):
            if ids[i] < 0 or ids[i] >= experts:
                ctl[w.COMPLAINT], ctl[w.COMPLAINT_LAYER] = w.WRONG_IDS, layer
                return False
        c = keeping.cache_of(ctl, streams[t])
        if prepared[layer] == 0:
            _begin(ctl, state, c, layer, t)
        _decide(ctl, state, c, layer, t, ids)
        if c.routing != EXACT:
            _set(tensor, chosen + 4 * k * t, t * fields[_NB + 1], 4 * k)
        for i in range(k):
            needed[ids[i]] = 1
    prepared[layer] = 0
    return True


@kernel
def _turn(ctl, state, layer, tensor):  # type: ignore[no-untyped-def]
    """One layer of one decode, at the node that holds its choice. False: do not go on."""
    clock = np.empty(2, np.int64)
    start = reads.now(clock)
    store, row = _words(ctl[w.STORE], reads.CTL_WORDS), _row(ctl, layer)
    experts, tokens, layers = ctl[w.EXPERTS], ctl[w.TOKENS], ctl[w.LAYERS]
    needed = carray(_pointer(ctl[w.NEEDED]), (experts,), np.uint8)
    wanted = carray(_pointer(ctl[w.WANTED]), (experts,), np.uint8)
    asked = carray(_pointer(ctl[w.ASKED]), (layers, experts), np.uint8)
    streams = _words(ctl[w.ROW_STREAM], tokens)
    if ctl[w.OPEN] >= 0:  # it was computed with slices that nobody waited for
        ctl[w.COMPLAINT], ctl[w.COMPLAINT_LAYER] = w.NO_STOP, ctl[w.OPEN]
        return False
    if _tap(state, row[w.TOPK_TAP])[native.FILLED] != tokens:
        ctl[w.COMPLAINT], ctl[w.COMPLAINT_LAYER] = w.WRONG_ROWS, layer
        return False
    if not _decide_rows(ctl, state, layer, tensor, streams, needed):
        return False
    others, kept = _note_use(ctl, layer, needed), ctl[w.KEEP]
    # A layer may execute more than is kept. What exceeds it is one layer's at a time.
    wanted[:] = 0
    keeping.make_room(ctl, layer - 1 if layer > 0 else layers - 1, kept, wanted)
    keeping.make_room(ctl, layer, kept if others <= kept else max(ctl[w.LIMIT], kept), needed)
    _mirror(ctl, layer, needed, asked[layer])
    much = reads.FIRST if row[w.STOPS] else reads.WHOLE
    waits = not reads.have_come(store, layer, needed, much)
    decided = reads.now(clock)
    reads.wake(store)
    if ctl[w.SINGLE] and layer + 1 < layers:
        _prepare(ctl, state, layer + 1, streams, wanted, asked[layer + 1])
        if not waits:  # else it took no time: the disk was busy meanwhile
            decided = reads.now(clock)
        reads.wake(store)
    reads.trim(store)
    ctl[w.POLICY_NS] += decided - start
    fine = _await(ctl, layer, much, decided)
    if fine and row[w.STOPS]:
        ctl[w.OPEN] = layer
    return fine


@kernel
def _await(ctl, layer, much, since):  # type: ignore[no-untyped-def]
    """Wait for what a layer needs of its experts. False: do not go on."""
    needed = carray(_pointer(ctl[w.NEEDED]), (ctl[w.EXPERTS],), np.uint8)
    fine = reads.wait_for(_words(ctl[w.STORE], reads.CTL_WORDS), layer, needed, much)
    ctl[w.WAIT_NS] += reads.now(np.empty(2, np.int64)) - since
    if not fine:
        ctl[w.COMPLAINT], ctl[w.COMPLAINT_LAYER] = w.READS_FAILED, layer
    return fine


@kernel
def _is_missing(ctl, graph_layer):  # type: ignore[no-untyped-def]
    """Whether the layer, at whose stop ggml is about to be, must stop there. If not, it is done with."""
    layer = ctl[w.OPEN]
    if layer < 0 or _row(ctl, layer)[w.STOPS] != graph_layer + 1:
        return False
    needed = carray(_pointer(ctl[w.NEEDED]), (ctl[w.EXPERTS],), np.uint8)
    store = _words(ctl[w.STORE], reads.CTL_WORDS)
    if not reads.have_come(store, layer, needed, reads.WHOLE):
        return True
    ctl[w.OPEN] = -1
    reads.wait_for(store, layer, needed, reads.WHOLE)  # it is over, and counts as one
    return False


@kernel
def _last_slices(ctl):  # type: ignore[no-untyped-def]
    """Before a layer's last product. False: do not go on."""
    layer = ctl[w.OPEN]
    ctl[w.OPEN] = -1
    return _await(ctl, layer, reads.WHOLE, reads.now(np.empty(2, np.int64)))


@kernel
def _note_use(ctl, layer, needed):  # type: ignore[no-untyped-def]
    """When the layer's experts last ran, and how many there were. Returns how many of them are not pinned."""
    c, others = keeping.cache_of(ctl, 0), 0
    used = _words(ctl[w.USED] + 8 * layer * ctl[w.EXPERTS], ctl[w.EXPERTS])
    distinct = 0
    for e in range(ctl[w.EXPERTS]):
        if needed[e]:
            used[e] = ctl[w.CLOCK]
            distinct += 1
            others += not keeping.is_pinned(c, layer, e)
    if ctl[w.SINGLE]:
        ctl[w.DISTINCT] += distinct
        ctl[w.TURNS] += 1
    return others


def on_node(tensor: int, ask: int, user_data: Any) -> int:
    state = carray(user_data, (STATE_WORDS,), np.int64)
    if state[_STOP] != 0:
        return ask  # wanted, so that the answer to "go on?" can be no
    if state[_MODE] == _OFF:
        return 0
    if ask and _ask(tensor, state) == 0:
        return 0
    found = _find(tensor, state)
    entry = _words(state[_TABLE] + found * native.TABLE_WORDS * 8, native.TABLE_WORDS)
    ctl = _words(state[STREAM], w.CTL_WORDS)
    is_stop = entry[native.OWN_TAP] < 0 and entry[native.INPUT_TAP] < 0
    if ask:
        return 1 if not is_stop or _is_missing(ctl, found % state[native.LAYER_COUNT]) else 0
    if is_stop:
        return 1 if _last_slices(ctl) else 0
    if entry[native.INPUT_TAP] >= 0:
        _copy(_words(tensor, _TENSOR_WORDS)[_SRC + 1], entry[native.INPUT_TAP], state)
    if entry[native.OWN_TAP] < 0:
        return 1
    _copy(tensor, entry[native.OWN_TAP], state)
    if state[_ERROR] != 0:
        return 0
    for layer in range(ctl[w.LAYERS]):
        if _row(ctl, layer)[w.TOPK_TAP] == entry[native.OWN_TAP]:
            return 1 if _turn(ctl, state, layer, tensor) else 0
    return 1


@functools.cache
def callback_address() -> int:
    """Address of the compiled callback; its user data is the hub's state, which word STREAM extends.

    A `Hub` must exist: it gives ggml's functions, which this code calls by name, their addresses.
    """
    signature = types.uint8(types.intp, types.uint8, types.CPointer(types.int64))
    return int(c_callback(on_node, signature, SOURCES).address)
