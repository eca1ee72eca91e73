"""The examples of docs/python-api.md run, in order, on a trace like the one they name and on the demo model."""

import re
from pathlib import Path

import numpy as np
import pandas as pd

from edgemoe.tracing import Trace, save_trace, stats

PAGE = Path(__file__).parents[2] / "docs" / "python-api.md"


def test_every_example_runs(tmp_path, monkeypatch, capsys):
    scores = np.random.default_rng(1).normal(size=(3, 200, 16)).astype(np.float32)
    trace = Trace(
        experts=np.argsort(-scores, axis=2)[:, :, :4].astype(np.int16),
        n_experts=16,
        layers=np.arange(3, dtype=np.int32),
        windows=np.array([0, 100]),
        domains=("prose", "code"),
        name="story",
        pregate=scores,
    )
    save_trace(trace, tmp_path / "story.npz")
    (tmp_path / "model.gguf").symlink_to(PAGE.parents[1] / "edgemoe" / "data" / "demo-moe-32m-q8_0.gguf")
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len(examples) >= 6
    names: dict = {}
    for example in examples:
        exec(compile(example, str(PAGE), "exec"), names)
    said = capsys.readouterr().out
    assert "of the experts" in said and "hit rate" in said
    assert names["first"] == names["again"] != ""
    assert [message["role"] for message in names["messages"]] == ["user", "assistant", "user", "assistant", "user"]
    assert {"load.png", "reuse.svg", "working-set.png", "similarity.png"} <= {
        path.name for path in (tmp_path / "pictures").iterdir()
    }
    assert (tmp_path / "tables" / "reuse.csv").exists()
    assert isinstance(names["cosine"], pd.DataFrame)


def test_the_table_names_the_columns_that_there_are():
    text = Trace(np.zeros((1, 9, 1), np.int16), 2, np.zeros(1, np.int32), np.zeros(1, np.int64), ("d",), "d")
    for name, columns in re.findall(r"^\| `stats\.(\w+)\(.*?\)` \| (.*?) \|", PAGE.read_text(), flags=re.MULTILINE):
        frame = getattr(stats, name)(text)
        assert list(frame.columns) == ["trace", "layer", *re.findall(r"`(\w+)`", columns)], name
