"""docs/calibration.md is true: its table names what a real file holds, and its example runs on one."""

import json
import re
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from edgemoe.model.synthetic import write_synthetic
from edgemoe.progress import no_progress
from edgemoe.tracing.calibrate import MAX_ENTRIES, calibrate
from edgemoe.tracing.capture import Settings
from edgemoe.tracing.texts import Source

PAGE = (Path(__file__).parents[2] / "docs" / "calibration.md").read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calibration")
    [model] = write_synthetic(folder / "model.gguf", n_experts=32, top_k=8)
    (folder / "text.txt").write_text(PAGE)
    sources, settings = [Source("text", folder / "text.txt")], Settings(max_tokens=200, n_threads=1)
    calibrate(model, sources, folder / "model.calib", settings, watch=lambda *_: nullcontext(no_progress))
    return folder


def test_members_and_meta_are_those_of_a_real_file(folder: Path) -> None:
    table = PAGE.split("## The file", 1)[1]
    documented = {
        name: (shape, kind) for name, shape, kind in re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \|", table, re.M)
    }
    with np.load(folder / "model.calib") as archive:
        assert set(documented) == set(archive.files)
        sizes = {"L": 4, "E": 32, "V": len(archive["tokens"]), "V + 1": len(archive["tokens"]) + 1}
        sizes["n"] = len(archive["cells"])
        sizes["P"], sizes["C"] = archive["hit_rates"].shape
        for name, (shape, kind) in documented.items():
            if name != "meta":
                assert archive[name].shape == tuple(sizes[letter] for letter in shape.strip("[]").split(", "))
                assert str(archive[name].dtype) in kind.split(" or ")
        keys = set(re.findall(r"`(\w+)`", next(line for line in table.splitlines() if line.startswith("| `meta`"))))
        # Its line may name members of the file, besides its own keys.
        assert keys - set(archive.files) == set(json.loads(str(archive["meta"])))


def test_the_bound_is_the_one_in_the_code() -> None:
    assert f"{MAX_ENTRIES:,} entries" in PAGE
    assert f"room for {MAX_ENTRIES // (48 * 8):,} tokens seen once, or {MAX_ENTRIES // (48 * 128):,} seen" in PAGE


def test_the_example_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    [example] = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(example, "calibration.md", "exec"), names)
    assert names["cache"].resident(0) == names["found"].warm[0, :16].tolist()  # type: ignore[attr-defined]
