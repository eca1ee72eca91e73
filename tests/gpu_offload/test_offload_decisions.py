"""The engine decides what `LogicalCache` decides from its recorded scores, and its slots follow."""

import numpy as np
import pytest

pytest.importorskip("torch", reason="the GPU tier needs torch (pip install edgemoe[gpu])")

from offload_engines import POLICIES, PROMPT, TINY, generate, joined, made_up_calibration, make

from edgemoe.model.synthetic import write_synthetic
from edgemoe.policy import LogicalCache, preset


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_synthetic(tmp_path_factory.mktemp("tiny") / "tiny.gguf", **TINY)[0]


def replayed(record, cache, has_pregate, token_of=lambda token: None):
    """What a cache decides, token by token, from recorded scores: executed, and the copies of both parts."""
    n_layers, n_tokens, _ = record["scores"].shape
    for t in range(n_tokens):
        cache.begin_token(token_of(int(record["tokens"][t])))
        for layer in range(n_layers):
            given = record["pregate"][layer, t] if has_pregate[layer] else None
            skips = cache.policy.needs_pregate and given is None
            first = [] if skips else cache.prefetch(layer, given)
            executed, second = cache.select(layer, record["scores"][layer, t])
            yield layer, t, executed, first, second


@pytest.mark.parametrize(
    ("name", "calibrated"),
    [(name, known) for name in POLICIES for known in (False, True) if known or name != "token-prior"],
)
def test_decisions_are_those_of_a_replay(tiny, name, calibrated):
    known = made_up_calibration() if calibrated else None
    with make(tiny, policy=POLICIES[name], calibration=known, record=True) as engine:
        generate(engine)
        record, policy, has_pregate = joined(engine), engine.policy, engine.has_pregate
        stats = engine.stats()
    assert has_pregate.tolist() == [False] + [policy.needs_pregate] * 3
    assert record["tokens"][: len(PROMPT)].tolist() == PROMPT
    cache = LogicalCache(
        policy,
        n_layers=4,
        n_experts=16,
        top_k=4,
        capacity=8,
        delta=known.delta if known else None,
        warm=known.warm if known else None,
        prior=known,
    )
    loads = misses = 0
    for layer, t, executed, first, second in replayed(record, cache, has_pregate, lambda token: token):
        assert record["executed"][layer, t].tolist() == executed + [-1] * (4 - len(executed))
        for part, copies in enumerate((first, second)):
            count = record["counts"][layer, t, part]
            assert record["copies"][layer, t, part, :count].tolist() == [copy.expert for copy in copies]
        loads, misses = loads + len(executed), misses + len(second)
    assert (stats.loads, stats.hits) == (loads, loads - misses)


def test_policies_differ_here(tiny):
    """So that agreement with a replay says something."""
    texts = {}
    for name in ("exact-lru", "cache-prior", "psr", "speculative", "tau", "elided"):
        with make(tiny, policy=POLICIES[name]) as engine:
            texts[name] = generate(engine)
    names = list(texts)
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            assert not np.array_equal(texts[one], texts[other]), (one, other)


def test_exact_policies_differ_in_copies_only(tiny):
    """What is resident, when it comes and how the prompt is cut decide no bit of exact logits within one partition."""
    found = []
    for name, slots in (("exact-lru", "4"), ("exact-score", "8"), ("exact-prefetch", "8"), ("static", "16")):
        from edgemoe.units import Residency

        with make(tiny, policy=POLICIES[name], residency=Residency.parse(slots)) as engine:
            found.append(generate(engine))
    assert all(np.array_equal(found[0], other) for other in found[1:])


def test_elided_gates_execute_fewer(tiny):
    with make(tiny, policy=POLICIES["elided"], record=True) as engine:
        generate(engine)
        executed, stats = joined(engine)["executed"], engine.stats()
    assert 0 < (executed < 0).sum() < executed.size / 2
    assert (executed[..., 0] >= 0).all()
    assert stats.loads == (executed >= 0).sum()


def test_chunks_of_one_decide_like_decoding(tiny):
    """A prompt token by token takes the path of decode; chunks take the other. From close scores, the same sets."""
    found = []
    for chunk in (1, 24, 50):
        with make(tiny, policy=POLICIES["psr-gated"], chunk=chunk, record=True) as engine:
            found.append((engine.prefill(PROMPT), joined(engine)["executed"], engine.executor.slot_of()))
    for logits, executed, slot_of in found[1:]:
        assert np.allclose(logits, found[0][0], atol=1e-4)
        assert (executed == found[0][1]).mean() > 0.99
        assert ((slot_of >= 0) == (found[0][2] >= 0)).mean() > 0.95


def test_counters_of_decoding_add_up(tiny):
    """Each prefetch copy is in time or unused; a demand copy is a miss; bytes are copies times an expert."""
    with make(tiny, policy=POLICIES["psr"]) as engine:
        logits = engine.prefill(PROMPT)
        before = engine.stats()
        for _ in range(10):
            logits = engine.decode(int(logits.argmax()))
        s = engine.stats() - before
        size = engine.shape.expert_values * 2
    assert s.tokens == 10 and s.loads == 10 * 4 * 4
    assert s.prefetch_reads == s.prefetch_in_time + s.prefetch_unused > 0
    assert s.demand_reads == s.loads - s.hits > 0 and s.prefetch_late == 0
    assert s.demand_bytes == s.demand_reads * size and s.prefetch_bytes == s.prefetch_reads * size


def test_a_chunk_brings_an_expert_once(tiny):
    with make(tiny, policy=preset("exact-lru"), chunk=50, record=True) as engine:
        warm = engine.executor.slot_of() >= 0
        engine.prefill(PROMPT)
        executed, stats = joined(engine)["executed"], engine.stats()
        after = engine.executor.slot_of()
    union = np.zeros((4, 16), bool)
    for layer in range(4):
        union[layer, np.unique(executed[layer])] = True
    # An expert that left and came back may end in another slot, and is moved there.
    least = int((union & ~warm).sum())
    assert least <= stats.demand_reads <= least + int((warm & (after >= 0)).sum())
    assert stats.prefetch_reads == 0


def test_a_verified_slot_that_is_wrong_is_reported(tiny):
    from edgemoe.errors import UserError

    with make(tiny) as engine:
        engine.prefill(PROMPT)
        engine.verify()
        engine.executor.slots.bytes[2, 3, 100] ^= 1
        with pytest.raises(UserError, match="slot 3 of layer 2 does not hold the bytes of expert"):
            engine.verify()
