"""Stop strings: the same cut as searching the whole text, however it arrives."""

from __future__ import annotations

import itertools

from hypothesis import example, given
from hypothesis import strategies as st

from coppice.stop_strings import StopStringMatcher

# Two letters make overlaps and near misses likely.
TEXT = st.text("ab", max_size=30)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


def cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The oracle: search every growing prefix, so the stop string that is complete first wins."""
    for end in range(1, len(text) + 1):
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
