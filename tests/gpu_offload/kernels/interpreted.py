"""The kernels in Triton's interpreter: run as a program, since Triton asks for it once, when it is imported.

Prints one JSON object: the name of each check, and what it compared or how it failed.
"""

import json
import os
import sys
import traceback
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch

from edgemoe.calibration import TokenPrior
from edgemoe.generation.options import Options
from edgemoe.gpu_offload.kernels import draw, sampling
from edgemoe.gpu_offload.kernels.comparing import KINDS, Alone, compare, fitted, policies, random_case
from edgemoe.gpu_offload.kernels.device_policy import DevicePolicy
from edgemoe.gpu_offload.kernels.selfcheck import check_sampling
from edgemoe.gpu_offload.kernels.state import DevicePrior
from edgemoe.policy import LogicalCache, Policy, preset

WEIGHTS = ("softmax", "softmax-executed", "given", "given-executed")


def every_policy():
    """Each on another kind of adversarial input, in turn as a prompt, mixed, and token by token."""
    n = 0
    for i, policy in enumerate(policies()):
        kind = KINDS[i % len(KINDS)]
        weights = WEIGHTS[i % 2] if kind in ("masked", "zeros") else WEIGHTS[i % 4]
        case = random_case(fitted(policy, 2, 4), seed=i, kind=kind, shape=(4, 2))
        n += compare(case, "cpu", (4, 2, 0)[i % 3], weights)
    return n


def every_budget_and_window():
    """All n ≤ w ≤ C, with C = k among them."""
    n = 0
    for capacity in (2, 4):
        for window in range(1, capacity + 1):
            for budget in range(window + 1):
                policy = preset("psr", lam=1.0, window=window, budget=budget)
                n += compare(
                    random_case(policy, seed=n, kind="ties", shape=(2, 2), n_experts=5, top_k=2, capacity=capacity),
                    "cpu",
                    n % 2,
                )
    return n


def corners():
    """C = E; C = k = E; one expert."""
    gated = preset("psr-gated", window=2)
    n = compare(random_case(gated, kind="ties", shape=(2, 2), n_experts=6, top_k=2, capacity=6), "cpu")
    n += compare(random_case(gated, kind="masked", shape=(2, 2), n_experts=3, top_k=3, capacity=3), "cpu", 1)
    one = preset("psr", window=1)
    return n + compare(random_case(one, shape=(2, 2), n_experts=1, top_k=1, capacity=1), "cpu")


def a_long_sequence():
    running = preset("psr-gated", scale="running", lam=0.3, top_j=1, window=3)
    return compare(random_case(running, seed=1, shape=(30, 2)), "cpu", 20)


def a_model_s_size():
    return compare(random_case(preset("psr-gated"), seed=1, shape=(2, 2), n_experts=64, top_k=8, capacity=32), "cpu", 1)


def a_reset_in_the_middle():
    """A reset on both sides: nothing of what was decided before it is left."""
    case = random_case(preset("exact-score"), seed=4, shape=(3, 1), n_experts=16, top_k=3, capacity=6)
    host, device = case.cache(), DevicePolicy(case.cache(), device="cpu")
    scores = torch.from_numpy(case.scores[:, 0].copy())
    device.chunk(0, scores[:1])
    device.reset()
    alone = Alone(device, 6)
    for t in range(3):
        host.begin_token(None)
        selection = host.select(0, case.scores[t, 0])
        alone.begin()
        alone.decide(None, 0)
        alone.decide(0, None, scores[t])
        m, n, _ = device.decisions.counts[0].tolist()
        assert device.decisions.executed[0, :m].tolist() == selection.experts
        assert device.decisions.demand[0, :n].tolist() == [[copy.expert, copy.slot] for copy in selection.copies]
    return 3


def the_sparse_prior():
    """Rows of a calibration's prior, for one token in all layers and for many tokens in one."""
    rng = np.random.default_rng(0)
    tokens = np.array([2, 5, 6], dtype=np.int32)
    cells = [np.sort(rng.choice(24, size=n, replace=False)) for n in (5, 0, 24)]
    prior = TokenPrior(
        (3, 8), tokens, np.array([7, 1, 9], np.uint32), np.array([0, 5, 5, 29]),
        np.concatenate(cells).astype(np.uint32), rng.integers(1, 7, size=29).astype(np.uint32),
    )  # fmt: skip
    prior.check()
    policy = Policy(eviction="score")
    cache = LogicalCache(policy, n_layers=3, n_experts=8, top_k=2, capacity=4)
    device = DevicePolicy(cache, device="cpu")
    device.prior = DevicePrior.from_prior(prior, "cpu")
    for token in (-1, 0, 2, 5, 6, 7, 1000):
        device.begin_token(torch.tensor([token]))
        found = device.state.reals[:, 2, :8].numpy()
        assert found.tobytes() == prior.row(token).tobytes(), token
    asked = torch.tensor([6, 2, -1, 5, 9])
    out = torch.empty(5, 32)
    device._unpack(asked, out, 32, 1, 1)
    assert out[:, :8].numpy().tobytes() == prior.rows(1, asked.numpy()).tobytes()
    return 12


def tokens_are_those_of_the_reference():
    n = check_sampling("cpu", vocabularies=(150,), steps=2)["tokens"]
    blocks = sampling.DeviceSampler(Options(top_k=3), 5000, 2, device="cpu")
    blocks.start(5)
    logits = np.random.default_rng(1).normal(size=5000).astype(np.float32)
    logits[[4999, 17, 3000]] = 9.0  # three blocks tie
    blocks.sample(torch.from_numpy(logits))
    assert int(blocks.control[sampling.TOKEN]) == draw.choose(logits, Options(top_k=3), 5, 0)
    greedy = sampling.DeviceSampler(Options(temperature=0), 5000, 2, device="cpu")
    greedy.sample(torch.from_numpy(logits))
    assert greedy.sequence.tolist() == [17, 0]
    return n + 2


def a_text_ends():
    """After its end, when full, and after logits that are no numbers, nothing is written any more."""

    def run(rows, capacity):
        sampler = sampling.DeviceSampler(Options(temperature=0), 4, capacity, ends=(2, 1, 3), device="cpu")
        sampler.sequence.fill_(-1)
        sampler.start(0)
        for row in rows:
            sampler.sample(torch.tensor(row))
        return sampler.control.tolist()[1:], sampler.sequence.tolist()

    goes_on, ends = [1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0]
    assert run([goes_on, ends, goes_on], 4) == ([2, sampling.ENDED, 2], [0, 2, -1, -1])
    assert run([goes_on, goes_on, goes_on], 2) == ([2, sampling.FULL, 0], [0, 0])
    for wrong in (float("nan"), -float("nan"), float("inf")):
        broken = [0.0, wrong, 0.0, 0.0]
        assert run([goes_on, broken, goes_on], 4) == ([1, sampling.NOT_FINITE, 0], [0, -1, -1, -1]), wrong
    assert run([[-float("inf")] * 4], 4)[0] == [0, sampling.NOT_FINITE, -1]
    return 6


CHECKS = {
    check.__name__: check
    for check in (
        every_policy, every_budget_and_window, corners, a_long_sequence, a_model_s_size, a_reset_in_the_middle,
        the_sparse_prior, tokens_are_those_of_the_reference, a_text_ends,
    )
}  # fmt: skip


def main(out: str, names: list[str]) -> None:
    torch.set_num_threads(1)
    found = {}
    for name in names or CHECKS:
        try:
            found[name] = {"compared": int(CHECKS[name]())}
        except Exception:
            found[name] = {"error": traceback.format_exc()}
    Path(out).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
