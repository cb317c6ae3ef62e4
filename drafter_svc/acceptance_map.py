"""Calibration of a drafter's own probabilities, learned from outcomes and shared by a service's sequences.

A node's own probability, softmax(score / sigma) with the checkpoint's sigma, is what the map begins with. A cell holds
the nodes of one temperature class, depth, rank among siblings and range of own probabilities; under coupling these
probabilities are those of the perturbed scores, so that rank and probability are the perturbed rank and gap. A node's
calibrated probability is its own, times what nodes of its cell were accepted over what they had promised. A cell that
has seen little leans on all cells of its depth, and these on the own probabilities.

The search goes by own probabilities, and only what is sent is calibrated: which tree is drafted stays a function of
the request and the committed tokens alone, whatever the service has seen of other requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from coppice.core.tree import ROOT, TokenTree

# Highest temperature of each class but the last, and how the classes are called.
_CLASS_LIMITS = (0.0, 0.85)
TEMPERATURE_CLASSES = ("0", "to_0.85", "above_0.85")
# Nodes deeper than this, and of a higher rank, share a cell with these.
MAX_DEPTH = 8
MAX_RANK = 3
# Ranges of own probabilities, equal on the scale of their roots: unlikely nodes are many, and differ by factors.
NUM_RANGES = 10
# Tenths of sent probabilities, for the counts.
NUM_TENTHS = 10
# Nodes of its temperature class after which an observation counts 1/e: cells that are seldom seen age with the others.
_HORIZON = 4096
# Promised tokens that a depth's own probabilities are worth, and a depth's ratio to one of its cells.
_OWN_WEIGHT = 48.0
_DEPTH_WEIGHT = 24.0
# Nothing becomes more certain than this.
_MOST = math.log(0.999)

_DEPTHS = len(TEMPERATURE_CLASSES) * MAX_DEPTH
_CELLS_PER_DEPTH = MAX_RANK * NUM_RANGES
_CELLS = _DEPTHS * _CELLS_PER_DEPTH


def temperature_class(temperature: float) -> int:
    """The index of a temperature's class."""
    return sum(temperature > limit for limit in _CLASS_LIMITS)


@dataclass(slots=True)
class ObservedCounts:
    """Observed nodes, the sum of their probabilities as sent, and those accepted, by tenth of that probability.

    One list per temperature class. They only grow. The model thread writes them, and any may read.
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
    """From own probabilities to observed acceptance. The model thread's own, but for `counts`.

    Its memory is of a fixed size. What it says is a function of what it was told, in order.
    """

    def __init__(self, *, is_applied: bool = True) -> None:
        """Unless it `is_applied`, trees are sent with own probabilities, and outcomes only counted."""
        self._is_applied = is_applied
        self.counts = ObservedCounts()
        self._depths, self._cells = _Evidence(_DEPTHS), _Evidence(_CELLS)
        # Nodes that were observed of each temperature class.
        self._num_observed = [0] * len(TEMPERATURE_CLASSES)

    def calibrated(self, tree: TokenTree, temperature: float) -> SentTree:
        """The tree as it is to be sent; it stays to be told what becomes of it."""
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
        """Learn whether a node of a cell was right. Its parent must have been."""
        at = cell // (_CELLS_PER_DEPTH * MAX_DEPTH)
        now = self._num_observed[at] = self._num_observed[at] + 1
        promised = math.exp(own_log_prob)
        self._depths.add(cell // _CELLS_PER_DEPTH, now, promised, is_right)
        self._cells.add(cell, now, promised, is_right)


class _Evidence:
    """Tokens that were promised and accepted, by index, and when they last changed. Times are counts of nodes."""

    def __init__(self, size: int) -> None:
        self._promised = [0.0] * size
        self._accepted = [0.0] * size
        self._changed = [0] * size

    def add(self, index: int, now: int, promised: float, is_right: bool) -> None:
        """Take in a node."""
        kept = math.exp((self._changed[index] - now) / _HORIZON)
        self._promised[index] = kept * self._promised[index] + promised
        self._accepted[index] = kept * self._accepted[index] + is_right
        self._changed[index] = now

    def ratio(self, index: int, now: int, prior_weight: float, prior: float) -> float:
        """Accepted over promised, with so many promised tokens' worth of a prior ratio."""
        promised = self._promised[index]
        if not promised:
            return prior
        kept = math.exp((self._changed[index] - now) / _HORIZON)
        return (kept * self._accepted[index] + prior_weight * prior) / (kept * promised + prior_weight)


class SentTree:
    """A tree that was sent, and how far the committed tokens behind its root have followed it.

    What the target would have said behind a token that was not committed, nobody knows. Only nodes whose parent was
    committed are therefore observed, and all of these, right or wrong, whether a round has verified them or not. A node
    says how likely it is given that its parent is right, so that this is unbiased for such nodes, and for no others.
    """

    def __init__(
        self, learner: AcceptanceMap, tree: TokenTree, own_log_probs: Sequence[float], cells: Sequence[int], at: int
    ) -> None:
        self.tree = tree
        self._learner = learner
        self._own_log_probs = own_log_probs
        self._cells = cells
        self._at = at
        # Nodes that were committed, with their depths; the root is at 0. And how many tokens were.
        self._committed = {ROOT: 0}
        self._num_committed = 0

    def follow(self, token_ids: Sequence[int]) -> None:
        """Take in the tokens committed next."""
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
    """The cell of each node; siblings are ranked in their order."""
    cells = []
    # The root's own place comes last, where its index of -1 finds it.
    num_children = [0] * (len(tree) + 1)
    # By index, as `TokenTree.depths` would be, which nobody else here asks for.
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
