"""Index of earlier occurrences of a sequence's last tokens; it grows with the tokens.

Positions after the same two tokens are chained, latest first, as in LZ77 match finders. A token costs one dictionary
entry; a search scans a bounded number of positions and extends each match backwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# Separates unrelated sequences; not a token.
SEPARATOR = -1
MIN_MATCH = 2
# Longer matches are not distinguished: they are right about as often.
MAX_MATCH = 16
# Positions scanned per search.
MAX_SCANNED = 16
MAX_TOKENS = 4096


class Occurrence(NamedTuple):
    """Earlier occurrence: `length` matching tokens that end before position `end`."""

    end: int
    length: int


class SuffixIndex:
    """Index of the last `max_tokens` to `2 * max_tokens` tokens appended."""

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._tokens: list[int] = []
        # Latest position after each pair of tokens at which a token follows, and for each such position the previous
        # one (-1: none).
        self._latest: dict[tuple[int, int], int] = {}
        self._earlier: list[int] = []

    def __len__(self) -> int:
        return len(self._tokens)

    def append(self, token_ids: Sequence[int]) -> None:
        """Append tokens."""
        if len(self._tokens) + len(token_ids) > 2 * self._max_tokens:
            recent = [*self._tokens, *token_ids][-self._max_tokens :]
            self._tokens, self._latest, self._earlier = [], {}, []
            self._add(recent)
        else:
            self._add(token_ids)

    def find(self, suffix: Sequence[int]) -> list[Occurrence]:
        """Occurrences of the last tokens of `suffix` (two or more), longest first, then latest first.

        At most the `MAX_SCANNED` latest occurrences of its last two tokens are scanned.
        """
        if len(suffix) < MIN_MATCH:
            return []
        tail = suffix[-MAX_MATCH:]
        end = self._latest.get((tail[-2], tail[-1]), -1)
        found: list[Occurrence] = []
        while end >= 0 and len(found) < MAX_SCANNED:
            found.append(Occurrence(end, self._length(end, tail)))
            end = self._earlier[end]
        found.sort(key=lambda one: -one.length)
        return found

    def continuation(self, end: int, count: int) -> list[int]:
        """Up to `count` tokens from a position; at the end of the index they repeat as a cycle."""
        taken = self._tokens[end : end + count]
        if SEPARATOR in taken:
            return taken[: taken.index(SEPARATOR)]
        while len(taken) < count:
            taken.extend(taken[: count - len(taken)])
        return taken

    def _add(self, token_ids: Sequence[int]) -> None:
        tokens, latest, earlier = self._tokens, self._latest, self._earlier
        for token in token_ids:
            before = -1
            if len(tokens) >= MIN_MATCH and token != SEPARATOR:
                pair = (tokens[-2], tokens[-1])
                if SEPARATOR not in pair:
                    before = latest.get(pair, -1)
                    latest[pair] = len(tokens)
            earlier.append(before)
            tokens.append(token)

    def _length(self, end: int, tail: Sequence[int]) -> int:
        length, most = MIN_MATCH, min(len(tail), end)
        while length < most and self._tokens[end - length - 1] == tail[-length - 1]:
            length += 1
        return length
