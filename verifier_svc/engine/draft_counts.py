"""Counts of drafts and of their nodes before verification, over all sequences."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class DraftOrigin(enum.Enum):
    """When the draft of a round was made. All but a fresh one were there when the outcome before was known."""

    FRESH = "fresh"
    # What the last round's tree had behind the tokens that it committed.
    LEFT_OVER = "left_over"
    # Late, and behind the tokens committed since.
    REROOTED = "rerooted"
    # For the committed length, before that was known.
    AHEAD = "ahead"
    # By the target itself, in the pass that committed the tokens before.
    REDRAFT = "redraft"


@dataclass(slots=True)
class DraftCounts:
    """One thread writes it, any may read."""

    # Drafts with nodes that were there for the round that they were made for, and those that came later and were of use
    # to another one, behind the tokens committed meanwhile.
    in_time: int = 0
    late: int = 0
    # Rounds that ended while trees behind likely outcomes of theirs were there: whether theirs was among those.
    ahead_hits: int = 0
    ahead_misses: int = 0
    # Those of no use, by reason: the committed tokens had left them; a better tree was there; they were for lengths far
    # ahead, and too many; not for the coming round, where that alone is of use, sampled or in synchronous sequences.
    stale_left: int = 0
    stale_worse: int = 0
    stale_ahead: int = 0
    stale_sampled: int = 0
    stale_missed: int = 0
    # Nodes that were at hand for a round and not verified in it, by reason: the output has no room for them, its
    # grammar forbids them, the budget is less, the pass or the KV cache had no room. What is beyond the budget stays
    # for the next round, and is counted in each.
    pruned_output: int = 0
    pruned_grammar: int = 0
    pruned_budget: int = 0
    pruned_room: int = 0

    def pruned(self, whole: int, fitting: int, allowed: int, within_budget: int, verified: int) -> None:
        """A round had a draft of `whole` nodes, of which so many were left at each step."""
        self.pruned_output += whole - fitting
        self.pruned_grammar += fitting - allowed
        self.pruned_budget += allowed - within_budget
        self.pruned_room += within_budget - verified
