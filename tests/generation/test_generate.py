"""Generation with the demo model: same seed, same text; whole characters; every way to end; memory that is kept."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from edgemoe.errors import UserError
from edgemoe.generation import Context, Options, Writer, generate, load
from edgemoe.generation.chat import ChatTemplate
from edgemoe.generation.summary import Meter

DEMO = Path(__file__).parents[2] / "edgemoe" / "data" / "demo-moe-32m-q8_0.gguf"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
EMOJI = "Weather: 🙂🙃🙂🙃🙂🙃🙂🙃🙂🙃🙂🙃🙂"


@pytest.fixture(scope="module")
def writer() -> Iterator[Writer]:
    with load(DEMO, n_ctx=256, n_threads=1) as made:
        yield made


@pytest.fixture(autouse=True)
def fresh(writer: Writer) -> None:
    writer.engine.reset()
    writer.context.tokens.clear()
    writer.template = writer._said = None


def test_the_same_seed_gives_the_same_text_and_another_does_not(writer):
    first = writer.write("In the beginning", n=24, seed=5)
    assert writer.write("In the beginning", n=24, seed=5) == first
    assert writer.write("In the beginning", n=24, seed=6) != first


def test_an_engine_of_its_own_gives_the_same_text_again(writer):
    first = writer.write("def main(", n=16, seed=1)
    with load(DEMO, n_ctx=256, n_threads=1) as other:
        assert other.write("def main(", n=16, seed=1) == first


def test_greedy_needs_no_seed_and_equals_a_loop_by_hand(writer):
    prompt = writer.tokens("for i in range(")
    tokens = [step.token for step in generate(writer.engine, prompt, Options(n=8, temperature=0))]
    writer.engine.reset()
    logits, expected = writer.engine.prefill(prompt), []
    for _ in range(8):
        expected.append(int(logits.argmax()))
        logits = writer.engine.decode(expected[-1])
    assert tokens == expected


def test_split_characters_are_shown_whole(writer):
    """The demo model spells emoji in several tokens of bytes; greedy goes on with the pattern."""
    steps = list(writer.stream(EMOJI, n=30, temperature=0))
    pieces = [writer.engine.piece(step.token) for step in steps]
    split = [piece for piece in pieces if _is_part(piece)]
    assert len(split) >= 4, "the model no longer writes emoji here: choose another prompt"
    whole = b"".join(pieces).decode(errors="replace")
    assert "".join(step.text for step in steps) == whole
    assert "🙂" in whole
    assert all("�" not in step.text for step in steps[:-1])


def _is_part(piece: bytes) -> bool:
    try:
        piece.decode()
    except UnicodeDecodeError:
        return True
    return False


def test_every_step_says_which_it_is_and_the_last_one_why(writer):
    steps = list(writer.stream("One two three", n=5, seed=1))
    assert [step.index for step in steps] == list(range(5))
    assert [step.finish for step in steps] == [None] * 4 + ["length"]
    assert all(step.seconds > 0 for step in steps)


def test_a_stop_string_ends_the_text_before_it_also_across_tokens(writer):
    free = writer.write("In the beginning", n=40, temperature=0)
    stop = free[11:15]  # some characters from the middle of words
    steps = list(writer.stream("In the beginning", n=40, temperature=0, stop=(stop,)))
    assert "".join(step.text for step in steps) == free[: free.index(stop)]
    assert steps[-1].finish == "stop" and len(steps) < 40


def test_the_models_own_end_ends_the_text_and_is_no_part_of_it(writer):
    (eos,) = writer.engine.eos_tokens
    steps = _after_forced(writer, eos, Options(n=9, temperature=0))
    assert [step.token for step in steps] == [eos] and steps[0].text == "" and steps[0].finish == "end"


def test_ignore_eos_goes_on(writer):
    (eos,) = writer.engine.eos_tokens
    steps = _after_forced(writer, eos, Options(n=3, temperature=0, ignore_eos=True))
    assert steps[0].token == eos and len(steps) == 3 and steps[-1].finish == "length"


def _after_forced(writer, token, options):
    """A generation whose first token is `token`, whatever the model thinks."""
    from edgemoe.generation.sampling import Sampler

    class Forced(Sampler):
        first = True

        def sample(self, logits):
            chosen = token if self.first else super().sample(logits)
            self.first = False
            return chosen

    return list(generate(writer.context, writer.tokens("A text"), options, Forced(options)))


def test_a_full_context_ends_the_text(writer):
    prompt = writer.tokens("word " * 260)[:250]
    steps = list(generate(writer.engine, prompt, Options(temperature=0, ignore_eos=True)))
    assert steps[-1].finish == "context"
    assert len(steps) == 256 - 250 + 1  # the last one needs no place
    assert writer.engine.position == 256


def test_a_prompt_longer_than_the_context_is_refused_with_both_sizes(writer):
    with pytest.raises(UserError, match=r"the prompt has 3\d\d tokens, the context holds 256"):
        list(writer.stream("word " * 300))


def test_an_empty_prompt_is_refused_at_once(writer):
    with pytest.raises(UserError, match="empty"):
        writer.stream("")
    with pytest.raises(UserError, match="empty"):
        next(generate(writer.engine, []))


def test_a_bad_option_is_refused_at_once(writer):
    with pytest.raises(UserError, match="temperature"):
        writer.stream("text", temperature=-1)


def test_a_prompt_that_begins_alike_computes_only_what_is_new(writer):
    first = writer.tokens("The quick brown fox jumps over the lazy dog.")
    text = writer.write("The quick brown fox jumps over the lazy dog.", n=6, temperature=0)
    before = writer.engine.stats()
    longer = "The quick brown fox jumps over the lazy dog." + text + " And then it slept"
    warm = writer.write(longer, n=6, temperature=0)
    read = (writer.engine.stats() - before).tokens - 5
    assert writer.context.reused >= len(first) - 1
    assert read == len(writer.prompt) - writer.context.reused < len(first)
    with load(DEMO, n_ctx=256, n_threads=1) as cold:
        assert cold.write(longer, n=6, temperature=0) == warm


def test_the_same_prompt_again_decodes_its_last_token_only(writer):
    writer.write("Once more, with feeling", n=3, temperature=0)
    writer.write("Once more, with feeling", n=3, temperature=0)
    assert writer.context.reused == len(writer.prompt) - 1


def test_a_memory_that_cannot_forget_a_part_starts_again(writer, monkeypatch):
    """As recurrent models: rewinding leaves nothing."""
    expected = writer.write("A longer text to go on from, with an end", n=5, temperature=0)
    writer.write("A longer text to go on from, with a turn", n=5, temperature=0)

    def forget_all(position):
        writer.engine.reset()
        return 0

    monkeypatch.setattr(writer.engine, "rewind", forget_all)
    assert writer.write("A longer text to go on from, with an end", n=5, temperature=0) == expected
    assert writer.context.reused == 0


def test_messages_go_through_the_chat_template(writer):
    writer.template = ChatTemplate.of(writer.engine, CHATML)
    tokens = writer.tokens([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi 🙂"}])
    assert tokens[0] == writer.engine.bos
    text = b"".join(writer.engine.piece(t, special=True) for t in tokens[1:]).decode()
    assert (
        text
        == "<|im_start|>system\nBe brief.<|endoftext|>\n<|im_start|>user\nHi 🙂<|endoftext|>\n<|im_start|>assistant\n"
    )


def test_a_growing_conversation_keeps_its_beginning(writer):
    writer.template = ChatTemplate.of(writer.engine, CHATML)
    messages = [{"role": "user", "content": "Tell me of the sea"}]
    reply = writer.write(messages, n=12, temperature=0)
    held = len(writer.context.tokens)
    messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "And then?"}]
    writer.write(messages, n=4, temperature=0)
    assert writer.context.reused == held  # the reply, too, was there already


def test_an_answer_that_would_be_cut_elsewhere_keeps_the_models_own_tokens(writer):
    """Two tokens that the tokenizer would write as one."""
    writer.template = ChatTemplate.of(writer.engine, CHATML)
    the = writer.engine.tokenize(b"t").tolist() + writer.engine.tokenize(b"he").tolist()
    assert writer.engine.tokenize(b"the").tolist() != the
    messages = [{"role": "user", "content": "A word"}]
    prompt = writer.tokens(messages)
    writer._said.add(b"t", the[0])
    writer._said.add(b"he", the[1])
    messages += [{"role": "assistant", "content": "the"}, {"role": "user", "content": "B"}]
    longer = writer.tokens(messages)
    assert longer[: len(prompt) + 2] == prompt + the
    writer._said = None
    again = writer.tokens(messages)
    assert again != longer
    spelled = [b"".join(writer.engine.piece(t, special=True) for t in tokens) for tokens in (again, longer)]
    assert spelled[0] == spelled[1]


def test_another_conversation_does_not_keep_the_last_ones_tokens(writer):
    writer.template = ChatTemplate.of(writer.engine, CHATML)
    fresh = writer.tokens([{"role": "user", "content": "Other"}])
    writer.write([{"role": "user", "content": "A word"}], n=5, temperature=0)
    assert writer.tokens([{"role": "user", "content": "Other"}]) == fresh


def test_special_tokens_of_a_template_are_tokens(writer):
    (eos,) = writer.engine.eos_tokens
    name = writer.engine.special_text("eos")
    writer.template = ChatTemplate.of(writer.engine, "{{ messages[0]['content'] }}{{ eos_token }}")
    tokens = writer.tokens([{"role": "user", "content": "Hi"}])
    assert name and tokens[-1] == eos and eos not in tokens[1:-1]


def test_a_template_that_writes_bos_does_not_get_a_second_one(writer):
    writer.template = ChatTemplate.of(writer.engine, "{{ bos_token }}{{ messages[0]['content'] }}")
    tokens = writer.tokens([{"role": "user", "content": "Hi"}])
    assert tokens == writer.tokens("Hi")


def test_a_model_without_a_template_says_so(writer):
    with pytest.raises(UserError, match="no chat template"):
        writer.stream([{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for %}", "no valid Jinja template"),
        ("{{ raise_exception('system role not supported') }}", "refuses this conversation: system role not supported"),
        ("{{ messages.nothing.here }}", "refuses this conversation"),
        ("{{ ''.__class__.__mro__ }}", "refuses this conversation"),
    ],
)
def test_a_template_that_fails_is_one_line(writer, template, said):
    with pytest.raises(UserError, match=said) as refusal:
        ChatTemplate.of(writer.engine, template).render([{"role": "system", "content": "x"}])
    assert "\n" not in str(refusal.value)


def test_a_generation_that_is_left_can_be_taken_up_again(writer):
    expected = writer.write("The end of the", n=6, temperature=0)
    writer.engine.reset()
    writer.context.tokens.clear()
    steps = writer.stream("The end of the", n=6, temperature=0)
    next(steps), next(steps)
    del steps
    assert writer.write("The end of the", n=6, temperature=0) == expected
    assert writer.context.reused == len(writer.prompt) - 1


def test_the_summary_adds_up(writer):
    meter = Meter(writer.engine)
    meter.begin()
    for step in writer.stream("Figures of a text", n=6, seed=1):
        meter.step(step)
    s = meter.summary(seed=writer.seed, prompt_tokens=len(writer.prompt), reused_tokens=writer.context.reused)
    assert (s.finish, s.generated_tokens, s.decoded_tokens, s.seed) == ("length", 6, 5, 1)
    assert s.prompt.tokens == len(writer.prompt) and s.decode.tokens == 5
    assert s.tokens_per_s == pytest.approx(5 / s.decode_s)
    assert sum(s.seconds_per_token.values()) == pytest.approx(s.decode_s / 5, rel=1e-6)
    assert s.as_json()["decode_phase"]["tokens"] == 5
    twice = s.then(s)
    assert twice.generated_tokens == 12 and twice.tokens_per_s == pytest.approx(s.tokens_per_s)


def test_a_missing_file_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match=r"none\.gguf"):
        load(tmp_path / "none.gguf")


def test_a_context_belongs_to_one_engine(writer):
    context = Context(writer.engine)
    prompt = writer.tokens("Two ways in")
    a = [s.token for s in generate(context, prompt, Options(n=4, temperature=0))]
    assert [s.token for s in generate(writer.engine, prompt, Options(n=4, temperature=0))] == a
