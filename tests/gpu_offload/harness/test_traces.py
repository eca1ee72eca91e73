"""Traces of steered models: what `simulate`, `stats` and the calibration read, and the names that results carry."""

import numpy as np
import pytest
import torch
from tiny_models import FAMILIES, MOE_LAYERS, calibrated, tiny, windows

from edgemoe.errors import UserError
from edgemoe.gpu_offload.harness.calibrate import calibrate_model
from edgemoe.gpu_offload.harness.record import trace_of
from edgemoe.gpu_offload.harness.steer import steer
from edgemoe.gpu_offload.harness.windows import stacked
from edgemoe.policy import Policy, preset
from edgemoe.policy.replay import DEMAND, PREFETCHED, REPLACED, UNUSED
from edgemoe.tracing.calibrate import calibration_of
from edgemoe.tracing.simulate import Calibration, simulate
from edgemoe.tracing.stats import expert_loads, pregate_recall
from edgemoe.tracing.tracefile import load_trace, save_trace

PSR = preset("psr", window=4)


def run(steered, texts):
    with steered, torch.no_grad():
        steered.model(input_ids=stacked(steered.model, texts))
    return steered.take()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_trace_replays_to_the_very_counts(family, tmp_path):
    """Scores of a run under a policy, replayed under that policy by `edgemoe simulate`: copy for copy the same."""
    model = tiny(family)
    calibration = calibrated(model)
    capacity = steer(model, Policy(), 8).routers[0].n_experts // 2
    steered = steer(model, PSR, capacity, calibration, record="scores")
    records = run(steered, windows())
    save_trace(trace_of(records, steered.provenance(batch=4), "tiny", list("abcd")), tmp_path / "t.npz")
    trace = load_trace(tmp_path / "t.npz")
    assert trace.layers.tolist() == MOE_LAYERS.get(family, [0, 1, 2, 3])
    assert trace.windows.tolist() == [0, 24, 48, 72] and trace.domains == tuple("abcd")
    assert np.array_equal(trace.tokens, np.concatenate(windows()))
    known = Calibration.loaded(calibration, trace, "calibration")
    (row,) = simulate(trace, [capacity], {"psr": PSR}, calibration=known).to_dict("records")
    totals = dict(
        zip(("demand", "prefetch", "unused", "replaced"), (DEMAND, PREFETCHED, UNUSED, REPLACED), strict=True)
    )
    assert {name: row[f"{name}_per_token"] * 96 for name in totals} == pytest.approx(
        {name: steered.totals[at] for name, at in totals.items()}
    )
    assert steered.totals[REPLACED] > 0
    assert np.array_equal(trace.executed, np.concatenate([record.executed for record in records], axis=1))
    own = np.take_along_axis(trace.scores, trace.experts.astype(np.int64), axis=2)
    best = np.sort(trace.scores, axis=2)[..., ::-1][..., : trace.top_k]
    assert np.array_equal(own, best)
    assert trace.meta["steered"] is True
    assert trace.meta["run"]["policy_hash"] == PSR.hash and trace.meta["run"]["slots"] == capacity


def test_statistics_read_a_trace():
    model = tiny("qwen3_moe")
    steered = steer(model, Policy(), 16, record="scores")
    trace = trace_of(run(steered, windows(4, 64)), steered.provenance(), "tiny")
    assert trace.executed is None and trace.meta["steered"] is False
    assert trace.meta["architecture"] == "qwen3_moe" and trace.meta["model"] == "qwen3_moe"
    assert expert_loads(trace).sum(axis=1).tolist() == [4 * 256] * 3
    recall = pregate_recall(trace)
    assert set(recall["layer"]) == {"all", 3}  # the dense layer 1 leaves layer 2 without a pre-gate


def test_a_calibration_is_that_of_the_trace(tmp_path):
    """Estimated as the model runs, or from its exact trace: the same file."""
    model = tiny("deepseek_v3")
    texts = windows(4, 32, seed=99)
    steered = steer(model, Policy(), 16, record="scores")
    trace = trace_of(run(steered, texts), steered.provenance(), "text")
    direct = calibrate_model(model, texts, texts=[{"domain": "random", "tokens": 128}], batch=4)
    assert direct.digest == calibration_of(trace).digest
    assert direct.layers.tolist() == [1, 2, 3] and direct.n_tokens == 128 and direct.texts[0]["domain"] == "random"
    assert direct.header_sha256 == (steered.fingerprint,)
    finite = np.where(np.isneginf(trace.scores), np.nan, trace.scores)
    assert np.allclose(direct.delta, (np.nanmax(finite, 2) - np.nanmin(finite, 2)).mean(1), rtol=1e-5)
    counts = np.bincount(trace.experts[0].ravel(), minlength=16)
    assert direct.warm[0, 0] == counts.argmax()
    token = int(texts[0][0])
    at = trace.tokens == token
    row = np.bincount(trace.experts[1][at].ravel(), minlength=16) / at.sum()
    assert np.allclose(direct.prior_row(token)[1], row)


def test_the_fingerprint_names_the_model_and_not_its_precision():
    def id_of(model):
        return steer(model, Policy(), 16).fingerprint

    model = tiny("olmoe", torch.bfloat16)
    assert id_of(model) == id_of(tiny("olmoe", torch.bfloat16)) == id_of(tiny("olmoe", torch.bfloat16).float())
    assert id_of(model) != id_of(tiny("olmoe", torch.bfloat16, seed=1))
    tuned = tiny("olmoe", torch.bfloat16)
    tuned.model.norm.weight.data[0] = 2
    assert id_of(model) != id_of(tuned)


def test_the_configuration_hash_names_all_that_decides():
    model = tiny("olmoe")
    calibration = calibrated(model)

    def hash_of(policy=PSR, capacity=8, known=calibration, **how):
        return steer(model, policy, capacity, known).configuration(**how)["config_hash"]

    same = hash_of(chunk=None, batch=1)
    assert same == hash_of(chunk=None, batch=1) and len(same) == 12
    others = [
        hash_of(chunk=64, batch=1),
        hash_of(chunk=None, batch=2),
        hash_of(capacity=9, chunk=None, batch=1),
        hash_of(policy=preset("psr", window=3), chunk=None, batch=1),
        hash_of(known=calibrate_model(model, windows(1)), chunk=None, batch=1),
    ]
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    others.append(hash_of(chunk=None, batch=1))
    torch.set_num_threads(threads)
    assert len({same, *others}) == 7


def test_levels_hold_what_they_say():
    model = tiny("olmoe")
    records = {level: run(steer(model, Policy(), 8, record=level), windows(1)) for level in ("counts", "decisions")}
    assert records["counts"][0].executed is None and records["decisions"][0].scores is None
    assert np.array_equal(records["counts"][0].counts, records["decisions"][0].counts)
    about = steer(model, Policy(), 8).provenance()
    with pytest.raises(UserError, match="only counts were recorded"):
        trace_of(records["counts"], about, "tiny")
    with pytest.raises(UserError, match="no tokens were recorded"):
        trace_of([], about, "tiny")
    with pytest.raises(UserError, match="record 'everything' is not one of counts, decisions, scores"):
        steer(model, Policy(), 8, record="everything")
