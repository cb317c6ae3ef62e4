"""The input of a search for a draft tree: candidate children, and its bounds."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

# Nodes that only fill up rows: at least this share of the path probability that is worth a row of its own.
_FILL_LOG_SHARE = math.log(0.25)


class Children(NamedTuple):
    """Candidate children of one node, likeliest first; log-probabilities given that the node is right, at most 0."""

    token_ids: Sequence[int]
    log_probs: Sequence[float]


@dataclass(frozen=True, slots=True)
class TreeLimits:
    """Bounds of one search.

    `width`: most nodes expanded per step. `max_steps`: most steps after the root. `max_depth`: depth of the
    deepest node. `min_step_gain`: a step is taken only if the path probabilities of the nodes that it would
    expand, the most further accepted tokens it can give on average, add up to this. `min_path_log_prob`: nodes less
    likely than this are not worth a row of the target's pass. `row_multiple`: the target computes the rows of root and
    nodes in multiples of this, and the last one is filled with nodes below that, which cost nothing.
    """

    max_nodes: int
    width: int = 4
    max_steps: int = sys.maxsize
    max_depth: int = sys.maxsize
    min_step_gain: float = 0.0
    min_path_log_prob: float = -math.inf
    row_multiple: int = 1

    @property
    def min_fill_log_prob(self) -> float:
        """The path log-probability below which a node is not even remembered."""
        return self.min_path_log_prob + (_FILL_LOG_SHARE if self.row_multiple > 1 else 0.0)

    def num_kept(self, num_worth: int, num_found: int) -> int:
        """How many of the best nodes make the tree, when `num_worth` of those found are worth a row of their own."""
        rows = -(-(1 + min(num_worth, self.max_nodes)) // self.row_multiple) * self.row_multiple
        return min(rows - 1, num_found, self.max_nodes)
