"""The SSD→RAM tier: stock llama.cpp with its experts on the SSD, decoding one sequence or several side by side.

`engine.StreamingEngine` is the tier with one sequence, `streams.Streams` with many that join and leave.
"""

import hashlib
import json
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from edgemoe.errors import UserError
from edgemoe.generation.engine import EngineStats, Observer
from edgemoe.llamacpp.graph import Router, Stop, find_routers, find_stops
from edgemoe.llamacpp.header import header_fingerprint
from edgemoe.llamacpp.layout import Tensor as GraphTensor
from edgemoe.llamacpp.reserve import SkeletonSession
from edgemoe.llamacpp.resident import KV_TYPES
from edgemoe.llamacpp.session import default_threads
from edgemoe.llamacpp.vocabulary import Speaker, Vocabulary
from edgemoe.policy import LogicalCache, Policy
from edgemoe.progress import Advance, no_progress
from edgemoe.streaming import words as w
from edgemoe.streaming.budget import RUNTIME_BYTES
from edgemoe.streaming.decider import ELSE, Decider
from edgemoe.streaming.fitting import DEFAULT_CHUNK, fit
from edgemoe.streaming.memory import check_address_space, held_bytes
from edgemoe.streaming.pins import bring, digest
from edgemoe.streaming.skeleton import Skeleton
from edgemoe.streaming.store import ExpertStore, readers_for
from edgemoe.streaming.stream import Stream
from edgemoe.units import Residency

if TYPE_CHECKING:
    from edgemoe.calibration import Calibration
    from edgemoe.wall.plan import Plan

_MARGIN = 128 << 20  # address space for stacks, allocators, and what llama.cpp takes for a while
_T = TypeVar("_T", bound="Tier")
OBSERVED = ("executed", "scores", "pregate")  # what an observer is told of each token


