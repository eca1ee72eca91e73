"""Does tracing read what this llama.cpp computes? `python -m edgemoe.doctor.selftest` is silent and exits 0 if so.

A process of its own, because a library whose structs lie elsewhere may crash instead of answering. Tiny random models
are traced through the real callback with their scores; every token's experts must be the top-k of its scores, in rank
order, in each way that llama.cpp ranks them: by logits, by sigmoids with a selection bias, and by logits with a bias.
"""

import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from edgemoe.errors import UserError
from edgemoe.llamacpp.layout import verify_layout
from edgemoe.model.synthetic import write_synthetic
from edgemoe.progress import no_progress
from edgemoe.tracing.capture import Settings, capture
from edgemoe.tracing.texts import Source
from edgemoe.tracing.tracefile import load_trace

N_TOKENS = 96
MODELS: list[dict[str, Any]] = [
    {"arch": "olmoe", "n_layers": 3},
    # llama.cpp's fastest products take quantised weights alone.
    {"arch": "olmoe", "n_layers": 2, "dense_type": "Q8_0", "expert_type": "Q8_0", "d_expert": 64},
    {"arch": "deepseek2", "n_layers": 3, "leading_dense": 1, "n_experts": 24, "top_k": 3},
    {"arch": "gpt-oss", "n_layers": 2, "n_kv_heads": 2},
]


def selftest() -> None:
    """Raise `UserError` with the first thing that is wrong."""
    verify_layout()
    for shape in MODELS:
        with tempfile.TemporaryDirectory(prefix="edgemoe-selftest-") as directory:
            _trace_one(Path(directory), shape)


def _trace_one(directory: Path, shape: dict[str, Any]) -> None:
    [model] = write_synthetic(directory / f"{shape['arch']}.gguf", **shape)
    text, out = directory / "text.txt", directory / "trace.npz"
    text.write_bytes(np.random.default_rng(0).integers(ord("!"), ord("~"), 4 * N_TOKENS, dtype=np.uint8).tobytes())
    settings = Settings(n_ctx=32, max_tokens=N_TOKENS, scores=True, n_threads=1)
    report = capture(model, [Source("text", text)], out, settings, watch=lambda _: nullcontext(no_progress))
    if report.failures:
        raise UserError(f"a trace of a tiny {shape['arch']} model fails its checks: {report.failures[0]}")
    trace = load_trace(out)
    first_moe = shape.get("leading_dense", 0)
    if list(trace.layers) != list(range(first_moe, shape["n_layers"])) or trace.scores is None:
        raise UserError(f"a trace of a tiny {shape['arch']} model has layers {list(trace.layers)}")
    ranked = np.argsort(-trace.scores, axis=2, kind="stable")[:, :, : trace.top_k]
    wrong = int((ranked != trace.experts).any(axis=2).sum())
    if wrong:
        raise UserError(
            f"in {wrong} of {ranked.shape[0] * ranked.shape[1]} rows the experts are not the top-k of the scores"
        )


def main() -> int:
    try:
        selftest()
    except UserError as error:
        sys.stdout.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
