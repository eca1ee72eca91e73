"""The engine that keeps the whole model in RAM: plain llama.cpp, and what streaming engines are compared with."""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np

from edgemoe.errors import UserError
from edgemoe.generation.engine import EngineStats, Observer
from edgemoe.llamacpp.brake import brake_address
from edgemoe.llamacpp.routing_rows import RoutingRows
from edgemoe.llamacpp.session import Session
from edgemoe.llamacpp.vocabulary import Speaker, Vocabulary
from edgemoe.progress import Advance, no_progress

KvType = Literal["f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]
# enum ggml_type. Not f32: with flash attention llama.cpp rounds it to f16 before use.
KV_TYPES: dict[str, int] = {
    "f16": 1,
    "bf16": 30,
    "q8_0": 8,
    "q5_1": 7,
    "q5_0": 6,
    "q4_1": 3,
    "q4_0": 2,
    "iq4_nl": 20,
}
LOAD_STEPS = 1000  # what `advance` counts in all while a model loads
DEFAULT_CTX = 4096


class ResidentEngine(Speaker):
    """An `edgemoe.generation.engine.Engine` on stock llama.cpp.

    `n_ctx` defaults to 4096, or to what the model was trained for where that is less. `all_rows` computes the logits of
    every token of a prompt, which changes the last bits of them; `repack` lets llama.cpp rearrange weights for speed:
    without it, and with the same rows and ubatches, a streaming engine gives the same bits. An `observer` is told what
    the routers choose, and has all rows computed. Raises `UserError` for a model that does not load and a context that
    does not fit.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        n_ctx: int | None = None,
        n_ubatch: int | None = None,
        n_threads: int | None = None,
        n_gpu_layers: int = 0,
        kv_type: KvType = "f16",
        all_rows: bool = False,
        repack: bool = True,
        observer: Observer | None = None,
        advance: Advance = no_progress,
    ) -> None:
        if kv_type not in KV_TYPES:
            raise UserError(f"KV type {kv_type!r} is not one of {', '.join(KV_TYPES)}")
        self._observer = observer
        self._routing = RoutingRows() if observer else None
        self._session = _Interruptible(
            path,
            n_ctx=n_ctx,
            n_ubatch=n_ubatch,
            n_threads=n_threads,
            n_gpu_layers=n_gpu_layers,
            kv_type=kv_type,
            all_rows=all_rows or observer is not None,
            repack=repack,
            advance=advance,
            hub=self._routing,
        )
        if self._routing:
            try:
                self._routing.find(self._session)
            except BaseException:
                self._session.close()
                raise
        self._vocabulary = Vocabulary(self._session.model)
        self._position = self._tokens = 0
        self._seconds = 0.0

    @property
    def description(self) -> str:
        return self._session.description

    @property
    def n_ctx(self) -> int:
        return self._session.n_ctx

    @property
    def position(self) -> int:
        return self._position

    def prefill(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        count = len(tokens)
        if self._position + count > self.n_ctx:
            held = f" after {self._position:,}" if self._position else ""
            raise UserError(f"{count:,} tokens{held} do not fit into a context of {self.n_ctx:,}: give a larger one")
        start = time.perf_counter()
        try:
            for at in range(0, count, self._session.n_batch):
                chunk = tokens[at : at + self._session.n_batch]
                self._decode(np.asarray(chunk, np.int32))
            return self._session.last_logits()
        except BaseException:
            self._position = self._session.forget(self._position)
            raise
        finally:
            self._seconds += time.perf_counter() - start

    def _decode(self, tokens: np.ndarray) -> None:
        with self._routing.capture() if self._routing else nullcontext():
            self._session.decode(tokens, self._position)
        self._position += len(tokens)
        self._tokens += len(tokens)
        if self._observer and self._routing:
            self._observer.decoded(tokens, self._routing.of(len(tokens)))

    def decode(self, token: int) -> np.ndarray:
        return self.prefill([token])

    def rewind(self, position: int) -> int:
        assert 0 <= position <= self._position
        if position < self._position:
            self._position = self._session.forget(position)
        return self._position

    def reset(self) -> None:
        self._session.clear()
        self._position = 0
        if self._observer:
            self._observer.reset()

    def stats(self) -> EngineStats:
        import psutil

        held = psutil.Process().memory_info().rss
        return EngineStats(tokens=self._tokens, seconds=self._seconds, compute_s=self._seconds, ram_bytes=held)

    def close(self) -> None:
        self._session.close()

    def __enter__(self) -> "ResidentEngine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Interruptible(Session):
    """A session whose running graph Ctrl-C stops, and that asks for few logits."""

    def __init__(
        self,
        path: str | Path,
        *,
        n_ctx: int | None,
        kv_type: str,
        all_rows: bool,
        repack: bool,
        advance: Advance,
        **more: Any,
    ) -> None:
        self._kv_type, self._all_rows, self._repack, self._advance = KV_TYPES[kv_type], all_rows, repack, advance
        self._brake = np.zeros(1, np.uint8)
        self._default_ctx = n_ctx is None
        super().__init__(path, n_ctx=n_ctx or DEFAULT_CTX, **more)

    def _loading(self, progress: float) -> bool:
        self._advance(int(progress * LOAD_STEPS) - int(self.loaded * LOAD_STEPS))
        return super()._loading(progress)

    def _model_params(self, n_gpu_layers: int) -> Any:
        params = super()._model_params(n_gpu_layers)
        params.use_extra_bufts = self._repack
        return params

    def _context_params(self) -> Any:
        if self._default_ctx:
            self.n_ctx = min(self.n_ctx, self._lib.llama_model_n_ctx_train(self._model) or self.n_ctx)
            self.n_batch = min(self.n_batch, self.n_ctx)
            self.n_ubatch = min(self.n_ubatch, self.n_batch)
        params = super()._context_params()
        params.type_k = params.type_v = self._kv_type
        params.abort_callback = self._lib.ggml_abort_callback(brake_address())
        params.abort_callback_data = self._brake.ctypes.data
        return params

    def _fill(self, tokens: np.ndarray, *where: np.ndarray) -> None:
        super()._fill(tokens, *where)
        if not self._all_rows:
            for i in range(len(tokens) - 1):
                self._batch.logits[i] = 0

    def _wait(self) -> None:
        self._brake[0] = self._interrupted
        super()._wait()
        self._brake[0] = 0
