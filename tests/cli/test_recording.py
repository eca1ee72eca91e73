"""`--trace` of run and chat: what was executed, in a trace file whose replay decides what the run decided."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgemoe.cli import commands
from edgemoe.errors import UserError
from edgemoe.model.synthetic import write_synthetic
from edgemoe.tracing import Trace, load_trace

DEMO = str(Path(__file__).parents[2] / "edgemoe" / "data" / "demo-moe-32m-q8_0.gguf")
MODEL = ["run", DEMO, "--threads", "1", "-p", "In the beginning God created the", "-n", "70", "--seed", "1", "--json"]


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """A command takes SIGTERM for itself: a test that runs one in this process gives it back."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert commands.run(list(arguments)) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize(
    ("policy", "same"),
    [
        (("--policy", "psr"), "psr"),
        (("--policy", "cache-prior", "--top-j", "2", "--lambda", "0.3"), "cache-prior"),
        (("--routing", "tau", "--tau", "0.3"), "exact-lru"),
        (("--policy", "exact-prefetch"), "exact-prefetch"),
    ],
)
def test_simulate_decides_what_the_run_decided(
    policy: tuple[str, ...], same: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run's misses are those of a replay of its own trace, given the same options."""
    out = tmp_path / "run.npz"
    run = said(capsys, *MODEL, "--residency", "16", *policy, "--trace", str(out))
    options = [option for option in policy if option not in ("--policy", same)]
    row = said(capsys, "simulate", str(out), "--capacity", "16", "--policy", same, *options, "--json")["rows"][0]
    phases = (run["prompt_phase"], run["decode_phase"])
    misses = sum(phase["loads"] - phase["hits"] for phase in phases)
    trace = load_trace(out)
    assert run["trace"] == {"path": str(out), "tokens": trace.n_tokens, "partial": False}
    assert trace.n_tokens == sum(phase["tokens"] for phase in phases) > 70
    assert row["misses_per_token"] * trace.n_tokens == pytest.approx(misses)
    if trace.executed is not None:
        assert row["replaced_per_token"] * trace.n_tokens == pytest.approx(replaced(trace)) and replaced(trace) > 0
    assert trace.meta["steered"] == (trace.executed is not None) == (policy[-1] != "exact-prefetch")
    assert trace.meta["run"]["config_hash"] == run["config_hash"] and trace.meta["run"]["slots"] == 16
    assert trace.meta["self_check"] == "passed" and trace.meta["header_sha256"]


def replaced(trace: Trace) -> int:
    """Executed experts that the router did not choose."""
    assert trace.executed is not None
    pairs = zip(trace.executed.reshape(-1, 8), trace.experts.reshape(-1, 8), strict=True)
    return sum(len(set(ran.tolist()) - set(own.tolist())) for ran, own in pairs)


def test_both_engines_trace_the_same_routing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Resident and streamed (exact) in their own numerics: near-ties aside, the same choices of the same tokens."""
    found = []
    for name, more in (("resident.npz", []), ("streamed.npz", ["--residency", "25%"])):
        out = tmp_path / name
        said(capsys, *MODEL, "--greedy", *more, "--trace", str(out))
        found.append(load_trace(out))
    one, two = found
    n = min(8, one.n_tokens)  # the prompt: nothing has been drawn yet
    assert np.array_equal(one.tokens[:n], two.tokens[:n])  # type: ignore[index]
    assert np.mean(np.sort(one.experts[:, :n]) == np.sort(two.experts[:, :n])) > 0.95
    assert one.scores is not None and one.scores.shape == (8, one.n_tokens, 64)
    chosen = np.take_along_axis(one.scores, one.experts.astype(np.int64), axis=2)
    rest = one.scores.copy()
    np.put_along_axis(rest, one.experts.astype(np.int64), -np.inf, axis=2)
    assert (chosen.min(axis=2) >= rest.max(axis=2)).all()  # every choice is the top of its own scores
    assert commands.run(["stats", str(tmp_path / "resident.npz")]) == 0


def test_a_conversation_is_one_window_until_it_is_reset(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import io

    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m['content'] }}{{ eos_token }}\n{% endfor %}")
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\nAnd then?\n/reset\nAnother text\n"))
    chat = ["chat", DEMO, "--threads", "1", "--chat-template", str(tmp_path / "t.jinja"), "-n", "5", "--greedy"]
    turns = said(capsys, *chat, "--json", "--residency", "16", "--policy", "psr", "--trace", str(tmp_path / "c.npz"))
    trace, tokens = load_trace(tmp_path / "c.npz"), [turn["prompt_phase"]["tokens"] for turn in turns["turns"]]
    assert trace.windows.tolist() == [0, sum(tokens[:2]) + 2 * 4] and trace.domains == ("chat", "chat")
    assert trace.n_tokens == sum(tokens) + 3 * 4


def test_what_cannot_be_traced_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "there.npz").write_bytes(b"precious")
    write_synthetic(tmp_path / "dense.gguf", "llama")
    for arguments, message in (
        ([*MODEL, "--trace", str(tmp_path / "there.npz")], "exists already"),
        ([*MODEL, "--trace", DEMO, "--overwrite"], "choose another name"),
        ([*MODEL, "--overwrite"], "--overwrite is about --trace"),
        (["run", str(tmp_path / "dense.gguf"), "-p", "a", "--trace", str(tmp_path / "d.npz")], "no experts to trace"),
        ([*MODEL, "--residency", "16", "--elide", "0.1"], "always executes the model's k experts"),
    ):
        with pytest.raises(UserError, match=message):
            commands.run(arguments)
    assert (tmp_path / "there.npz").read_bytes() == b"precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense.gguf", "there.npz"]


def test_a_failing_disk_ends_the_run_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from edgemoe.tracing.spool import Spool

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Spool, "append", full)
    with pytest.raises(UserError, match=r"cannot be written \(No space left on device\)"):
        commands.run([*MODEL, "--residency", "16", "--trace", str(tmp_path / "t.npz")])


@pytest.mark.parametrize(("policy", "same"), [((), "exact-lru"), (("--policy", "psr"), "psr")])
def test_simulate_decides_with_a_plan_what_the_run_decided_with_it(
    policy: tuple[str, ...], same: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that pins experts, unevenly over layers, hits and replaces what a replay with the same plan does; what it
    reads besides misses are warm experts' first uses."""
    from edgemoe.model import read_model
    from edgemoe.wall.plan import LayerPlan, Plan, save_plan

    g = read_model(DEMO).geometry
    kept = {layer: (tuple(range(layer)), tuple(range(40, 40 + 2 * layer))) for layer in g.moe_layers}
    layers = tuple(
        LayerPlan(layer, *pins, tuple(e for e in range(g.n_experts) if e not in pins[0] + pins[1]))
        for layer, pins in kept.items()
    )
    plan = save_plan(Plan(g.name, g.architecture, g.n_experts, (), 0, 0, (), {}, layers), tmp_path / "plan.json")
    out, asked = tmp_path / "run.npz", ("--residency", "16", *policy, "--plan", str(plan))
    run = said(capsys, *MODEL, *asked, "--trace", str(out))
    replay = ["simulate", str(out), "--capacity", "16", "--policy", same, "--json"]
    row = said(capsys, *replay, "--plan", str(plan))["rows"][0]
    phases, trace = (run["prompt_phase"], run["decode_phase"]), load_trace(out)
    tokens = trace.n_tokens
    misses = sum(phase["loads"] - phase["hits"] for phase in phases)
    assert row["misses_per_token"] * tokens == pytest.approx(misses)
    assert row["hit_rate"] == pytest.approx(1 - misses / sum(phase["loads"] for phase in phases))
    assert (trace.executed is not None) == (same == "psr")
    if trace.executed is not None:
        assert row["replaced_per_token"] * tokens == pytest.approx(replaced(trace)) and replaced(trace) > 0
    else:
        assert misses <= sum(phase["demand_reads"] for phase in phases) <= misses + 16 * g.n_moe_layers
    unplanned = said(capsys, *replay)["rows"][0]
    assert unplanned["misses_per_token"] > row["misses_per_token"]
