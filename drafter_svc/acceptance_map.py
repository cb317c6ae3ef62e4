"""Online calibration of a drafter's probabilities from outcomes, shared by all sequences of a service.

The prior of a node is the drafter's own probability, softmax(score / sigma) with the checkpoint's sigma. A cell holds
nodes of one temperature class, depth, rank among siblings and range of own probabilities; under coupling these are
probabilities of perturbed scores. The calibrated probability is the own one times the cell's ratio of accepted to
promised tokens. A cell with little evidence leans on all cells of its depth, and these on a ratio of 1.
has seen little leans on all cells of its depth, and these on the own probabilities.

The search uses own probabilities and only sent trees are calibrated, so drafted trees are a function of the request and
its committed tokens, independent of other requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from coppice.core.tree import ROOT, TokenTree

# Upper temperature of each class but the last, and names of the classes.
_CLASS_LIMITS = (0.0, 0.85)
TEMPERATURE_CLASSES = ("0", "to_0.85", "above_0.85")
# Deeper nodes and higher ranks share the last cell.
MAX_DEPTH = 8
MAX_RANK = 3
# Ranges of own probabilities, equally spaced in their square root: unlikely nodes are many and differ by factors.
NUM_RANGES = 10
# Ranges of sent probabilities, for the counts.
NUM_TENTHS = 10
# Observations of a temperature class after which one's weight is 1/e, so that rarely updated cells age with the others.
_HORIZON = 4096
# Prior weights in promised tokens: of a ratio of 1 in a depth's, and of a depth's ratio in a cell's.
_OWN_WEIGHT = 48.0
_DEPTH_WEIGHT = 24.0
# Upper bound of calibrated log-probabilities.
_MOST = math.log(0.999)

_DEPTHS = len(TEMPERATURE_CLASSES) * MAX_DEPTH
_CELLS_PER_DEPTH = MAX_RANK * NUM_RANGES
_CELLS = _DEPTHS * _CELLS_PER_DEPTH


def temperature_class(temperature: float) -> int:
    """Index of a temperature's class."""
    return sum(temperature > limit for limit in _CLASS_LIMITS)


@dataclass(slots=True)
class ObservedCounts:
    """Observed nodes, the sum of their probabilities as sent, and accepted ones, by tenth of the probability.

    One list per temperature class; monotonic. Written by the model thread, readable by any.
    """

    nodes: list[list[int]] = field(default_factory=lambda: [[0] * NUM_TENTHS for _ in TEMPERATURE_CLASSES])
    expected: list[list[float]] = field(default_factory=lambda: [[0.0] * NUM_TENTHS for _ in TEMPERATURE_CLASSES])
    accepted: list[list[int]] = field(default_factory=lambda: [[0] * NUM_TENTHS for _ in TEMPERATURE_CLASSES])

    def count(self, temperature: int, log_prob: float, is_right: bool) -> None:
        """Count a node of a temperature class."""
        probability = math.exp(log_prob)
        tenth = min(int(probability * NUM_TENTHS), NUM_TENTHS - 1)
        self.nodes[temperature][tenth] += 1
        self.expected[temperature][tenth] += probability
        self.accepted[temperature][tenth] += is_right


