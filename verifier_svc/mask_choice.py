"""Which ends of a round get masks, and how many: those that promise the next round most accepted tokens. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from coppice.tree import ROOT, TokenTree
from verifier_svc.mask_groups import MaskGroup, MaskShape
from verifier_svc.pass_curve import PassCurve

# Accepted tokens that a mask has to promise the next round even where its row is computed anyhow: what its additions
# and its part of the draft cost.
MASK_PRICE = 0.02
# A mask's token is accepted so much less often than that of the mask before it, whose tokens are accepted too.
FURTHER = 0.8
# Ends that are less likely are not worth looking at.
_LEAST_END = 1e-3


def choose_groups(
    tree: TokenTree,
    shape: MaskShape,
    max_rows: int,
    room: int,
    hit_rate: float,
    *,
    curve: PassCurve,
    rate: float,
) -> tuple[MaskGroup, ...]:
    """Masks where they promise most, behind likely ends of the accepted path; the likeliest end's group comes first.

    One mask after the other is given to the end where it adds most to the next round: behind that end, and behind those
    below that have no nearer ones (`masks_for`). So masks behind the root are of use wherever the path ends. Of these
    there are as many as are worth most, when all rows that they add to the pass are paid for.

    Args:
        tree: what the round verifies, whose own probabilities are believed.
        shape: of the groups, at most.
        max_rows: most rows of all masks together.
        room: tokens that the output may still have. What a mask predicts must be of use in the next round, which
            has a token of its own to add.
        hit_rate: how likely the token that a group's first mask predicts is accepted.
        curve: how long a pass takes with more rows; believed to be this sequence's alone.
        rate: accepted tokens that the time of the smallest pass has to promise.
    """
    ends = end_probabilities(tree)
    likeliest = sorted(range(ROOT, len(tree)), key=lambda node: (-ends[node], node))[: shape.num_groups]
    rates = [hit_rate * FURTHER**place for place in range(shape.num_masks)]
    counts = dict.fromkeys([*likeliest, ROOT], 0)
    most = {node: min(shape.num_masks, room - 2 - (0 if node == ROOT else tree.depths[node])) for node in counts}
    below = _ends_below(tree, ends, most)
    drafts = {end: _Draft(rates) for reached in below.values() for end, _ in reached}
    chosen: list[int] = []
    num_best = 0
    worth = best_worth = 0.0
    paid = rate * curve.at(1 + len(tree))
    usual_price = rate * curve.per_row
    while len(chosen) < max_rows:
        is_full = sum(map(bool, counts.values())) == shape.num_groups
        gains = [
            (sum([ends[end] * drafts[end].gain(count - distance, count) for end, distance in below[node]]), node)
            for node, count in counts.items()
            if count < most[node] and (count or not is_full)
        ]
        # Of equal gains the likelier end's comes first.
        gain, node = max(gains, key=lambda one: one[0], default=(0.0, ROOT))
        price = rate * curve.at(1 + len(tree) + len(chosen) + 1) - paid
        # It may begin a block of rows that those behind it fill; but they promise hardly more than it.
        if gain < MASK_PRICE + min(price, usual_price):
            break
        for end, distance in below[node]:
            drafts[end].add(counts[node] - distance, counts[node])
        counts[node] += 1
        chosen.append(node)
        worth += gain - MASK_PRICE - price
        paid += price
        if worth > best_worth:
            num_best, best_worth = len(chosen), worth
    kept = chosen[:num_best]
    return tuple(MaskGroup(node, kept.count(node)) for node in counts if node in kept)


def num_worth_verifying(path_log_probs: Sequence[float], num_masks: int, *, curve: PassCurve, rate: float) -> int:
    """How many nodes of a tree to verify, the likeliest first: as many as promise most beyond what their rows cost.

    Args:
        path_log_probs: of the tree's nodes, in any order.
        num_masks: rows that the pass has behind them all the same.
        curve: how long a pass takes with more rows; believed to be this sequence's alone.
        rate: accepted tokens that the time of the smallest pass has to promise.
    """
    best, best_worth, promised = 0, -rate * curve.at(1 + num_masks), 0.0
    for count, log_prob in enumerate(sorted(path_log_probs, reverse=True), 1):
        promised += math.exp(log_prob)
        worth = promised - rate * curve.at(1 + count + num_masks)
        if worth > best_worth:
            best, best_worth = count, worth
    return best


def end_probabilities(tree: TokenTree) -> list[float]:
    """How likely the accepted path ends at each node; that of the root comes last, where its index of -1 finds it."""
    ends = [*map(math.exp, tree.path_log_probs), 1.0]
    # A node's own place holds its path's probability until all of its children have taken their part.
    for node, parent in enumerate(tree.parents):
        ends[parent] -= math.exp(tree.path_log_probs[node])
    return ends


def _ends_below(tree: TokenTree, ends: Sequence[float], most: Mapping[int, int]) -> dict[int, list[tuple[int, int]]]:
    """For each node that may have masks, the ends at or below it that they would reach, and how far down these are."""
    below: dict[int, list[tuple[int, int]]] = {node: [] for node in most}
    for end in range(ROOT, len(tree)):
        if ends[end] < _LEAST_END:
            continue
        node, distance = end, 0
        while True:
            if distance < most.get(node, 0):
                below[node].append((end, distance))
            if node == ROOT:
                break
            node, distance = tree.parents[node], distance + 1
    return below


class _Draft:
    """What the next round would have behind one end: a chain, whose token at each depth comes from a mask."""

    __slots__ = ("_path", "_places", "_rates")

    def __init__(self, rates: Sequence[float]) -> None:
        """`rates`: how likely the token of the mask at each place of a group is accepted."""
        self._rates = rates
        self._places: list[int] = []
        self._path = 1.0

    def gain(self, depth: int, place: int) -> float:
        """Accepted tokens that one more mask promises, which is at `place` of its group and says the one at `depth`."""
        if depth == len(self._places):
            return self._path * self._rates[place]
        if not self._is_better(depth, place):
            return 0.0
        return self._accepted([*self._places[:depth], place, *self._places[depth + 1 :]]) - self._accepted(self._places)

    def add(self, depth: int, place: int) -> None:
        """Have that mask."""
        if depth == len(self._places):
            self._places.append(place)
        elif self._is_better(depth, place):
            self._places[depth] = place
        self._path = math.prod([self._rates[taken] for taken in self._places])

    def _is_better(self, depth: int, place: int) -> bool:
        """Of two masks for one depth the nearer group's is."""
        return 0 <= depth < len(self._places) and place < self._places[depth]

    def _accepted(self, places: Sequence[int]) -> float:
        total, path = 0.0, 1.0
        for place in places:
            path *= self._rates[place]
            total += path
        return total
