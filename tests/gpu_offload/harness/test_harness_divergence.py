"""Divergence from exact routing: by hand on one window, zero where nothing is steered, KL and selfgen agreeing."""

import numpy as np
import pytest
import torch
from tiny_models import VOCABULARY, calibrated, tiny, windows

from edgemoe.errors import UserError
from edgemoe.gpu_offload.harness.divergence import Setting, divergences, exactly, summarise
from edgemoe.gpu_offload.harness.selfgen import sample_windows
from edgemoe.gpu_offload.harness.steer import steer
from edgemoe.gpu_offload.harness.windows import batches, stacked, text_windows
from edgemoe.policy import Policy, preset
from edgemoe.policy.replay import DEMAND, EXECUTED, PREFETCHED, REPLACED, UNUSED

PSR = preset("psr", window=4)
EXACT = Setting(Policy(), 8)


@pytest.fixture(scope="module")
def olmoe():
    model = tiny("olmoe")
    return model, calibrated(model)


def log_probabilities(model, ids):
    with torch.no_grad():
        return model(input_ids=ids).logits.double().log_softmax(-1).numpy()


def test_one_window_by_hand(olmoe):
    model, calibration = olmoe
    (window,) = windows(1)
    ids = stacked(model, [window])
    p = log_probabilities(model, ids)[0]
    with steer(model, PSR, 8, calibration, record="counts") as steered:
        q = log_probabilities(model, ids)[0]
    (record,) = steered.take()
    ((at, (exact, psr)),) = divergences(model, [EXACT, Setting(PSR, 8)], [window], calibration)
    assert at == 0
    rows = np.arange(len(window) - 1)
    assert np.allclose(psr.nll_exact, -p[rows, window[1:]], atol=1e-4)
    assert np.allclose(psr.nll_steered, -q[rows, window[1:]], atol=1e-4)
    assert np.allclose(psr.kl, (np.exp(p) * (p - q)).sum(1)[:-1], atol=1e-4)
    assert np.array_equal(psr.agree, (p.argmax(1) == q.argmax(1))[:-1])
    assert np.array_equal(psr.counts, record.counts.sum(axis=0))
    # The last position predicts nothing in the window, so its copies are no token's.
    assert psr.copies.tolist() == [layer[:-1, [DEMAND, PREFETCHED]].sum() for layer in record.counts]
    assert psr.counts[:, REPLACED].any() and psr.counts[:, PREFETCHED].any() and psr.kl.mean() > 1e-3
    # Exact routing diverges by nothing at all, and its experts still have to be brought.
    assert not exact.kl.any() and exact.agree.all() and np.array_equal(exact.nll_exact, exact.nll_steered)
    assert not exact.counts[:, REPLACED].any() and exact.counts[:, DEMAND].any()


def test_the_summary_is_means_over_tokens(olmoe):
    model, calibration = olmoe
    texts = [*windows(2, 24), *windows(1, 9, seed=3)]
    found = [parts[0] for _, parts in divergences(model, [Setting(PSR, 8)], texts, calibration)]
    says = summarise(found)
    assert (says["windows"], says["tokens"], says["predictions"]) == (3, 57, 54)
    nll = [np.mean([x for w in found for x in getattr(w, name).tolist()]) for name in ("nll_exact", "nll_steered")]
    assert says["perplexity_exact"] == pytest.approx(np.exp(nll[0]), rel=1e-6)
    assert says["perplexity"] == pytest.approx(np.exp(nll[1]), rel=1e-6)
    assert says["excess_nll"] == pytest.approx(nll[1] - nll[0], abs=1e-6)
    assert says["excess_perplexity"] == pytest.approx(says["perplexity"] / says["perplexity_exact"] - 1)
    counts = np.concatenate([w.counts for w in found]).sum(axis=0) / 57
    names = {"loads": EXECUTED, "demand": DEMAND, "prefetch": PREFETCHED, "unused": UNUSED, "replaced": REPLACED}
    assert {name: says[name] for name in names} == pytest.approx({name: counts[at] for name, at in names.items()})
    assert says["loads"] == 16 and says["copies"] == pytest.approx(says["demand"] + says["prefetch"])


def test_batches_chunks_and_resumption(olmoe):
    """Only last bits may differ by batch or chunk; a resumed run repeats those of a whole one."""
    model, calibration = olmoe
    texts, setting = [*windows(3, 16), *windows(1, 9, seed=3)], [Setting(PSR, 8)]
    one = {at: parts[0] for at, parts in divergences(model, setting, texts, calibration)}
    ticks = []
    together = divergences(model, setting, texts, calibration, batch=2, advance=ticks.append)
    two = {at: parts[0] for at, parts in together}
    assert list(one) == list(two) == [0, 1, 2, 3]
    assert sum(ticks) == 2 * sum(map(len, texts))
    rest = {at: parts[0] for at, parts in divergences(model, setting, texts, calibration, batch=2, skip={0, 2})}
    assert list(rest) == [1, 3]
    for at in rest:
        for name in ("nll_exact", "nll_steered", "kl", "agree", "counts"):
            assert np.array_equal(getattr(rest[at], name), getattr(two[at], name))
    chunked = {at: parts[0] for at, parts in divergences(model, setting, texts, calibration, chunk=5)}
    for other in (two, chunked):
        for at in one:
            assert np.allclose(other[at].nll_exact, one[at].nll_exact, atol=1e-3)
            assert len(other[at].kl) == len(other[at].agree) == len(texts[at]) - 1
            assert len(other[at].counts) == len(texts[at])
            assert abs(other[at].kl.mean() - one[at].kl.mean()) < 0.2 * one[at].kl.mean() + 1e-3


