"""`OffloadEngine`: the RAM→VRAM tier as an engine that generation can drive.

engine = OffloadEngine("model.gguf", residency=Residency.parse("50%"), policy=preset("psr-gated"))
logits = engine.prefill(engine.tokenize(b"Once upon a time"))
logits = engine.decode(int(logits.argmax()))
"""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TypeVar, cast

import numpy as np
import torch

from edgemoe.calibration import Calibration
from edgemoe.errors import UserError
from edgemoe.generation.engine import EngineStats, Observer
from edgemoe.generation.options import Options
from edgemoe.gpu_offload.executor import Executor, Snapshot
from edgemoe.gpu_offload.figures import engine_stats
from edgemoe.gpu_offload.fingerprint import fingerprint, fitting
from edgemoe.gpu_offload.hub import resolve
from edgemoe.gpu_offload.kernels import draw
from edgemoe.gpu_offload.memory import SNAPSHOTS, Need, choose_slots, need, prior_bytes
from edgemoe.gpu_offload.refusals import check_room, check_tokens, checked
from edgemoe.gpu_offload.shape import Shape, read_shape
from edgemoe.gpu_offload.target import Target, find_target, forget
from edgemoe.gpu_offload.vocabulary import open_vocabulary
from edgemoe.gpu_offload.weights import DTYPES, THREADS, Weights, load_weights
from edgemoe.llamacpp.vocabulary import Speaker, Vocabulary
from edgemoe.model import Model, read_model
from edgemoe.policy import LogicalCache, Policy
from edgemoe.progress import Advance, no_progress
from edgemoe.tracing.interrupts import interrupts_deferred
from edgemoe.units import Residency

DEFAULT_CTX = 4096
DEFAULT_CHUNK = 128  # on the CPU; a GPU's is the largest, since every chunk brings its experts anew
MAX_CHUNK = 512
BLOCK = 16  # tokens that a GPU is given at once: a twentieth of a second of text
OBSERVED = ("executed", "scores", "pregate")  # what an observer is told of each token
_Found = TypeVar("_Found")


@dataclass(frozen=True)
class _Extended:
    """What the last call was, if it was `extend`: a rewind into it starts there."""

    position: int
    before: Snapshot
    token: int
    options: Options
    ends: frozenset[int]


