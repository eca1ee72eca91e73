"""A plain Python eval callback that shares nothing with the native one: ggml's accessors, one row at a time."""

import ctypes
from pathlib import Path
from typing import Any

import numpy as np

from edgemoe.llamacpp.libraries import ggml_base, llama


def reference_rows(
    path: Path, tokens: np.ndarray, n_experts: int, wanted: dict[str, int], n_ubatch: int = 512
) -> dict[str, np.ndarray]:
    """Rows of each node `stem-layer` in `wanted` (its elements per token) over one decode, [T, elements].

    `topk` rows are read at strides of a whole argsort row, E·4 bytes, everything else at its own width. The flat read
    of the paper's false start is returned too, as `flat:<name>`.
    """
    lib: Any = llama()
    base = ctypes.CDLL(ggml_base()._name)
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    base.ggml_get_name.restype, base.ggml_get_name.argtypes = ctypes.c_char_p, [pointer]
    base.ggml_get_data.restype, base.ggml_get_data.argtypes = pointer, [pointer]
    base.ggml_nelements.restype, base.ggml_nelements.argtypes = ctypes.c_int64, [pointer]
    base.ggml_backend_tensor_get.restype, base.ggml_backend_tensor_get.argtypes = None, [pointer, pointer, size, size]
    rows: dict[str, list[np.ndarray]] = {}

    def on_node(tensor: int, ask: bool, _: object) -> bool:
        name = base.ggml_get_name(tensor).decode()
        if ask or name not in wanted:
            return name in wanted
        kind = np.int32 if "topk" in name else np.float32
        stride = (n_experts if "topk" in name else wanted[name]) * 4
        count = base.ggml_nelements(tensor) // wanted[name]
        for row in range(count):
            values = np.zeros(wanted[name], kind)
            base.ggml_backend_tensor_get(tensor, values.ctypes.data, row * stride, values.nbytes)
            rows.setdefault(name, []).append(values)
        flat = (ctypes.c_int32 * (count * wanted[name])).from_address(base.ggml_get_data(tensor))
        rows.setdefault(f"flat:{name}", []).extend(np.array(flat).reshape(count, -1))
        return True

    callback = lib.ggml_backend_sched_eval_callback(on_node)
    model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
    params = lib.llama_context_default_params()
    params.n_ctx = params.n_batch = 512
    params.n_ubatch = n_ubatch
    params.n_threads = params.n_threads_batch = 1
    params.cb_eval = callback
    context = lib.llama_init_from_model(model, params)
    batch = lib.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, 1
        batch.seq_id[i][0] = 0
    assert lib.llama_decode(context, batch) == 0
    lib.llama_batch_free(batch)
    lib.llama_free(context)
    lib.llama_model_free(model)
    return {name: np.stack(values) for name, values in rows.items()}
