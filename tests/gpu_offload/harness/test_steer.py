"""Models of every family under a policy: exact routing is untouched, steering is Algorithm 1 on what was recorded."""

import copy

import numpy as np
import pytest
import torch
import transformers
from tiny_models import FAMILIES, MOE_LAYERS, calibrated, tiny, windows

from edgemoe.errors import UserError
from edgemoe.gpu_offload.harness.families import find_routers
from edgemoe.gpu_offload.harness.steer import steer
from edgemoe.gpu_offload.harness.windows import kv_name, passes, stacked
from edgemoe.policy import LogicalCache, Policy, preset
from edgemoe.policy.replay import DEMAND, EXECUTED, PREFETCHED, REPLACED

PSR = preset("psr", window=4)


@pytest.fixture(scope="module")
def models():
    """Every family's model and calibration, made when first asked for."""
    made = {}

    def get(family):
        if family not in made:
            model = tiny(family)
            made[family] = model, calibrated(model)
        return made[family]

    return get


def capacity_of(model) -> int:
    return find_routers(model)[0].n_experts // 2


def logits_of(model, ids, **kwargs):
    with torch.no_grad():
        return model(input_ids=ids, **kwargs).logits


def replayed(record, steered):
    """Executed experts and copies of a record's scores and tokens, one token at a time through `LogicalCache`."""
    known = steered.calibration
    n_layers, length, n_experts = record.scores.shape
    cache = LogicalCache(
        steered.policy,
        n_layers=n_layers,
        n_experts=n_experts,
        top_k=steered.routers[0].top_k,
        capacity=steered.capacity,
        delta=known.delta,
        warm=known.warm,
        prior=known,
    )
    layers = [router.layer for router in steered.routers]
    for t in range(length):
        cache.begin_token(int(record.tokens[t]))
        for at in range(n_layers):
            early = []
            if at and layers[at] == layers[at - 1] + 1:
                early = cache.prefetch(at, record.pregate[at, t])
            chosen = cache.select(at, record.scores[at, t])
            yield at, t, chosen.experts, early, chosen.copies


def check_replay(record, steered):
    """The record holds what Algorithm 1 decides from its scores."""
    for at, t, experts, early, demand in replayed(record, steered):
        assert record.executed[at, t, : len(experts)].tolist() == experts
        assert (record.executed[at, t, len(experts) :] == -1).all()
        copies = record.copies[at, t]
        assert copies[copies[:, 0] >= 0].tolist() == [list(pair) for pair in [*early, *demand]]
        own = set(np.argsort(-record.scores[at, t], kind="stable")[: record.own.shape[2]].tolist())
        assert set(record.own[at, t].tolist()) == own
        counts = record.counts[at, t]
        assert counts[[EXECUTED, DEMAND, PREFETCHED]].tolist() == [len(experts), len(demand), len(early)]
        assert counts[REPLACED] == len(set(experts) - own)


@pytest.mark.parametrize("family", FAMILIES)
def test_exact_routing_is_the_model_itself_bit_for_bit(models, family):
    model, calibration = models(family)
    ids = stacked(model, windows())
    plain = logits_of(model, ids)
    with steer(model, preset("exact-score"), capacity_of(model), calibration, record="decisions") as steered:
        assert torch.equal(logits_of(model, ids), plain)
    assert [router.layer for router in steered.routers] == MOE_LAYERS.get(family, [0, 1, 2, 3])
    assert steered.totals[DEMAND] > 0 and steered.totals[REPLACED] == 0
    assert steered.tokens == ids.numel()
    assert torch.equal(logits_of(model, ids), plain)  # the hooks are gone


@pytest.mark.parametrize("family", FAMILIES)
def test_steering_is_algorithm_1_on_the_recorded_scores(models, family):
    model, calibration = models(family)
    ids = stacked(model, windows())
    plain = logits_of(model, ids)
    with steer(model, PSR, capacity_of(model), calibration, record="scores") as steered:
        changed = logits_of(model, ids)
    records = steered.take()
    assert len(records) == len(ids)
    for record, row in zip(records, ids.numpy(), strict=True):
        assert record.tokens.tolist() == row.tolist()
        check_replay(record, steered)
    assert steered.totals[REPLACED] > 0 and steered.totals[PREFETCHED] > 0
    assert not torch.equal(changed, plain)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_pregate_is_the_next_router_on_this_layers_input(models, family):
    model, calibration = models(family)
    inputs, handles = {}, []
    for router in find_routers(model):
        keep = lambda module, args, layer=router.layer: inputs.__setitem__(layer, args[0].flatten(0, -2))  # noqa: E731
        handles.append(router.gate.register_forward_pre_hook(keep))
    with steer(model, PSR, capacity_of(model), calibration, record="scores") as steered:
        logits_of(model, stacked(model, windows(1)))
    for handle in handles:
        handle.remove()
    (record,) = steered.take()
    for at, router in enumerate(steered.routers):
        own, before = router.scores(inputs[router.layer]).numpy(), inputs.get(router.layer - 1)
        assert np.array_equal(record.scores[at], own)
        if before is None:
            assert not record.pregate[at].any() and not record.counts[at, :, PREFETCHED].any()
        else:
            assert np.array_equal(record.pregate[at], router.scores(before).numpy())
            assert record.counts[at, :, PREFETCHED].any()


