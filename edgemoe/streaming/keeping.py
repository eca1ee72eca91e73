"""Which experts stay in RAM: what the logical caches hold; where that is more than there is room for, what most hold.

Every stream's logical cache decides for that stream alone, as if the store were its own. The store is one for all: per
layer it keeps those that are pinned and `KEEP` others, and while a layer runs, all that the layer executes. When it
must give one back, that is an expert that the fewest caches hold, and among those the one that has not run for the
longest time. With one stream it therefore keeps what the one cache holds. No decision depends on it: an expert that a
cache holds and the store does not is read again.
"""

import numpy as np
from numba import carray

from edgemoe.llamacpp.native import _pointer, _words
from edgemoe.policy.state import attach
from edgemoe.streaming import reads
from edgemoe.streaming import words as w
from edgemoe.streaming.jit import kernel

_RECENT = 1 << 40  # more than decodes ever are: holders come first


@kernel
def cache_of(ctl, stream):  # type: ignore[no-untyped-def]
    """The logical cache of a stream."""
    address = _words(ctl[w.BLOCKS], ctl[w.STREAMS])[stream]
    return attach(carray(_pointer(address), (_words(address, 1)[0],), np.uint8))


@kernel
def is_pinned(c, layer, expert):  # type: ignore[no-untyped-def]
    """Whether an expert stays whatever happens: every stream's cache has it in one of its first slots."""
    return 0 <= c.slot_of[layer, expert] < c.pinned[layer]


@kernel
def holders(ctl, layer):  # type: ignore[no-untyped-def]
    """How many live streams hold each expert of a layer, int64 [E]: working memory, until the next call."""
    held = _words(ctl[w.HELD], ctl[w.EXPERTS])
    held[:] = 0
    live = _words(ctl[w.LIVE], ctl[w.STREAMS])
    for stream in range(ctl[w.STREAMS]):
        if live[stream]:
            slots = cache_of(ctl, stream).slot_of
            for e in range(ctl[w.EXPERTS]):
                if slots[layer, e] >= 0:
                    held[e] += 1
    return held


@kernel
def make_room(ctl, layer, room, wanted):  # type: ignore[no-untyped-def]
    """Give experts back until a layer has at most `room` besides those that are pinned: those there or on their way,
    and those `wanted` (uint8 [E]), which stay. Returns how many it has then; more than `room` where what is left is
    wanted or being read. Their pages go at the next `reads.trim`."""
    c = cache_of(ctl, 0)
    store, experts = _words(ctl[w.STORE], reads.CTL_WORDS), ctl[w.EXPERTS]
    at = reads.table(store, reads.STATE)[layer * experts : (layer + 1) * experts]
    count = 0
    for e in range(experts):
        count += (at[e] != reads.ABSENT or wanted[e] != 0) and not is_pinned(c, layer, e)
    if count <= room:
        return count
    held = holders(ctl, layer)
    used = _words(ctl[w.USED] + 8 * layer * experts, experts)
    while count > room:
        worst = -1
        for e in range(experts):
            if at[e] == reads.PRESENT and wanted[e] == 0 and not is_pinned(c, layer, e):
                worth = held[e] * _RECENT + used[e]
                if worst < 0 or worth < held[worst] * _RECENT + used[worst]:
                    worst = e
        if worst < 0:
            break
        reads.vacate(store, layer, worst)
        count -= 1
    return count
