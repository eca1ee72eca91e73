"""Many prompts side by side: each text ends as its options say, and the next prompt takes its place."""

import pytest

from edgemoe.demo import demo_model
from edgemoe.errors import UserError
from edgemoe.generation.options import Options
from edgemoe.generation.parallel import Parallel, load_streams, seeded

TEXTS = ["In the beginning", "Once upon a time", "def main(argv):", "The theorem", "A list of", "It was"]
SETTINGS = {"residency": "16", "n_ctx": 64, "n_threads": 1, "chunk": 16}


def work(streams, options):
    return Parallel(streams, [streams.tokenize(text.encode()).tolist() for text in TEXTS], options)


def test_every_prompt_is_written_and_places_are_taken_again():
    with load_streams(demo_model(), 2, **SETTINGS) as streams:
        options = [Options(n=3 + 4 * i, temperature=0) for i in range(6)]
        parallel = work(streams, options)
        live, ended = [], []
        for texts in parallel.run():
            live.append(parallel.live)
            ended += [text.index for text in texts]
        assert sorted(ended) == list(range(6)) and max(live) == 2 and live[-1] == 0 and not streams.live
        assert [text.index for text in parallel.written] == list(range(6))
        for text, asked in zip(parallel.written, options, strict=True):
            assert text.finish in ("length", "end") and text.tokens <= asked.n and text.text
            assert (text.tokens == asked.n) == (text.finish == "length")
        # All tokens but the first of each text, which its prompt gave, are rows of steps.
        assert parallel.rows == sum(text.tokens - 1 for text in parallel.written) == parallel.decode.tokens
        assert parallel.steps < parallel.rows


def test_stops_seeds_and_full_contexts():
    with load_streams(demo_model(), 3, policy="psr", **SETTINGS) as streams:
        runs = []
        for _ in range(2):
            parallel = work(streams, seeded(Options(n=500, seed=7, stop=("e",), ignore_eos=True), 6))
            for _ in parallel.run():
                pass
            runs.append([(text.text, text.seed, text.finish) for text in parallel.written])
        assert runs[0] == runs[1]
        assert [seed for _, seed, _ in runs[0]] == list(range(7, 13))
        assert all(("e" in text) == (finish != "stop") or finish == "context" for text, _, finish in runs[0])
        assert "stop" in {finish for *_, finish in runs[0]}
        parallel = work(streams, [Options(temperature=0, ignore_eos=True)] * 6)
        for _ in parallel.run():
            pass
        assert {text.finish for text in parallel.written} == {"context"}
        assert {text.tokens + text.prompt_tokens for text in parallel.written} == {streams.n_ctx + 1}


def test_prompts_that_cannot_be_written_are_refused_first():
    with load_streams(demo_model(), 2, **SETTINGS) as streams:
        with pytest.raises(UserError, match="prompt 2 is empty"):
            Parallel(streams, [[40], []], [Options()] * 2)
        with pytest.raises(UserError, match=r"prompt 1 has 1,000 tokens, the context holds"):
            Parallel(streams, [[40] * 1000], [Options()])
