"""Logits become numbers in one place: by hand, as torch does where the logits lie, and zero where nothing differs."""

import numpy as np
import pytest

from edgemoe.errors import UserError
from edgemoe.evaluation.token_metrics import METRICS, compare_rows, copies_of, counts_of
from edgemoe.policy import LogicalCache, Policy, preset
from edgemoe.policy.block import CacheRows
from edgemoe.policy.replay import DEMAND, EXECUTED, PREFETCHED, REPLACED, UNUSED

RNG = np.random.default_rng(5)


def logits(rows=150, size=40, scale=3.0):
    return (scale * RNG.standard_normal((rows, size))).astype(np.float32)


def test_by_hand():
    p, q = np.array([0.5, 0.25, 0.25]), np.array([0.25, 0.5, 0.25])
    tokens, counts = np.array([0, 2, 1]), np.arange(10).reshape(2, 5)
    exact = np.log(np.stack([p, p])).astype(np.float32) + 7
    found = compare_rows(tokens, exact, np.log(np.stack([q, p])).astype(np.float32), counts)
    assert found.nll_exact == pytest.approx([np.log(4), np.log(4)], abs=1e-6)
    assert found.nll == pytest.approx([np.log(4), np.log(4)], abs=1e-6)
    assert found.kl == pytest.approx([0.25 * np.log(2), 0], abs=1e-6)
    assert found.agree.tolist() == [False, True]
    means = found.means()
    assert set(means) == set(METRICS)
    assert means["kl"] == pytest.approx(np.log(2) / 8, abs=1e-6) and means["top1"] == 0.5
    assert [means[name] for name in ("loads", "demand", "prefetch", "unused", "replaced")] == [
        (counts[0, at] + counts[1, at]) / 2 for at in (EXECUTED, DEMAND, PREFETCHED, UNUSED, REPLACED)
    ]


def test_the_same_rows_diverge_by_exactly_nothing():
    rows, tokens = logits(), RNG.integers(0, 40, 151)
    found = compare_rows(tokens, rows, rows.copy(), np.zeros((150, 5)))
    assert not found.kl.any() and found.agree.all() and np.array_equal(found.nll, found.nll_exact)


def test_torch_computes_the_same():
    torch = pytest.importorskip("torch", reason="the harness needs torch (pip install edgemoe[eval])")
    from edgemoe.gpu_offload.harness.divergence import _tokens

    exact, steered, tokens = logits(), logits(), RNG.integers(0, 40, 151)
    ours = compare_rows(tokens, exact, steered, np.zeros((150, 5)))
    theirs = _tokens(
        *(torch.from_numpy(rows)[None].log_softmax(-1) for rows in (exact, steered)), torch.from_numpy(tokens[1:])[None]
    )
    for name, column in zip(("nll_exact", "nll", "kl", "agree"), theirs, strict=True):
        assert np.allclose(getattr(ours, name), column[0].numpy(), atol=2e-5), name
    assert ours.kl.mean() > 0.1


def test_logits_that_are_not_numbers_are_refused():
    rows = logits(4)
    rows[2, 3] = np.nan
    with pytest.raises(UserError, match="not numbers"):
        compare_rows(np.arange(5), logits(4), rows, np.zeros((4, 5)))


@pytest.mark.parametrize("policy", [Policy(), preset("psr", window=6), preset("cache-prior", elide=0.2)], ids=str)
def test_counts_are_those_of_the_policy(policy):
    """An engine's records of single tokens, and the block kernel's own counts, from the same scores."""
    layers, tokens, experts, k = 3, 40, 16, 4
    scores, pregate = RNG.standard_normal((2, layers, tokens, experts)).astype(np.float32)
    make = {
        "n_layers": layers,
        "n_experts": experts,
        "top_k": k,
        "capacity": 8,
        "delta": np.full(layers, 3, np.float32),
    }
    rows, records = CacheRows(LogicalCache(policy, **make)), []
    rows.reset(1)
    wanted = np.zeros((tokens, 5), int)
    for layer in range(layers):
        given = pregate[None, layer] if layer and policy.needs_pregate else None
        wanted += rows.decide(layer, scores[None, layer], given).counts[0]
    cache = LogicalCache(policy, **make)
    for t in range(tokens):
        executed, counts = np.full((layers, 1, k), -1), np.zeros((layers, 1, 2), int)
        copies = np.zeros((layers, 1, 2, experts), int)
        cache.begin_token()
        for layer in range(layers):
            early = cache.prefetch(layer, pregate[layer, t]) if layer and policy.needs_pregate else []
            ran, demand = cache.select(layer, scores[layer, t])
            executed[layer, 0, : len(ran)] = ran
            for part, found in enumerate((early, demand)):
                counts[layer, 0, part] = len(found)
                copies[layer, 0, part, : len(found)] = [copy.expert for copy in found]
        records.append({"executed": executed, "counts": counts, "copies": copies, "scores": scores[:, t : t + 1]})
    found = counts_of(records, policy)
    assert np.array_equal(found, wanted)
    assert found[:, DEMAND].any() and found[:, REPLACED].any() == (policy.routing != "exact")
    assert counts_of([], policy).shape == (0, 5)


def test_copies_are_told_by_layer() -> None:
    steps = [np.array([[[1, 2], [0, 0]], [[0, 3], [1, 1]]]), np.array([[[4, 0]], [[0, 1]]])]  # [L, S, 2]
    assert copies_of([{"counts": counts} for counts in steps]).tolist() == [7, 6]  # type: ignore[union-attr]
    assert copies_of(()) is None
