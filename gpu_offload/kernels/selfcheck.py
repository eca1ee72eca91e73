"""`check_on_device`: do the kernels decide on this GPU what the host decides, and how long does a decision take?

    python -c "import json; from edgemoe.gpu_offload.kernels.selfcheck import *; print(json.dumps(check_on_device()))"

A GPU rounds and fuses as an interpreter does not, so this is run on each new kind of card. Seconds, no test runner.
"""

import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from edgemoe.generation.options import Options
from edgemoe.gpu_offload.kernels import draw
from edgemoe.gpu_offload.kernels.comparing import KINDS, Alone, compare, fitted, policies, random_case
from edgemoe.gpu_offload.kernels.device_policy import DevicePolicy
from edgemoe.gpu_offload.kernels.sampling import DeviceSampler
from edgemoe.policy import preset

TIMED = ((64, 32, 8), (256, 64, 8))  # E, C, k
LAYERS, REPLAYS = 16, 50
OPTIONS = (
    Options(temperature=0),
    Options(),
    Options(top_k=5, top_p=0.5, min_p=0, temperature=2.0),
    Options(top_k=100, top_p=1, min_p=0, temperature=0.1),
)


def check_on_device(device: str = "cuda", budget_s: float = 50.0) -> dict[str, Any]:
    """Compare and time; what fails is reported with its traceback, and nothing is raised. All values are JSON's.

    Comparisons stop after `budget_s`, compilation included, and the report says how many ran; timings need CUDA.
    """
    start = time.perf_counter()
    report: dict[str, Any] = {"device": device, "torch": torch.__version__}
    if device != "cpu":
        report["device"] = torch.cuda.get_device_name(device)
        _into(report, "timings", time_policy)
        _into(report, "sampling_us", time_sampling)
    left = budget_s - (time.perf_counter() - start)
    _into(report, "sampling", lambda: check_sampling(device, vocabularies=(50304, 151936)))
    _into(report, "policy", lambda: check_policies(device, left))
    report["seconds"] = round(time.perf_counter() - start, 2)
    report["ok"] = not any("error" in value for value in report.values() if isinstance(value, dict))
    return report


def _into(report: dict[str, Any], name: str, check: Callable[[], dict[str, Any]]) -> None:
    try:
        report[name] = check()
    except Exception:  # a report that says what broke is worth more than none
        report[name] = {"error": traceback.format_exc(limit=-4)}


def check_policies(device: str, budget_s: float) -> dict[str, Any]:
    """Long sequences at the size of a real model for what users run, then every policy on adversarial input."""
    start = time.perf_counter()
    done = {"decisions": 0, "cases": 0, "skipped": 0}
    cases = []
    for number, name in enumerate(("psr-gated", "psr", "exact-lru", "speculative")):
        # Longer than a score needs to become denormal.
        case = random_case(preset(name), seed=number, shape=(200, 2), n_experts=64, top_k=8, capacity=32)
        cases.append((case, 160))
    wide = random_case(preset("psr-gated", scale="running"), seed=1, shape=(12, 2), n_experts=512, top_k=8, capacity=64)
    cases.append((wide, 4))
    for number, policy in enumerate(policies()):
        kind = KINDS[number % len(KINDS)]
        case = random_case(
            fitted(policy, 3, 5), seed=number, kind=kind, shape=(16, 2), n_experts=12, top_k=3, capacity=5
        )
        cases.append((case, 16 * (number % 2)))  # as a prompt, or token by token
    for case, chunk in cases:
        if time.perf_counter() - start > budget_s:
            done["skipped"] += 1
            continue
        done["decisions"] += compare(case, device, chunk)
        done["cases"] += 1
    return done


