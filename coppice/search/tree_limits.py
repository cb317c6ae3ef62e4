"""Input of a tree search: candidate children and bounds."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

# Nodes that fill up a row multiple need at least this fraction of the path probability worth a row.
_FILL_LOG_SHARE = math.log(0.25)


class Children(NamedTuple):
    """Candidate children of a node, likeliest first; log-probabilities given that the node is right, at most 0."""

    token_ids: Sequence[int]
    log_probs: Sequence[float]


@dataclass(frozen=True, slots=True)
class TreeLimits:
    """Bounds of one search.

    `width`: most nodes expanded per step. `max_steps`: most steps after the root. `max_depth`: largest depth of a node.
    `min_step_gain`: least expected accepted tokens that a step can add, the sum of the path probabilities of the nodes
    it expands. `min_path_log_prob`: least path log-probability worth a row of the target's pass. `row_multiple`: the
    target pads rows (root and nodes) to multiples of this; less likely nodes fill the last multiple at no cost.
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
        """Path log-probability below which nodes are discarded."""
        return self.min_path_log_prob + (_FILL_LOG_SHARE if self.row_multiple > 1 else 0.0)

    def num_kept(self, num_worth: int, num_found: int) -> int:
        """Number of best nodes in the tree, of `num_found`, if `num_worth` are worth a row of their own."""
        rows = -(-(1 + min(num_worth, self.max_nodes)) // self.row_multiple) * self.row_multiple
        return min(rows - 1, num_found, self.max_nodes)