class OffloadEngine(Speaker):
    """An `edgemoe.generation.engine.Engine` that holds C experts per layer on its device and all of them in RAM.

    model: a GGUF file, a safetensors folder, or a name on the Hugging Face hub, of OLMoE's architecture. device: `cpu`,
    or `cuda` with the GPU's number (0) and how it is driven, executor (`target.find_target`). residency or vram (bytes
    on the device) choose C; with neither, as many as fit. calibration: warm set, bonus scale and token prior of this
    model; without it the warm set is experts 0 … C − 1, the scale a running mean, and there is no prior. chunk: tokens
    of a prompt that go through a layer together. dtype: how weights and KV cache are stored. record: keep each step's
    decisions (`records`), in memory; observer: tell it of each instead. verify_slots: after each step compare every
    slot with the expert that it should hold. `advance` is told of the bytes that loading reads:
    `edgemoe.gpu_offload.weights.load_bytes` in all.

    A prompt that is given again goes back to the logical cache of its beginning (`rewind`), so it gives the same text
    under steered policies too. Raises `UserError`, one line, for what is missing, damaged, not implemented, or does not
    fit; then nothing has been allocated.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        device: str = "cpu",
        gpu: int | None = None,
        executor: str | None = None,
        policy: Policy | None = None,
        residency: Residency | None = None,
        vram: int | None = None,
        calibration: Calibration | None = None,
        n_ctx: int | None = None,
        n_threads: int | None = None,
        chunk: int | None = None,
        dtype: str = "bfloat16",
        record: bool = False,
        observer: Observer | None = None,
        verify_slots: bool = False,
        advance: Advance = no_progress,
    ) -> None:
        _check(dtype, chunk, n_ctx)
        self.target: Target = find_target(device, gpu, executor)
        self.device, self.dtype = device, dtype
        self.model: Model = read_model(resolve(model))
        self.shape: Shape = read_shape(self.model)
        self._calibration = fitting(calibration, self.model)
        self.policy = policy = (policy or Policy()).completed(calibration is not None)
        self.target.check(self.shape, self._prior.prior if self._prior else None)
        self._n_ctx = n_ctx or min(DEFAULT_CTX, self.shape.n_ctx or DEFAULT_CTX)
        self.chunk = min(chunk or (MAX_CHUNK if self.target.is_gpu else DEFAULT_CHUNK), self._n_ctx)
        self.n_threads = n_threads or torch.get_num_threads()
        self._record, self._observer, self._verify = record, observer, verify_slots
        self.records: list[dict[str, np.ndarray]] = []
        self._position = self._tokens = 0
        self._seconds = 0.0
        self._snapshots: dict[int, Snapshot] = {}
        self._extended: _Extended | None = None
        self._weights: Weights | None = None
        self._executor: Executor | None = None
        self.need: Need = self._need()
        self.capacity = self._choose_slots(residency, vram)
        self._words = open_vocabulary(self.model)
        self._vocabulary = cast(Vocabulary, self._words)
        try:
            with self.target.use():
                self._load(advance)
        except BaseException as error:
            forget(error)
            self.close()
            raise

    def _need(self) -> Need:
        gpu = self.target.is_gpu
        return need(
            self.shape, itemsize=DTYPES[self.dtype].itemsize, n_ctx=self._n_ctx, chunk=self.chunk,
            prior_bytes=prior_bytes(self._prior, gpu), threads=THREADS, gpu=gpu,
        )  # fmt: skip

    @property
    def _prior(self) -> Calibration | None:
        return self._calibration if self.policy.uses_prior else None

    def _choose_slots(self, residency: Residency | None, vram: int | None) -> int:
        where, room = str(self.model.path), self.target.room()
        return choose_slots(where, self.shape, self.policy, self.need, residency=residency, vram=vram, room=room)

    def _load(self, advance: Advance) -> None:
        known, shape = self._calibration, self.shape
        torch.set_num_threads(self.n_threads)
        start = time.perf_counter()
        self._weights = load_weights(
            self.model, shape, dtype=DTYPES[self.dtype], device=self.target.device, threads=THREADS, advance=advance
        )
        cache = LogicalCache(
            self.policy,
            n_layers=shape.n_layers,
            n_experts=shape.n_experts,
            top_k=shape.top_k,
            capacity=self.capacity,
            delta=known.delta if known else None,
            warm=known.warm if known else None,
            prior=self._prior,
        )
        self.has_pregate = np.array([self.policy.needs_pregate and layer > 0 for layer in range(shape.n_layers)])
        """[L]: whether a layer's pre-gate decides anything under this policy."""
        self._executor = self.target.open(self._weights, cache, n_ctx=self._n_ctx, chunk=self.chunk)
        self.load_seconds = time.perf_counter() - start

    @property
    def executor(self) -> Executor:
        assert self._executor is not None, "the engine is closed"
        return self._executor

    @property
    def expert_bytes(self) -> int:
        """What one copy moves."""
        return self.shape.expert_values * DTYPES[self.dtype].itemsize

    @property
    def description(self) -> str:
        geometry = self.model.geometry
        return f"{geometry.name} ({geometry.architecture}, {geometry.parameters / 1e9:.2g} B parameters, {self.dtype})"

    @property
    def n_vocab(self) -> int:
        return self.shape.n_vocab

    @property
    def n_ctx(self) -> int:
        return self._n_ctx

    @property
    def position(self) -> int:
        return self._position

    @cached_property
    def config_hash(self) -> str:
        """Twelve hex digits that name all that decides the tokens, from the model to the calibration."""
        decides = {
            "model": fingerprint(self.model),
            "policy": self.policy.hash,
            "slots": self.capacity,
            "executor": f"{self.executor.name} on {self.target.name}",
            "torch": torch.__version__,
            "dtype": self.dtype,
            "chunk": self.chunk,
            "threads": 0 if self.target.is_gpu else self.n_threads,
            "context": self.n_ctx,
            "calibration": self._calibration.digest if self._calibration else "",
        }
        return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:12]

    def prefill(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        return self._prefill(tokens, all_rows=False)[-1]

    def rows(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """As `prefill`, but the logits after every token, [T, V] float32: for evaluation."""
        return np.concatenate(self._prefill(tokens, all_rows=True))

    def _prefill(self, tokens: Sequence[int] | np.ndarray, all_rows: bool) -> list[np.ndarray]:
        tokens = checked(tokens, self._position, self.n_ctx, self.n_vocab)
        found: list[np.ndarray] = []
        for at in range(0, len(tokens), self.chunk):
            with self.target.use():
                self._remember()
            logits = self._advance(tokens[at : at + self.chunk], all_rows)
            found = [*found, logits] if all_rows else [logits]
        return found

    def decode(self, token: int) -> np.ndarray:
        return self._advance(checked([token], self._position, self.n_ctx, self.n_vocab), all_rows=False)

    @property
    def block(self) -> int:
        """Tokens for one `extend`: more than 1 where the host need not see each, and is not asked to."""
        return BLOCK if self.target.executor == "device" and not (self._record or self._observer) else 1

    def choose(self, logits: np.ndarray, options: Options) -> int:
        """The token that follows, for the logits [V] after the last one: what `extend` would choose there."""
        return draw.choose(logits, options, options.seed or 0, self._position - 1)

    def extend(self, token: int, count: int, options: Options | None = None) -> list[int]:
        """Append `token`, let the device choose what follows, append that, and so on: the `count` tokens chosen, fewer
        at the end of the text. The last one is not appended. A draw depends on the seed and its position alone. Keeps
        no records."""
        options = options or Options(temperature=0.0)
        check_room(self._position, count, self.n_ctx)
        check_tokens(np.array([token]), self.n_vocab)
        ends = frozenset() if options.ignore_eos else self.eos_tokens
        with self.target.use():
            before = self.executor.snapshot()
            return self._chosen(_Extended(self._position, before, token, options, ends), count)

    def _chosen(self, asked: _Extended, count: int) -> list[int]:
        def extend() -> list[int]:
            return list(self.executor.extend(asked.token, asked.position, count, asked.options, asked.ends))

        def settle(chosen: list[int]) -> int:
            self._extended = asked
            return len(chosen)

        return self._whole(asked.before, extend, settle)

    def _advance(self, tokens: np.ndarray, all_rows: bool) -> np.ndarray:
        def step() -> np.ndarray:
            return self.executor.step(tokens, self._position, all_rows=all_rows)

        def settle(_: np.ndarray) -> int:
            if self._record or self._observer:
                self._tell(tokens)
            self._extended = None
            return len(tokens)

        with self.target.use():
            return self._whole(self.executor.snapshot(), step, settle)

    def _whole(self, before: Snapshot, compute: Callable[[], _Found], settle: Callable[[_Found], int]) -> _Found:
        """A step or a block, from the logical cache `before`: all of it, or nothing of it happened.

        Ctrl-C ends `compute` at once. It waits while `settle` tells of what was found and says how many tokens that
        appends, and while an error takes the step back.
        """
        position, start = self._position, time.perf_counter()
        try:
            try:
                found = compute()
            finally:
                self._seconds += time.perf_counter() - start
            with interrupts_deferred():
                count = settle(found)
                self._tokens += count
                self._position += count
        except BaseException:
            if self._position == position:  # else it happened: the interrupt had waited
                with interrupts_deferred():
                    self.executor.restore(before)
            raise
        if self._verify:
            self.executor.verify()
        return found

    def _tell(self, tokens: np.ndarray) -> None:
        told = self.executor.record(len(tokens))
        if self._observer:
            self._observer.decoded(tokens.copy(), {name: told[name] for name in OBSERVED if name in told})
        if self._record:  # last: an observer's error takes the step back
            self.records.append({"tokens": tokens.copy(), **told})

    def _remember(self) -> None:
        """Keep the logical cache of this position, where a chunk begins: a rewind starts from such a place."""
        self._snapshots[self._position] = self.executor.snapshot()
        if len(self._snapshots) > SNAPSHOTS:
            del self._snapshots[min(self._snapshots)]

    def rewind(self, position: int) -> int:
        """Forget the tokens from `position` on, and what the logical cache learnt from them.

        The new position is `position` within what `extend` appended last, else where a chunk of a prompt began, at or
        before `position`: from there the same tokens, in the same chunks, make the same decisions and the same text
        again.
        """
        assert 0 <= position <= self._position
        last = self._extended
        if position == self._position:
            return position
        with self.target.use():
            if last and last.position < position:
                self._go_back(last.position, last.before)
                self._chosen(last, position - last.position)
                return position
            begin = max((at for at in self._snapshots if at <= position), default=0)
            if begin:
                self._go_back(begin, self._snapshots[begin])
                self._snapshots = {at: kept for at, kept in self._snapshots.items() if at <= begin}
            else:
                self.reset()
        return begin

    def _go_back(self, position: int, before: Snapshot) -> None:
        with interrupts_deferred():
            self._position, self._extended = position, None
            self.executor.restore(before)

    def reset(self) -> None:
        with self.target.use(), interrupts_deferred():
            self._snapshots.clear()
            self._position, self._extended = 0, None
            self.executor.reset()
            if self._observer:
                self._observer.reset()

    def verify(self) -> None:
        """Raise `UserError` unless every slot holds the bytes of its expert."""
        with self.target.use():
            self.executor.verify()

    def stats(self) -> EngineStats:
        with self.target.use():
            counters = self.executor.counters
        return engine_stats(
            counters,
            tokens=self._tokens,
            seconds=self._seconds,
            expert_bytes=self.expert_bytes,
            timed=self.target.executor != "device",
            vram_bytes=self.target.held if self.target.is_gpu else self.need.device(self.capacity),
        )

    def close(self) -> None:
        self._snapshots.clear()
        self._extended = None
        self.target.release()
        with self.target.use():
            if self._executor is not None:
                self._executor.close()
                self._executor = None
            if self._weights is not None:
                self._weights.close()
                self._weights = None
        self.target.release()
        self._words.close()

    def __enter__(self) -> "OffloadEngine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _check(dtype: str, chunk: int | None, n_ctx: int | None) -> None:
    if dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if chunk is not None and not 1 <= chunk <= MAX_CHUNK:
        raise UserError(f"a chunk of {chunk} tokens: expected 1 to {MAX_CHUNK}")
    if n_ctx is not None and not 1 <= n_ctx <= 1 << 20:
        raise UserError(f"a context of {n_ctx} tokens: expected 1 to {1 << 20}")
