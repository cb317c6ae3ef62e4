"""A sequence's mailbox: drafts arrive here by base length, whenever they arrive; a round takes what is there."""

from __future__ import annotations

from coppice.tree import TokenTree

# Drafts for lengths that are not reached yet; more than this means that the sender has lost track.
_MAX_AHEAD = 8


class Mailbox:
    """Holds the best draft for each base length that is not passed yet."""

    def __init__(self) -> None:
        self._drafts: dict[int, TokenTree] = {}
        self._num_stale = 0

    def put(self, base_length: int, tree: TokenTree, committed_length: int) -> bool:
        """Keep a draft; a later one for the same length replaces it. False when it came too late."""
        if base_length < committed_length or len(self._drafts) >= _MAX_AHEAD:
            self._num_stale += 1
            return False
        self._drafts[base_length] = tree
        return True

    def peek(self, committed_length: int) -> TokenTree | None:
        """The draft for this length, if it has arrived. An empty tree is a draft, too: nothing better will come."""
        return self._drafts.get(committed_length)

    def advance(self, committed_length: int) -> None:
        """Forget drafts for lengths before this one; those that were never used count as stale."""
        for length in [length for length in self._drafts if length < committed_length]:
            del self._drafts[length]
            self._num_stale += 1

    def take(self, committed_length: int) -> TokenTree | None:
        """Remove and return the draft for this length."""
        return self._drafts.pop(committed_length, None)

    def take_stale(self) -> int:
        """How many drafts were dropped since the last call."""
        count, self._num_stale = self._num_stale, 0
        return count
