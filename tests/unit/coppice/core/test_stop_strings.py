"""Stop strings: the same cut as searching the whole text, however it arrives."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from coppice.core.stop_strings import StopStringMatcher
from coppice.core.tokenizer import TargetTokenizer
from tests.toy_target import TOKENIZER_JSON

# Two letters make overlaps and near misses likely.
TEXT = st.text("ab", max_size=30)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


def cut(text: str, stops: list[str], exempt: int = 0) -> tuple[str, str | None]:
    """The oracle: search every growing prefix, so the stop string that is complete first wins.

    Those that end within the first `exempt` characters do not count.
    """
    for end in range(exempt + 1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(min(place, len(text)) for place in cuts), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(edges)]


@given(TEXT, STOPS, st.lists(st.integers(0, 30), max_size=8))
@example("abab", ["abab", "b"], [])
@example("abab", ["abab", "b"], [1, 2, 3])
def test_any_chunking_gives_the_cut_of_the_whole_text(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopStringMatcher(stops)
    shown = "".join(matcher.push(piece) for piece in pieces_of(text, cuts))
    if matcher.match is None:
        shown += matcher.flush()
    assert (shown, matcher.match) == cut(text, stops)


@given(TEXT, STOPS, st.lists(st.integers(0, 30), max_size=8), st.integers(0, 8))
@example("abab", ["ab"], [1, 2, 3], 2)
@example("abab", ["abab", "ab"], [1, 2, 3], 3)
@example("aab", ["a", "aab"], [1, 2], 1)
def test_matches_that_end_in_exempt_pieces_do_not_count(
    text: str, stops: list[str], cuts: list[int], num_exempt: int
) -> None:
    matcher = StopStringMatcher(stops)
    pieces = pieces_of(text, cuts)
    shown = "".join(matcher.push(piece, may_end=index >= num_exempt) for index, piece in enumerate(pieces))
    if matcher.match is None:
        shown += matcher.flush()
    assert (shown, matcher.match) == cut(text, stops, len("".join(pieces[:num_exempt])))


@given(TEXT, STOPS, st.integers(0, 30))
def test_no_more_of_exempt_text_is_held_back_than_may_begin_a_stop_string(
    text: str, stops: list[str], num_exempt: int
) -> None:
    matcher = StopStringMatcher(stops)
    shown = ""
    for end, letter in enumerate(text, start=1):
        shown += matcher.push(letter, may_end=end > num_exempt)
        if matcher.match is not None:
            break
        held = text[len(shown) : end]
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)


@pytest.mark.parametrize(
    ("min_tokens", "expected"),
    [
        (0, ("x", "ab")),
        (1, ("x", "ab")),
        (2, ("x", "ab")),
        # The first one is complete in the text of the first three tokens; the second begins there and ends later.
        (3, ("xab", "ab")),
        (4, ("xab", "ab")),
        (5, ("xabab", None)),
    ],
)
def test_a_match_counts_that_ends_behind_the_first_min_tokens(
    min_tokens: int, expected: tuple[str, str | None]
) -> None:
    tokenizer = TargetTokenizer(TOKENIZER_JSON)
    matcher, detokenizer = StopStringMatcher(["ab"]), tokenizer.detokenizer()
    shown = ""
    for index, token in enumerate(b"xabab"):
        shown += matcher.push_token(token, index, min_tokens, detokenizer)
    if matcher.match is None:
        shown += matcher.flush()
    assert (shown, matcher.match) == expected


def test_a_character_that_is_spread_over_tokens_is_text_of_the_last_of_them() -> None:
    tokenizer = TargetTokenizer(TOKENIZER_JSON)
    for min_tokens, expected in ((2, "€"), (3, None)):
        matcher, detokenizer = StopStringMatcher(["€"]), tokenizer.detokenizer()
        for index, token in enumerate("€".encode()):
            matcher.push_token(token, index, min_tokens, detokenizer)
        assert matcher.match == expected


@given(TEXT, STOPS)
def test_no_more_is_held_back_than_may_still_become_a_stop_string(text: str, stops: list[str]) -> None:
    matcher = StopStringMatcher(stops)
    shown = ""
    for end, letter in enumerate(text, start=1):
        shown += matcher.push(letter)
        if matcher.match is not None:
            break
        held = text[len(shown) : end]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_nothing_is_shown_after_a_match() -> None:
    matcher = StopStringMatcher(["\n\n"])
    assert matcher.push("x = 1\n") == "x = 1"
    assert matcher.push("\ny = 2") == ""
    assert matcher.match == "\n\n"
    assert matcher.push("more") == ""
    assert matcher.flush() == ""


def test_without_stop_strings_text_passes_through_at_once() -> None:
    matcher = StopStringMatcher([])
    assert matcher.push("abc") == "abc"
    assert matcher.flush() == ""
