"""GGUF headers through ggml's own parser: against gguf-py, and on files that are none."""

import os
import random
from pathlib import Path

import gguf
import pytest

from edgemoe.errors import UserError
from edgemoe.llamacpp.header import read_header
from edgemoe.model import read_model
from edgemoe.model.synthetic import write_synthetic


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("header") / "model.gguf"
    return write_synthetic(file, "deepseek2", n_layers=2, n_vocab=258, leading_dense=1, expert_type="Q8_0")[0]


def test_agrees_with_gguf_py(path: Path) -> None:
    header, reader = read_header(path), gguf.GGUFReader(path)
    assert header.data_offset == reader.data_offset and header.alignment == reader.alignment
    assert [(t.name, t.type, list(t.ne), t.offset, t.nbytes) for t in header.tensors] == [
        (t.name, t.tensor_type.name, list(t.shape), t.data_offset, t.n_bytes) for t in reader.tensors
    ]
    for key, field in reader.fields.items():
        if key.startswith("GGUF."):
            continue
        if field.types[0] is gguf.GGUFValueType.ARRAY:
            assert header.lengths[key] == len(field.data)
            assert header.values.get(key, field.contents()) == field.contents()
        else:
            assert header.values[key] == field.contents()
    assert header.values["tokenizer.ggml.token_type"] == [1] * 256 + [3, 1]


def test_size_of_the_vocabulary_costs_no_list(tmp_path: Path) -> None:
    header = read_header(write_synthetic(tmp_path / "m.gguf", n_vocab=5000, n_layers=1, hole=True)[0])
    assert header.lengths["tokenizer.ggml.tokens"] == header.lengths["tokenizer.ggml.token_type"] == 5000
    assert "tokenizer.ggml.token_type" not in header.values


def test_what_is_no_gguf_is_said_in_one_line(tmp_path: Path, path: Path) -> None:
    text, empty, short, corrupt = (tmp_path / name for name in ("text", "empty", "short", "corrupt"))
    text.write_text("hello\n")
    empty.touch()
    short.write_bytes(path.read_bytes()[:500])
    corrupt.write_bytes(path.read_bytes()[:16] + b"\xff" * 8 + path.read_bytes()[24:])
    for file, message in {
        text: "starts with b'hell', expected a GGUF file",
        empty: "an empty file",
        short: "not a readable GGUF file",
        corrupt: "not a readable GGUF file",
        tmp_path: "a directory",
        tmp_path / "none": "no such file",
    }.items():
        with pytest.raises(UserError, match=message) as error:
            read_header(file)
        assert "\n" not in str(error.value)


def test_truncated_data_is_reported_with_the_bytes_missing(tmp_path: Path, path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(UserError, match=r"truncated: .* of the .* \(1,000 bytes missing\)"):
        read_header(cut)


def test_llama_cpp_complaints_stay_off_stderr(tmp_path: Path, path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UserError):
        read_header(bad)
    assert capfd.readouterr() == ("", "")


def test_random_damage_never_crashes(tmp_path: Path, path: Path) -> None:
    """Each damaged file is read in a child, because the parser is C: an abort must show as what it is."""
    rng, base = random.Random(0), path.read_bytes()
    start = read_header(path).data_offset
    verdicts = {0: 0, 2: 0}
    for number in range(60):
        data = bytearray(base)
        at = rng.randrange(start - 8)
        if number % 3 == 0:
            data = data[:at]
        else:
            data[at : at + 8] = rng.choice((rng.randbytes(8), b"\xff" * 8, (2**40).to_bytes(8, "little")))
        file = tmp_path / "damaged.gguf"
        file.write_bytes(data)
        child = os.fork()
        if child == 0:
            os._exit(verdict(file))
        verdicts[os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])] += 1  # KeyError: a crash
    assert min(verdicts.values()) > 0


def verdict(file: Path) -> int:
    try:
        read_model(file)
    except UserError as error:
        return 2 if "\n" not in str(error) else 1
    except BaseException:
        return 1
    return 0
