"""When a round need not wait any longer. Pure, and without torch: the simulator follows the same rule."""

from __future__ import annotations

from verifier_svc.mailbox import ExactMailbox, Mailbox

# A round starts with what is left of an older tree when that promises this share of what rounds accept on average:
# waiting for a fresh tree takes about two thirds as long as the pass itself.
WORTH_STARTING = 0.6
# Weight of a round in the running mean of accepted nodes.
MEAN_RATE = 0.2


def has_draft_to_start_with(mailbox: Mailbox | ExactMailbox, budget: int, mean_accepted: float) -> bool:
    """Whether a draft is there that is worth starting with at once.

    One made for this round is; what is left of an older one is, when it promises most of what rounds accept.
    """
    tree = mailbox.tree
    if tree is None or mailbox.is_fresh:
        return tree is not None
    return tree.prune(budget).expected_tokens >= WORTH_STARTING * mean_accepted
