"""Counts of drafts and of their nodes before verification, over all sequences."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

_STEPS = ("output", "grammar", "budget", "room")


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
    # Discarded drafts: not on the path of committed tokens; a better tree was there; too many for later lengths; not
    # for the coming round, in sequences that verify sampled trees or are synchronous.
    stale: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("left", "worse", "ahead", "sampled", "missed"), 0)
    )
    # Available nodes that a round did not verify: output length, grammar, budget, or room in the pass or cache. Nodes
    # beyond the budget stay for the next round, and are counted in each.
    pruned: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_STEPS, 0))

    def add_pruned(self, *num_nodes: int) -> None:
        """Count the nodes of a round's draft, all and those left after each step of `pruned`."""
        for step, before, after in zip(_STEPS, num_nodes, num_nodes[1:], strict=False):
            self.pruned[step] += before - after
