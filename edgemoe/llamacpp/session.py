"""A loaded model: tokenise, decode with all rows, clear, free. Quiet, interruptible, and watched by a hub."""

import ctypes
import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import numpy as np

from edgemoe.errors import UserError
from edgemoe.llamacpp.hub import Hub
from edgemoe.llamacpp.libraries import llama

MAX_BATCH = 512  # tokens per llama_decode: bounds the logits of all rows (512 × 152k × 4 bytes = 311 MB)
# llama.cpp keeps a context's size in 32 bits and wraps what is larger; no model is trained for more than this.
MAX_CTX = 1 << 20
MAX_THREADS = 512  # GGML_MAX_N_THREADS: ggml's thread pool does not look
MAX_LAYERS = 512  # LLAMA_MAX_LAYERS
MAX_SEQUENCES = 256  # LLAMA_MAX_SEQ
_LOG_ERROR, _LOG_CONTINUES = 4, 5
_complaints: deque[str] = deque(maxlen=64)


def default_threads() -> int:
    """Physical cores that this process may use."""
    import psutil

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(usable, psutil.cpu_count(logical=False) or usable))


def check_limits(n_ctx: int, n_threads: int | None) -> None:
    """Raise `UserError` for numbers that llama.cpp would answer by stopping the process."""
    if not 1 <= n_ctx <= MAX_CTX:
        raise UserError(f"a context of {n_ctx} tokens: expected 1 to {MAX_CTX}")
    if n_threads is not None and not 1 <= n_threads <= MAX_THREADS:
        raise UserError(f"{n_threads} threads: expected 1 to {MAX_THREADS}")


def check_gpu(n_gpu_layers: int) -> None:
    """Raise `UserError` for layers on a GPU where llama.cpp was built without support for any."""
    if n_gpu_layers and not llama().llama_supports_gpu_offload():
        raise UserError("this llama.cpp build has no GPU support: leave out --n-gpu-layers, or install one that has")


@functools.cache
def quiet() -> tuple[ModuleType, object]:
    """The bindings, with llama.cpp's log going to `_complaints` (errors only) instead of stderr."""
    lib = llama()
    level_before = 0

    def collect(level: int, text: bytes, _: object) -> None:
        nonlocal level_before
        level_before = level if level != _LOG_CONTINUES else level_before
        if level_before >= _LOG_ERROR:
            _complaints.append(text.decode(errors="replace"))

    callback = lib.llama_log_callback(collect)
    lib.llama_log_set(callback, ctypes.c_void_p(0))
    lib.llama_backend_init()
    return lib, callback  # the callback must outlive every log line


@functools.cache
def decoder() -> ThreadPoolExecutor:
    """The one thread that decodes, for every session.

    OpenMP keeps a team of workers per thread that starts work. Two teams are more threads than cores; their barriers
    then sleep instead of spinning, and every graph becomes slower (measured: 15% with a callback).
    """
    return ThreadPoolExecutor(1, thread_name_prefix="llama_decode")


class _Call:
    """One call on the decoding thread, which may be given up at any moment: also before it was handed over."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._function, self._arguments = function, arguments
        self._owner: dict[str, str] = {}
        self._ended = threading.Event()

    def __call__(self) -> Any:
        # setdefault is atomic: either the call begins, or whoever gave it up knows that it never will.
        if self._owner.setdefault("owner", "decoder") != "decoder":
            return None
        try:
            return self._function(*self._arguments)
        finally:
            self._ended.set()

    def give_up(self) -> None:
        """Return once the call has ended, or can no longer begin. Ctrl-C does not make this shorter."""
        while self._owner.setdefault("owner", "nobody") == "decoder" and not self._ended.is_set():
            try:
                self._ended.wait()
            except KeyboardInterrupt:
                continue


def _last_complaint() -> str:
    """The first line of what llama.cpp complained about, without the C function's name."""
    lines = [line for line in "".join(_complaints).splitlines() if line.strip()]
    _complaints.clear()
    return lines[0].split(": ", 1)[-1].strip() if lines else "llama.cpp gives no reason"


