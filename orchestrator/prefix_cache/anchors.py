"""The positions of a text at which something is remembered: chosen by the tokens there, not by how far in they are.

So a text that is found again elsewhere has its anchors in the same places.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from orchestrator.prefix_cache.keys import SUFFIX_TOKENS

# One position in so many is an anchor.
SPACING = 8
# Tokens remembered behind an anchor: several spacings, so that there is something to follow until the next is read.
DEPTH = 48


def anchors(tokens: Sequence[int], start: int, stop: int) -> Iterator[int]:
    """Positions in [start, stop) that are anchors, with enough tokens before them for a key."""
    for position in range(max(start, SUFFIX_TOKENS), stop):
        mixed = (tokens[position - 2] * 0x9E3779B1 + tokens[position - 1] * 0x85EBCA6B) & 0xFFFFFFFF
        if (mixed >> 15) % SPACING == 0:
            yield position
