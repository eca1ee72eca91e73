"""`llama-moe-trace`: built against the installed wheel, run on real models, and held against the Python capture."""

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from edgemoe.llamacpp.libraries import library_directory
from edgemoe.model.synthetic import write_synthetic
from edgemoe.progress import no_progress
from edgemoe.tracing.capture import Settings, capture
from edgemoe.tracing.native import convert_native, read_native
from edgemoe.tracing.texts import Source
from edgemoe.tracing.tracefile import load_trace

PATCHES = Path(__file__).parents[2] / "patches"
DATA = Path(__file__).parents[2] / "edgemoe" / "data"
DEMO_MODELS = sorted(DATA.glob("*.gguf"))
TEXT = Path(__file__).read_text()


@pytest.fixture(scope="module")
def tool(tmp_path_factory):
    if not shutil.which(os.environ.get("CXX", "c++")):
        pytest.skip("no C++ compiler")
    if not (library_directory().parent.parent / "include" / "llama.h").exists():
        pytest.skip("the installed llama-cpp-python has no headers")
    program = tmp_path_factory.mktemp("native") / "llama-moe-trace"
    build = subprocess.run(
        [PATCHES / "build", "-o", program],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert build.returncode == 0, build.stderr
    return program


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traces")
    (folder / "text.txt").write_text(TEXT[:6000])
    return folder


def run(tool, *arguments, **settings):
    return subprocess.run([tool, *map(str, arguments)], capture_output=True, text=True, **settings)


def test_the_patch_is_made_from_the_source():
    check = subprocess.run([sys.executable, PATCHES / "make-patch", "--check"], capture_output=True, text=True)
    assert check.returncode == 0, check.stderr


@pytest.mark.skipif(not shutil.which("patch"), reason="no `patch` program")
def test_the_patch_adds_one_example_and_one_line(tmp_path):
    before = "".join(
        f"    add_subdirectory({name})\n"
        for name in ("debug", "eval-callback", "idle", "lookahead", "lookup", "parallel", "passkey", "retrieval")
    )
    examples = tmp_path / "examples"
    examples.mkdir()
    (examples / "CMakeLists.txt").write_text(before)
    subprocess.run(
        ["patch", "-p1", "-s", "-d", tmp_path, "-i", PATCHES / "llama-moe-trace.patch"], check=True, capture_output=True
    )
    added = "    add_subdirectory(lookup)\n    add_subdirectory(moe-trace)\n"
    assert (examples / "CMakeLists.txt").read_text() == before.replace("    add_subdirectory(lookup)\n", added)
    sources = {file.name: file.read_text() for file in (PATCHES / "llama-moe-trace").iterdir()}
    assert {file.name: file.read_text() for file in (examples / "moe-trace").iterdir()} == sources


def test_only_public_headers_of_llama_cpp_are_used():
    includes = {
        line.split('"')[1]
        for file in (PATCHES / "llama-moe-trace").iterdir()
        for line in file.read_text().splitlines()
        if line.startswith('#include "')
    }
    assert includes == {"llama.h", "ggml.h", *(file.name for file in (PATCHES / "llama-moe-trace").glob("*.h"))}


@pytest.mark.skipif(
    "EDGEMOE_LLAMA_SDIST" not in os.environ,
    reason="compiles llama.cpp (minutes): set EDGEMOE_LLAMA_SDIST to a llama_cpp_python-0.3.36.tar.gz",
)
def test_it_builds_from_the_source_distribution(place, tmp_path):
    """In a copy of patches/, so that what is unpacked and built goes away with the test."""
    shutil.copytree(PATCHES, tmp_path / "patches")
    program = tmp_path / "llama-moe-trace"
    command = [tmp_path / "patches" / "build", "--from-source", os.environ["EDGEMOE_LLAMA_SDIST"], "-o", program]
    build = subprocess.run(command, capture_output=True, text=True)
    assert build.returncode == 0, build.stderr[-2000:]
    model = write_synthetic(tmp_path / "m.gguf")[0]
    same(program, model, place / "text.txt", tmp_path, n_ctx=128, max_tokens=500, decode=False)


MODELS = {
    "olmoe": {"arch": "olmoe"},
    "with BOS": {"arch": "qwen3moe", "add_bos": True},
    "leading dense layer, groups, selection bias": {"arch": "deepseek2", "leading_dense": 1, "expert_groups": 4},
    "one MoE layer, every expert chosen": {"arch": "olmoe", "n_layers": 1, "n_experts": 4, "top_k": 4},
    "split in three files": {"arch": "olmoe", "shards": 3},
}


@pytest.mark.parametrize("decode", [False, True], ids=["batched", "decode"])
@pytest.mark.parametrize("name", MODELS)
def test_same_experts_as_edgemoe_trace(tool, place, tmp_path, name, decode):
    model = write_synthetic(tmp_path / "m.gguf", **MODELS[name])[0]
    same(
        tool,
        model,
        place / "text.txt",
        tmp_path,
        n_ctx=80 if decode else 600,
        max_tokens=200 if decode else 1500,
        decode=decode,
    )


@pytest.mark.skipif(not DEMO_MODELS, reason="no demo model in edgemoe/data")
def test_same_experts_on_the_demo_model(tool, tmp_path):
    text = max((file for file in DATA.glob("*.txt")), key=lambda file: file.stat().st_size)
    same(tool, DEMO_MODELS[0], text, tmp_path, n_ctx=512, max_tokens=1000, decode=False)


def same(tool, model, text, folder, *, n_ctx, max_tokens, decode):
    """Both tracers, same text, batches and threads: not one expert, token or boundary may differ."""
    settings = Settings(n_ctx=n_ctx, max_tokens=max_tokens, decode=decode, n_threads=1)
    python = folder / "python.npz"
    capture(model, [Source("text", text)], python, settings, watch=lambda total: nullcontext(no_progress))
    given = ["--ctx", n_ctx, "--max-tokens", max_tokens, "-t", 1, *["--decode"] * decode]
    result = run(tool, "-m", model, "-f", text, "-o", folder / "native.moetrace", *given)
    assert result.returncode == 0, result.stderr
    convert_native(folder / "native.moetrace", folder / "native.npz")
    ours, native = load_trace(python), load_trace(folder / "native.npz")
    for member in ("tokens", "windows", "layers", "experts"):
        assert np.array_equal(getattr(ours, member), getattr(native, member)), member
    assert ours.n_experts == native.n_experts
    assert ours.n_tokens >= max_tokens
    for key in ("architecture", "layer_top_k", "model_file", "n_moe_layers", "num_experts", "bos"):
        assert ours.meta[key] == native.meta[key], key
    for key, value in native.meta["settings"].items():
        assert ours.meta["settings"][key] == value, key
    assert native.meta["texts"][0]["tokens"] == ours.meta["texts"][0]["tokens"]


def test_several_batches_in_one_window(tool, place, tmp_path):
    """A window longer than a ubatch is routed as the same tokens in one context: nothing is cleared in between."""
    model = write_synthetic(tmp_path / "m.gguf")[0]
    assert (
        run(tool, "-m", model, "-f", place / "text.txt", "-o", tmp_path / "a", "--ctx", 1500, "-t", 1).returncode == 0
    )
    assert run(tool, "-m", model, "-f", place / "text.txt", "-o", tmp_path / "b", "--ctx", 512, "-t", 1).returncode == 0
    long, short = read_native(tmp_path / "a"), read_native(tmp_path / "b")
    assert list(long.windows[:3]) == [0, 1500, 3000]
    assert np.array_equal(long.tokens, short.tokens)
    assert np.array_equal(long.experts[:, :512], short.experts[:, :512])
    assert not np.array_equal(long.experts[:, 512:1024], short.experts[:, 512:1024])  # other context, other routing


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_interrupted_runs_keep_what_was_captured(tool, place, olmoe, tmp_path, how):
    (tmp_path / "long.txt").write_text(TEXT * 50)
    whole, part = tmp_path / "whole.moetrace", tmp_path / "part.moetrace"
    arguments = ["-m", olmoe, "-f", tmp_path / "long.txt", "--decode", "-t", 1]
    assert run(tool, *arguments, "-o", whole, "--max-tokens", 200).returncode == 0
    running = subprocess.Popen([tool, *map(str, arguments), "-o", part], stderr=subprocess.PIPE, text=True)
    wait_until(lambda: part.exists() and part.stat().st_size > 4000)
    running.send_signal(how)
    _, message = running.communicate(timeout=300)
    trace = read_native(part)
    assert trace.meta["partial"]
    if how == signal.SIGKILL:
        assert running.returncode == -signal.SIGKILL
    else:
        assert running.returncode == 130, message
        assert f"interrupted; kept {trace.n_tokens} tokens" in message
    common = min(trace.n_tokens, 200)
    assert common > 50
    assert np.array_equal(trace.experts[:, :common], read_native(whole).experts[:, :common])


def test_interrupted_before_the_first_token_leaves_nothing(tool, place, olmoe, tmp_path):
    """While the text is tokenised: the model is mapped already, the output is not made yet."""
    (tmp_path / "long.txt").write_text(TEXT * 1000)
    out = tmp_path / "out"
    arguments = [tool, "-m", olmoe, "-f", tmp_path / "long.txt", "-o", out, "-t", "1"]
    running = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: olmoe.name in Path(f"/proc/{running.pid}/maps").read_text())
    running.send_signal(signal.SIGINT)
    _, message = running.communicate(timeout=300)
    assert (running.returncode, message) == (130, "llama-moe-trace: interrupted, nothing written\n")
    assert not out.exists()