class Session:
    """One model and one context of `n_ctx` tokens, which `n_sequences` share; a context manager.

    Every row's logits are requested, because llama.cpp computes the last layer only for such rows. Raises `UserError`
    where the model does not load or the context does not fit, with llama.cpp's own first complaint.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        n_ctx: int = 512,
        n_batch: int = MAX_BATCH,
        n_ubatch: int | None = None,
        n_sequences: int = 1,
        n_gpu_layers: int = 0,
        n_threads: int | None = None,
        hub: Hub | None = None,
    ) -> None:
        check_limits(n_ctx, n_threads)
        self._lib: Any = quiet()[0]
        self.path, self.hub = Path(path), hub
        self.n_ctx, self.n_batch = n_ctx, min(n_batch, n_ctx, MAX_BATCH)
        self.n_ubatch = min(n_ubatch or self.n_batch, self.n_batch)
        self.n_sequences = n_sequences
        self.n_threads = n_threads or min(default_threads(), MAX_THREADS)
        self._model: Any = None
        self._context: Any = None
        self._batch: Any = None
        self._vocab: Any = None
        check_gpu(n_gpu_layers)
        self._running: _Call | None = None
        self._interrupted = False
        self.loaded = 0.0  # the share of the model file that is
        try:
            self._load(n_gpu_layers)
        except BaseException:
            self.close()
            raise

    def _load(self, n_gpu_layers: int) -> None:
        lib = self._lib
        _complaints.clear()
        model_params = self._model_params(n_gpu_layers)
        # Asked for every tensor: Ctrl-C need not wait for the rest of a large file.
        go_on = lib.llama_progress_callback(lambda progress, _data: self._loading(progress))
        model_params.progress_callback = go_on
        self._model = self._open(model_params)
        if not self._model:
            raise UserError(f"{self.path}: llama.cpp cannot load it ({_last_complaint()})")
        self._context = lib.llama_init_from_model(self._model, self._context_params())
        if not self._context:
            raise UserError(f"{self.path}: no room for a context of {self.n_ctx} tokens ({_last_complaint()})")
        self._batch = lib.llama_batch_init(self.n_batch, 0, 1)
        self._vocab = lib.llama_model_get_vocab(self._model)

    def _open(self, params: Any) -> Any:
        return self._call(self._lib.llama_model_load_from_file, str(self.path).encode(), params)

    def _loading(self, progress: float) -> bool:
        """Called while loading, on the decoding thread, with the share done; False ends it."""
        self.loaded = progress
        return not self._interrupted

    def _model_params(self, n_gpu_layers: int) -> Any:
        params = self._lib.llama_model_default_params()
        params.n_gpu_layers = n_gpu_layers
        return params

    def _context_params(self) -> Any:
        params = self._lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = self.n_ctx, self.n_batch, self.n_ubatch
        params.n_threads = params.n_threads_batch = self.n_threads
        params.n_seq_max = self.n_sequences
        # One cache for all: with one per sequence, llama.cpp splits a batch whose sequences are not neighbours.
        params.kv_unified = self.n_sequences > 1
        params.no_perf = True
        if self.hub is not None:
            params.cb_eval = self._lib.ggml_backend_sched_eval_callback(self.hub.callback)
            params.cb_eval_user_data = self.hub.state.ctypes.data
        return params

    @property
    def model(self) -> Any:
        """The `llama_model` pointer."""
        return self._model

    @property
    def description(self) -> str:
        buffer = ctypes.create_string_buffer(256)
        self._lib.llama_model_desc(self._model, buffer, len(buffer))
        return buffer.value.decode(errors="replace")

    @property
    def n_vocab(self) -> int:
        return int(self._lib.llama_vocab_n_tokens(self._vocab))

    @property
    def bos(self) -> int | None:
        """The token that a text starts with, where the model wants one."""
        return int(self._lib.llama_vocab_bos(self._vocab)) if self._lib.llama_vocab_get_add_bos(self._vocab) else None

    def tokenize(self, text: bytes) -> np.ndarray:
        """Token ids of plain text, [T] int32: no BOS, and no special tokens parsed out of the text."""
        tokens = np.empty(len(text) + 16, np.int32)
        pointer = tokens.ctypes.data_as(ctypes.POINTER(self._lib.llama_token))
        count = self._lib.llama_tokenize(self._vocab, text, len(text), pointer, len(tokens), False, False)
        if count < 0:
            raise UserError(f"{self.path}: its tokenizer fails on a text of {len(text)} bytes ({_last_complaint()})")
        return tokens[:count].copy()

    def decode(
        self,
        tokens: Sequence[int] | np.ndarray,
        position: int = 0,
        *,
        positions: np.ndarray | None = None,
        sequences: np.ndarray | None = None,
    ) -> None:
        """Run at most `n_batch` tokens from `position` on, in ubatches of `n_ubatch` (one graph each).

        For several sequences, `positions` [T] and `sequences` [T] say where each token goes.

        The work is done on another thread, so that Ctrl-C arrives: it stops the graph at its next node, and is raised
        here after llama.cpp returned. The memory of those tokens is then void: `clear` before going on.
        """
        if positions is None:
            positions = np.arange(position, position + len(tokens))
        if sequences is None:
            sequences = np.zeros(len(tokens), np.int32)
        assert 0 < len(tokens) <= self.n_batch and positions.max() < self.n_ctx
        self._fill(np.asarray(tokens, np.int32), positions, sequences)
        status = self._call(self._lib.llama_decode, self._context, self._batch)
        if status != 0:
            raise UserError(f"{self.path}: llama.cpp fails to decode (status {status}: {_last_complaint()})")

    def _call(self, function: Any, *arguments: Any) -> Any:
        """Call llama.cpp on the decoding thread; an exception meanwhile (Ctrl-C) stops it, then is raised here."""
        call = self._running = _Call(function, arguments)
        try:
            return decoder().submit(call).result()
        except BaseException:
            self._interrupted = True
            if self.hub is not None:
                self.hub.stop()
            self._wait()
            if self.hub is not None:
                self.hub.go_on()
            self._interrupted = False
            raise

    def _wait(self) -> None:
        """Until llama.cpp has let go of this context: freeing it earlier would crash."""
        if self._running is not None:
            self._running.give_up()

    def _fill(self, tokens: np.ndarray, positions: np.ndarray, sequences: np.ndarray) -> None:
        batch, count = self._batch, len(tokens)
        batch.n_tokens = count
        for i in range(count):
            batch.token[i] = tokens[i]
            batch.pos[i] = positions[i]
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequences[i]
            batch.logits[i] = 1

    def logits(self, count: int) -> np.ndarray:
        """The logits of the last decode's `count` rows, [count, n_vocab] float32 (a copy)."""
        pointer = self._lib.llama_get_logits(self._context)
        return np.ctypeslib.as_array(pointer, (count, self.n_vocab)).copy()

    def last_logits(self) -> np.ndarray:
        """The logits after the last decoded token, [n_vocab] float32 (a copy)."""
        return self.row_logits(-1)

    def row_logits(self, row: int) -> np.ndarray:
        """The logits of one row of the last decode, −1 for the last, [n_vocab] float32 (a copy)."""
        pointer = self._lib.llama_get_logits_ith(self._context, row)
        return np.ctypeslib.as_array(pointer, (self.n_vocab,)).copy()

    def forget(self, position: int, sequence: int = 0) -> int:
        """Drop a sequence's tokens from `position` on; the new position: 0 where only all of it can be dropped."""
        memory = self._lib.llama_get_memory(self._context)
        if self._lib.llama_memory_seq_rm(memory, sequence, position, -1):
            return position
        self._lib.llama_memory_seq_rm(memory, sequence, -1, -1)
        return 0

    def clear(self) -> None:
        """Forget every token."""
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)

    def close(self) -> None:
        """Free everything; may be called again. A decode that an exception left running is waited for."""
        self._wait()
        if self._batch is not None:
            self._lib.llama_batch_free(self._batch)
        if self._context:
            self._lib.llama_free(self._context)
        if self._model:
            self._lib.llama_model_free(self._model)
        self._batch = self._context = self._model = None

    def __enter__(self) -> "Session":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
