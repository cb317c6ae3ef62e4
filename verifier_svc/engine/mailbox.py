"""A sequence's mailbox: drafts arrive here by base length, whenever they arrive; a round takes the best that fits.

No draft is dropped for being late. It is re-rooted: walked down the tokens committed since the length that it starts
from; what hangs below is still a valid draft. Sampled trees and synchronous sequences have a mailbox of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

from coppice.core.tree import EMPTY_TREE, TokenTree
from verifier_svc.engine.draft_counts import DraftCounts, DraftOrigin

# Drafts for lengths that are not reached yet; more than this means that the sender has lost track.
_MAX_AHEAD = 8


class Mailbox:
    """Holds the draft for the coming round and those for lengths that are not reached yet.

    A draft is fresh when it was made for the committed length itself: nothing better is on its way.
    """

    def __init__(self, counts: DraftCounts | None = None) -> None:
        """`counts` are those of all sequences."""
        self._counts = counts or DraftCounts()
        self._tree: TokenTree | None = None
        self._is_fresh = False
        self._origin = DraftOrigin.FRESH
        self._later: dict[int, TokenTree] = {}
        # What was drafted ahead, behind outcomes of the coming round.
        self._ahead: TokenTree | None = None
        self._num_stale = 0

    @property
    def tree(self) -> TokenTree | None:
        """The best draft for the coming round. A fresh empty tree is a draft, too."""
        return self._tree

    @property
    def is_fresh(self) -> bool:
        """Whether the draft was made for the coming round."""
        return self._is_fresh

    @property
    def origin(self) -> DraftOrigin:
        """When the draft was made; of no meaning without one."""
        return self._origin

    def put(self, base_length: int, tree: TokenTree, tokens: Sequence[int]) -> None:
        """Take a draft behind the first `base_length` of the committed `tokens`, or of more to come."""
        if base_length > len(tokens):
            if len(self._later) < _MAX_AHEAD:
                self._later[base_length] = tree
            else:
                self._num_stale += 1
                self._counts.stale_ahead += 1
        elif base_length == len(tokens):
            if len(tree) == 0 and self._tree is not None and self._origin is DraftOrigin.REDRAFT:
                # Nobody else has anything to say: there is nothing to wait for, and the target's own draft stays.
                self._is_fresh = True
                return
            self._tree, self._is_fresh, self._origin = tree, True, DraftOrigin.FRESH
            self._counts.in_time += len(tree) > 0
        else:
            self._put_late(tree.descend(tokens[base_length:]))

    def put_ahead(self, base_length: int, tree: TokenTree, tokens: Sequence[int], *, in_time: bool = False) -> None:
        """Take a tree of outcomes of the round that starts at `base_length`, and of what may follow them.

        It is no draft for that round itself. One that comes behind that round is re-rooted. With `in_time` it had come
        before the last outcome was known, and is put here only now.
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
        """These `token_ids` were committed, and `tokens` are all: what is left of the draft is for the next round.

        So is what was drafted ahead for this outcome, if that promises more.
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
        """Take the target's own draft behind all committed tokens, unless what is there is better."""
        if not self._tree or (not self._is_fresh and tree.expected_tokens > self._tree.expected_tokens):
            self._tree, self._origin = tree, DraftOrigin.REDRAFT

    def take_stale(self) -> int:
        """How many drafts were of no use since the last call."""
        count, self._num_stale = self._num_stale, 0
        return count

    def _put_drafted_ahead(self, behind: TokenTree) -> None:
        """Take what was drafted ahead behind the outcome that came, if that is anything."""
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
    """Holds the tree that was made for the coming round, for sequences that are verified by traversal or synchronous.

    One that comes for any other length is dropped, and so is what a round leaves over: of a sampled tree those nodes
    were looked at, and what was committed tells something of them.
    """

    def __init__(self, counts: DraftCounts | None = None, *, is_sampled: bool = True) -> None:
        """`counts` are those of all sequences."""
        self._counts = counts or DraftCounts()
        self._is_sampled = is_sampled
        self._tree: TokenTree | None = None
        self._num_stale = 0

    @property
    def tree(self) -> TokenTree | None:
        """The draft for the coming round. An empty tree is a draft, too."""
        return self._tree

    @property
    def origin(self) -> DraftOrigin:
        """When the draft was made: for the coming round, once that was known."""
        return DraftOrigin.FRESH

    @property
    def is_fresh(self) -> bool:
        """Whether there is a draft: all of them are made for the coming round."""
        return self._tree is not None

    def put(self, base_length: int, tree: TokenTree, tokens: Sequence[int]) -> None:
        """Take a draft behind the first `base_length` of the committed `tokens`, if that is all of them."""
        if base_length == len(tokens):
            self._tree = tree
            self._counts.in_time += len(tree) > 0
        else:
            self._num_stale += 1
            self._counts.stale_sampled += self._is_sampled
            self._counts.stale_missed += not self._is_sampled

    def put_ahead(self, base_length: int, tree: TokenTree, tokens: Sequence[int], *, in_time: bool = False) -> None:
        """Drop a tree that was drafted ahead."""
        self._num_stale += 1
        self._counts.stale_sampled += self._is_sampled
        self._counts.stale_missed += not self._is_sampled

    def advance(self, token_ids: Sequence[int], tokens: Sequence[int]) -> None:
        """These `token_ids` were committed: the round's draft is used up."""
        self._tree = None

    def take_stale(self) -> int:
        """How many drafts were of no use since the last call."""
        count, self._num_stale = self._num_stale, 0
        return count
