"""The demo model's weights mean the same to llama.cpp, transformers and the code that trained them, and so does text.

The shipped Q8_0 weights are dequantised to F32 for all three, so that only the order of additions differs.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="the training code needs torch (pip install edgemoe[gpu])")
transformers = pytest.importorskip("transformers", reason="needs transformers (pip install edgemoe[eval])")

from exact_llamacpp import exact_runs  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

import edgemoe.data  # noqa: E402
from edgemoe.llamacpp.session import Session  # noqa: E402
from edgemoe.training.data import BOS, DOMAINS  # noqa: E402
from edgemoe.training.export import SPECIAL_TOKENS, Weights, model_of, read_gguf, weights_of, write_gguf, write_hf  # noqa: E402
from edgemoe.training.model import ModelConfig  # noqa: E402

DATA = Path(edgemoe.data.__file__).parent
DEMO = DATA / "demo-moe-32m-q8_0.gguf"
WINDOW, WINDOWS_PER_DOMAIN = 384, 3


@dataclass(frozen=True)
class Exported:
    """The shipped model, dequantised, in every format."""

    config: ModelConfig
    weights: Weights
    hf: Path
    gguf: Path


@dataclass(frozen=True)
class Run:
    """What one engine makes of the windows, their rows joined."""

    logits: np.ndarray  # [T, V] float32
    experts: np.ndarray  # [L, T, k] in ascending order: which are chosen decides, not their rank


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    folder = tmp_path_factory.mktemp("demo")
    config, weights, tokenizer = read_gguf(DEMO)
    write_hf(folder / "hf", config, weights, tokenizer)
    write_gguf(folder / "f32.gguf", config, weights, tokenizer, "F32")
    return Exported(config, weights, folder / "hf", folder / "f32.gguf")


@pytest.fixture(scope="module")
def tokenizer(exported: Exported) -> Tokenizer:
    """`tokenizers` reading the exported file; special tokens in a text are plain text to it."""
    tokenizer = Tokenizer.from_file(str(exported.hf / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    return tokenizer


@pytest.fixture(scope="module")
def windows(tokenizer: Tokenizer) -> list[list[int]]:
    """Windows that start with BOS, from the beginning, middle and end of every sample."""
    found = []
    for domain in DOMAINS:
        ids = tokenizer.encode((DATA / f"{domain}.txt").read_text(), add_special_tokens=False).ids
        for start in np.linspace(0, len(ids) - (WINDOW - 1), WINDOWS_PER_DOMAIN).astype(int):
            found.append([BOS, *ids[start : start + WINDOW - 1]])
    return found


def joined(parts: list[tuple[np.ndarray, np.ndarray]]) -> Run:
    logits, experts = zip(*parts, strict=True)
    return Run(np.concatenate(logits), np.sort(np.concatenate(experts, axis=1), axis=-1))


@pytest.fixture(scope="module")
def runs(exported: Exported, windows: list[list[int]]) -> dict[str, Run]:
    return {
        "llama.cpp": joined(list(exact_runs(exported.gguf, windows))),
        "transformers": joined(list(transformers_runs(exported, windows))),
        "edgemoe": joined(list(training_runs(exported, windows))),
    }


@torch.no_grad()
def transformers_runs(exported: Exported, windows: list[list[int]]) -> list[tuple[np.ndarray, np.ndarray]]:
    model = transformers.OlmoeForCausalLM.from_pretrained(exported.hf, dtype=torch.float32).eval()
    found = []
    for window in windows:
        out = model(torch.tensor([window]), output_router_logits=True)
        chosen = [scores.topk(exported.config.top_k).indices for scores in out.router_logits]
        found.append((out.logits[0].numpy(), torch.stack(chosen).numpy()))
    return found


@torch.no_grad()
def training_runs(exported: Exported, windows: list[list[int]]) -> list[tuple[np.ndarray, np.ndarray]]:
    model = model_of(exported.config, exported.weights).eval()
    found = []
    for window in windows:
        hidden, routings = model(torch.tensor([window]))
        chosen = torch.stack([routing.experts for routing in routings])
        found.append((model.lm_head(hidden)[0].numpy(), chosen.numpy()))
    return found


@pytest.mark.parametrize(
    ("first", "second"), [("llama.cpp", "transformers"), ("edgemoe", "transformers"), ("llama.cpp", "edgemoe")]
)
def test_engines_agree(runs: dict[str, Run], first: str, second: str) -> None:
    """Relative error of a row: ‖a − b‖ / ‖b‖ over the vocabulary. Rows with another top-k run other experts."""
    a, b = runs[first], runs[second]
    assert a.logits.shape == b.logits.shape == (len(DOMAINS) * WINDOWS_PER_DOMAIN * WINDOW, 8192)
    same = (a.experts == b.experts).all(axis=(0, 2))
    error = np.linalg.norm(a.logits - b.logits, axis=1) / np.linalg.norm(b.logits, axis=1)
    assert same.mean() >= 0.99
    assert error[same].max() < 1e-3
    # Rare rows may stand near a tie. A typical row shows rounding only: an F16 cache would not pass here.
    assert np.median(error) < 1e-5


def test_the_rows_are_worth_comparing(runs: dict[str, Run]) -> None:
    """Other rows differ widely, so that agreement says something."""
    run = runs["transformers"]
    shifted = np.roll(run.logits, 1, axis=0)
    error = np.linalg.norm(shifted - run.logits, axis=1) / np.linalg.norm(run.logits, axis=1)
    assert np.median(error) > 0.1
    assert (np.roll(run.experts, 1, axis=1) == run.experts).all(axis=(0, 2)).mean() < 0.01


def test_weights_go_into_the_training_model_and_back(exported: Exported) -> None:
    back = weights_of(model_of(exported.config, exported.weights))
    assert back.keys() == exported.weights.keys()
    assert all(np.array_equal(back[name], exported.weights[name]) for name in back)


Encode = Callable[[str], list[int]]


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with Session(DEMO, n_ctx=32, n_threads=1) as session:
        yield session


@pytest.fixture(scope="module")
def auto(exported: Exported) -> "transformers.PreTrainedTokenizerFast":
    return transformers.AutoTokenizer.from_pretrained(exported.hf)


@pytest.fixture(scope="module")
def encoders(session: Session, auto: "transformers.PreTrainedTokenizerFast", tokenizer: Tokenizer) -> dict[str, Encode]:
    """Text as plain text, without BOS, by the shipped GGUF in llama.cpp and by the export in the other two."""
    return {
        "llama.cpp": lambda text: session.tokenize(text.encode()).tolist(),
        "transformers": lambda text: auto(text, add_special_tokens=False, split_special_tokens=True)["input_ids"],
        "tokenizers": lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
    }


def same_ids(encoders: dict[str, Encode], text: str) -> list[int]:
    ids = {name: encode(text) for name, encode in encoders.items()}
    assert ids["llama.cpp"] == ids["tokenizers"]
    assert ids["transformers"] == ids["tokenizers"]
    return ids["tokenizers"]


@pytest.mark.parametrize("domain", DOMAINS)
def test_samples_are_tokenised_alike(encoders: dict[str, Encode], tokenizer: Tokenizer, domain: str) -> None:
    text = (DATA / f"{domain}.txt").read_bytes().decode()
    ids = same_ids(encoders, text)
    assert len(ids) < len(text.encode()) / 2.5  # words, not bytes
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "\r\n\r\nline\r\n\tand\rline\n",
        "a" + " " * 63 + "b" + " " * 200,
        "\t\t  \t\n \n  \n\n\n   x",
        "naïve café, Ærøskøbing; Straße; İstanbul",
        "日本語の文章。한국어 텍스트 ру́сский العربية עברית ไทย हिन्दी",
        "e\u0301 vs \u00e9; \ufb01; \u212b; \u1e9e",
        "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 \U0001f1e9\U0001f1ea ☃",
        "0 12 345 6789 1234567890 1e-17 0x7fff ½ ² ③ ٣",
        "I'm you're we'VE they'll 'S ''s can't'd",
        "\x00\x01\x1b[0m\x7f\x85\xa0\u1680\u180e\u2028\u2029\u200b\u3000\ufeff",
        "!!!???...---___+=/*(){}[]<>@#$%^&|\\~`\"'",
        "def f(x):\n    return x ** 2  # comment\n\n\nclass A:\n\tpass\n",
        "\U00010000\U0010ffff\ue000\ufffd",
    ],
)
def test_odd_texts_are_tokenised_alike(encoders: dict[str, Encode], tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(same_ids(encoders, text)) == text


@settings(max_examples=300)
@given(text=st.text(max_size=60))
def test_any_text_is_tokenised_alike(encoders: dict[str, Encode], text: str) -> None:
    same_ids(encoders, text)


@pytest.mark.parametrize("special", SPECIAL_TOKENS)
def test_special_tokens_in_a_text_are_plain_text(
    encoders: dict[str, Encode], tokenizer: Tokenizer, special: str
) -> None:
    ids = same_ids(encoders, f"before {special}{special} after")
    assert not {tokenizer.token_to_id(token) for token in SPECIAL_TOKENS} & set(ids)


def test_a_text_starts_with_bos_in_both(session: Session, auto: "transformers.PreTrainedTokenizerFast") -> None:
    assert session.bos == BOS
    assert auto("two words")["input_ids"] == [BOS, *session.tokenize(b"two words").tolist()]