def test_windows_of_one_length_share_a_pass():
    texts = [np.zeros(n) for n in (4, 4, 4, 3, 4, 3, 3)]
    assert list(batches(texts, 2)) == [[0, 1], [2], [3], [4], [5, 6]]
    assert list(batches(texts, 9)) == [[0, 1, 2], [3], [4], [5, 6]]


def test_excess_on_sampled_text_estimates_the_divergence(olmoe):
    """Sampled from the exact model, the mean of log p − log q is KL(p ‖ q): paired, within four standard errors."""
    model, calibration = olmoe
    texts = sample_windows(model, 32, 24, prefix=[0], seed=1, batch=16)
    setting = [Setting(preset("cache-prior", lam=0.5), 8)]
    found = [parts[0] for _, parts in divergences(model, setting, texts, calibration, batch=16)]
    gap = np.array([(w.nll_steered - w.nll_exact - w.kl).mean(dtype=np.float64) for w in found])
    error = gap.std(ddof=1) / np.sqrt(len(gap))
    says = summarise(found)
    assert says["kl"] > 5 * error
    assert abs(gap.mean()) < 4 * error
    # The model's own text is likelier to it than text from elsewhere.
    others = summarise([parts[0] for _, parts in divergences(model, [EXACT], windows(4))])
    assert says["perplexity_exact"] < others["perplexity_exact"]


def test_samples_depend_on_the_seed_and_not_on_how_many_are_asked_for(olmoe):
    model, _ = olmoe
    four = sample_windows(model, 4, 12, prefix=[0, 5], seed=7)
    assert [w.tolist() for w in sample_windows(model, 2, 12, prefix=[0, 5], seed=7)] == [w.tolist() for w in four[:2]]
    assert all(len(w) == 12 and w[:2].tolist() == [0, 5] for w in four)
    assert len({tuple(w.tolist()) for w in [*four, *sample_windows(model, 4, 12, prefix=[0, 5], seed=8)]}) == 8
    assert max(w.max() for w in four) < VOCABULARY


def test_samples_follow_the_models_distribution(olmoe):
    """First tokens after BOS: a chi-square of the most likely ones against the exact probabilities."""
    model, _ = olmoe
    drawn = np.array([w[1] for w in sample_windows(model, 1500, 2, prefix=[0], seed=3, batch=500)])
    with exactly(model):
        p = np.exp(log_probabilities(model, torch.tensor([[0]]))[0, 0])
    often = np.argsort(-p)[:10]
    expected = np.append(p[often], 1 - p[often].sum()) * len(drawn)
    seen = np.array([(drawn == token).sum() for token in often])
    seen = np.append(seen, len(drawn) - seen.sum())
    assert ((seen - expected) ** 2 / expected).sum() < 29.6  # 10 degrees of freedom, one in a thousand


class Words:
    """A tokenizer that knows numbers."""

    bos_token_id = 0

    def __call__(self, text, add_special_tokens=True, split_special_tokens=False):
        ids = [int(word) for word in text.split() if word.isdigit()]
        return {"input_ids": [0, *ids] if add_special_tokens else ids}


def test_a_text_becomes_windows_that_start_with_bos():
    found = text_windows(Words(), "1 2 3 4 5 6 7", 4)
    assert [w.tolist() for w in found] == [[0, 1, 2, 3], [0, 4, 5, 6], [0, 7]]
    assert [w.tolist() for w in text_windows(Words(), "1 2 3 4 5 6 7", 4, limit=1)] == [[0, 1, 2, 3]]
    plain = Words()
    plain.bos_token_id = None
    assert [w.tolist() for w in text_windows(plain, "1 2 3 4 5 6 7", 3)] == [[1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize(
    ("texts", "options", "words"),
    [
        ([], {}, "no windows"),
        ([np.array([3])], {}, "window 0 has 1 tokens"),
        ([np.array([3, 4]), np.array([3, VOCABULARY])], {}, f"window 1 holds token {VOCABULARY}"),
        ([np.array([-1, 3])], {}, "token -1"),
        ([np.array([3, 4])], {"batch": 0}, "batch of 0"),
        ([np.array([3, 4])], {"chunk": 0}, "0 positions per pass"),
    ],
)
def test_what_cannot_be_measured_is_refused(olmoe, texts, options, words):
    with pytest.raises(UserError, match=words):
        list(divergences(olmoe[0], [EXACT], texts, **options))


def test_what_cannot_be_sampled_is_refused(olmoe):
    for count, length, prefix, words in (
        (1, 4, [], "prefix of 0"),
        (1, 2, [0, 1], "prefix of 2"),
        (0, 4, [0], "0 win"),
    ):
        with pytest.raises(UserError, match=words):
            sample_windows(olmoe[0], count, length, prefix=prefix)
    with pytest.raises(UserError, match="predict nothing"):
        text_windows(Words(), "1 2", 1)
