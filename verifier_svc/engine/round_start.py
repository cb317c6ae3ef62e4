"""Rule for starting a round without further waiting. Pure, and without torch for the simulator."""

from __future__ import annotations

from coppice.core.tree import TokenTree
from verifier_svc.engine.mailbox import Mailbox

# Least expected tokens of an older tree's rest, relative to mean drafts, with which a round starts at once: waiting for
# a fresh tree takes about two thirds of a pass.
WORTH_STARTING = 0.6
# Weight of a draft in the running mean.
_MEAN_RATE = 0.2


class RoundPromise:
    """Running mean of a sequence's drafts' expected tokens, in time or late.

    Not of accepted tokens: if most rounds begin with trees drafted ahead, those with fresh drafts are few and hard.
    """

    def __init__(self) -> None:
        self.tokens = 0.0
        self._is_known = False

    def add(self, draft: TokenTree, budget: int) -> None:
        """Add a draft, of which a round verifies at most `budget` nodes. Empty ones are ignored."""
        if len(draft):
            promised = draft.prune(budget).expected_tokens
            self.tokens += (_MEAN_RATE if self._is_known else 1.0) * (promised - self.tokens)
            self._is_known = True


def has_draft_to_start_with(mailbox: Mailbox, budget: int, usual: RoundPromise, room: int) -> bool:
    """Whether a draft worth starting with at once is there.

    A fresh one is; an older rest or one drafted ahead is if its expected tokens are close to the mean, as far as the
    output has room: of its `room` remaining tokens the last is no node's.
    """
    tree = mailbox.tree
    if tree is None or mailbox.is_fresh:
        return tree is not None
    return tree.prune(budget).expected_tokens >= WORTH_STARTING * min(usual.tokens, room - 1)
