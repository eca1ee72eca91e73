"""Divergence on text, through every engine: nothing where nothing is steered, and the same story from each of them."""

from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from edgemoe.data import DOMAINS
from edgemoe.demo import demo_file, demo_model
from edgemoe.errors import UserError
from edgemoe.evaluation.compare import compare
from edgemoe.evaluation.divergence import Extent, evaluate, summarise
from edgemoe.evaluation.results import load_results
from edgemoe.evaluation.subjects import Runs
from edgemoe.evaluation.token_metrics import METRICS
from edgemoe.evaluation.windows import text_windows
from edgemoe.gpu_offload.vocabulary import open_vocabulary
from edgemoe.llamacpp.resident import ResidentEngine
from edgemoe.model import read_model
from edgemoe.model.synthetic import write_synthetic
from edgemoe.policy import preset
from edgemoe.progress import no_progress
from edgemoe.tracing.texts import Source
from edgemoe.units import Residency

SMALL = Extent(windows=3, length=24)
EXACT = {name: preset(name, **more) for name, more in (("exact-lru", {}), ("exact-prefetch", {"window": 6}))}
PSR = {"psr": preset("psr", window=6, lam=0.3)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("divergence")
    write_synthetic(folder / "moe.gguf")
    write_synthetic(folder / "other.gguf", n_layers=3)
    write_synthetic(folder / "dense.gguf", "llama")
    write_synthetic(folder / "short.gguf", n_ctx=16)
    for domain in DOMAINS:
        (folder / f"{domain}.txt").write_bytes(demo_file(f"{domain}.txt").read_bytes()[-4000:])
    (folder / "tiny.txt").write_text("hi")
    return folder


@contextmanager
def unwatched(*_):
    yield no_progress


def run(folder, out, policies, model="moe.gguf", domains=("prose", "code"), extent=SMALL, watch=unwatched, **more):
    sources = [Source(domain, folder / f"{domain}.txt") for domain in domains]
    Path(out).mkdir(exist_ok=True)
    places = {name: Path(out) / f"{name}.json" for name in policies}
    runs = Runs(extent.length, threads=1, **more.pop("runs", {}))
    path = folder / model
    return evaluate(path, sources, policies, places, watch=watch, extent=extent, runs=runs, **more)


def column(results, metric, task="prose"):
    return [item.metrics[metric] for item in results.of(task)]


def test_exact_routing_diverges_by_exactly_nothing(folder, tmp_path):
    found = run(folder, tmp_path, {**EXACT, **PSR})
    for name in EXACT:
        for task in ("prose", "code"):
            assert column(found[name], "kl", task) == [0, 0, 0] and column(found[name], "top1", task) == [1, 1, 1]
            assert column(found[name], "nll", task) == column(found[name], "nll_exact", task)
            assert not any(column(found[name], "replaced", task)) and all(column(found[name], "demand", task))
    assert not any(column(found["exact-lru"], "prefetch")) and all(column(found["exact-prefetch"], "prefetch"))
    assert all(column(found["psr"], "kl")) and all(column(found["psr"], "replaced"))
    assert column(found["psr"], "nll_exact") == column(found["exact-lru"], "nll")
    assert column(found["psr"], "loads") == [16, 16, 16]
    # The reference is llama.cpp itself, one token per decode.
    model = read_model(folder / "moe.gguf")
    words = open_vocabulary(model)
    windows = text_windows([Source("prose", folder / "prose.txt")], [(folder / "prose.txt").read_bytes()], words, 3, 24)
    words.close()
    with ResidentEngine(model.path, n_ctx=24, n_ubatch=1, n_threads=1, repack=False) as engine:
        for window, nll in zip(windows["prose"], column(found["exact-lru"], "nll"), strict=True):
            engine.reset()
            rows = np.stack([engine.decode(int(token)) for token in window[:-1]]).astype(np.float64)
            rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
            assert nll == pytest.approx(-rows[np.arange(23), window[1:]].mean(), abs=1e-9)


def test_the_file_is_what_compare_reads(folder, tmp_path):
    more = Extent(windows=6, length=16)
    found = run(folder, tmp_path, {"exact-lru": EXACT["exact-lru"]}, extent=more)
    found |= run(folder, tmp_path, PSR, extent=more)  # another run: the exact one is the reference by itself
    files = [load_results(tmp_path / f"{name}.json") for name in ("exact-lru", "psr")]
    assert files == [found["exact-lru"], found["psr"]]
    header = files[1].header
    assert header.kind == "divergence" and header.tasks["code"].items == 6 and header.tasks["code"].metric == "nll"
    assert header.config["engine"] == "llama.cpp" and header.config["slots"] == 8 and header.config["window"] == 16
    assert header.config["policy"]["lam"] == 0.3 and header.config["policy"]["scale"] == "running"
    assert files[1].metrics("prose") == tuple(sorted(METRICS))
    table = compare([("exact", files[0]), ("psr", files[1])])
    assert [row.task for row in table.rows] == ["code", "prose"] and table.rows[0].n == 6
    lines = summarise(files[1])
    assert [line.domain for line in lines] == ["code", "prose", "all"]
    row, prose, whole = table.rows[1], lines[1], lines[2]
    assert prose.excess_nll.mean == pytest.approx(row.difference.mean)
    assert prose.excess_nll.half_width == pytest.approx(row.difference.half_width)
    assert prose.perplexity == pytest.approx(np.exp(np.mean(column(files[1], "nll"))))
    assert whole.windows == 12 and whole.kl.mean == pytest.approx(np.mean([line.kl.mean for line in lines[:2]]))
    assert whole.perplexity / whole.perplexity_exact == pytest.approx(1 + whole.excess_perplexity)


def test_with_every_expert_resident_a_policy_is_exact(folder, tmp_path):
    found = run(folder, tmp_path, {"psr": preset("psr", lam=2.0)}, residency=Residency.parse("100%"), domains=("math",))
    for metric in ("kl", "replaced", "demand", "prefetch"):
        assert column(found["psr"], metric, "math") == [0, 0, 0]


def test_text_of_the_models_own(folder, tmp_path):
    """The mean excess on it estimates the KL; it is a diagnostic, and counts in no mean."""
    extent = Extent(windows=2, length=40, selfgen=16, seed=5)
    found = run(folder, tmp_path, PSR, domains=("prose",), extent=extent)["psr"]
    assert found.header.seeds == {"selfgen": 5} and not found.header.tasks["selfgen"].in_mean
    prose, own = summarise(found)
    assert own.domain == "selfgen" and own.windows == 16 and own.perplexity_exact < prose.perplexity_exact
    gap = np.subtract(column(found, "nll", "selfgen"), column(found, "nll_exact", "selfgen"))
    gap -= column(found, "kl", "selfgen")
    assert abs(gap.mean()) < 4 * gap.std(ddof=1) / np.sqrt(16)
    again = run(folder, tmp_path / "again", PSR, domains=("prose",), extent=Extent(2, 40, 2, 5))["psr"]
    assert again.of("selfgen") == found.of("selfgen")[:2]
    other = run(folder, tmp_path / "other", PSR, domains=("prose",), extent=Extent(2, 40, 2, 6))["psr"]
    assert other.of("selfgen") != again.of("selfgen")


def test_an_interrupted_run_goes_on(folder, tmp_path):
    policies = {"exact-lru": EXACT["exact-lru"], **PSR}
    whole = {name: results.as_bytes() for name, results in run(folder, tmp_path, policies).items()}
    told = []

    @contextmanager
    def stopped(what, total, unit):
        assert (total, unit) == (2 * 6 * 23, "tokens")

        def advance(count):
            told.append(count)
            if len(told) == 5 * 23 + 4:  # four exact windows, then the first under the policy, then within one
                raise KeyboardInterrupt

        yield advance

    with pytest.raises(KeyboardInterrupt):
        run(folder, tmp_path / "b", policies, watch=stopped)
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == [
        "exact-lru.json.partial",
        "psr.json.partial",
    ]
    announced, counted = [], []

    @contextmanager
    def watch(what, total, unit):
        announced.append(total)
        yield counted.append

    found = run(folder, tmp_path / "b", policies, watch=watch)
    assert {name: results.as_bytes() for name, results in found.items()} == whole
    assert {path.name: path.read_bytes() for path in (tmp_path / "b").iterdir()} == {
        f"{name}.json": content for name, content in whole.items()
    }
    # Of six windows one is finished under both, three under exact routing.
    assert sum(counted) == announced[0] == 10 * 23


def test_engines_tell_one_story(folder, tmp_path):
    """The demo model, as GGUF and as a folder: exact perplexities alike, the same windows, the same decisions."""
    pytest.importorskip("torch", reason="needs torch (pip install edgemoe[eval])")
    pytest.importorskip("transformers", reason="needs transformers (pip install edgemoe[eval])")
    from edgemoe.training.export import read_gguf, write_hf

    write_hf(folder / "hf", *read_gguf(demo_model()))
    policies, extent = {"exact-lru": preset("exact-lru"), "psr": preset("psr")}, Extent(windows=2, length=32)
    share = {"residency": Residency.parse("50%"), "domains": ("prose",), "extent": extent}
    float32 = {"runs": {"dtype": "float32"}}
    found = {
        "llama.cpp": run(folder, tmp_path / "l", policies, demo_model(), **share),
        "torch": run(folder, tmp_path / "t", policies, "hf", **share, **float32),
        "offload": run(folder, tmp_path / "o", policies, "hf", engine="offload", **share, **float32),
    }
    lines = {name: [summarise(results)[0] for results in runs.values()] for name, runs in found.items()}
    headers = {name: runs["psr"].header for name, runs in found.items()}
    assert len({header.tasks["prose"].questions for header in headers.values()}) == 1
    assert len({header.model.tokenizer for header in headers.values()}) == 1
    assert headers["torch"].model == headers["offload"].model and headers["torch"].config["dtype"] == "float32"
    assert len({header.config_hash for header in headers.values()}) == 3
    for name, (exact, psr) in lines.items():
        assert exact.kl.mean == 0 and exact.replaced.mean == 0 and exact.demand.mean > psr.demand.mean > 0
        assert psr.kl.mean > 0.01 and psr.replaced.mean > 1 and psr.prefetch.mean > 0
        # llama.cpp rounds activations to eight bits, differently from processor to processor.
        near = 0.03 if name == "llama.cpp" else 1e-3
        assert exact.perplexity == pytest.approx(lines["torch"][0].perplexity, rel=near), name
        assert psr.copies == pytest.approx(lines["torch"][1].copies, rel=0.1), name
    # One arithmetic, one policy: engine and harness agree to rounding.
    assert lines["offload"][1].perplexity == pytest.approx(lines["torch"][1].perplexity, rel=2e-3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": "dense.gguf"}, "a dense model, without experts to choose"),
        ({"domains": ("tiny",)}, "tiny: text too short, . tokens, for a window of 24"),
        ({"extent": Extent(windows=4000, length=24)}, "its text fills .* windows of 24 tokens, 4,000 were asked for"),
        ({"extent": Extent(windows=1, length=24)}, "--windows 1: an interval needs at least 2"),
        ({"extent": Extent(windows=2, length=4)}, "--ctx 4: a window needs at least 8"),
        ({"extent": Extent(windows=2, length=24, selfgen=1)}, "--selfgen 1"),
        ({"model": "short.gguf"}, "--ctx 24: longer than the context of 16 tokens that short.gguf was made for"),
        ({"engine": "vllm"}, "--engine vllm: expected one of llama.cpp, torch, offload"),
        ({"engine": "torch"}, "torch runs Hugging Face folders"),
        ({"runs": {"batch": 2}}, "--batch: the llama.cpp engine has no such choice"),
        ({"policies": {"psr": preset("psr", elide=0.1, window=6)}}, "--elide: llama.cpp always executes"),
        ({"residency": Residency.parse("2")}, "a cache of 2 per layer cannot hold the 4 experts"),
        ({"calibration": "none.calib"}, "no such calibration file"),
        ({"model": "missing.gguf"}, "missing.gguf"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(folder, tmp_path, change, words):
    policies = change.pop("policies", PSR)
    with pytest.raises(UserError, match=words) as refusal:
        run(folder, tmp_path, policies, **change)
    assert "\n" not in str(refusal.value)
    assert not list(tmp_path.iterdir())


def test_a_policy_that_the_model_cannot_run_is_refused_before_anything_runs(folder, tmp_path, monkeypatch):
    from dataclasses import replace

    from edgemoe.streaming import tier

    found = tier.find_routers
    monkeypatch.setattr(
        tier,
        "find_routers",
        lambda nodes: {layer: replace(router, gate="for a test") for layer, router in found(nodes).items()},
    )
    with pytest.raises(UserError, match="no pre-gate can be formed"):
        run(folder, tmp_path, {"exact-lru": EXACT["exact-lru"], **PSR})
    assert not list(tmp_path.iterdir())
