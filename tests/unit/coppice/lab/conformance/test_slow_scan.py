"""Where stops must cut, on outputs whose cuts can be read off."""

from __future__ import annotations

import pytest

from coppice.lab.conformance.requests import build
from coppice.lab.conformance.slow_scan import Cut, Known, cut_at_strings, cut_at_token

# Tokens 1, 2, 3, 1 say "ab", "c", "" and "ab".
OUTPUT = Known(build("x"), (1, 2, 3, 1), ("", "ab", "abc", "abc", "abcab"))


@pytest.mark.parametrize(
    ("stops", "cut"),
    [
        (("a",), Cut(1, "", "a")),
        (("b",), Cut(1, "a", "b")),
        (("bc",), Cut(2, "a", "bc")),
        (("ca",), Cut(4, "ab", "ca")),
        (("bca", "c"), Cut(2, "ab", "c")),
        (("c", "bc"), Cut(2, "a", "bc")),
        (("d",), None),
    ],
)
def test_the_string_that_is_complete_first_cuts_and_the_longest_of_those(stops: tuple[str, ...], cut: Cut) -> None:
    assert cut_at_strings(OUTPUT, stops) == cut


def test_a_token_cuts_where_it_is_first_and_keeps_out_of_the_text() -> None:
    assert cut_at_token(OUTPUT, 1) == Cut(1, "", "")
    assert cut_at_token(OUTPUT, 3) == Cut(3, "abc", "")


def test_windows_are_every_piece_once_and_none_with_an_incomplete_character() -> None:
    output = Known(build("x"), (1, 2), ("", "aba", "abab\ufffd"))
    assert output.windows(2) == ["ab", "ba"]
