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
        self._tree: TokenTree | None = None
        self._is_fresh = False
        self._origin = DraftOrigin.FRESH
        self._later: dict[int, TokenTree] = {}
        # Drafted ahead: a tree of the coming round's possible outcomes and their continuations.
        self._ahead: TokenTree | None = None
        self._num_stale = 0

    @property
    def tree(self) -> TokenTree | None:
        """Best draft for the coming round. A fresh empty tree counts as a draft."""
        return self._tree

    @property
    def is_fresh(self) -> bool:
        """Whether the draft was made for the coming round."""
        return self._is_fresh

    @property
    def origin(self) -> DraftOrigin:
        """Origin of the draft; undefined without one."""
        return self._origin

    def put(self, base_length: int, tree: TokenTree, tokens: Sequence[int]) -> None:
        """Add a draft after the first `base_length` of the committed `tokens`, or of a later length."""
        if base_length > len(tokens):
            if len(self._later) < _MAX_AHEAD:
                self._later[base_length] = tree
            else:
                self._num_stale += 1
                self._counts.stale_ahead += 1
        elif base_length == len(tokens):
            if len(tree) == 0 and self._tree is not None and self._origin is DraftOrigin.REDRAFT:
                # No drafter has a draft: nothing to wait for, and the target's own draft stays.
                self._is_fresh = True
                return
            self._tree, self._is_fresh, self._origin = tree, True, DraftOrigin.FRESH
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
            self._num_stale += 1
            self._counts.stale_ahead += 1

    def advance(self, token_ids: Sequence[int], tokens: Sequence[int]) -> None:
        """Commit `token_ids`, the last of all `tokens`: the remaining subtree becomes the next round's draft.

        Or the subtree drafted ahead for this outcome, if it has more expected tokens.
        """
        left = EMPTY_TREE if self._tree is None else self._tree.descend(token_ids)
        self._tree, self._is_fresh, self._origin = (left if len(left) else None), False, DraftOrigin.LEFT_OVER
        if self._ahead is not None:
            ahead, self._ahead = self._ahead.descend(token_ids), None
            self._put_drafted_ahead(ahead)
        for length in sorted(length for length in self._later if length <= len(tokens)):
            self.put(length, self._later.pop(length), tokens)
        if self._is_fresh:
            self._origin = DraftOrigin.AHEAD

    def put_redraft(self, tree: TokenTree) -> None:
        """Add the target's own draft after all committed tokens, unless a better one is there."""
        if not self._tree or (not self._is_fresh and tree.expected_tokens > self._tree.expected_tokens):
            self._tree, self._origin = tree, DraftOrigin.REDRAFT

    def take_stale(self) -> int:
        """Number of drafts discarded since the last call."""
        count, self._num_stale = self._num_stale, 0
        return count

    def _put_drafted_ahead(self, behind: TokenTree) -> None:
        """Add a non-empty subtree drafted ahead for the actual outcome."""
        self._counts.ahead_hits += len(behind) > 0
        self._counts.ahead_misses += not len(behind)
        promised = 0.0 if self._tree is None else self._tree.expected_tokens
        if not self._is_fresh and behind.expected_tokens > promised:
            self._tree, self._origin = behind, DraftOrigin.AHEAD

    def _put_late(self, rerooted: TokenTree) -> None:
        if not len(rerooted):
            self._num_stale += 1
            self._counts.stale_left += 1
        elif self._tree is None or (not self._is_fresh and rerooted.expected_tokens > self._tree.expected_tokens):
            self._tree, self._origin = rerooted, DraftOrigin.REROOTED
            self._counts.late += 1
        else:
            self._counts.stale_worse += 1


class ExactMailbox:
    """Holds the tree made for the coming round, for synchronous sequences and for traversal.

    Trees for other lengths and remaining subtrees are dropped: the nodes of a sampled tree were examined, so committed
    tokens carry information about them.
    """

    def __init__(self, counts: DraftCounts | None = None, *, is_sampled: bool = True) -> None:
        """`counts` are those of all sequences."""
        self._counts = counts or DraftCounts()
        self._is_sampled = is_sampled
        self._tree: TokenTree | None = None
        self._num_stale = 0

    @property
    def tree(self) -> TokenTree | None:
        """Draft for the coming round. An empty tree counts as a draft."""
        return self._tree

    @property
    def origin(self) -> DraftOrigin:
        """Always fresh."""
        return DraftOrigin.FRESH

    @property
    def is_fresh(self) -> bool:
        """Whether there is a draft; all are made for the coming round."""
        return self._tree is not None

    def put(self, base_length: int, tree: TokenTree, tokens: Sequence[int]) -> None:
        """Add a draft, if `base_length` is the number of committed `tokens`."""
        if base_length == len(tokens):
            self._tree = tree
            self._counts.in_time += len(tree) > 0
        else:
            self._num_stale += 1
            self._counts.stale_sampled += self._is_sampled
            self._counts.stale_missed += not self._is_sampled

    def put_ahead(self, base_length: int, tree: TokenTree, tokens: Sequence[int], *, in_time: bool = False) -> None:
        """Drop a tree drafted ahead."""
        self._num_stale += 1
        self._counts.stale_sampled += self._is_sampled
        self._counts.stale_missed += not self._is_sampled

    def advance(self, token_ids: Sequence[int], tokens: Sequence[int]) -> None:
        """Drop the round's draft after a commit."""
        self._tree = None

    def take_stale(self) -> int:
        """Number of drafts discarded since the last call."""
        count, self._num_stale = self._num_stale, 0
        return count
