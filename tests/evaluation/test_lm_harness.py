"""The lm-eval model on Hugging Face models: batches, padding and chat templates."""

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the quality harness needs torch (pip install edgemoe[eval])")
transformers = pytest.importorskip("transformers", reason="needs transformers (pip install edgemoe[eval])")
pytest.importorskip("lm_eval", reason="needs lm_eval (pip install edgemoe[eval])")

from lm_eval.api.instance import Instance  # noqa: E402

from edgemoe.demo import demo_model  # noqa: E402
from edgemoe.errors import UserError  # noqa: E402
from edgemoe.evaluation.answering import Setup, answering  # noqa: E402
from edgemoe.evaluation.lm import PolicyLM  # noqa: E402
from edgemoe.generation.options import Options  # noqa: E402
from edgemoe.model import read_model  # noqa: E402
from edgemoe.policy import preset  # noqa: E402
from edgemoe.units import Residency  # noqa: E402

TEXTS = ["1, 2, 3, 4, 5,", "Once upon a time there was a little", "def f(x):\n    return"]
FLOAT32 = {"n_ctx": 64, "threads": 1, "dtype": "float32"}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two layers of the demo model as a Hugging Face folder, with a chat template."""
    from edgemoe.training.export import read_gguf, write_hf

    folder = tmp_path_factory.mktemp("lm") / "hf"
    config, weights, tokenizer = read_gguf(demo_model())
    kept = {
        name: weight for name, weight in weights.items() if not name.startswith("blk.") or int(name.split(".")[1]) < 2
    }
    write_hf(folder, replace(config, n_layers=2), kept, tokenizer)
    (folder / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    return folder


def opened(folder, engine="torch", policy="psr", **more):
    setup = Setup(**FLOAT32, **more)
    return answering(engine, read_model(folder), preset(policy), Residency.parse("50%"), None, setup)


def asked(answers):
    tokens = [[answers.language.bos, *answers.language.tokenize(text.encode()).tolist()] for text in TEXTS]
    pairs = [(row[:cut], row[cut:]) for row in tokens for cut in (1, len(row) - 1) if len(row) > cut > 0]
    greedy, drawn = Options(n=4, temperature=0), Options(n=6, temperature=1, seed=3, stop=("5",))
    return pairs, [(row, greedy) for row in tokens] + [(row, drawn) for row in tokens]


def test_batches_answer_as_single_requests_do(folder):
    """Under a policy with state: padding touches no row's cache, and finished texts touch no other."""
    found = {}
    for batch in (1, 3):
        with opened(folder, batch=batch) as (answers, config):
            pairs, prompts = asked(answers)
            found[batch] = answers.loglikelihoods(pairs), answers.texts(prompts)
            assert config["batch"] == batch and config["slots"] == 32 and config["dtype"] == "float32"
            assert answers.loglikelihoods(pairs) == found[batch][0] and answers.texts(prompts) == found[batch][1]
    (scores, texts), (others, same) = found[1], found[3]
    np.testing.assert_allclose([nats for nats, _ in scores], [nats for nats, _ in others], rtol=0, atol=1e-3)
    assert texts == same and len(set(texts)) > 3


def test_engines_agree(folder):
    """The same weights in float32: the harness scores whole continuations, the other engine decodes them."""
    answered = {}
    for engine in ("torch", "offload"):
        with opened(folder, engine) as (answers, _):
            pairs, prompts = asked(answers)
            answered[engine] = answers.loglikelihoods(pairs), answers.texts(prompts)
    (ours, texts), (theirs, others) = answered["torch"], answered["offload"]
    np.testing.assert_allclose([nats for nats, _ in ours], [nats for nats, _ in theirs], rtol=0, atol=1e-3)
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]
    # The second half is drawn: this engine draws on its device, by other numbers.
    half = len(texts) // 2
    assert texts[:half] == others[:half] and any(texts[:half]) and len(texts[half:]) == len(others[half:]) == half


@torch.no_grad()
def test_exact_routing_scores_as_transformers_does(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with opened(folder, policy="exact-lru", batch=4) as (answers, _):
        pairs, _ = asked(answers)
        found = answers.loglikelihoods(pairs)
    for (context, continuation), (nats, greedy) in zip(pairs, found, strict=True):
        rows = model(torch.tensor([[*context, *continuation]])).logits[0, len(context) - 1 : -1].double()
        targets = torch.tensor(continuation)
        assert nats == pytest.approx(float(rows.log_softmax(-1).gather(1, targets[:, None]).sum()), abs=1e-3)
        assert greedy == bool((rows.argmax(-1) == targets).all())


def test_conversations_are_written_by_the_template(folder):
    with opened(folder) as (answers, _):
        lm = PolicyLM(answers, chat=True)
        turns = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "1, 2"}]
        bos = answers.language.special_text("bos")
        assert lm.apply_chat_template(turns[:1]) == f"{bos}user: Count.\nassistant:"
        assert lm.apply_chat_template(turns, add_generation_prompt=False) == f"{bos}user: Count.\nassistant:1, 2"
        tokens = lm.tok_encode(lm.apply_chat_template(turns[:1]))
        assert (
            tokens.count(answers.language.bos)
            == 1
            == len(tokens) - len(PolicyLM(answers).tok_encode("user: Count.\nassistant:")) + 1
        )
        # Without a template's say a special token in a text is text.
        assert PolicyLM(answers).tok_encode(bos) != [answers.language.bos]
        assert lm.chat_template(True) == answers.language.chat_template and lm.chat_template(False) is None
        assert lm.tokenizer_name.startswith("edgemoe-") and lm.batch_size == 1 and lm.max_length == 64
        prompt = lm.apply_chat_template(turns[:1])
        request = Instance("generate_until", {}, (prompt, {"until": ["\n"], "max_gen_toks": 4}), 0, ("task", 0, 1))
        assert lm.generate_until([request]) == answers.texts([(tokens, Options(n=4, temperature=0, stop=("\n",)))])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"chunk": 4}, "--chunk: the torch engine has no such choice"),
        ({"engine": "llama.cpp"}, "llama.cpp runs GGUF files"),
        ({"engine": "onnx"}, "--engine onnx: expected one of"),
        ({"n_ctx": 4096}, "--ctx 4,096: longer than the context of 1,024 tokens"),
        ({"policy": "psr", "engine": "offload", "batch": 2}, "--batch: the offload engine has no such choice"),
    ],
)
def test_what_an_engine_has_not_is_refused(folder, options, words):
    engine = options.pop("engine", "torch")
    setup = Setup(**{**FLOAT32, **{name: value for name, value in options.items() if name != "policy"}})
    with (
        pytest.raises(UserError, match=words),
        answering(engine, read_model(folder), preset("psr"), Residency.parse("50%"), None, setup),
    ):
        pass
