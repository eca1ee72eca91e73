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
from edgemoe.tracing.tracefile import Trace, save_trace

MAGIC = b"MOETRACE"
VERSION = 1
END = 0xFFFFFFFF  # in place of a window number: the trace is complete
_PAIR = struct.Struct("<II")


def read_native(path: str | Path) -> Trace:
    """The trace in a file of `llama-moe-trace`.

    A file without its end record (the run was interrupted, or killed in the middle of a record) gives the whole
    records before, and `meta["partial"]` is true. Raises `UserError` for a missing file, another format or version,
    no whole record, or contents that contradict the header.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    header, start = _header(path, data)
    top_k = header["top_k"]
    spans, complete = _records(path, data, start, sum(top_k))
    if not spans:
        raise UserError(f"{path}: holds no tokens: the run ended before its first batch; trace again")
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
    _check_ids(path, experts, top_k, header["num_experts"])
    return Trace(
        experts=experts,
        n_experts=header["num_experts"],
        layers=np.array(header["layers"], dtype=np.int32),
        windows=np.array(windows, dtype=np.int64),
        domains=(Path(header["text"]).stem,) * len(windows),
        name=path.name.removesuffix(".moetrace"),
        tokens=tokens,
        meta={**header, "tool": "llama-moe-trace", "partial": not complete},
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
        top_k, layers, n_experts = header["top_k"], header["layers"], header["num_experts"]
        sound = (
            len(top_k) == len(layers) > 0 and all(0 < k <= n_experts for k in top_k) and isinstance(header["text"], str)
        )
    except (ValueError, KeyError, TypeError):
        sound = False
    if not sound:
        raise UserError(f"{path}: its header is damaged: trace again")
    return header, start + size


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


def _check_ids(path: Path, experts: np.ndarray, top_k: list[int], n_experts: int) -> None:
    for layer, k in zip(experts, top_k, strict=True):
        ids = np.sort(layer[:, :k], axis=1)
        if ids.min() < 0 or ids.max() >= n_experts or (np.diff(ids, axis=1) == 0).any():
            raise UserError(
                f"{path}: damaged: expert ids repeated within a token, or not below {n_experts}; trace again"
            )


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
