"""Stop strings cut the text at the first match, however the text arrives (cases S1, S2, S3)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.tokenizer.stop_strings import StopStrings


def run(stop: list[str], pieces: list[str], include: bool = False) -> tuple[str, str | None, list[str]]:
    """The whole text that went out, the match, and what went out piece by piece (the flush last)."""
    stops = StopStrings(stop, include_in_output=include)
    sent = []
    for piece in pieces:
        text, matched = stops.feed(piece)
        sent.append(text)
        if matched is not None:
            break
    sent.append(stops.flush())
    return "".join(sent), stops.matched, sent


def cut(text: str, stop: list[str], include: bool) -> tuple[str, str | None]:
    """The specification: the match that starts first, then the shortest."""
    starts = [(text.index(s), len(s), s) for s in stop if s in text]
    if not starts:
        return text, None
    start, length, matched = min(starts)
    return text[: start + length if include else start], matched


def test_what_may_begin_a_stop_string_is_held_back() -> None:
    stops = StopStrings(["DEFGHIJ"])
    assert stops.feed("ABC") == ("ABC", None)
    assert [stops.feed(piece) for piece in ("DEF", "G", "HI")] == [("", None)] * 3
    assert stops.feed("J") == ("", "DEFGHIJ")
    assert stops.flush() == ""


def test_a_stop_string_inside_a_token_and_across_tokens_matches() -> None:
    assert run(["lo w"], ["hel", "lo wor", "ld"])[:2] == ("hel", "lo w")
    assert run(["b"], ["abc"])[:2] == ("a", "b")


def test_what_was_held_goes_out_at_the_end() -> None:
    assert run(["DEFGHIJ"], ["ABC", "DEF"]) == ("ABCDEF", None, ["ABC", "", "DEF"])


def test_what_was_held_goes_out_once_it_cannot_match() -> None:
    stops = StopStrings(["aab"])
    assert stops.feed("a") == ("", None)
    assert stops.feed("a") == ("", None)
    assert stops.feed("a") == ("a", None)  # "aa" may still begin the stop string
    assert stops.feed("c") == ("aac", None)


def test_the_stop_string_is_kept_where_asked_for() -> None:
    assert run(["END"], ["one EN", "D two"], include=True)[:2] == ("one END", "END")


def test_a_match_waits_for_one_that_began_earlier() -> None:
    stops = StopStrings(["bc", "abcd"])
    assert stops.feed("abc") == ("", None)
    assert stops.feed("d") == ("", "abcd")
    stops = StopStrings(["bc", "abcd"])
    assert stops.feed("abc") == ("", None)
    assert stops.feed("x") == ("a", "bc")


def test_a_match_that_waited_counts_at_the_end() -> None:
    stops = StopStrings(["bc", "abcd"])
    stops.feed("abc")
    assert stops.matched is None
    assert stops.flush() == "a"
    assert stops.matched == "bc"


def test_of_matches_at_the_same_place_the_first_complete_one_wins() -> None:
    assert run(["abc", "ab"], ["xabc"], include=True)[:2] == ("xab", "ab")


def test_nothing_goes_out_after_a_match() -> None:
    stops = StopStrings(["x"])
    assert stops.feed("axb") == ("a", "x")
    assert stops.feed("more") == ("", "x")
    assert stops.flush() == ""


def test_without_stop_strings_text_passes() -> None:
    assert run([], ["a", "", "b"]) == ("ab", None, ["a", "", "b", ""])


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])


# Few letters, so that matches, near matches and overlaps are common.
stops_strategy = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)
pieces_strategy = st.lists(st.text("abc", max_size=4), max_size=12)


@given(stops_strategy, pieces_strategy, st.booleans())
def test_any_chunking_gives_the_cut_of_the_whole_text(stop: list[str], pieces: list[str], include: bool) -> None:
    text, matched, _ = run(stop, pieces, include)
    assert (text, matched) == cut("".join(pieces), stop, include)


@given(stops_strategy, pieces_strategy)
def test_no_more_is_held_than_could_begin_a_match(stop: list[str], pieces: list[str]) -> None:
    stops = StopStrings(stop)
    fed = sent = ""
    for piece in pieces:
        text, matched = stops.feed(piece)
        if matched is not None:
            return
        fed, sent = fed + piece, sent + text
        held = fed[len(sent) :]
        assert fed.startswith(sent)
        assert not held or any(s.startswith(held) for s in stop)
