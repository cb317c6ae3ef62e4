"""The shape of sampled trees, planned before anything is drawn: how many children the nodes of each level get."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

# Most children of one node, levels and nodes. Larger shapes take long to plan, and hardly a draft reaches so deep.
MAX_WIDTH = 4
MAX_LEVELS = 12
MAX_NODES = 64


class _Plan(NamedTuple):
    gain: float
    widths: tuple[int, ...]


@lru_cache(maxsize=256)
def tree_widths(
    max_nodes: int, max_levels: int, acceptance_by_rank: tuple[float, ...], node_cost: float, min_level_gain: float
) -> tuple[int, ...]:
    """The widths, one per level, whose expected accepted tokens less `node_cost` for each node are the most.

    A node's w children are taken to hold the right token as often as the first w of `acceptance_by_rank` together. A
    level below the first costs a forward pass, and has to be reached with probability `min_level_gain` at least.
    """
    rates = tuple(accumulate(acceptance_by_rank[:MAX_WIDTH]))

    def best(parents: int, nodes_left: int, levels_left: int, reach: float) -> _Plan:
        found = _Plan(0.0, ())
        if levels_left == 0:
            return found
        for width, rate in enumerate(rates, start=1):
            nodes = parents * width
            if nodes > nodes_left:
                break
            reached = reach * min(rate, 1.0)
            below = _Plan(0.0, ())
            if reached >= min_level_gain:
                below = best(nodes, nodes_left - nodes, levels_left - 1, reached)
            gain = reached - node_cost * nodes + below.gain
            if gain > found.gain:
                found = _Plan(gain, (width, *below.widths))
        return found

    return best(1, min(max_nodes, MAX_NODES), min(max_levels, MAX_LEVELS), 1.0).widths
