import pytest

from edgemoe.errors import UserError
from edgemoe.units import Residency, format_bytes, parse_bytes, parse_count


@pytest.mark.parametrize(
    ("text", "count"), [("18GB", 18 * 10**9), ("512MiB", 512 * 2**20), ("1.5 kb", 1500), ("4096B", 4096)]
)
def test_sizes_are_decimal_unless_binary_is_asked_for(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["18", "GB", "-1GB", "1XB", "", "9" * 400 + "GB", "2000000TB"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="not a size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (12_600_000, "12.6 MB"), (134e9, "134 GB"), (2.7e9, "2.70 GB")]
)
def test_three_significant_digits(count: float, text: str) -> None:
    assert format_bytes(count) == text


def test_a_share_becomes_the_nearest_count() -> None:
    assert Residency.parse("13.4%").slots(128) == 17
    assert Residency.parse("25%").slots(64) == 16
    assert Residency.parse("32").slots(64) == 32
    assert Residency.of("32") == Residency.parse("32") == Residency.of(Residency.parse("32"))


def test_bytes_buy_whole_slots_in_every_layer() -> None:
    assert Residency.parse("6GB").slots(128, layer_expert_bytes=94 * 10_600_000) == 6


@pytest.mark.parametrize("text", ["0%", "101%", "0", "half", "6", "9" * 5000, "9" * 5000 + "%", "1" * 400 + "GB"])
def test_impossible_residencies_are_refused(text: str) -> None:
    with pytest.raises(UserError) as refusal:
        Residency.parse(text).slots(4)
    assert len(str(refusal.value)) < 150


def test_counts_fit_64_bits() -> None:
    assert [parse_count(text) for text in ("0", " 12 ", "1" + "0" * 18)] == [0, 12, 10**18]
    assert [parse_count(text) for text in ("-1", "1.5", "", "9" * 19, "9" * 5000)] == [None] * 5


def test_bytes_need_an_expert_size() -> None:
    with pytest.raises(UserError, match="--model"):
        Residency.parse("6GB").slots(64)
