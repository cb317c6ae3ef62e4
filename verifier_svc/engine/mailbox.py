"""A sequence's mailbox: drafts by base length; a round takes the best one that applies.

Late drafts are not dropped but re-rooted: the subtree after the tokens committed since their base is still a valid
draft. Sampled trees and synchronous sequences have a mailbox of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

from coppice.core.tree import EMPTY_TREE, TokenTree
from verifier_svc.engine.draft_counts import DraftCounts, DraftOrigin

# Upper bound of drafts for later lengths; more means a sender out of step.
_MAX_AHEAD = 8


class Mailbox:
    """Holds the draft for the coming round and those for later lengths.

    A draft is fresh if made for the committed length itself: no better one is to come.
    """

    def __init__(self, counts: DraftCounts | None = None) -> None:
        """`counts` are those of all sequences."""
        self._counts = counts or DraftCounts()
        # Best draft for the coming round, and its origin. A fresh empty tree counts as a draft.
        self.tree: TokenTree | None = None
        self.is_fresh = False
        self.origin = DraftOrigin.FRESH
        self._later: dict[int, TokenTree] = {}
        # Drafted ahead: a tree of the coming round's possible outcomes and their continuations.
        self._ahead: TokenTree | None = None
        self._num_stale = 0

    def put(self, base_length: int, tree: TokenTree, tokens: Sequence[int]) -> None:
        """Add a draft after the first `base_length` of the committed `tokens`, or of a later length."""
        if base_length > len(tokens):
            if len(self._later) < _MAX_AHEAD:
                self._later[base_length] = tree
            else:
                self._discard("ahead")
        elif base_length == len(tokens):
            if len(tree) == 0 and self.tree is not None and self.origin is DraftOrigin.REDRAFT:
                # No drafter has a draft: nothing to wait for, and the target's own draft stays.
                self.is_fresh = True
                return
            self.tree, self.is_fresh, self.origin = tree, True, DraftOrigin.FRESH
            self._counts.in_time += len(tree) > 0
        else:
            self._put_late(tree.descend(tokens[base_length:]))

    def put_ahead(self, base_length: int, tree: TokenTree, tokens: Sequence[int], *, in_time: bool = False) -> None:
        """Add a tree of possible outcomes of the round that starts at `base_length`, and of their continuations.

        It is not a draft for that round itself. After that round it is re-rooted. `in_time`: it arrived before the last
        outcome but is added only now.
        """
        if base_length == len(tokens):
            self._ahead = tree
        elif base_length < len(tokens) and in_time:
            self._put_drafted_ahead(tree.descend(tokens[base_length:]))
        elif base_length < len(tokens):
            self._put_late(tree.descend(tokens[base_length:]))
        else:
            self._discard("ahead")

    def advance(self, token_ids: Sequence[int], tokens: Sequence[int]) -> None:
        """Commit `token_ids`, the last of all `tokens`: the remaining subtree becomes the next round's draft.

        Or the subtree drafted ahead for this outcome, if it has more expected tokens.
        """
        left = EMPTY_TREE if self.tree is None else self.tree.descend(token_ids)
        self.tree, self.is_fresh, self.origin = (left if len(left) else None), False, DraftOrigin.LEFT_OVER
        if self._ahead is not None:
            ahead, self._ahead = self._ahead.descend(token_ids), None
            self._put_drafted_ahead(ahead)
        for length in sorted(length for length in self._later if length <= len(tokens)):
            self.put(length, self._later.pop(length), tokens)
        if self.is_fresh:
            self.origin = DraftOrigin.AHEAD

    def put_redraft(self, tree: TokenTree) -> None:
        """Add the target's own draft after all committed tokens, unless a better one is there."""
        if not self.tree or (not self.is_fresh and tree.expected_tokens > self.tree.expected_tokens):
            self.tree, self.origin = tree, DraftOrigin.REDRAFT

    def take_stale(self) -> int:
        """Number of drafts discarded since the last call."""
        count, self._num_stale = self._num_stale, 0
        return count

    def _discard(self, reason: str) -> None:
        self._num_stale += 1
        self._counts.stale[reason] += 1

    def _put_drafted_ahead(self, behind: TokenTree) -> None:
        """Add a non-empty subtree drafted ahead for the actual outcome."""
        self._counts.ahead_hits += len(behind) > 0
        self._counts.ahead_misses += not len(behind)
        promised = 0.0 if self.tree is None else self.tree.expected_tokens
        if not self.is_fresh and behind.expected_tokens > promised:
            self.tree, self.origin = behind, DraftOrigin.AHEAD

    def _put_late(self, rerooted: TokenTree) -> None:
        if not len(rerooted):
            self._discard("left")
        elif self.tree is None or (not self.is_fresh and rerooted.expected_tokens > self.tree.expected_tokens):
            self.tree, self.origin = rerooted, DraftOrigin.REROOTED
            self._counts.late += 1
        else:
            self._counts.stale["worse"] += 1


class ExactMailbox(Mailbox):
    """Holds the tree made for the coming round, for synchronous sequences and for traversal.

    Trees for other lengths and remaining subtrees are dropped: the nodes of a sampled tree were examined, so committed
    tokens carry information about them.
    """

    def __init__(self, counts: DraftCounts | None = None, *, is_sampled: bool = True) -> None:
        """`counts` are those of all sequences."""
        super().__init__(counts)
        self._reason = "sampled" if is_sampled else "missed"

    def put(self, base_length: int, tree: TokenTree, tokens: Sequence[int]) -> None:
        """Add a draft, if `base_length` is the number of committed `tokens`."""
        if base_length == len(tokens):
            super().put(base_length, tree, tokens)
        else:
            self._discard(self._reason)

    def put_ahead(self, base_length: int, tree: TokenTree, tokens: Sequence[int], *, in_time: bool = False) -> None:
        """Drop a tree drafted ahead."""
        self._discard(self._reason)

    def advance(self, token_ids: Sequence[int], tokens: Sequence[int]) -> None:
        """Drop the round's draft after a commit."""
        self.tree, self.is_fresh = None, False