def paper_weights(family, gate, x, executed):
    """Mixing weights [T, k] by the definitions of the model cards, in float64."""
    logits = x.double().numpy() @ gate.weight.detach().double().numpy().T
    if family in ("deepseek_v3", "glm4_moe"):
        sigmoid = 1 / (1 + np.exp(-logits))
        chosen = np.take_along_axis(sigmoid, executed, axis=1)
        return chosen / chosen.sum(1, keepdims=True) * gate.routed_scaling_factor
    shares = np.exp(logits - logits.max(1, keepdims=True))
    chosen = np.take_along_axis(shares / shares.sum(1, keepdims=True), executed, axis=1)
    return chosen if family in ("olmoe", "qwen2_moe") else chosen / chosen.sum(1, keepdims=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_mixing_weights_are_the_unmodified_routers(models, family):
    model, calibration = models(family)
    with steer(model, PSR, capacity_of(model), calibration, record="decisions") as steered:
        run, handles = {}, []
        for router in steered.routers:
            experts = model.get_decoder().layers[router.layer].mlp.experts
            keep = lambda module, args, layer=router.layer: run.__setitem__(layer, args)  # noqa: E731
            handles.append(experts.register_forward_pre_hook(keep))
        logits_of(model, stacked(model, windows(1)))
        for handle in handles:
            handle.remove()
    (record,) = steered.take()
    for at, router in enumerate(steered.routers):
        x, ids, weights = run[router.layer]
        assert np.array_equal(np.sort(ids.numpy(), axis=1), np.sort(record.executed[at], axis=1))
        wanted = paper_weights(family, router.gate, x.detach(), ids.numpy())
        assert np.allclose(weights.detach().numpy(), wanted, rtol=1e-5, atol=1e-7)
        assert record.counts[at, :, REPLACED].any()


@pytest.mark.parametrize("policy", [PSR, preset("speculative", window=8), Policy(routing="cache-prior", lam=50.0)])
def test_a_bonus_never_crosses_a_group_mask(models, policy):
    model, calibration = models("deepseek_v3")
    with steer(model, policy, 8, calibration, record="scores") as steered:
        logits_of(model, stacked(model, windows()))
    for record in steered.take():
        groups = np.isneginf(record.scores).reshape(*record.scores.shape[:2], 4, 4)
        assert (groups.all(-1).sum(-1) == 2).all() and (groups.any(-1) == groups.all(-1)).all()
        taken = np.take_along_axis(record.scores, record.executed.astype(np.int64), axis=2)
        if policy.routing == "cache-prior":
            assert np.isfinite(taken).all()
        assert (record.executed >= 0).all()


def test_half_precision_keeps_float32_scores():
    """bf16 and the model's own bf16 scores differ in near-ties, so logits are close and no more than that."""
    wide, narrow = tiny("olmoe"), tiny("olmoe", torch.bfloat16)
    ids = stacked(narrow, windows())
    with steer(narrow, Policy(), 16, record="scores") as steered:
        found = logits_of(narrow, ids)
    assert found.dtype == torch.bfloat16
    scores = np.concatenate([record.scores.ravel() for record in steered.take()])
    rounded = torch.from_numpy(scores).bfloat16().float().numpy()
    assert (scores != rounded).mean() > 0.9
    error = (found.float() - logits_of(wide, ids)).norm() / logits_of(wide, ids).norm()
    assert error < 0.25


def test_elided_gates_weigh_nothing(models):
    model, calibration = models("mixtral")
    policy = Policy(elide=0.3)
    blocks = [model.get_decoder().layers[layer].mlp for layer in range(4)]
    run, handles = [], []
    for block in blocks:
        handles.append(block.experts.register_forward_pre_hook(lambda module, args: run.append(args)))
    with steer(model, policy, 4, calibration, record="scores") as steered:
        logits_of(model, stacked(model, windows(1)))
    for handle in handles:
        handle.remove()
    (record,) = steered.take()
    elided = record.executed[..., 1] < 0
    assert 0 < elided.mean() < 1
    weights = np.stack([args[2].detach().numpy() for args in run])
    assert (weights[elided] == [1, 0]).all()
    assert (weights[~elided] > 0).all()
    check_replay(record, steered)


class CachePrior:
    """Cache-Prior routing (Skliar et al. 2025, as PSR §2, Equation 1) over an LRU cache: sets and sorting, no more.

    The bonus is λΔ̄ for residents; ties go to the higher logit, then the lower index. A missing expert of the chosen
    takes the place of the resident that was chosen longest ago and is not chosen now, ties to the lowest index; the
    missing ones come in index order. The resident experts are not touched by anything but choices.
    """

    def __init__(self, warm, lam, delta):
        self.bonus = np.float32(lam) * np.float32(delta)
        self.last = dict.fromkeys(warm, 0)
        self.now = 0

    def token(self, z, k):
        self.now += 1
        ranked = sorted(range(len(z)), key=lambda e: (-(z[e] + self.bonus if e in self.last else z[e]), -z[e], e))
        chosen = ranked[:k]
        missing = sorted(set(chosen) - set(self.last))
        for e in missing:
            del self.last[min(set(self.last) - set(chosen), key=lambda j: (self.last[j], j))]
            self.last[e] = self.now
        for e in chosen:
            self.last[e] = self.now
        return set(chosen), len(missing)


@pytest.mark.parametrize("family", ["olmoe", "deepseek_v3", "qwen3_5_moe"])
def test_lru_without_prefetch_is_cache_prior(models, family):
    model, calibration = models(family)
    with steer(model, preset("cache-prior", lam=0.3), 8, calibration, record="scores") as steered:
        logits_of(model, stacked(model, windows(3, 64)))
    replaced = 0
    for record in steered.take():
        for at in range(len(record.scores)):
            plain = CachePrior(calibration.warm[at, :8].tolist(), 0.3, calibration.delta[at])
            for t, z in enumerate(record.scores[at]):
                chosen, misses = plain.token(z, record.executed.shape[2])
                assert chosen == set(record.executed[at, t].tolist())
                assert misses == record.counts[at, t, DEMAND]
                replaced += record.counts[at, t, REPLACED]
    assert replaced > 100


@pytest.mark.parametrize("family", FAMILIES)
def test_left_padding_is_not_a_token(models, family):
    """Rows of a padded batch decide as rows alone: exactly so from the same scores, end to end but for near-ties."""
    model, calibration = models(family)
    texts = [window[:length] for window, length in zip(windows(3), (24, 15, 7), strict=True)]
    ids, mask = np.full((3, 24), 1), np.zeros((3, 24), np.int64)
    for row, text in enumerate(texts):
        ids[row, 24 - len(text) :], mask[row, 24 - len(text) :] = text, 1
    positions = np.maximum(mask.cumsum(1) - 1, 0)
    with steer(model, PSR, capacity_of(model), calibration, record="scores") as steered:
        given = {"attention_mask": torch.from_numpy(mask), "position_ids": torch.from_numpy(positions)}
        logits_of(model, torch.from_numpy(ids), **given)
        batch = steered.take()
        for text in texts:
            logits_of(model, stacked(model, [text]))
    assert steered.tokens == 2 * sum(map(len, texts))
    alone = steered.take()
    for text, padded, single in zip(texts, batch, alone, strict=True):
        assert padded.tokens.tolist() == single.tokens.tolist() == text.tolist()
        check_replay(padded, steered)
        same = (np.sort(padded.executed, axis=2) == np.sort(single.executed, axis=2)).all(axis=2)
        assert same.mean() > 0.95


@pytest.mark.parametrize("family", FAMILIES)
def test_state_goes_on_from_step_to_step_and_starts_afresh_with_a_request(models, family):
    model, calibration = models(family)
    ids = stacked(model, windows(2, 12))
    asked = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False, "pad_token_id": 1}
    with steer(model, PSR, capacity_of(model), calibration, record="scores") as steered:
        first = model.generate(ids, **asked)
        once = steered.take()
        again = model.generate(ids, **asked)
        twice = steered.take()
    assert torch.equal(first, again)
    for row, (record, same) in enumerate(zip(once, twice, strict=True)):
        assert record.tokens.tolist() == first[row, : len(record.tokens)].tolist()
        assert len(record.tokens) > 12
        check_replay(record, steered)
        for name in ("counts", "executed", "copies", "scores"):
            assert np.array_equal(getattr(record, name), getattr(same, name))


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_carry_the_state(models, family):
    model, calibration = models(family)
    ids = stacked(model, windows(2, 24))
    with steer(model, PSR, capacity_of(model), calibration, record="scores") as steered:
        whole = torch.cat([logits for _, logits in passes(model, ids)], dim=1)
        (at_once, _) = steered.take()
        for chunk in (1, 7):
            parts = list(passes(model, ids, chunk))
            assert [at for at, _ in parts] == list(range(0, 24, chunk))
            (record, _) = steered.take()
            check_replay(record, steered)
            same = (np.sort(record.executed, axis=2) == np.sort(at_once.executed, axis=2)).all(axis=(0, 2))
            before = np.flatnonzero(~same)[0] if (~same).any() else 24  # a flipped near-tie spreads
            assert before > 4
            assert torch.allclose(torch.cat([p for _, p in parts], dim=1)[0, :before], whole[0, :before], atol=1e-3)


