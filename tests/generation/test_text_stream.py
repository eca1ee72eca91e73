"""Streaming text: whole characters only, stop strings across pieces, nothing lost and nothing repeated."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgemoe.generation.text import TextStream


def streamed(pieces, stops=()):
    stream = TextStream(stops)
    shown = [stream.feed(piece) for piece in pieces]
    return [*shown, stream.finish()], stream.stopped


def test_a_character_appears_once_it_is_whole():
    shown, _ = streamed([b"a", *(bytes([b]) for b in "🙂é".encode()), b"z"])
    assert shown == ["a", "", "", "", "🙂", "", "é", "z", ""]


def test_bytes_that_no_rest_can_complete_become_one_replacement_character_each():
    assert streamed([b"a\xf0\x9f", b"b\xff"])[0] == ["a", "�b�", ""]


def test_a_character_that_never_ends_is_replaced_at_the_end():
    assert streamed([b"a\xf0\x9f\x99"])[0] == ["a", "�"]


@given(st.text(max_size=60), st.lists(st.integers(1, 5), min_size=1))
def test_any_cut_of_any_text_streams_to_the_same_text(text, sizes):
    data, pieces, at, i = text.encode(), [], 0, 0
    while at < len(data):
        pieces.append(data[at : at + sizes[i % len(sizes)]])
        at, i = at + sizes[i % len(sizes)], i + 1
    shown, _ = streamed(pieces)
    assert "".join(shown) == text
    assert "�" in text or all("�" not in part for part in shown)


def test_a_stop_string_over_several_pieces_ends_the_text_before_it():
    shown, stopped = streamed([b"one EN", b"D", b" two", b" three"], ["END"])
    assert shown == ["one ", "", "", "", ""] and stopped == "END"


def test_what_only_began_like_a_stop_string_is_shown_after_all():
    shown, stopped = streamed([b"one EN", b"C", b"E"], ["END"])
    assert shown == ["one ", "ENC", "", "E"] and stopped is None


def test_a_stop_string_of_split_characters():
    data = "wait 🙂 now".encode()
    shown, stopped = streamed([bytes([b]) for b in data], ["🙂"])
    assert "".join(shown) == "wait " and stopped == "🙂"


@pytest.mark.parametrize(("stops", "ended"), [(["bc", "b"], "bc"), (["c", "bc"], "bc"), (["d", "cd"], "cd")])
def test_of_several_stop_strings_the_first_and_longest_ends_the_text(stops, ended):
    assert streamed([b"abcd"], stops)[1] == ended


@given(st.text("ab", max_size=30), st.text("ab", min_size=1, max_size=4), st.integers(1, 4))
def test_a_stop_string_cuts_where_a_search_finds_it(text, stop, size):
    data = text.encode()
    shown, stopped = streamed([data[i : i + size] for i in range(0, len(data), size)], [stop])
    assert "".join(shown) == text.split(stop)[0]
    assert (stopped is not None) == (stop in text)