class AcceptanceMap:
    """Map from own probabilities to observed acceptance. For the model thread, except `counts`.

    Its memory is bounded, and its state a function of the observations in order.
    """

    def __init__(self, *, is_applied: bool = True) -> None:
        """Unless `is_applied`, trees are sent with own probabilities, and outcomes are only counted."""
        self._is_applied = is_applied
        self.counts = ObservedCounts()
        self._depths, self._cells = _Evidence(_DEPTHS), _Evidence(_CELLS)
        # Nodes observed per temperature class.
        self._num_observed = [0] * len(TEMPERATURE_CLASSES)

    def calibrated(self, tree: TokenTree, temperature: float) -> SentTree:
        """The calibrated tree, to be sent; follow its outcomes with the result."""
        at = temperature_class(temperature)
        cells = _cells(tree, at)
        if not self._is_applied:
            return SentTree(self, tree, tree.log_probs, cells, at)
        now = self._num_observed[at]
        values = tuple([self._calibrated(*node, now) for node in zip(cells, tree.log_probs, strict=True)])
        sent = TokenTree(tree.token_ids, tree.parents, values, tree.source_names, tree.sources)
        return SentTree(self, sent, tree.log_probs, cells, at)

    def _calibrated(self, cell: int, log_prob: float, now: int) -> float:
        ratio = self._depths.ratio(cell // _CELLS_PER_DEPTH, now, _OWN_WEIGHT, 1.0)
        ratio = self._cells.ratio(cell, now, _DEPTH_WEIGHT, ratio)
        if ratio <= 1:
            return log_prob + math.log(ratio)
        return max(log_prob, min(_MOST, log_prob + math.log(ratio)))

    def observe(self, cell: int, own_log_prob: float, *, is_right: bool) -> None:
        """Record whether a node was right; its parent must have been."""
        at = cell // (_CELLS_PER_DEPTH * MAX_DEPTH)
        now = self._num_observed[at] = self._num_observed[at] + 1
        promised = math.exp(own_log_prob)
        self._depths.add(cell // _CELLS_PER_DEPTH, now, promised, is_right)
        self._cells.add(cell, now, promised, is_right)


class _Evidence:
    """Decayed sums of promised and accepted tokens by index. Times are counts of nodes."""

    def __init__(self, size: int) -> None:
        self._promised = [0.0] * size
        self._accepted = [0.0] * size
        self._changed = [0] * size

    def add(self, index: int, now: int, promised: float, is_right: bool) -> None:
        """Add a node."""
        kept = math.exp((self._changed[index] - now) / _HORIZON)
        self._promised[index] = kept * self._promised[index] + promised
        self._accepted[index] = kept * self._accepted[index] + is_right
        self._changed[index] = now

    def ratio(self, index: int, now: int, prior_weight: float, prior: float) -> float:
        """Accepted over promised tokens, with a prior ratio worth `prior_weight` promised tokens."""
        promised = self._promised[index]
        if not promised:
            return prior
        kept = math.exp((self._changed[index] - now) / _HORIZON)
        return (kept * self._accepted[index] + prior_weight * prior) / (kept * promised + prior_weight)


class SentTree:
    """A tree that was sent, and its nodes on the committed path.

    Only nodes whose parent was committed are observed, right or wrong, verified or not: elsewhere the target's token is
    unknown. A probability is conditional on the parent being right, so this is unbiased.
    """

    def __init__(
        self, learner: AcceptanceMap, tree: TokenTree, own_log_probs: Sequence[float], cells: Sequence[int], at: int
    ) -> None:
        self.tree = tree
        self._learner = learner
        self._own_log_probs = own_log_probs
        self._cells = cells
        self._at = at
        # Depths of committed nodes (root: 0), and the number of committed tokens.
        self._committed = {ROOT: 0}
        self._num_committed = 0

    def follow(self, token_ids: Sequence[int]) -> None:
        """Add the tokens committed next."""
        first = self._num_committed
        last = self._num_committed = first + len(token_ids)
        tree, counts, committed = self.tree, self._learner.counts, self._committed
        for node, parent in enumerate(tree.parents):
            depth = committed.get(parent)
            if depth is None or not first <= depth < last:
                continue
            is_right = tree.token_ids[node] == token_ids[depth - first]
            self._learner.observe(self._cells[node], self._own_log_probs[node], is_right=is_right)
            counts.count(self._at, tree.log_probs[node], is_right)
            if is_right:
                committed[node] = depth + 1


def _cells(tree: TokenTree, at: int) -> list[int]:
    """Cell of each node; siblings rank in order."""
    cells = []
    # The root's entry is last, at index -1.
    num_children = [0] * (len(tree) + 1)
    # Computed here, as nothing else needs `TokenTree.depths`.
    depths = [0] * (len(tree) + 1)
    depths[-1] = -1
    for node, (parent, log_prob) in enumerate(zip(tree.parents, tree.log_probs, strict=True)):
        rank = num_children[parent]
        num_children[parent] = rank + 1
        depth = depths[node] = depths[parent] + 1
        place = at * MAX_DEPTH + min(depth, MAX_DEPTH - 1)
        own = min(int(math.exp(log_prob / 2) * NUM_RANGES), NUM_RANGES - 1)
        cells.append((place * MAX_RANK + min(rank, MAX_RANK - 1)) * NUM_RANGES + own)
    return cells