def test_a_pass_that_fails_leaves_no_trace(models):
    model, calibration = models("olmoe")
    ids = stacked(model, windows(1, 12))
    steered = steer(model, PSR, 8, calibration, record="scores")

    def fail(module, args, output):
        raise KeyboardInterrupt

    with steered:
        handle = model.get_decoder().layers[2].register_forward_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            logits_of(model, ids)
        handle.remove()
        assert steered.take() == []
        logits_of(model, ids)
        (record,) = steered.take()
    check_replay(record, steered)


@pytest.mark.parametrize(
    ("policy", "capacity", "words"),
    [
        (PSR, 3, "cannot hold the 4 experts"),
        (PSR, 17, "the model has 16 experts"),
        (preset("psr", window=9), 8, "window of 9"),
    ],
)
def test_what_does_not_fit_is_refused(models, policy, capacity, words):
    model, calibration = models("olmoe")
    with pytest.raises(UserError, match=words):
        steer(model, policy, capacity, calibration)


def test_models_and_calibrations_that_do_not_fit_are_refused(models):
    model, _ = models("olmoe")
    config = transformers.LlamaConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=9)
    config.intermediate_size = 32
    with pytest.raises(UserError, match=r"llama model has no MoE block .* it can steer olmoe") as refusal:
        steer(transformers.LlamaForCausalLM(config), PSR, 8)
    assert "\n" not in str(refusal.value)
    with pytest.raises(UserError, match="needs Δ̄"):
        steer(model, PSR, 8)
    with pytest.raises(UserError, match=r"a calibration of 3 layers .* the model routes in 4"):
        steer(model, PSR, 8, models("deepseek_v3")[1])
    for policy, words in ((Policy(routing="tau", tau=0.5), "tau routing"), (Policy(elide=0.1), "gate elision")):
        with pytest.raises(UserError, match=f"{words} needs logits"):
            steer(models("deepseek_v3")[0], policy, 8)
    dense = tiny("qwen3_moe")
    dense.get_decoder().layers = dense.get_decoder().layers[1:2]
    with pytest.raises(UserError, match="no MoE layer"):
        steer(dense, PSR, 8)
    old = tiny("deepseek_v3")
    del old.get_decoder().layers[2].mlp.gate.num_group
    with pytest.raises(
        UserError, match="layer 2 of this deepseek_v3 model has a DeepseekV3TopkRouter without num_group"
    ):
        steer(old, PSR, 8)


