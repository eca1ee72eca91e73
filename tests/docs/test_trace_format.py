"""docs/trace-format.md is true: its tables name what a real trace holds, and its examples run on one."""

import re
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from edgemoe.model.synthetic import write_synthetic
from edgemoe.progress import no_progress
from edgemoe.tracing import load_trace, stats
from edgemoe.tracing.capture import Settings, capture
from edgemoe.tracing.texts import Source

PAGE = (Path(__file__).parents[2] / "docs" / "trace-format.md").read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("format")
    [model] = write_synthetic(folder / "m.gguf")
    (folder / "main.py").write_text(PAGE)
    settings = Settings(n_ctx=128, max_tokens=300, n_threads=1, scores=True, weights=True, pregate=True)
    sources = [Source("code", folder / "main.py")]
    capture(model, sources, folder / "code.npz", settings, watch=lambda _: nullcontext(no_progress))
    return folder


def rows(heading: str) -> dict[str, str]:
    """First cell → rest of the table that follows `heading`."""
    table = PAGE.split(heading, 1)[1].split("\n\n")
    lines = next(part for part in table if part.startswith("|")).splitlines()[2:]
    cells = [line.strip("|").split("|", 1) for line in lines]
    return {name.strip(): rest for name, rest in cells}


def test_members_are_those_of_a_real_file(folder: Path) -> None:
    sizes = {"L": 4, "T": 300, "k": 4, "E": 16, "W": 3}
    with np.load(folder / "code.npz") as archive:
        documented = rows("W of windows.")
        del documented["`executed`"]  # a steered run's only
        assert {name.strip("`") for name in documented} == set(archive.files)
        for name, rest in documented.items():
            array = archive[name.strip("`")]
            shape, kind = (cell.strip() for cell in rest.split("|")[:2])
            if shape != "scalar":
                assert array.shape == tuple(sizes[letter] for letter in shape.strip("[]").split(", "))
                assert array.dtype == kind


def test_meta_keys_are_those_of_a_real_file(folder: Path) -> None:
    documented = {key for cell in rows("## `meta`") for key in re.findall(r"`(\w+)`", cell)}
    published = {"model", "k", "n_moe_layers", "source"}
    assert documented | published == set(load_trace(folder / "code.npz").meta)


def test_the_examples_run_and_agree_with_edgemoe(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    for example in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL):
        exec(compile(example, "trace-format.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "4 layers, 300 tokens" in printed and "code 300 (4, 300, 4)" in printed
    frame = stats.reuse(load_trace("code.npz"), lags=(1,))
    ours = float(frame.loc[frame.layer == "all", "reuse"].iloc[0])
    assert f"lag-1 reuse {ours:.1%}" in printed
