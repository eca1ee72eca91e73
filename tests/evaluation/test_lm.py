"""The lm-eval model on engines that decode token by token: its numbers are those of the engine's own logits."""

import numpy as np
import pytest

pytest.importorskip("lm_eval", reason="needs lm_eval (pip install edgemoe[eval])")

from lm_eval.api.instance import Instance
from scipy.special import log_softmax

from edgemoe.demo import demo_model
from edgemoe.errors import UserError
from edgemoe.evaluation.answers import EngineAnswers
from edgemoe.evaluation.lm import PolicyLM
from edgemoe.generation.generate import generate
from edgemoe.generation.options import Options
from edgemoe.llamacpp.resident import ResidentEngine
from edgemoe.policy import preset
from edgemoe.streaming.engine import StreamingEngine
from edgemoe.units import Residency

HALF = {"residency": Residency.parse("50%"), "n_ctx": 96, "n_threads": 1, "chunk": 16}
PAIRS = [
    ("The capital of France is", " the city of Paris."),
    ("def add(a, b):\n    return", " a + b"),
    ("One, two,", " three"),
    ("One, two,", " four"),
    ("One, two,", " three, four"),
    ("One, two,", " three"),
]


@pytest.fixture(scope="module")
def steered():
    with StreamingEngine(demo_model(), policy=preset("psr"), **HALF) as engine:
        yield engine


@pytest.fixture(scope="module")
def resident():
    with ResidentEngine(demo_model(), n_ctx=96, n_threads=1) as engine:
        yield engine


def request(kind, *arguments, at=0):
    return Instance(kind, {}, arguments, 0, ("task", at, 1))


def scored(lm, pairs):
    return lm.loglikelihood([request("loglikelihood", *pair) for pair in pairs])


def directly(engine, context, continuation):
    """(sum of log-probabilities, greedy) of token ids, by the engine's logits alone."""
    engine.reset()
    row, nats, greedy = engine.prefill(context), 0.0, True
    for at, token in enumerate(continuation):
        nats += log_softmax(row.astype(np.float64))[token]
        greedy &= int(np.argmax(row)) == token
        if at + 1 < len(continuation):
            row = engine.decode(token)
    return nats, bool(greedy)


def split(engine, context, continuation):
    whole = [engine.bos, *engine.tokenize((context + continuation).encode()).tolist()]
    length = 1 + len(engine.tokenize(context.encode()))
    return whole[:length], whole[length:]


@pytest.mark.parametrize("name", ["steered", "resident"])
def test_loglikelihoods_are_those_of_the_engines_logits(name, request):
    engine = request.getfixturevalue(name)
    found = scored(PolicyLM(EngineAnswers(engine)), PAIRS)
    expected = [directly(engine, *split(engine, *pair)) for pair in PAIRS]
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    np.testing.assert_allclose([nats for nats, _ in found], [nats for nats, _ in expected], rtol=0, atol=1e-9)
    assert all(nats < 0 for nats, _ in found) and found[2] == found[5] != found[3]


def test_no_answer_depends_on_another(steered):
    lm = PolicyLM(EngineAnswers(steered))
    together = scored(lm, PAIRS)
    assert [scored(lm, [pair])[0] for pair in reversed(PAIRS)] == together[::-1]
    # The policy does steer: otherwise nothing could depend on anything.
    with StreamingEngine(demo_model(), policy=preset("exact-lru"), **HALF) as exact:
        assert not {nats for nats, _ in scored(PolicyLM(EngineAnswers(exact)), PAIRS)} & {n for n, _ in together}


def test_what_is_greedy_is_what_generation_writes(resident):
    prompt = [resident.bos, *resident.tokenize(b"Once upon a time").tolist()]
    tokens = [step.token for step in generate(resident, prompt, Options(n=5, temperature=0))]
    answers = EngineAnswers(resident)
    other = (tokens[-1] + 1) % resident.n_vocab
    found = answers.loglikelihoods([(prompt, tokens), (prompt, [*tokens[:-1], other])])
    assert [greedy for _, greedy in found] == [True, False]


def test_a_space_before_the_continuation_belongs_to_it(resident):
    lm = PolicyLM(EngineAnswers(resident))
    assert scored(lm, [("One, two, ", "three")]) == scored(lm, [("One, two,", " three")])


def test_without_a_context_bos_comes_first(resident):
    lm = PolicyLM(EngineAnswers(resident))
    tokens = resident.tokenize(b"Hello there").tolist()
    found = scored(lm, [("", "Hello there")])[0]
    assert found[0] == pytest.approx(directly(resident, [resident.bos], tokens)[0], abs=1e-9)
    assert lm.loglikelihood_rolling([request("loglikelihood_rolling", "Hello there")]) == [found[0]]
    assert lm.tok_encode("Hello") == [resident.bos, *resident.tokenize(b"Hello").tolist()]