def test_what_cannot_be_followed_is_refused(models):
    model, calibration = models("olmoe")
    ids = stacked(model, windows(1, 8))
    with steer(model, PSR, 8, calibration) as steered:
        with pytest.raises(UserError, match="generate with one beam"):
            model.generate(ids, num_beams=2, max_new_tokens=3, attention_mask=torch.ones_like(ids))
        with torch.no_grad():
            kept = getattr(model(input_ids=ids, use_cache=True), kv_name(model))
            model(input_ids=ids)
            with pytest.raises(UserError, match="KV cache holds 8 positions"):
                model(input_ids=torch.cat([ids, ids])[:, :1], **{kv_name(model): copy.deepcopy(kept)})
        with pytest.raises(UserError, match="dynamic cache"):
            logits_of(model, ids, attention_mask=torch.ones(1, 1, 8, 8, dtype=torch.bool))
        with pytest.raises(RuntimeError, match="steered already"), steer(model, PSR, 8, calibration):
            pass
        with pytest.raises(RuntimeError, match="outside a forward pass"):
            model.get_decoder()(ids)
        with pytest.raises(ValueError, match="nothing is recorded"):
            steered.take()
    broken = tiny("olmoe")
    broken.get_decoder().layers[1].mlp.gate.weight.data[3] = float("nan")
    with steer(broken, Policy(), 8), pytest.raises(UserError, match="layer 1 has router scores that are not numbers"):
        logits_of(broken, ids)
