"""The hub whose callback decides: it lays out what `step` works on, from the model's graph, policy and calibration."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from edgemoe.errors import UserError
from edgemoe.llamacpp import native
from edgemoe.llamacpp.graph import Gate, Reading, Router, Stop
from edgemoe.llamacpp.hub import Hub, Tap
from edgemoe.model import Model
from edgemoe.policy import LogicalCache, Policy
from edgemoe.streaming import reads, step
from edgemoe.streaming import words as w
from edgemoe.streaming.store import ExpertStore
from edgemoe.streaming.weights import load_weight

ELSE = "keep it in RAM (run it without --ram and --residency)"  # what works where streaming does not fit
_COMPLAINTS = {
    w.WRONG_IDS: "chose experts that do not exist",
    w.WRONG_ROWS: "did not choose for every token",
    w.NO_STOP: "computed its last product before its experts had been read",
}


class Decider(Hub):
    """The eval callback of a streaming session. `plan` makes it decide; until then it is a plain hub."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model
        self.state = np.append(self.state, np.zeros(step.STATE_WORDS - native.STATE_WORDS, np.int64))
        self.callback = step.callback_address()
        self.ctl = np.zeros(w.CTL_WORDS, np.int64)
        self.state[step.STREAM] = self.ctl.ctypes.data
        self._store: ExpertStore | None = None

    def check(self, routers: Sequence[Router], policy: Policy) -> None:
        """Raise `UserError`, with what works instead, where the graph lacks what the policy needs."""
        name = self.model.path
        if policy.elide:
            raise UserError(f"{name}: gate elision cannot be done in llama.cpp, which executes k experts: leave it out")
        layers = [router.layer for router in routers]
        if tuple(layers) != self.model.geometry.moe_layers:
            raise UserError(
                f"{name}: its graph routes in layers {layers}, the file has {self.model.geometry.moe_layers}: {ELSE}"
            )
        for at, router in enumerate(routers):
            if policy.needs_scores and not isinstance(router.scores, Reading):
                raise UserError(
                    f"{name}: layer {router.layer} ranks no scores that could be steered ({router.scores}): "
                    "use an exact policy (exact-lru, exact-score)"
                )
            feeds = at + 1 < len(routers) and layers[at + 1] == router.layer + 1
            gates = [router.gate, routers[at + 1].gate] if feeds else []
            for gate in gates if policy.needs_pregate else []:
                if not isinstance(gate, Gate):
                    raise UserError(
                        f"{name}: no pre-gate can be formed at layer {router.layer} ({gate}): use a policy without "
                        "pre-gate prefetch (exact-lru, exact-score)"
                    )

    def plan(
        self,
        routers: Sequence[Router],
        caches: Sequence[LogicalCache],
        store: ExpertStore,
        rows: int,
        *,
        keep: int,
        at_once: int,
        stops: Mapping[int, Stop] = MappingProxyType({}),
        has_prior: bool = False,
        record: bool = False,
    ) -> None:
        """Decide with a stream's own cache and read with `store` from now on, at most `rows` tokens per decode.

        The store keeps `keep` experts per layer, and has up to `at_once` of a layer while that runs; pinned ones are
        there besides. `stops`: by layer, where the slices of its last product can be waited for by themselves.
        """
        policy, n_layers, n_experts = caches[0].policy, len(routers), self.model.geometry.n_experts
        self._store, self._caches, self._top_k = store, caches, max(router.top_k for router in routers)
        self._layers = [router.layer for router in routers]
        self._rows = np.zeros((n_layers, w.ROW_WORDS), np.int64)
        self._weights: list[np.ndarray] = []
        taps: list[Tap] = []
        wants_scores = policy.needs_scores or (record and all(isinstance(r.scores, Reading) for r in routers))
        for at, (row, router) in enumerate(zip(self._rows, routers, strict=True)):
            row[w.TOPK_TAP] = _tap(taps, router.topk)
            row[[w.SCORES_TAP, w.MASK_TAP, w.INPUT_TAP]] = -1
            row[w.EXPERT_BYTES], row[w.TOP_K] = self.model.geometry.expert_bytes[at], router.top_k
            if router.layer in stops:
                row[w.STOPS] = router.layer + 1
                store.read_last(at, stops[router.layer].weight)
            if wants_scores and isinstance(router.scores, Reading):
                row[w.SCORES_TAP] = _tap(taps, router.scores)
                row[w.MASK_TAP] = _tap(taps, router.mask) if router.mask else -1
            if policy.needs_pregate and at + 1 < n_layers and self._layers[at + 1] == router.layer + 1:
                gate = routers[at + 1].gate
                assert isinstance(router.gate, Gate) and isinstance(gate, Gate)
                row[w.INPUT_TAP] = _tap(taps, router.gate.product, of_input=True)
                self._form(self._rows[at + 1], gate)
        self.install(taps, rows, [stop.at for stop in stops.values()])
        self.prior = np.zeros((rows, n_layers, n_experts) if has_prior else (0, n_layers, n_experts), np.float32)
        self._pregates = np.zeros((n_layers, rows, n_experts) if policy.needs_pregate else (0, 0, 0), np.float32)
        recorded = rows if record else 0
        self._executed = np.full((n_layers, recorded, self._top_k), -1, np.int32)
        self._counts = np.zeros((n_layers, recorded, 2), np.int32)
        self._copies = np.zeros((n_layers, recorded, 2, n_experts), np.int32)
        self._needed, self._wanted = np.zeros((2, n_experts), np.uint8)
        self._chosen = np.zeros(n_experts, np.int64)
        self._asked = np.zeros((n_layers, n_experts), np.uint8)
        self._prepared = np.zeros(n_layers, np.int64)
        self._used, self._held = np.zeros((n_layers, n_experts), np.int64), np.zeros(n_experts, np.int64)
        self._blocks = np.array([cache.block.ctypes.data for cache in caches], np.int64)
        self._row_stream, self.live = np.zeros(rows, np.int64), np.zeros(len(caches), np.int64)
        ctl = self.ctl
        ctl[w.STORE] = store.ctl.ctypes.data
        ctl[[w.LAYERS, w.EXPERTS, w.CAPACITY, w.STREAMS]] = n_layers, n_experts, rows, len(caches)
        ctl[[w.KEEP, w.LIMIT, w.MOST]] = keep, at_once, self._top_k
        ctl[w.MODE] = w.SELECT if policy.needs_scores else w.OBSERVE
        for word, array in (
            (w.PRIOR, self.prior),
            (w.ROUTING_OUT, self._executed),
            (w.COUNTS_OUT, self._counts),
            (w.COPIES_OUT, self._copies),
            (w.PREGATE_OUT, self._pregates),
            (w.ROWS, self._rows),
            (w.NEEDED, self._needed),
            (w.WANTED, self._wanted),
            (w.CHOSEN, self._chosen),
            (w.BLOCKS, self._blocks),
            (w.ROW_STREAM, self._row_stream),
            (w.LIVE, self.live),
            (w.USED, self._used),
            (w.HELD, self._held),
            (w.ASKED, self._asked),
            (w.PREPARED, self._prepared),
        ):
            ctl[word] = array.ctypes.data if array.size else 0

    def _form(self, row: np.ndarray, gate: Gate) -> None:
        """The pre-gate of the layer that `row` describes."""
        weight = load_weight(self.model, gate.weight)
        self._weights.append(weight)
        row[w.WEIGHT], row[w.WIDTH], row[w.STEPS] = weight.ctypes.data, weight.shape[1], len(gate.steps)
        if len(gate.steps) > w.MAX_STEPS:
            raise UserError(f"{self.model.path}: its router has {len(gate.steps)} steps: use a policy without pre-gate")
        for i, (name, operand) in enumerate(gate.steps):
            row[w.FIRST_STEP + 2 * i] = w.STEP_CODES[name]
            if operand:
                self._weights.append(load_weight(self.model, operand).ravel())
                row[w.FIRST_STEP + 2 * i + 1] = self._weights[-1].ctypes.data
        if gate.groups:
            row[[w.GROUPS, w.GROUPS_USED, w.OF_SOFTMAX]] = gate.groups.count, gate.groups.used, gate.groups.of_softmax

    def begin(self, streams: np.ndarray) -> None:
        """Before a decode whose rows belong to `streams` [T], each one's in order. What an earlier one prepared is
        void, and what it asked for counts no more: its cache was restored."""
        ctl, tokens = self.ctl, len(streams)
        ctl[[w.TOKENS, w.COMPLAINT, w.OPEN]] = tokens, 0, -1
        ctl[w.SINGLE] = len(set(streams.tolist())) == tokens
        ctl[w.CLOCK] += 1
        self._row_stream[:tokens] = streams
        self._prepared[:] = 0

    def forget_asked(self) -> None:
        """After an undone decode: prefetches that it asked for are nobody's."""
        self._asked[:] = 0

    def complaint(self) -> UserError | None:
        """Why the last decode stopped, if the callback stopped it; failed reads are the store's to explain."""
        late = int(self.ctl[w.OPEN])
        found = _COMPLAINTS.get(w.NO_STOP if late >= 0 else int(self.ctl[w.COMPLAINT]))
        layer = self._layers[late if late >= 0 else int(self.ctl[w.COMPLAINT_LAYER])]
        return (
            UserError(f"{self.model.path}: layer {layer} {found}: streaming does not fit this model: {ELSE}")
            if found
            else None
        )

    @property
    def failed(self) -> bool:
        """Whether the callback stopped the last decode, or was not asked before a layer's last product."""
        return bool(self.ctl[w.COMPLAINT]) or bool(self.ctl[w.OPEN] >= 0)

    def record(self, rows: slice) -> dict[str, np.ndarray]:
        """What the last decode decided for these rows, from: executed [L, T, k] (−1 pads), counts [L, T, 2] and copies
        [L, T, 2, E] of parts 1 and 2, and scores and pregate [L, T, E] where the policy has them (copies)."""
        out = {
            "executed": self._executed[:, rows].copy(),
            "counts": self._counts[:, rows].copy(),
            "copies": self._copies[:, rows].copy(),
        }
        if (self._rows[:, w.SCORES_TAP] >= 0).all():
            out["scores"] = np.stack([self.rows(int(tap))[rows] for tap in self._rows[:, w.SCORES_TAP]])
        if self._pregates.size:
            out["pregate"] = self._pregates[:, rows].copy()
        return out

    @property
    def has_pregate(self) -> np.ndarray:
        """[L]: whether a layer's pre-gate is formed."""
        return self._rows[:, w.WEIGHT] != 0

    def stop(self) -> None:
        super().stop()
        if self._store is not None:
            reads.stop(self._store.ctl, reads.ABORT)


def _tap(taps: list[Tap], at: Reading, of_input: bool = False) -> int:
    tap = Tap(at, of_input)
    if tap not in taps:
        taps.append(tap)
    return taps.index(tap)