def check_sampling(device: str, vocabularies: tuple[int, ...], steps: int = 6, seed: int = 1) -> dict[str, Any]:
    """Tokens chosen on the device are those of `draw.choose`, with ties and masked logits; the number compared."""
    rng = np.random.default_rng(seed)
    compared = 0
    for options in OPTIONS:
        for vocabulary in vocabularies:
            sampler = DeviceSampler(options, vocabulary, steps, device=device)
            for case in range(3):
                logits = (rng.normal(size=(steps, vocabulary)) * 4).astype(np.float32)
                if case == 1:
                    logits = np.round(logits)
                if case == 2:
                    logits[rng.random(logits.shape) < 0.9] = -np.inf
                number = int(rng.integers(0, 2**64, dtype=np.uint64))
                sampler.start(number)
                for row in torch.from_numpy(logits).to(device):
                    sampler.sample(row)
                expected = [draw.choose(row, options, number, at) for at, row in enumerate(logits)]
                found = sampler.sequence.tolist()
                if found != expected:
                    raise AssertionError(f"{options}, V {vocabulary}, case {case}: {found}, not {expected}")
                compared += steps
    return {"tokens": compared}


def time_policy() -> dict[str, Any]:
    """Microseconds per decision, with what asks for its copies, in a CUDA graph of a token over 16 layers; median of 50
    replays."""
    found = {}
    for n_experts, capacity, k in TIMED:
        for name in ("psr-gated", "psr", "exact-lru"):
            policy = preset(name)
            case = random_case(policy, shape=(1, LAYERS), n_experts=n_experts, top_k=k, capacity=capacity)
            alone = Alone(DevicePolicy(case.cache()), capacity)
            scores = torch.randn(LAYERS, n_experts, device="cuda")
            pregate = scores + 0.5 * torch.randn_like(scores)

            def token(alone: Alone = alone, z: torch.Tensor = scores, g: torch.Tensor = pregate) -> None:
                alone.begin()
                alone.decide(None, 0)
                for layer in range(LAYERS):
                    last = layer + 1 == LAYERS
                    alone.decide(layer, None if last else layer + 1, z[layer], None if last else g[layer + 1])

            # Scores change between replays: decisions that never change would copy nothing.
            graph_us = _graph_us(token, scores.normal_) / (LAYERS + 1)
            moved = alone.policy.decisions.counts[:, 1:].sum(0).tolist()
            found[f"{name} E={n_experts} C={capacity} k={k}"] = {
                "us_per_launch": round(graph_us, 2),
                "copies_of_last_token": moved,
            }
        found[f"chunk psr-gated E={n_experts}"] = {"us_per_token": round(_chunk_us(n_experts, capacity, k), 2)}
    return found


def _chunk_us(n_experts: int, capacity: int, k: int, n_tokens: int = 512) -> float:
    case = random_case(preset("psr-gated"), shape=(1, 1), n_experts=n_experts, top_k=k, capacity=capacity)
    decide = DevicePolicy(case.cache())
    scores = torch.randn(n_tokens, n_experts, device="cuda")
    pregate = scores + 0.5 * torch.randn_like(scores)
    tokens = torch.zeros(n_tokens, dtype=torch.int64, device="cuda")
    out = decide.chunk(0, scores, pregate, tokens)
    return _graph_us(lambda: decide.chunk(0, scores, pregate, tokens, out=out), lambda: None, 5) / n_tokens


def time_sampling() -> dict[str, Any]:
    """Microseconds per token for the two launches at a vocabulary of 151,936 and 50,304, in a CUDA graph."""
    found = {}
    for vocabulary in (50304, 151936):
        for name, options in (("greedy", Options(temperature=0)), ("top-k 40", Options())):
            sampler = DeviceSampler(options, vocabulary, 10_000)
            sampler.start(1)
            logits = torch.randn(vocabulary, device="cuda")
            found[f"{name} V={vocabulary}"] = round(_graph_us(partial(sampler.sample, logits), logits.normal_), 2)
    return found


def _graph_us(work: Callable[[], Any], between: Callable[[], Any], replays: int = REPLAYS) -> float:
    """Median time of a captured graph; `work` runs once before, to compile."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times = []
    for _ in range(replays):
        between()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000)
    return float(np.median(times))
