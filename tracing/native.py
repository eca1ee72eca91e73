"""Traces written by `llama-moe-trace`, the optional native tracer: read, checked, and saved as trace files.

Format and tool: patches/README.md. Run as `python -m edgemoe.tracing.native IN.moetrace OUT.npz`.
"""

import json
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np

from edgemoe.errors import UserError
from edgemoe.tracing.selfcheck import failures
from edgemoe.tracing.tracefile import Trace, save_trace

MAGIC = b"MOETRACE"
VERSION = 1
END = 0xFFFFFFFF  # in place of a window number: the trace is complete
_TEXTS = ("model", "text", "architecture", "llama_cpp")
_SETTINGS = ("n_ctx", "n_ubatch", "n_threads", "n_gpu_layers", "decode")
_PAIR = struct.Struct("<II")


def read_native(path: str | Path) -> Trace:
    """The trace in a file of `llama-moe-trace`.

    A file without its end record (the run was interrupted, or killed in the middle of a record) gives the whole
    records before, and `meta["partial"]` is true. Raises `UserError` for a missing file, another format or version,
    no whole record, contents that contradict the header, or routing that fails the self-check of every trace.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    empty = f"{path}: holds no tokens: the run ended before its first batch; remove it and trace again"
    if not data:
        raise UserError(empty)
    header, start = _header(path, data)
    top_k = header["top_k"]
    spans, complete = _records(path, data, start, sum(top_k))
    if not spans:
        raise UserError(empty)
    n_tokens = sum(count for _, count, _ in spans)
    experts = np.full((len(top_k), n_tokens, max(top_k)), -1, dtype=np.int16)
    tokens = np.empty(n_tokens, dtype=np.int32)
    windows: list[int] = []
    done = 0
    for window, count, offset in spans:
        if window == len(windows):
            windows.append(done)
        elif window != len(windows) - 1:
            raise UserError(f"{path}: damaged: window {window} follows window {len(windows) - 1}; trace again")
        tokens[done : done + count] = np.frombuffer(data, "<i4", count, offset)
        offset += 4 * count
        for layer, k in enumerate(top_k):
            block = np.frombuffer(data, "<i2", count * k, offset).reshape(count, k)
            experts[layer, done : done + count, :k] = block
            offset += block.nbytes
        done += count
    wrong = failures(experts, header["num_experts"], np.array(windows), header["layers"], tokens)
    if wrong:
        raise UserError(f"{path}: not a router's trace: {wrong[0]}; trace again")
    domain = Path(header["text"]).stem
    return Trace(
        experts=experts,
        n_experts=header["num_experts"],
        layers=np.array(header["layers"], dtype=np.int32),
        windows=np.array(windows, dtype=np.int64),
        domains=(domain,) * len(windows),
        name=path.name.removesuffix(".moetrace"),
        tokens=tokens,
        meta=_meta(header, domain, n_tokens, len(windows), partial=not complete),
    )


def convert_native(path: str | Path, out: str | Path) -> Trace:
    """Save a file of `llama-moe-trace` as the trace file `out` and return the trace; `UserError`s as `read_native`,
    and for an output that exists or cannot be written."""
    out = Path(out)
    if out.exists():
        raise UserError(f"{out} exists: remove it or choose another output")
    trace = read_native(path)
    try:
        save_trace(trace, out)
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror})") from None
    return trace


def _header(path: Path, data: bytes) -> tuple[dict[str, Any], int]:
    """The JSON header, and where the records start."""
    if not data.startswith(MAGIC) or len(data) < len(MAGIC) + _PAIR.size:
        raise UserError(f"{path}: not a trace of llama-moe-trace: it does not start with {MAGIC.decode()}")
    version, size = _PAIR.unpack_from(data, len(MAGIC))
    if version != VERSION:
        raise UserError(f"{path}: format version {version}, expected {VERSION}: trace again with patches/build's tool")
    start = len(MAGIC) + _PAIR.size
    try:
        header = json.loads(data[start : start + size].decode("utf-8", "replace"))
        sound = _is_sound(header)
    except (ValueError, KeyError, TypeError):
        sound = False
    if not sound:
        raise UserError(f"{path}: its header is damaged: trace again")
    return header, start + size


def _is_sound(header: Any) -> bool:
    """Whether the header has every member, of a type and size that the records can be read by."""
    top_k, layers, n_experts = header["top_k"], header["layers"], header["num_experts"]
    numbers = [n_experts, *top_k, *layers, *([] if header["bos"] is None else [header["bos"]])]
    return (
        all(type(number) is int for number in numbers)
        and len(top_k) == len(layers) > 0
        and all(0 < k <= n_experts for k in top_k)
        and all(isinstance(header[name], str) for name in _TEXTS)
        and all(name in header for name in _SETTINGS)
    )


def _records(path: Path, data: bytes, at: int, slots: int) -> tuple[list[tuple[int, int, int]], bool]:
    """(window, tokens, offset of the token ids) of each whole record, and whether the end record is there."""
    spans: list[tuple[int, int, int]] = []
    while at + _PAIR.size <= len(data):
        window, count = _PAIR.unpack_from(data, at)
        at += _PAIR.size
        if window == END:
            if count != sum(tokens for _, tokens, _ in spans) or at != len(data):
                raise UserError(f"{path}: damaged: its end record does not fit what comes before; trace again")
            return spans, True
        size = count * (4 + 2 * slots)
        if at + size > len(data):
            break
        spans.append((window, count, at))
        at += size
    return spans, False


def _meta(header: dict[str, Any], domain: str, n_tokens: int, n_windows: int, partial: bool) -> dict[str, Any]:
    """What `edgemoe trace` would say of the same run, as far as the native tool knows it."""
    in_text = n_tokens - (n_windows if header["bos"] is not None else 0)
    return {
        "model": Path(header["model"]).name.removesuffix(".gguf"),
        "top_k": max(header["top_k"]),
        "k": max(header["top_k"]),
        "num_experts": header["num_experts"],
        "num_tokens": n_tokens,
        "n_moe_layers": len(header["layers"]),
        "source": "llama-moe-trace (llama.cpp eval callback, weights untouched)",
        "layer_top_k": header["top_k"],
        "model_file": Path(header["model"]).name,
        "architecture": header["architecture"],
        "llama_cpp": {"llama_version": header["llama_cpp"]},
        "texts": [{"domain": domain, "file": Path(header["text"]).name, "tokens": in_text}],
        "bos": header["bos"],
        "settings": {name: header[name] for name in _SETTINGS},
        "partial": partial,
        "self_check": "passed",
    }


def main(arguments: list[str] | None = None) -> int:
    """`python -m edgemoe.tracing.native IN OUT`: 0, or 2 after one line on stderr."""
    paths = sys.argv[1:] if arguments is None else arguments
    try:
        if len(paths) != 2:
            raise UserError("usage: python -m edgemoe.tracing.native IN.moetrace OUT.npz")
        trace = convert_native(*paths)
    except UserError as error:
        print(f"edgemoe: {error}", file=sys.stderr)  # noqa: T201
        return 2
    note = "; partial: the run was interrupted" if trace.meta["partial"] else ""
    print(f"{paths[1]}: {trace.n_tokens} tokens, {trace.n_layers} layers, {trace.n_experts} experts{note}")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
