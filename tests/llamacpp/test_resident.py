"""The resident engine: the same bits however a sequence came about, and whole again after anything that goes wrong."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edgemoe.errors import UserError
from edgemoe.generation.engine import Engine
from edgemoe.llamacpp.resident import LOAD_STEPS, ResidentEngine
from edgemoe.llamacpp.session import Session
from edgemoe.model.synthetic import write_synthetic

DEMO_MODEL = Path(__file__).parents[2] / "edgemoe" / "data" / "demo-moe-32m-q8_0.gguf"
TOKENS = np.random.default_rng(1).integers(0, 500, 600).astype(np.int32)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_synthetic(tmp_path_factory.mktemp("resident") / "m.gguf", n_layers=4, d_model=128, add_bos=True)[0]


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[ResidentEngine]:
    with ResidentEngine(path, n_ctx=640, n_threads=1) as made:
        yield made


@pytest.fixture(autouse=True)
def fresh(engine: ResidentEngine) -> None:
    engine.reset()


@pytest.fixture
def sigint_raises() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_it_is_an_engine(engine: ResidentEngine) -> None:
    known: Engine = engine
    assert known.position == 0 and known.n_ctx == 640 and known.bos is not None and known.n_vocab > 500


def test_a_prefill_gives_the_logits_of_its_last_token(engine: ResidentEngine, path: Path) -> None:
    mine = engine.prefill(TOKENS[:20])
    with Session(path, n_ctx=640, n_threads=1) as session:
        session.decode(TOKENS[:20])
        assert np.allclose(mine, session.logits(20)[-1], rtol=1e-4, atol=1e-4)
    assert engine.position == 20


def test_all_rows_without_repacking_are_the_bits_of_a_plain_decode(path: Path) -> None:
    """What a streaming engine is compared with."""
    with ResidentEngine(path, n_ctx=64, n_threads=1, all_rows=True, repack=False) as plain:
        first = plain.prefill(TOKENS[:40])
    with ResidentEngine(path, n_ctx=64, n_threads=1, all_rows=True, repack=False) as again:
        assert np.array_equal(again.prefill(TOKENS[:40]), first)


def test_a_long_prompt_comes_in_batches_and_rewinding_repeats_its_end(engine: ResidentEngine) -> None:
    whole = engine.prefill(TOKENS)
    assert engine.position == 600
    assert engine.rewind(512) == 512
    assert np.array_equal(engine.prefill(TOKENS[512:]), whole)


def test_rewinding_forgets(engine: ResidentEngine) -> None:
    engine.prefill(TOKENS[:10])
    expected = engine.decode(7)
    engine.rewind(10)
    engine.decode(11)
    engine.rewind(10)
    assert np.array_equal(engine.decode(7), expected)


def test_too_many_tokens_are_refused_and_nothing_changes(engine: ResidentEngine) -> None:
    engine.prefill(TOKENS[:30])
    expected = engine.decode(3)
    with pytest.raises(UserError, match="610 tokens after 31 do not fit into a context of 640"):
        engine.prefill(np.zeros(610, np.int32))
    assert engine.position == 31
    engine.rewind(30)
    assert np.array_equal(engine.decode(3), expected)


def test_an_interrupt_at_any_moment_leaves_a_whole_memory(engine: ResidentEngine, sigint_raises: None) -> None:
    expected = engine.prefill(TOKENS)
    interrupted = 0
    for delay in (0.0, 0.002, 0.01, 0.03, 0.1):
        engine.reset()
        timer = threading.Timer(delay, lambda: os.kill(os.getpid(), signal.SIGINT))
        try:
            timer.start()
            engine.prefill(TOKENS)
            timer.join()
        except KeyboardInterrupt:
            interrupted += 1
            assert engine.position in (0, 512, 600)
        at = min(engine.rewind(engine.position), 512)
        engine.rewind(at)
        assert np.array_equal(engine.prefill(TOKENS[at:]), expected)
    assert interrupted >= 1


def test_what_it_counts(engine: ResidentEngine) -> None:
    before = engine.stats()
    engine.prefill(TOKENS[:20])
    engine.decode(1)
    since = engine.stats() - before
    assert since.tokens == 21 and since.seconds > 0 and since.compute_s == since.seconds
    assert since.hit_rate is None and since.read_bytes == 0
    assert since.ram_bytes > 10e6  # a level, not a difference


@pytest.mark.parametrize("kind", ["bf16", "q8_0", "q4_0"])
def test_kv_types_change_little(kind: str) -> None:
    with (
        ResidentEngine(DEMO_MODEL, n_ctx=64, n_threads=1) as usual,
        ResidentEngine(
            DEMO_MODEL,
            n_ctx=64,
            n_threads=1,
            kv_type=kind,  # type: ignore[arg-type]
        ) as other,
    ):
        text = usual.tokenize(b"And it came to pass, when the people saw the light, that")
        a, b = usual.prefill(text), other.prefill(text)
        assert not np.array_equal(a, b)
        assert np.corrcoef(a, b)[0, 1] > 0.98


def test_an_unknown_kv_type_is_refused(path: Path) -> None:
    with pytest.raises(UserError, match="KV type 'q3' is not one of f16, bf16"):
        ResidentEngine(path, kv_type="q3")  # type: ignore[arg-type]


def test_loading_tells_how_far_it_is(path: Path) -> None:
    told: list[int] = []
    with ResidentEngine(path, n_ctx=32, n_threads=1, advance=told.append):
        assert sum(told) == LOAD_STEPS and min(told) >= 0


def test_the_default_context_is_no_larger_than_the_model_was_trained_for() -> None:
    with ResidentEngine(DEMO_MODEL, n_threads=1) as engine:
        assert engine.n_ctx == 1024
    with ResidentEngine(DEMO_MODEL, n_threads=1, n_ctx=48) as engine:
        assert engine.n_ctx == 48


@pytest.fixture(scope="module")
def demo() -> Iterator[ResidentEngine]:
    with ResidentEngine(DEMO_MODEL, n_ctx=32, n_threads=1) as made:
        yield made


class TestVocabulary:
    def test_pieces_join_to_the_text(self, demo: ResidentEngine) -> None:
        text = "naïve 🙂 👩‍👩‍👧 \n\tend"
        assert b"".join(demo.piece(int(t)) for t in demo.tokenize(text.encode())) == text.encode()

    def test_special_tokens_are_read_only_where_asked(self, demo: ResidentEngine) -> None:
        name = demo.special_text("eos")
        (eos,) = demo.eos_tokens
        assert name and demo.piece(eos) == b"" and demo.piece(eos, special=True) == name.encode()
        assert demo.tokenize(name.encode(), special=True).tolist() == [eos]
        assert eos not in demo.tokenize(name.encode())

    def test_the_demo_model_has_no_chat_template(self, demo: ResidentEngine) -> None:
        assert demo.chat_template is None

    def test_a_token_that_there_is_not_is_an_error(self, demo: ResidentEngine) -> None:
        with pytest.raises(ValueError, match="no token"):
            demo.piece(demo.n_vocab)
