"""Counts of drafts and of their nodes before verification, over all sequences."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class DraftOrigin(enum.Enum):
    """Origin of a round's draft. All but fresh ones existed before the previous outcome."""

    FRESH = "fresh"
    # Subtree of the last round's tree after its committed tokens.
    LEFT_OVER = "left_over"
    # Late, after the tokens committed since.
    REROOTED = "rerooted"
    # For the committed length, before it was known.
    AHEAD = "ahead"
    # By the target itself, in the previous round's pass.
    REDRAFT = "redraft"


@dataclass(slots=True)
class DraftCounts:
    """Written by one thread, readable by any."""

    # Non-empty drafts in time for their round, and late ones used for a later round, re-rooted after the tokens
    # committed since.
    in_time: int = 0
    late: int = 0
    # Rounds with trees drafted ahead of them: whether their outcome was among the drafted ones.
    ahead_hits: int = 0
    ahead_misses: int = 0
    # Discarded drafts by reason: not on the path of committed tokens; a better tree was there; too many for later
    # lengths; not for the coming round although only that is allowed (sampled, or synchronous sequences).
    stale_left: int = 0
    stale_worse: int = 0
    stale_ahead: int = 0
    stale_sampled: int = 0
    stale_missed: int = 0
    # Available nodes that a round did not verify, by reason: output length, grammar, budget, or room in the pass or KV
    # cache. Nodes beyond the budget stay for the next round, and are counted in each.
    pruned_output: int = 0
    pruned_grammar: int = 0
    pruned_budget: int = 0
    pruned_room: int = 0

    def pruned(self, whole: int, fitting: int, allowed: int, within_budget: int, verified: int) -> None:
        """Count the nodes of a round's draft left after each step, from `whole` on."""
        self.pruned_output += whole - fitting
        self.pruned_grammar += fitting - allowed
        self.pruned_budget += allowed - within_budget
        self.pruned_room += within_budget - verified