def wait_until(condition):
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture(scope="module")
def olmoe(place):
    return write_synthetic(place / "olmoe.gguf")[0]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"-m": "none.gguf"}, "none.gguf: llama.cpp cannot load this model (failed to open"),
        ({"-m": "."}, "llama.cpp cannot load this model"),
        ({"-m": "text.txt"}, "text.txt: llama.cpp cannot load this model"),
        ({"-m": "cut.gguf"}, "cut.gguf: llama.cpp cannot load this model"),
        ({"-m": "dense.gguf"}, "dense.gguf is a dense model (llama)"),
        ({"-f": "none.txt"}, "none.txt: cannot read the text (No such file"),
        ({"-f": "."}, "cannot read the text (Is a directory)"),
        ({"-f": "empty.txt"}, "empty.txt: text too short: 0 tokens"),
        ({"-f": "short.txt"}, "short.txt: text too short: "),
        ({"-f": "latin.txt"}, "latin.txt: not UTF-8 text (byte 303)"),
        ({"--max-tokens": "31"}, "text too short: 31 tokens"),
        ({"-o": "none/out"}, "none/out: cannot write (No such file"),
        ({"-o": "text.txt"}, "text.txt: cannot write (File exists)"),
        ({"-o": ""}, "all needed"),
        ({"-ngl": "9"}, "built without GPU support"),
        ({"--ctx": "1"}, "--ctx takes an integer from 2 to 1048576, not '1'"),
        ({"--ctx": "2147483647"}, "--ctx takes an integer from 2 to 1048576"),
        ({"--ctx": "4294967298"}, "--ctx takes an integer from 2 to 1048576"),
        ({"-t": "100000"}, "-t takes an integer from 1 to 512"),
        ({"--ctx": "12x"}, "--ctx takes an integer"),
        ({"-t": "99999999999"}, "-t takes an integer"),
        ({"--max-tokens": "0"}, "--max-tokens takes an integer"),
        ({"--nonsense": "1"}, "unknown option '--nonsense'"),
    ],
    ids=str,
)
def test_one_line_for_what_a_person_can_mend(tool, place, olmoe, change, complaint):
    write_synthetic(place / "dense.gguf", "llama")
    (place / "cut.gguf").write_bytes(olmoe.read_bytes()[:-100_000])
    (place / "empty.txt").write_text("")
    (place / "short.txt").write_text("Too short.")
    (place / "latin.txt").write_bytes(b"abc" * 100 + "caf\xe9".encode("latin-1"))
    given = {"-m": "olmoe.gguf", "-f": "text.txt", "-o": "new.moetrace", "-t": 1, **change}
    result = run(tool, *(word for pair in given.items() for word in pair), cwd=place)
    assert (result.returncode, result.stdout) == (2, ""), result.stderr
    assert result.stderr.startswith("llama-moe-trace: ")
    assert result.stderr.count("\n") == 1
    assert complaint in result.stderr
    assert not (place / "new.moetrace").exists()
    assert (place / "text.txt").read_text() == TEXT[:6000]


