"""An index of earlier occurrences of a token sequence's end; it grows with the tokens.

Positions that share their last two tokens are chained, latest first, as the match finders of LZ77 compressors do it. A
token costs one dictionary entry; a search looks at a bounded number of positions and extends each of them backwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# Stands between sequences that have nothing to do with each other; no token.
SEPARATOR = -1
MIN_MATCH = 2
# Longer matches are not told apart: they are right about as often.
MAX_MATCH = 16
# Positions that a search looks at.
MAX_SCANNED = 16
MAX_TOKENS = 4096


class Occurrence(NamedTuple):
    """An earlier occurrence of the searched tokens: it ends before position `end`, and `length` tokens match."""

    end: int
    length: int


class SuffixIndex:
    """An index of the last `max_tokens` to twice as many tokens that were appended."""

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._tokens: list[int] = []
        # The latest position after a pair of tokens at which another token follows, and before each such position the
        # one before it; -1 where there is none.
        self._latest: dict[tuple[int, int], int] = {}
        self._earlier: list[int] = []

    def __len__(self) -> int:
        return len(self._tokens)

    def append(self, token_ids: Sequence[int]) -> None:
        """Add tokens, of which the last `max_tokens` count."""
        if len(self._tokens) + len(token_ids) > 2 * self._max_tokens:
            recent = [*self._tokens, *token_ids][-self._max_tokens :]
            self._tokens, self._latest, self._earlier = [], {}, []
            self._add(recent)
        else:
            self._add(token_ids)

    def find(self, suffix: Sequence[int]) -> list[Occurrence]:
        """Occurrences of the last tokens of `suffix`, at least two, longest first, and of these the latest first.

        Of more than `MAX_SCANNED` occurrences of its last two tokens, the latest are looked at.
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
        """Up to `count` tokens from a position on. Where they reach the end of the tokens, they repeat themselves."""
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
