"""What the native callback works on: which nodes are wanted, where their rows go, and what it saw.

hub = Hub()
session = Session(path, hub=hub)
with hub.survey():                      # one decode, nothing copied: the graph itself
    session.decode(tokens)
hub.install([Tap(router.topk), …], rows=512)
with hub.capture():                     # afterwards hub.rows(i) are the rows of tap i
    session.decode(tokens)
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from edgemoe.errors import UserError
from edgemoe.llamacpp import native
from edgemoe.llamacpp.graph import Node, Reading
from edgemoe.llamacpp.layout import MAX_NAME, verify_layout

MAX_NODES = 1 << 17
_ERRORS = {
    native.ERROR_OVERFLOW: "more rows than tokens were decoded",
    native.ERROR_TYPE: "a wanted tensor is neither F32 nor I32",
    native.ERROR_SCRATCH: "a tensor on a device is larger than the scratch buffer",
}


@dataclass(frozen=True)
class Tap:
    """Rows to copy at one graph node: the node's own, or (`of_input`) those of its second operand."""

    at: Reading
    of_input: bool = False

    @property
    def width(self) -> int:
        return self.at.input_width if self.of_input else self.at.width


class Hub:
    """The state of one session's eval callback. Not shared between sessions."""

    def __init__(self) -> None:
        verify_layout()
        self.callback = int(native.callback().address)
        self.state = np.zeros(native.STATE_WORDS, np.int64)
        self._nodes = np.zeros(MAX_NODES, np.int64)
        self.state[native.NODES] = self._nodes.ctypes.data
        self.state[native.NODE_CAPACITY] = MAX_NODES
        self._taps: list[Tap] = []
        self._buffers: list[np.ndarray] = []
        self._words = np.zeros((0, native.TAP_WORDS), np.int64)
        self._table = np.zeros((0, 0, native.TABLE_WORDS), np.int64)

    def install(self, taps: Sequence[Tap], rows: int, stops: Sequence[Reading] = ()) -> None:
        """Prepare to capture `taps`, at most `rows` rows of each per `capture`. `stops` are nodes that a callback of a
        subclass wants to see, and none of which rows are copied."""
        seen = [*(tap.at for tap in taps), *stops]
        stems = sorted({at.stem for at in seen})
        layers = 1 + max((at.layer for at in seen), default=-1)
        self._taps = list(taps)
        self._buffers = [np.zeros((rows, tap.width), np.int32 if tap.at.integer else np.float32) for tap in taps]
        self._names = np.zeros((max(len(stems), 1), MAX_NAME), np.uint8)
        for i, stem in enumerate(stems):
            self._names[i, : len(stem)] = np.frombuffer(stem.encode(), np.uint8)
        self._table = np.zeros((len(stems), layers, native.TABLE_WORDS), np.int64)
        self._table[:, :, [native.OWN_TAP, native.INPUT_TAP]] = -1
        self._words = np.zeros((len(taps), native.TAP_WORDS), np.int64)
        for i, tap in enumerate(taps):
            self._words[i] = self._buffers[i].ctypes.data, tap.width, rows, 0
            entry = self._table[stems.index(tap.at.stem), tap.at.layer]
            entry[native.INPUT_TAP if tap.of_input else native.OWN_TAP] = i
            entry[native.PERIOD], entry[native.PICK] = tap.at.period, tap.at.pick
        for at in stops:
            entry = self._table[stems.index(at.stem), at.layer]
            assert not entry[native.PERIOD], "a node is a tap or a stop"
            entry[native.PERIOD], entry[native.PICK] = at.period, at.pick
        # a view of an argsort spans whole rows of all experts: 4 bytes × the widest source
        self._scratch = np.zeros(rows * max((tap.at.span for tap in taps), default=0), np.int32)
        self.state[native.STEMS], self.state[native.STEM_COUNT] = self._names.ctypes.data, len(stems)
        self.state[native.TABLE], self.state[native.LAYER_COUNT] = self._table.ctypes.data, layers
        self.state[native.TAPS] = self._words.ctypes.data
        self.state[native.SCRATCH], self.state[native.SCRATCH_BYTES] = self._scratch.ctypes.data, self._scratch.nbytes

    @contextmanager
    def survey(self) -> Iterator[None]:
        """Decodes inside note the graph's nodes; read them with `nodes` before the next decode."""
        self.state[native.NODE_COUNT] = 0
        with self._mode(native.SURVEY):
            yield

    def nodes(self) -> list[Node]:
        """The nodes of the surveyed graph, in the order of execution. They are gone at the next decode."""
        count = int(self.state[native.NODE_COUNT])
        if count > MAX_NODES:
            raise UserError(f"this model's graph has {count} nodes, more than the {MAX_NODES} that edgemoe surveys")
        return [Node(int(pointer)) for pointer in self._nodes[:count]]

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Decodes inside fill the taps from their first row on."""
        self._words[:, native.FILLED] = 0
        self._table[:, :, native.SEEN] = 0
        self.state[[native.ERROR, native.IGNORED]] = 0
        with self._mode(native.CAPTURE):
            yield
        if self.state[native.ERROR]:
            raise UserError(f"routing could not be read from the graph: {_ERRORS[int(self.state[native.ERROR])]}")

    def rows(self, tap: int) -> np.ndarray:
        """What tap `tap` has captured, [rows, width]: a view, overwritten by the next capture."""
        return self._buffers[tap][: self._words[tap, native.FILLED]]

    @property
    def ignored(self) -> int:
        """Wanted nodes of another width (warm-up runs execute every expert) since the capture began."""
        return int(self.state[native.IGNORED])

    def stop(self) -> None:
        """Make the running decode end at its next node; what it computes is void."""
        self.state[native.STOP] = 1

    def go_on(self) -> None:
        """Let decodes run again after `stop`."""
        self.state[native.STOP] = 0

    @contextmanager
    def _mode(self, mode: int) -> Iterator[None]:
        self.state[native.MODE] = mode
        try:
            yield
        finally:
            self.state[native.MODE] = native.OFF
