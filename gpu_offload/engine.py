"""`OffloadEngine`: the RAM→VRAM tier as an engine that generation can drive.

engine = OffloadEngine("model.gguf", residency=Residency.parse("50%"), policy=preset("psr-gated"))
logits = engine.prefill(engine.tokenize(b"Once upon a time"))
logits = engine.decode(int(logits.argmax()))
"""

import hashlib
import json
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from edgemoe.errors import UserError
from edgemoe.generation.engine import EngineStats, Observer
from edgemoe.generation.options import Options
from edgemoe.gpu_offload.cpu import CpuExecutor
from edgemoe.gpu_offload.decisions import Decisions
from edgemoe.gpu_offload.executor import Executor, Snapshot
from edgemoe.gpu_offload.hub import resolve
from edgemoe.gpu_offload.memory import Need, choose_slots, need
from edgemoe.gpu_offload.shape import Shape, read_shape
from edgemoe.gpu_offload.vocabulary import open_vocabulary
from edgemoe.gpu_offload.weights import DTYPES, THREADS, Weights, load_weights
from edgemoe.llamacpp.vocabulary import Speaker, Vocabulary
from edgemoe.machine.memory import ram
from edgemoe.model import Model, read_model
from edgemoe.policy import LogicalCache, Policy
from edgemoe.progress import Advance, no_progress
from edgemoe.units import Residency

if TYPE_CHECKING:
    from edgemoe.calibration import Calibration

DEFAULT_CTX = 4096
DEFAULT_CHUNK = 128
MAX_CHUNK = 512
DEVICES = ("cpu", "cuda")
OBSERVED = ("executed", "scores", "pregate")  # what an observer is told of each token
_SNAPSHOTS = 512  # the oldest go: a rewind before them starts anew


