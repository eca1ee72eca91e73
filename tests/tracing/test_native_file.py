"""The format of `llama-moe-trace` as patches/README.md states it, written here byte by byte; no compiler needed."""

import json
import struct

import numpy as np
import pytest

from edgemoe.errors import UserError
from edgemoe.tracing.native import convert_native, main, read_native
from edgemoe.tracing.tracefile import load_trace

TOP_K, LAYERS, N_EXPERTS = [2, 3], [1, 4], 5
HEADER = {
    "model": "m.gguf",
    "text": "some/prose.txt",
    "architecture": "olmoe",
    "llama_cpp": "0.5.0",
    "num_experts": N_EXPERTS,
    "layers": LAYERS,
    "top_k": TOP_K,
    "bos": 7,
    "n_ctx": 3,
    "n_ubatch": 2,
    "n_threads": 1,
    "n_gpu_layers": 0,
    "decode": False,
}
BATCHES = [  # window, tokens, experts of each layer
    (0, [7, 8], [[[0, 1], [4, 2]], [[3, 1, 0], [2, 3, 4]]]),
    (0, [9], [[[1, 0]], [[4, 3, 2]]]),
    (1, [7], [[[2, 3]], [[0, 1, 2]]]),
]


def record(window, tokens, experts):
    ids = b"".join(np.array(layer, "<i2").tobytes() for layer in experts)
    return struct.pack("<II", window, len(tokens)) + np.array(tokens, "<i4").tobytes() + ids


def content(header=HEADER, batches=BATCHES, end=4, version=1):
    encoded = json.dumps(header).encode()
    start = b"MOETRACE" + struct.pack("<II", version, len(encoded)) + encoded
    tail = b"" if end is None else struct.pack("<II", 0xFFFFFFFF, end)
    return start + b"".join(record(*batch) for batch in batches) + tail


@pytest.fixture
def written(tmp_path):
    def write(data):
        (tmp_path / "t.moetrace").write_bytes(data)
        return tmp_path / "t.moetrace"

    return write


def test_a_complete_file(written):
    trace = read_native(written(content()))
    assert trace.experts.dtype == np.int16
    assert trace.experts.tolist() == [
        [[0, 1, -1], [4, 2, -1], [1, 0, -1], [2, 3, -1]],
        [[3, 1, 0], [2, 3, 4], [4, 3, 2], [0, 1, 2]],
    ]
    assert trace.tokens.tolist() == [7, 8, 9, 7]
    assert (trace.windows.tolist(), trace.domains, trace.layers.tolist()) == ([0, 3], ("prose", "prose"), LAYERS)
    assert (trace.name, trace.n_experts, trace.meta["partial"]) == ("t", N_EXPERTS, False)
    assert trace.meta["texts"] == [{"domain": "prose", "file": "prose.txt", "tokens": 2}]  # 4, less two BOS
    assert trace.meta["settings"] == {name: HEADER[name] for name in trace.meta["settings"]}


def test_saved_as_a_trace_file(written, tmp_path):
    source, out = written(content()), tmp_path / "t.npz"
    convert_native(source, out)
    loaded, native = load_trace(out), read_native(source)
    for name in ("experts", "tokens", "windows", "layers"):
        assert np.array_equal(getattr(loaded, name), getattr(native, name))
    assert (loaded.domains, loaded.n_experts) == (native.domains, native.n_experts)
    with pytest.raises(UserError, match="exists"):
        convert_native(source, out)
    with pytest.raises(UserError, match="cannot be written"):
        convert_native(source, tmp_path / "none" / "t.npz")


def test_cut_anywhere_it_keeps_the_whole_records_before(written):
    """A kill can end the file at any byte: never an exception but a `UserError`, never a wrong token."""
    whole = content()
    full = read_native(written(whole))
    counts = set()
    for size in range(len(whole)):
        try:
            trace = read_native(written(whole[:size]))
        except UserError:
            assert size < len(content(batches=BATCHES[:1], end=None))
            continue
        assert trace.meta["partial"]
        assert np.array_equal(trace.experts, full.experts[:, : trace.n_tokens])
        counts.add(trace.n_tokens)
    assert counts == {2, 3, 4}


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "holds no tokens"),
        (b"MOETRACE", "not a trace of llama-moe-trace"),
        (b"GGUF" + bytes(100), "not a trace of llama-moe-trace"),
        (content(version=2), "format version 2, expected 1"),
        (content(header={**HEADER, "top_k": [2]}), "header is damaged"),
        (content(header={**HEADER, "top_k": [2, 9]}), "header is damaged"),
        (content(header={**HEADER, "top_k": [2, 2.5]}), "header is damaged"),
        (content(header={**HEADER, "num_experts": "many"}), "header is damaged"),
        (content(header=["a", "list"]), "header is damaged"),
        (content(header={name: value for name, value in HEADER.items() if name != "decode"}), "header is damaged"),
        (content(batches=[], end=0), "holds no tokens"),
        (content(end=5), "end record does not fit"),
        (content() + b"more", "end record does not fit"),
        (content(batches=[BATCHES[0], BATCHES[2], BATCHES[1]]), "window 0 follows window 1"),
        (content(batches=[BATCHES[2]], end=1), "window 1 follows window -1"),
        (content(batches=[(0, [7], [[[2, 2]], [[0, 1, 2]]])], end=1), "layer 1: token 0 chooses an expert twice"),
        (content(batches=[(0, [7], [[[2, 5]], [[0, 1, 2]]])], end=1), "layer 1: expert ids from 2 to 5"),
        (content(batches=[(0, [7], [[[2, 0]], [[-2, 1, 2]]])], end=1), "layer 4: expert ids from -2 to 2"),
    ],
)
def test_damage_is_named(written, data, complaint):
    with pytest.raises(UserError, match=complaint):
        read_native(written(data))


def test_command(written, tmp_path, capsys):
    source = written(content(end=None))
    assert main([str(source), str(tmp_path / "out.npz")]) == 0
    assert capsys.readouterr().out.endswith("4 tokens, 2 layers, 5 experts; partial: the run was interrupted\n")
    assert main([str(tmp_path / "none"), str(tmp_path / "out2.npz")]) == 2
    assert "none: cannot be read (No such file" in capsys.readouterr().err
    assert main([]) == 2
    assert "usage:" in capsys.readouterr().err