def test_a_full_disk_keeps_what_fitted(tool, place, olmoe, tmp_path):
    def small_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    out = tmp_path / "out"
    result = run(tool, "-m", olmoe, "-f", place / "text.txt", "-o", out, "-t", 1, preexec_fn=small_files)
    assert result.returncode == 2
    assert result.stderr == f"llama-moe-trace: {out}: cannot write (File too large)\n"
    trace = read_native(out)
    assert trace.meta["partial"]
    assert trace.n_tokens == 1024  # 36 bytes a token


@pytest.mark.parametrize(
    "text", ["\0 bytes, ☃, \U0010ffff and \ud7ff ", "\ufefftext\r\n\t", "\x7f\x80\u07ff\u0800\uffff\U00010000 "]
)
def test_unusual_text_is_text(tool, tmp_path, olmoe, text):
    (tmp_path / "text").write_bytes(text.encode() * 20)
    result = run(tool, "-m", olmoe, "-f", tmp_path / "text", "-o", tmp_path / "out", "-t", 1)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    "broken",
    [
        b"\x80",
        b"\xc1\xbf",
        b"\xe0\x9f\xbf",
        b"\xed\xa0\x80",
        b"\xf0\x8f\xbf\xbf",
        b"\xf4\x90\x80\x80",
        b"\xf5",
        b"\xe2\x98",
    ],
)
def test_what_python_takes_for_broken_utf8_is_refused(tool, tmp_path, olmoe, broken):
    with pytest.raises(UnicodeDecodeError):
        broken.decode()
    (tmp_path / "text").write_bytes(b"x" * 100 + broken)
    result = run(tool, "-m", olmoe, "-f", tmp_path / "text", "-o", tmp_path / "out", "-t", 1)
    assert result.returncode == 2
    assert "not UTF-8 text (byte 100)" in result.stderr


def test_help_names_every_option(tool):
    result = run(tool, "--help")
    assert result.returncode == 0
    for option in ("-m", "-f", "-o", "--ctx", "--max-tokens", "--decode", "-t", "-ngl"):
        assert f"  {option} " in result.stdout