class OffloadEngine(Speaker):
    """An `edgemoe.generation.engine.Engine` that holds C experts per layer on its device and all of them in RAM.

    model: a GGUF file, a safetensors folder, or a name on the Hugging Face hub, of OLMoE's architecture. residency or
    vram (bytes on the device) choose C; with neither, as many as fit. calibration: warm set, bonus scale and token
    prior of this model; without it the warm set is experts 0 … C − 1, the scale a running mean, and there is no prior.
    chunk: tokens of a prompt that go through a layer together. dtype: how weights and KV cache are stored. record: keep
    each step's decisions (`records`), in memory; observer: tell it of each instead. verify_slots: after each step
    compare every slot with the expert that it should hold. `advance` is told of the bytes that loading reads:
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
        policy: Policy | None = None,
        residency: Residency | None = None,
        vram: int | None = None,
        calibration: "Calibration | None" = None,
        n_ctx: int | None = None,
        n_threads: int | None = None,
        chunk: int = DEFAULT_CHUNK,
        dtype: str = "bfloat16",
        record: bool = False,
        observer: Observer | None = None,
        verify_slots: bool = False,
        advance: Advance = no_progress,
    ) -> None:
        _check(device, dtype, chunk, n_ctx)
        self.device, self.dtype = device, dtype
        self.model: Model = read_model(resolve(model))
        self.shape: Shape = read_shape(self.model)
        self._calibration = _fitting(calibration, self.model)
        self.policy = policy = (policy or Policy()).completed(calibration is not None)
        self._n_ctx = n_ctx or min(DEFAULT_CTX, self.shape.n_ctx or DEFAULT_CTX)
        self.chunk = min(chunk, self._n_ctx)
        self.n_threads = n_threads or torch.get_num_threads()
        self._record, self._observer, self._verify = record, observer, verify_slots
        self.records: list[dict[str, np.ndarray]] = []
        self._position = self._tokens = 0
        self._seconds = 0.0
        self._snapshots: dict[int, Snapshot] = {}
        self._weights: Weights | None = None
        self._executor: Executor | None = None
        self.need: Need = self._need()
        self.capacity = self._choose_slots(residency, vram)
        self._words = open_vocabulary(self.model)
        self._vocabulary = cast(Vocabulary, self._words)
        try:
            self._load(advance)
        except BaseException:
            self.close()
            raise

    def _need(self) -> Need:
        known = self._calibration if self.policy.uses_prior else None
        return need(
            self.shape,
            itemsize=DTYPES[self.dtype].itemsize,
            n_ctx=self._n_ctx,
            chunk=self.chunk,
            prior_bytes=known.prior.nbytes if known else 0,
            threads=THREADS,
        )

    def _choose_slots(self, residency: Residency | None, vram: int | None) -> int:
        free = ram().available
        return choose_slots(
            str(self.model.path),
            self.shape,
            self.policy,
            self.need,
            residency=residency,
            vram=vram,
            device_free=free,
            host_free=free,
            shared=True,
        )

    def _load(self, advance: Advance) -> None:
        known, shape = self._calibration, self.shape
        torch.set_num_threads(self.n_threads)
        start = time.perf_counter()
        self._weights = load_weights(
            self.model, shape, dtype=DTYPES[self.dtype], device=self.device, threads=THREADS, advance=advance
        )
        cache = LogicalCache(
            self.policy,
            n_layers=shape.n_layers,
            n_experts=shape.n_experts,
            top_k=shape.top_k,
            capacity=self.capacity,
            delta=known.delta if known else None,
            warm=known.warm if known else None,
        )
        decisions = Decisions(cache, self.chunk, known if self.policy.uses_prior else None)
        self.has_pregate = decisions.has_pregate
        """[L]: whether a layer's pre-gate decides anything under this policy."""
        self._executor = CpuExecutor(self._weights, decisions, n_ctx=self._n_ctx)
        self.load_seconds = time.perf_counter() - start

    @property
    def executor(self) -> Executor:
        assert self._executor is not None, "the engine is closed"
        return self._executor

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
            "model": _fingerprint(self.model),
            "policy": self.policy.hash,
            "slots": self.capacity,
            "executor": self.executor.name,
            "torch": torch.__version__,
            "dtype": self.dtype,
            "chunk": self.chunk,
            "threads": self.n_threads,
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
        self._check_room(len(tokens))
        found: list[np.ndarray] = []
        for at in range(0, len(tokens), self.chunk):
            self._remember()
            part = np.asarray(tokens[at : at + self.chunk], np.int32)
            logits = self._advance(part, all_rows)
            found = [*found, logits] if all_rows else [logits]
        return found

    def decode(self, token: int) -> np.ndarray:
        self._check_room(1)
        return self._advance(np.array([token], np.int32), all_rows=False)

    def extend(self, token: int, count: int, options: Options | None = None) -> list[int]:
        """Append `token`, let the device choose what follows, append that, and so on: the `count` tokens chosen, fewer
        at the end of the text. The last one is not appended. Its draws are not those of `edgemoe.generation`: they come
        from the seed and the position alone. Keeps no records."""
        options = options or Options(temperature=0.0)
        self._check_room(count)
        ends = frozenset() if options.ignore_eos else self.eos_tokens
        start, before = time.perf_counter(), self.executor.snapshot()
        try:
            chosen = list(self.executor.extend(token, self._position, count, options, ends))
        except BaseException:
            self.executor.restore(before)
            raise
        finally:
            self._seconds += time.perf_counter() - start
        self._position += len(chosen)
        self._tokens += len(chosen)
        if self._verify:
            self.executor.verify()
        return chosen

    def _check_room(self, count: int) -> None:
        if self._position + count > self.n_ctx:
            held = f" after {self._position:,}" if self._position else ""
            raise UserError(f"{count:,} tokens{held} do not fit into a context of {self.n_ctx:,}: give a larger one")

    def _advance(self, tokens: np.ndarray, all_rows: bool) -> np.ndarray:
        """A step: all of it, or nothing of it happened."""
        if tokens.min() < 0 or tokens.max() >= self.n_vocab:
            raise UserError(f"token {tokens.max()} is not one of the model's {self.n_vocab:,}: another tokenizer's?")
        executor, start = self.executor, time.perf_counter()
        before = executor.snapshot()
        try:
            logits = executor.step(tokens, self._position, all_rows=all_rows)
        except BaseException:
            executor.restore(before)
            raise
        finally:
            self._seconds += time.perf_counter() - start
        if self._record or self._observer:
            self._tell(tokens)
        self._position += len(tokens)
        self._tokens += len(tokens)
        if self._verify:
            executor.verify()
        return logits

    def _tell(self, tokens: np.ndarray) -> None:
        told = self.executor.record(len(tokens))
        if self._record:
            self.records.append({"tokens": tokens.copy(), **told})
        if self._observer:
            self._observer.decoded(tokens.copy(), {name: told[name] for name in OBSERVED if name in told})

    def _remember(self) -> None:
        """Keep the logical cache of this position, where a chunk begins: a rewind starts from such a place."""
        self._snapshots[self._position] = self.executor.snapshot()
        if len(self._snapshots) > _SNAPSHOTS:
            del self._snapshots[min(self._snapshots)]

    def rewind(self, position: int) -> int:
        """Forget the tokens from `position` on, and what the logical cache learnt from them.

        The new position is where a chunk of a prompt began, at or before `position`: from there the same tokens, in the
        same chunks, make the same decisions and the same text again.
        """
        assert 0 <= position <= self._position
        if position == self._position:
            return position
        self._position = max((at for at in self._snapshots if at <= position), default=0)
        if not self._position:
            self.reset()
            return 0
        self.executor.restore(self._snapshots[self._position])
        self._snapshots = {at: kept for at, kept in self._snapshots.items() if at <= self._position}
        return self._position

    def reset(self) -> None:
        self._snapshots.clear()
        self._position = 0
        self.executor.reset()
        if self._observer:
            self._observer.reset()

    def verify(self) -> None:
        """Raise `UserError` unless every slot holds the bytes of its expert."""
        self.executor.verify()

    def stats(self) -> EngineStats:
        import psutil

        c, size = self.executor.counters, self.shape.expert_values * DTYPES[self.dtype].itemsize
        return EngineStats(
            tokens=self._tokens,
            seconds=self._seconds,
            compute_s=max(self._seconds - c.wait_s - c.policy_s, 0.0),
            demand_wait_s=c.wait_s,
            policy_s=c.policy_s,
            loads=c.loads,
            hits=c.loads - c.misses,
            demand_reads=c.demand,
            demand_bytes=c.demand * size,
            prefetch_reads=c.prefetch,
            prefetch_bytes=c.prefetch * size,
            prefetch_in_time=c.in_time,
            prefetch_late=c.late,
            prefetch_unused=c.unused,
            ram_bytes=psutil.Process().memory_info().rss,
        )

    def close(self) -> None:
        if self._executor is not None:
            self._executor.close()
            self._executor = None
        if self._weights is not None:
            self._weights.close()
            self._weights = None
        self._snapshots.clear()
        self._words.close()

    def __enter__(self) -> "OffloadEngine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _check(device: str, dtype: str, chunk: int, n_ctx: int | None) -> None:
    if device not in DEVICES:
        raise UserError(f"device {device!r} is not one of {', '.join(DEVICES)}")
    if dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if not 1 <= chunk <= MAX_CHUNK:
        raise UserError(f"a chunk of {chunk} tokens: expected 1 to {MAX_CHUNK}")
    if n_ctx is not None and not 1 <= n_ctx <= 1 << 20:
        raise UserError(f"a context of {n_ctx} tokens: expected 1 to {1 << 20}")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "no CUDA device here that torch can use: --device cpu runs the same policies in RAM, and edgemoe run "
            "without --device runs the model in llama.cpp, with --ram from disk"
        )
    if device == "cuda":
        raise UserError("this version decodes on the CPU only: give --device cpu")


def _fitting(calibration: "Calibration | None", model: Model) -> "Calibration | None":
    """A safetensors folder has no GGUF header that a calibration could name: its shape must agree at least."""
    geometry = model.geometry
    if calibration is not None and (
        tuple(calibration.layers.tolist()) != geometry.moe_layers or calibration.n_experts != geometry.n_experts
    ):
        raise UserError(
            f"a calibration of {calibration.model}, with {len(calibration.layers)} layers of {calibration.n_experts} "
            f"experts, not of this {geometry.name}: run `edgemoe calibrate` on it"
        )
    return calibration


def _fingerprint(model: Model) -> list[str]:
    """Of each file's header: names, types, shapes and places of the tensors, and the hyperparameters."""
    if model.format == "GGUF":
        from edgemoe.llamacpp.header import header_fingerprint

        return [header_fingerprint(path) for path in model.files]
    content = [(model.path / "config.json").read_bytes()]
    for path in model.files:
        with path.open("rb") as file:
            content.append(file.read(int.from_bytes(file.read(8), "little")))
    return [hashlib.sha256(part).hexdigest() for part in content]
