"""`edgemoe wall` as a person runs it."""

import json
import sys
from pathlib import Path

import pytest

from edgemoe.cli import main
from edgemoe.model import read_model
from edgemoe.tracing import load_trace
from edgemoe.tracing.simulate import simulate
from edgemoe.wall.plan import load_plan

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "edgemoe" / "data" / "demo-moe-32m-q8_0.gguf"
ROUTING = ROOT.parent / "shared" / "data" / "routing"
PAPER = ("--profile", "none", "--ssd", "2.4GB/s", "--ram-bandwidth", "50GB/s", "--vram-bandwidth", "448GB/s")
needs_traces = pytest.mark.skipif(
    not ROUTING.is_dir(), reason="the published traces (../shared/data/routing) are absent"
)


@pytest.fixture
def edgemoe(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "no-profile"))

    def run(*arguments, expected=0):
        monkeypatch.setattr(sys, "argv", ["edgemoe", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            main()
        captured = capsys.readouterr()
        assert stopped.value.code == expected, captured.err
        return captured.out if expected == 0 else captured.err

    return run


def test_the_papers_machine_and_model(edgemoe):
    shown = edgemoe("wall", "qwen3-235b-a22b:Q4_K", *PAPER, "--ram", "18GB", "--vram", "8GB", "--hit-rate", "65.9%",
                    "--ctx", "1024", "--target", "10")  # fmt: skip
    for expected in (
        "qwen3-235b-a22b:Q4_K:", "bound by SSD", "routed experts", "7.98 GB", "given: --ssd", "default: 36%–61%",
        "hit rate 65.9%: given: --hit-rate", "0.63 to 0.711 tok/s = reads + computing",
        "0.882 tok/s = max(reads, computing)", "For 10 tok/s",
        "SSD 52× short", "CPU bounds it whatever is cached",
    ):  # fmt: skip
        assert expected in shown, expected
    assert "\x1b" not in shown, "piped output is plain"


def test_json_is_one_object_with_ranges_and_their_reasons(edgemoe):
    out = edgemoe("wall", "qwen3-235b-a22b:Q4_K", *PAPER, "--ram", "18GB", "--vram", "8GB", "--hit-rate", "65.9%",
                  "--target", "10", "--batch", "1,8", "--json")  # fmt: skip
    assert out.count("\n") == 1
    report = json.loads(out)
    ways = {way["name"]: way for way in report["ways"]}
    best = ways[report["best"]]
    least, most = best["tokens_per_s"]
    assert report["best"] == "slots in RAM, GPU" and best["bound"] == "SSD"
    assert least < most and best["reasons"] and best["hit_rate"] == pytest.approx([0.659, 0.659])
    # At best the SSD alone: 34.1% of 94 × 8 experts of 10.6 MB, the paper's 2.7 GB per token and 0.9 tok/s.
    misses = next(leg for leg in best["legs"] if leg["tier"] == "ssd")
    assert misses["bytes"][0] == pytest.approx(2.72e9, rel=0.002) and most == pytest.approx(0.88, abs=0.005)
    assert sum(best["time_shares"]["slow"].values()) == pytest.approx(1)
    assert all(rate["source"] for rate in report["machine"]["rates"].values())
    assert report["bytes_per_token"]["total"] == report["bytes_per_token"]["always"] + sum(
        report["bytes_per_token"][part] for part in ("routed", "kv")
    )
    assert report["target"]["reached"] == "no" and [row["streams"] for row in report["batches"]] == [1, 8]
    impossible = ways["all in VRAM"]
    assert not impossible["possible"] and "of VRAM, there is 8.00 GB" in impossible["missing"]


@pytest.fixture(scope="module")
def demo_trace(tmp_path_factory):
    """The demo model's own routing of two of its texts."""
    import subprocess

    folder = tmp_path_factory.mktemp("trace")
    texts = []
    for domain in ("prose", "code"):
        text = folder / f"{domain}.txt"
        text.write_text((ROOT / "edgemoe" / "data" / f"{domain}.txt").read_text()[:12_000])
        texts += ["-f", f"{domain}={text}"]
    command = [sys.executable, "-m", "edgemoe.cli", "trace", DEMO, *texts, "-o", folder / "demo.npz", "--ctx", "512"]
    subprocess.run([str(part) for part in command], check=True, capture_output=True, timeout=600)
    return folder / "demo.npz"


def test_the_demo_model_with_its_own_trace_a_plan_and_pictures(edgemoe, demo_trace, tmp_path):
    shown = edgemoe("wall", DEMO, *PAPER, "--ram", "320MB", "--trace", demo_trace, "--batch", "1,4", "--target", "900",
                    "--plan", tmp_path / "plan.json", "--plots", tmp_path / "plots")  # fmt: skip
    for expected in ("Residency, same bytes", "placed, other texts",
                     "2 texts, 4 windows of each", "plan serves the traced loads", "wall-batch.png"):  # fmt: skip
        assert expected in shown, expected
    model = read_model(DEMO)
    plan = load_plan(tmp_path / "plan.json", model.geometry, model.files)
    held = sum(len(layer.ram) * size for layer, size in zip(plan.layers, model.geometry.expert_bytes, strict=True))
    assert 0 < held <= plan.ram_bytes < 20_000_000 and plan.vram_bytes == 0 and len(plan.header_sha256) == 1
    assert {file.name for file in (tmp_path / "plots").iterdir()} == {"wall-ladder.png", "wall-batch.png"}
    shown = edgemoe("wall", "qwen3-30b-a3b", *PAPER, "--ram", "8GB", "--plots", tmp_path / "streamed")
    assert "wall-budget.png" in shown and (tmp_path / "streamed" / "wall-budget.png").exists()


def test_more_ram_raises_the_replayed_hit_rate(edgemoe, demo_trace):
    rates = []
    for ram in ("313MB", "321MB"):
        report = json.loads(edgemoe("wall", DEMO, *PAPER, "--ram", ram, "--trace", demo_trace, "--json"))
        way = next(way for way in report["ways"] if way["name"] == "slots in RAM")
        assert any("lru replayed on 2 texts (prose, code)" in reason for reason in way["reasons"])
        rates.append(way["hit_rate"])
    assert rates[0][0] < rates[1][0] and rates[0][1] < rates[1][1]


def test_the_same_ram_is_what_a_run_makes_of_it(edgemoe, demo_trace, tmp_path):
    """The slots are those of the engine itself, and a plan fits beside what a run holds, with hardly any room left."""
    from edgemoe.errors import UserError
    from edgemoe.streaming.engine import StreamingEngine

    def report(*more):
        return json.loads(edgemoe("wall", DEMO, *PAPER, "--ctx", 1024, "--json", *more))

    def streamed(found):
        return next(way for way in found["ways"] if way["name"] == "slots in RAM")

    with StreamingEngine(DEMO, ram=312_000_000, n_ctx=1024, n_threads=1) as engine:
        assert streamed(report("--ram", "312MB"))["slots"] == [engine.budget.slots] * 8
    few = streamed(report("--ram", "200MB"))
    assert not few["possible"] and "of RAM, there is 200 MB" in few["missing"]
    need = few["needs"]["ram"]
    StreamingEngine(DEMO, ram=need, n_ctx=1024, n_threads=1).close()
    with pytest.raises(UserError, match="too little"):
        StreamingEngine(DEMO, ram=need - 1, n_ctx=1024, n_threads=1)
    plan = tmp_path / "plan.json"
    planned = report("--ram", "312MB", "--trace", demo_trace, "--plan", plan)
    assert planned["notes"] == []
    StreamingEngine(DEMO, ram=312_000_000, n_ctx=1024, n_threads=1, plan=plan).close()
    with pytest.raises(UserError, match="too little"):
        StreamingEngine(DEMO, ram=311_000_000, n_ctx=1024, n_threads=1, plan=plan)
    in_vram = report("--ram", "312MB", "--vram", "100MB", "--trace", demo_trace, "--plan", plan)
    assert any("edgemoe run --plan needs about" in note for note in in_vram["notes"])


def test_a_plan_for_another_file_is_refused(edgemoe, demo_trace, tmp_path):
    edgemoe("wall", DEMO, *PAPER, "--ram", "320MB", "--trace", demo_trace, "--plan", tmp_path / "plan.json")
    plan = json.loads((tmp_path / "plan.json").read_text())
    (tmp_path / "plan.json").write_text(json.dumps(plan | {"header_sha256": ["0" * 64]}))
    model = read_model(DEMO)
    with pytest.raises(Exception, match="header fingerprints differ"):
        load_plan(tmp_path / "plan.json", model.geometry, model.files)


@needs_traces
def test_a_published_trace_with_its_preset(edgemoe):
    path = ROUTING / "qwen3-30b-a3b.code.npz"
    out = edgemoe("wall", "qwen3-30b-a3b:Q4_K", *PAPER, "--ram", "8GB", "--batch", "1,8", "--trace", path, "--json")
    report = json.loads(out)
    way = next(way for way in report["ways"] if way["name"] == "slots in RAM")
    trace = load_trace(path)
    bounds = simulate(trace, [min(way["slots"]), max(way["slots"])], ["lru"])["hit_rate"]
    assert bounds.iloc[0] <= way["hit_rate"][0] <= bounds.iloc[-1]
    eight = report["batches"][1]
    assert (eight["union"][0], eight["independent"]) == pytest.approx((33.32, 51.62), abs=0.01)
    reads = simulated_reads(trace, eight["slots"])
    assert eight["hit_rate"] == pytest.approx([1 - reads / eight["union"][0]] * 2)
    assert eight["copies_plus_computing"][0] < eight["longer_of_both"][0] == pytest.approx(eight["longer_of_both"][1])


def simulated_reads(trace, slots):
    """Of eight streams, per layer and step, as `edgemoe bench ssd` counts them."""
    from edgemoe.wall.sharing import replayed

    missed, _ = replayed(trace, 8, slots, 0, trace.n_tokens // 8)
    return missed.sum() / trace.n_layers / (trace.n_tokens // 8)


def test_mistakes_are_one_line_and_exit_code_2(edgemoe, demo_trace, tmp_path):
    preset = ("wall", "qwen3-30b-a3b", *PAPER)
    for arguments, message in (
        (("wall", "qwen3-30b-a3b"), "edgemoe probe"),
        (("wall", "gpt-6"), "no such file, and no preset: there are qwen3-235b-a22b"),
        (("wall", "qwen3-30b-a3b:Q9", *PAPER), "no quantisation"),
        ((*preset, "--ram", "-1GB"), "--ram -1GB: not a size"),
        ((*preset, "--ram", "0GB"), "--ram 0GB: expected more than nothing"),
        ((*preset, "--vram", "9999TB"), "at most 1000 TB"),
        ((*preset, "--ram", "18"), "--ram 18: not a size"),
        ((*preset, "--vram", "8GB/s"), "--vram 8GB/s: not a size"),
        ((*preset, "--pcie", "25Gb/s"), "means bits"),
        ((*preset, "--target", "0"), "--target 0"),
        ((*preset, "--target", "nan"), "--target nan"),
        ((*preset, "--batch", "1,two"), "expected numbers of streams"),
        ((*preset, "--hit-rate", "0.9"), "not a share"),
        ((*preset, "--ctx", "10000000"), "trained for 40,960"),
        ((*preset, "--policy", "mru"), "no policy 'mru'"),
        ((*preset, "--policy", "score"), "needs a --trace"),
        ((*preset, "--plan", tmp_path / "p.json"), "give the --trace"),
        ((*preset, "--trace", demo_trace), "is not a trace of qwen3-30b-a3b:Q4_K_M: it has 64 experts"),
        ((*preset, "--trace", tmp_path / "none.npz"), "no such trace file"),
        ((*preset, "--verify"), "--verify measures on this machine"),
        (("wall", "qwen3-30b-a3b", "--profile", tmp_path / "none.json"), "no such machine profile"),
        (("wall", DEMO, *PAPER, "--trace", demo_trace, "--policy", "psr"), "lacks: trace it with --scores"),
    ):  # fmt: skip
        for flags in ((), ("--json",)):
            error = edgemoe(*arguments, *flags, expected=2)
            assert message in error and error.count("\n") == 1, error


def test_a_trace_of_another_file_of_the_same_shape_is_refused(edgemoe, demo_trace, tmp_path):
    from dataclasses import replace

    from edgemoe.tracing import save_trace

    trace = load_trace(demo_trace)
    save_trace(replace(trace, meta={**trace.meta, "header_sha256": ["0" * 64]}), tmp_path / "other.npz")
    error = edgemoe("wall", DEMO, *PAPER, "--ram", "45MB", "--trace", tmp_path / "other.npz", expected=2)
    assert "fingerprints differ" in error and error.count("\n") == 1


def test_no_way_is_an_answer_too(edgemoe):
    shown = edgemoe("wall", "deepseek-v3", *PAPER, "--ram", "1GB", "--target", "10", "--batch", "2")
    assert "no way of running it is possible" in shown and "there is 1.00 GB" in shown
    assert json.loads(edgemoe("wall", "deepseek-v3", *PAPER, "--ram", "1GB", "--json"))["best"] is None


def test_a_dense_model_has_two_ways_and_no_cache(edgemoe, tmp_path):
    from edgemoe.model.synthetic import write_synthetic

    [path] = write_synthetic(tmp_path / "l.gguf", "llama")
    report = json.loads(edgemoe("wall", path, *PAPER, "--ram", "1GB", "--batch", "1,8", "--json"))
    assert [way["name"] for way in report["ways"]] == ["all in VRAM", "all in RAM"] and report["best"] == "all in RAM"
    assert "a dense model" in edgemoe("wall", path, *PAPER, "--hit-rate", "50%", expected=2)


def test_verify_sets_the_measurement_beside_the_prediction(edgemoe, tmp_path, monkeypatch):
    """A profile of invented costs, so that the prediction is known; the measurement is real."""
    from edgemoe.machine.identity import this_host
    from edgemoe.machine.profile import (
        ExpertRate,
        NodeCost,
        ProductCost,
        Profile,
        RamRates,
        Rate,
        ThreadsRate,
        save_profile,
    )

    monkeypatch.setattr("edgemoe.machine.profile.gpu_uuids", lambda: ())
    rate = Rate(10e9, 0.01, 5, True)
    ram = RamRates(10**9, 10**7, (ThreadsRate(1, rate),), (ThreadsRate(1, rate),))
    cost = ProductCost(0.0, 0.0, 1e-8, 0.0)  # 0.1 GB/s
    products = tuple(ExpertRate(kind, False, 1, rate, cost) for kind in ("Q8_0", "F32", "F16"))
    nodes = (NodeCost(1, 1e-9, 0.0, 0.0),)
    profile = Profile(this_host(), "2026-01-01T00:00:00", ram, None, products, products, nodes)
    save_profile(profile, tmp_path / "p.json")
    report = json.loads(edgemoe("wall", DEMO, "--profile", tmp_path / "p.json", "--ram", "1GB", "--verify", "--json"))
    v = report["verified"]
    assert v["error"] == pytest.approx(v["predicted_tokens_per_s"] / v["measured_tokens_per_s"] - 1)
    weights = report["bytes_per_token"]["total"] - report["bytes_per_token"]["kv"]
    assert v["predicted_tokens_per_s"] == pytest.approx(0.1e9 / weights, rel=0.1) and v["measured_tokens_per_s"] > 20
    slow = next(way for way in report["ways"] if way["name"] == "all in RAM")
    assert slow["tokens_per_s"][0] == pytest.approx(0.1e9 / weights, rel=0.1), "what is not bytes is in the slow end"
    assert any("not bytes" in reason for reason in slow["reasons"])