def test_a_long_text_is_scored_in_windows(resident):
    text = "It was the best of times, it was the worst of times. " * 9
    tokens = resident.tokenize(text.encode()).tolist()
    assert 96 < len(tokens) < 3 * 96
    expected, row = 0.0, [resident.bos, *tokens]
    for start in range(0, len(tokens), 96):
        # The last window is as long as the others, and scores only what is new.
        end = min(start + 96, len(tokens))
        first = end - 96
        known = start - first
        expected += directly(resident, row[first : first + known + 1], row[first + known + 1 : end + 1])[0]
    lm = PolicyLM(EngineAnswers(resident))
    assert lm.loglikelihood_rolling([request("r", text)])[0] == pytest.approx(expected, abs=1e-6)
    assert lm.loglikelihood_rolling([request("r", text), request("r", "")])[1] == 0


def test_a_longer_context_loses_its_beginning(resident):
    lm, context = PolicyLM(EngineAnswers(resident)), "and again " * 80 + "the same"
    before, after = split(resident, context, " thing")
    assert len(before) > 96
    cut = before[-(96 + 1 - len(after)) :]
    assert scored(lm, [(context, " thing")])[0][0] == pytest.approx(directly(resident, cut, after)[0], abs=1e-9)
    assert lm.truncated == 1
    lm.generate_until([request("generate_until", context, {"until": [], "max_gen_toks": 8})])
    assert lm.truncated == 2
    scored(lm, PAIRS)
    assert lm.truncated == 2


def text_of(lm, settings, prompt="1, 2, 3, 4, 5,", at=0):
    return lm.generate_until([request("generate_until", prompt, settings, at=at)])[0]


def test_texts_end_where_the_task_says(resident):
    lm = PolicyLM(EngineAnswers(resident))
    prompt = [resident.bos, *resident.tokenize(b"1, 2, 3, 4, 5,").tolist()]
    whole = "".join(step.text for step in generate(resident, prompt, Options(n=12, temperature=0)))
    assert text_of(lm, {"until": [], "max_gen_toks": 12}) == whole and "," in whole
    assert text_of(lm, {"until": [",", ""], "max_gen_toks": 12, "do_sample": False}) == whole.split(",")[0]
    assert text_of(lm, {"until": ",", "max_new_tokens": 12, "temperature": 0.0}) == whole.split(",")[0]
    assert len(text_of(lm, {"until": [], "max_gen_toks": 3})) < len(whole)


def test_sampled_texts_depend_on_the_seed_and_the_question(resident):
    drawn = {"until": [], "max_gen_toks": 12, "do_sample": True, "temperature": 1.0}
    answers = EngineAnswers(resident)
    first = text_of(PolicyLM(answers, seed=1), drawn)
    again = PolicyLM(answers, seed=1)
    other = text_of(again, drawn, at=1)  # another question before it changes nothing
    assert text_of(again, drawn) == first != other
    assert text_of(PolicyLM(answers, seed=2), drawn) != first
    one = request("generate_until", "1, 2, 3, 4, 5,", drawn)
    repeated = again.generate_until([one, one, one])
    assert repeated[0] == first and len(set(repeated)) == 3


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"until": [], "max_gen_toks": 96}, "leave a prompt no room in a context of 96"),
        ({"until": [], "num_beams": 4}, "generation_kwargs num_beams: 4: no engine here has that"),
        ({"until": [], "repetition_penalty": 1.2}, "repetition_penalty"),
        ({"until": [], "max_gen_toks": 8, "do_sample": True, "temperature": 1.0, "top_p": 7}, "top-p 7"),
    ],
)
def test_what_no_engine_has_is_refused(resident, settings, words):
    with pytest.raises(UserError, match=words):
        text_of(PolicyLM(EngineAnswers(resident)), settings)


def test_a_continuation_beyond_the_context_is_refused(resident):
    with pytest.raises(UserError, match=r"a continuation of \d+ tokens does not fit into a context of 96"):
        scored(PolicyLM(EngineAnswers(resident)), [("a", " b" * 200)])


def test_logits_that_are_no_numbers_are_refused():
    from edgemoe.evaluation.answers import predicted

    with pytest.raises(UserError, match="not numbers"):
        predicted(np.array([0, np.nan], np.float32), 0)
    assert predicted(np.array([1.0, 1.0], np.float32), 0) == (pytest.approx(-np.log(2)), True)
    assert predicted(np.array([1.0, 1.0], np.float32), 1)[1] is False
