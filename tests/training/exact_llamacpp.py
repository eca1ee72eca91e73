"""llama.cpp with nothing rounded on the way: F32 KV cache, no flash attention, and its routing beside its logits."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from edgemoe.llamacpp.graph import find_routers
from edgemoe.llamacpp.hub import Hub, Tap
from edgemoe.llamacpp.libraries import llama


def exact_runs(
    path: Path, windows: Sequence[Sequence[int]], n_threads: int = 1
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Logits [T, V] and chosen experts [L, T, k] of each window, decoded at once from an empty cache."""
    longest = max(len(window) for window in windows)
    hub = Hub()
    with _context(path, longest, n_threads, hub) as (lib, model, context):
        n_vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
        with hub.survey():
            _decode(lib, context, windows[0])
        routers = find_routers(hub.nodes())
        hub.install([Tap(routers[layer].topk) for layer in sorted(routers)], longest)
        for window in windows:
            lib.llama_memory_clear(lib.llama_get_memory(context), True)
            with hub.capture():
                _decode(lib, context, window)
            logits = np.ctypeslib.as_array(lib.llama_get_logits(context), (len(window), n_vocab)).copy()
            yield logits, np.stack([hub.rows(tap) for tap in range(len(routers))])


@contextmanager
def _context(path: Path, n_ctx: int, n_threads: int, hub: Hub) -> Iterator[tuple[Any, Any, Any]]:
    lib: Any = llama()
    model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
    params = lib.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = n_ctx
    params.n_threads = params.n_threads_batch = n_threads
    params.type_k = params.type_v = lib.GGML_TYPE_F32
    params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cb_eval = lib.ggml_backend_sched_eval_callback(hub.callback)
    params.cb_eval_user_data = hub.state.ctypes.data
    context = lib.llama_init_from_model(model, params)
    try:
        yield lib, model, context
    finally:
        lib.llama_free(context)
        lib.llama_model_free(model)


def _decode(lib: Any, context: Any, tokens: Sequence[int]) -> None:
    batch = lib.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):  # the last layer computes only the rows whose logits are asked for
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, 1
        batch.seq_id[i][0] = 0
    status = lib.llama_decode(context, batch)
    lib.llama_batch_free(batch)
    assert status == 0
