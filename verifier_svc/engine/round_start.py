"""The rule for starting a round without waiting longer. Pure, and without torch: the simulator follows it too."""

from __future__ import annotations

from coppice.core.tree import TokenTree
from verifier_svc.engine.mailbox import ExactMailbox, Mailbox

# A round starts with what is left of an older tree when that promises this share of what drafts promise on average:
# waiting for a fresh tree takes about two thirds as long as the pass itself.
WORTH_STARTING = 0.6
# Weight of a draft in that mean.
_MEAN_RATE = 0.2


class RoundPromise:
    """Running mean of the tokens that a sequence's drafts promised when they were made, in time or late.

    Not of the tokens that rounds accept: those in which a fresh draft is verified may be few, and hard ones, when most
    begin with what was drafted ahead.
    """

    def __init__(self) -> None:
        self.tokens = 0.0
        self._is_known = False

    def add(self, draft: TokenTree, budget: int) -> None:
        """A draft has come, of which a round verifies at most `budget` nodes. Empty ones promise nothing."""
        if len(draft):
            promised = draft.prune(budget).expected_tokens
            self.tokens += (_MEAN_RATE if self._is_known else 1.0) * (promised - self.tokens)
            self._is_known = True


def has_draft_to_start_with(mailbox: Mailbox | ExactMailbox, budget: int, usual: RoundPromise, room: int) -> bool:
    """Whether a draft is there that is worth starting with at once.

    One made for this round is; what is left of an older one, or was drafted ahead, is when it promises most of what
    drafts do, as far as there is room: the output has `room` tokens left, the last of which is no node's.
    """
    tree = mailbox.tree
    if tree is None or mailbox.is_fresh:
        return tree is not None
    return tree.prune(budget).expected_tokens >= WORTH_STARTING * min(usual.tokens, room - 1)