class Tier(Speaker):
    """A model whose experts are read when they are needed. Linux; experts run on the CPU.

    ram: bytes that the process may hold (RssAnon and shared memory). residency: slots per layer instead of that, or
    within it; with neither, every expert has a slot. calibration: warm set, bonus scale and token prior of this model;
    without it the warm set is experts 0 … C − 1, the scale is a running mean and there is no prior. A warm expert is
    read when it is first used. plan: a placement plan, or its file: the experts that it keeps out of the SSD are read
    now and stay, in RAM besides the slots, within `ram`. chunk: tokens of a prompt that are decoded at once; it changes
    what steered policies decide. readers: reads in flight, by default as many as `edgemoe probe` found this disk to
    want. verify_reads: read each slice twice and compare. record: keep each decision (a stream's `records`), in memory;
    observer: tell it of each of the only stream instead. n_gpu_layers: of so many layers all but the experts goes to a
    GPU. read_delay (seconds): slow reads down, unevenly, as tests do. streams: sequences that may be there at once, of
    `n_ctx` tokens each. `advance` is told of the bytes that loading copies:
    `edgemoe.streaming.skeleton.dense_bytes` in all.

    Raises `UserError` for a model that is no mixture of experts or whose graph is not as streaming needs it, for a
    policy that it does not allow, and for a budget that is too small, with the minimum, or with how many streams fit.
    """

    decider_type: type[Decider] = Decider
    """What decides in the callback; benchmarks put one in its place that replays recorded routing."""

    def __init__(
        self,
        path: str | Path,
        *,
        policy: Policy | None = None,
        ram: int | None = None,
        residency: Residency | None = None,
        calibration: "Calibration | None" = None,
        plan: "Plan | str | Path | None" = None,
        n_ctx: int | None = None,
        n_threads: int | None = None,
        readers: int | None = None,
        chunk: int = DEFAULT_CHUNK,
        kv_type: str = "f16",
        verify_reads: bool = False,
        record: bool = False,
        observer: Observer | None = None,
        n_gpu_layers: int = 0,
        read_delay: float = 0,
        streams: int = 1,
        advance: Advance = no_progress,
    ) -> None:
        fitted = fit(
            path,
            policy=policy,
            calibrated=calibration is not None,
            plan=plan,
            ram=ram,
            residency=residency,
            n_ctx=n_ctx,
            chunk=chunk,
            kv_type=kv_type,
            n_gpu_layers=n_gpu_layers,
            streams=streams,
        )
        self.model = model = fitted.model
        self.policy, self.chunk, self.pins, self.budget = fitted.policy, fitted.chunk, fitted.pins, fitted.budget
        self.n_threads = n_threads or default_threads()
        self._calibration, self._kv_type = calibration, kv_type
        self._record, self._observer, self._n_gpu_layers = record, observer, n_gpu_layers
        self._tokens, self._seconds = 0, 0.0
        self._streams: list[Stream] = []
        self._session: SkeletonSession | None = None
        readers = readers_for(model) if readers is None else readers
        self._store = ExpertStore(model, readers=readers, verify=verify_reads, delay=read_delay)
        try:
            self._store.allow(fitted.pinned + self.budget.slots * self.budget.slot_bytes + self.budget.scratch)
            beside = self.budget.fixed - RUNTIME_BYTES + _MARGIN
            check_address_space(beside + self._store.address_space, model.path)  # experts have it twice while loading
            self._load(fitted.n_ctx, kv_type, streams, advance)
        except BaseException:
            self.close()
            raise

    def _load(self, n_ctx: int, kv_type: str, streams: int, advance: Advance) -> None:
        rows = max(self.chunk, streams)
        self._decider = self.decider_type(self.model)
        with Skeleton(self.model, advance) as skeleton:
            self._session = SkeletonSession(
                self.model.path,
                skeleton.paths,
                kv_type=KV_TYPES[kv_type],
                hub=self._decider,
                n_ctx=n_ctx * streams,
                n_batch=rows,
                n_ubatch=rows,
                n_sequences=streams,
                n_threads=self.n_threads,
                n_gpu_layers=self._n_gpu_layers,
            )
        self._vocabulary = Vocabulary(self._session.model)
        routers, stops = self._survey()
        self._decider.check(routers, self.policy)
        known = self._calibration
        for number in range(streams):
            cache = LogicalCache(
                self.policy,
                n_layers=len(routers),
                n_experts=self.model.geometry.n_experts,
                top_k=[router.top_k for router in routers],
                capacity=self.budget.slots,
                delta=known.delta if known else None,
                warm=known.warm if known else None,
                pinned=self.pins,
            )
            self._streams.append(Stream(number, cache, self._observer))
        prior = known is not None and (self.policy.eviction == "score" or self.policy.prefetch == "token-prior")
        self._decider.plan(
            routers,
            [stream.cache for stream in self._streams],
            self._store,
            rows,
            keep=self.budget.slots,
            at_once=self.budget.at_once,
            stops=stops,
            has_prior=prior,
            record=self._recorded,
        )
        bring(self._store, self.pins)
        self._decider.live[0] = True  # where it is the only one, as long as the engine

    @property
    def _recorded(self) -> bool:
        return self._record or self._observer is not None

    def _survey(self) -> tuple[list[Router], dict[int, Stop]]:
        """Decode one token without experts to see the graph; then point its expert tensors at the store."""
        session, decider = self._session, self._decider
        assert session is not None
        with decider.survey():
            session.decode([0])
        nodes = decider.nodes()
        routers, stops = find_routers(nodes), find_stops(nodes)
        products = [node.source(0) for node in nodes if node.op == "MUL_MAT_ID"]
        left = dict(self._store.addresses)
        for weight in products:
            if weight.name not in self._store.addresses:
                raise UserError(
                    f"{self.model.path}: its graph multiplies by {weight.name or weight.op}, which is no "
                    f"tensor of experts that edgemoe knows: streaming does not fit this model: {ELSE}"
                )
            GraphTensor.from_address(weight.pointer).data = left.pop(weight.name, weight.tensor.data)
        if left:
            raise UserError(
                f"{self.model.path}: its graph does not use {next(iter(left))}: no fit for streaming: {ELSE}"
            )
        session.clear()
        session.drop_window()
        return [routers[layer] for layer in sorted(routers)], stops

    @property
    def description(self) -> str:
        assert self._session is not None
        return self._session.description

    @property
    def n_ctx(self) -> int:
        """The most tokens that one stream can have."""
        assert self._session is not None
        return self._session.n_ctx // len(self._streams)

    @property
    def capacity(self) -> int:
        """C: slots per layer, besides pinned experts'."""
        return self.budget.slots

    @property
    def direct(self) -> bool:
        """Whether reads pass the page cache by; if not, what they leave there is dropped at once."""
        return self._store.direct

    @property
    def has_pregate(self) -> np.ndarray:
        """[L]: whether a layer's pre-gate is formed under this policy."""
        return self._decider.has_pregate

    @cached_property
    def config_hash(self) -> str:
        """Twelve hex digits that name all that decides the tokens, from the model to the calibration."""
        decides = {
            "model": [header_fingerprint(path) for path in self.model.files],
            "policy": self.policy.hash,
            "slots": self.capacity,
            "chunk": self.chunk,
            "threads": self.n_threads,
            "context": self.n_ctx,
            "streams": len(self._streams),
            "gpu_layers": self._n_gpu_layers,
            "kv": self._kv_type,
            "calibration": self._calibration.digest if self._calibration else "",
            "pinned": digest(self.pins),
        }
        return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:12]

    def _read(self, stream: Stream, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """Append tokens to a stream, chunk by chunk; the logits after the last one, [V]."""
        count = len(tokens)
        if stream.position + count > self.n_ctx:
            held = f" after {stream.position:,}" if stream.position else ""
            raise UserError(f"{count:,} tokens{held} do not fit into a context of {self.n_ctx:,}: give a larger one")
        for at in range(0, count, self.chunk):
            self._advance([(stream, np.asarray(tokens[at : at + self.chunk], np.int32))])
        assert self._session is not None
        return self._session.last_logits()

    def _advance(self, feeds: Sequence[tuple[Stream, np.ndarray]]) -> None:
        """Decode some tokens of each of these streams, one after the other in one batch: all of it, or nothing of it
        happened, and nothing is counted (but bytes that were read are there)."""
        start, counted = time.perf_counter(), self._decider.ctl[w.COUNTERS]
        for stream, _ in feeds:
            stream.mark()
        try:
            self._decode(feeds)
        except BaseException:
            self._store.settle()
            self._decider.forget_asked()
            self._decider.ctl[w.COUNTERS] = counted
            assert self._session is not None
            for stream, _ in feeds:
                stream.undo()
                if self._session.forget(stream.position, stream.number) < stream.position:
                    stream.start()  # recurrent layers keep no earlier state: all of it is gone
            raise
        self._seconds += time.perf_counter() - start
        at = 0
        for stream, tokens in feeds:
            rows = slice(at, at + len(tokens))
            stream.position += len(tokens)
            at = rows.stop
            if self._record:
                stream.records.append({"tokens": tokens.copy(), **self._decider.record(rows)})
            if stream.observer:
                told = self._decider.record(rows)
                stream.observer.decoded(tokens.copy(), {name: told[name] for name in OBSERVED if name in told})
        self._tokens += at

    def _decode(self, feeds: Sequence[tuple[Stream, np.ndarray]]) -> None:
        session, decider = self._session, self._decider
        assert session is not None
        self._store.check_files()
        tokens = np.concatenate([tokens for _, tokens in feeds])
        positions = np.concatenate([stream.position + np.arange(len(tokens)) for stream, tokens in feeds])
        numbers = np.repeat([stream.number for stream, _ in feeds], [len(tokens) for _, tokens in feeds])
        if len(decider.prior):
            assert self._calibration is not None
            for t, token in enumerate(tokens.tolist()):
                decider.prior[t] = self._calibration.prior_row(token)
        decider.begin(numbers)
        with decider.capture():
            session.decode(tokens, positions=positions, sequences=numbers)
        if decider.failed:
            raise self._store.settle() or decider.complaint() or UserError("a read was given up: decode again")

    def stats(self) -> EngineStats:
        ctl = self._decider.ctl
        wait, policy = float(ctl[w.WAIT_NS] / 1e9), float(ctl[w.POLICY_NS] / 1e9)
        return EngineStats(
            tokens=self._tokens,
            seconds=self._seconds,
            compute_s=max(self._seconds - wait - policy, 0.0),
            demand_wait_s=wait,
            policy_s=policy,
            loads=int(ctl[w.LOADS]),
            hits=int(ctl[w.LOADS] - ctl[w.MISSES]),
            demand_reads=int(ctl[w.DEMAND_READS]),
            demand_bytes=int(ctl[w.DEMAND_BYTES]),
            prefetch_reads=int(ctl[w.PREFETCH_READS]),
            prefetch_bytes=int(ctl[w.PREFETCH_BYTES]),
            prefetch_in_time=int(ctl[w.IN_TIME]),
            prefetch_late=int(ctl[w.LATE]),
            prefetch_unused=int(ctl[w.UNUSED]),
            ram_bytes=held_bytes(),
        )

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None
        self._store.close()

    def __enter__(self: _T) -> _T:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
