"""The choice of ends that get masks: those that promise the next round most accepted tokens. Pure.

Every round chooses, so what takes longest is compiled. There the root's place is after those of all nodes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from coppice.core.tree import ROOT, TokenTree
from coppice.kernels.cpu.compiler import compiled_exactly
from verifier_svc.extras.redraft.groups import MaskGroup, MaskShape
from verifier_svc.model.pass_curve import PassCurve

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

# Accepted tokens that a mask has to promise the next round even where its row is computed anyhow: what its additions
# and its part of the draft cost.
MASK_PRICE = 0.02
# Ends that are less likely are not worth looking at.
_LEAST_END = 1e-3
# A mask's token is accepted so much less often than that of the mask before it, whose tokens are accepted too.
FURTHER = 0.8


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
    num_nodes = len(tree)
    most = min(max_rows, shape.max_rows)
    counts = count_masks(
        np.array(tree.parents, np.int64),
        np.array(tree.path_log_probs, np.float64),
        np.array([hit_rate * FURTHER**place for place in range(shape.num_masks)], np.float64),
        min(shape.num_groups, num_nodes + 1),
        room - 2,
        np.array([rate * curve.at(1 + num_nodes + more) for more in range(most + 1)], np.float64),
        rate * curve.per_row,
    )
    return tuple([MaskGroup(ROOT if node == num_nodes else node, count) for node, count in counts.tolist()])


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


class Drafts(NamedTuple):
    """What the next round would have behind each end: chains, whose token at each depth comes from a mask.

    `places` [ends, depths] are those of the masks in their groups, `lengths` [ends] how many there are, and `rates`
    [places] how likely the token of the mask at each place is accepted.
    """

    places: IntArray
    lengths: IntArray
    rates: FloatArray


@compiled_exactly
def count_masks(
    parents: IntArray,
    path_log_probs: FloatArray,
    rates: FloatArray,
    num_groups: int,
    room: int,
    times: FloatArray,
    usual_price: float,
) -> IntArray:
    """Masks of each group, the likeliest end's first.

    Args:
        parents: of the nodes, of which -1 is the root [nodes].
        path_log_probs: theirs [nodes].
        rates: how likely the token of the mask at each place of a group is accepted [places].
        num_groups: groups at most, no more than there are ends.
        room: masks behind the root that may be of use.
        times: what passes with 0, 1, ... masks have to promise; of no more masks than there are times.
        usual_price: what a row has to promise, where blocks of rows do not matter.

    Returns:
        nodes and their masks [groups, 2].
    """
    ends, above, depths = path_ends(parents, path_log_probs)
    nodes = _offered(ends, num_groups)
    counts = np.zeros(len(nodes), np.int64)
    chosen = np.empty(len(times), np.int64)
    drafts = Drafts(np.zeros((len(ends), len(rates)), np.int64), np.zeros(len(ends), np.int64), rates)
    num_chosen = num_best = 0
    worth = best_worth = 0.0
    while num_chosen + 1 < len(times):
        is_full = np.count_nonzero(counts) >= num_groups
        best, gain = -1, 0.0
        for at in range(len(nodes)):
            if counts[at] < min(len(rates), room - depths[nodes[at]]) and (counts[at] > 0 or not is_full):
                promised = _promised(nodes[at], counts[at], ends, above, drafts)
                # Of equal gains the likelier end's comes first.
                if best < 0 or promised > gain:
                    best, gain = at, promised
        price = times[num_chosen + 1] - times[num_chosen]
        # It may begin a block of rows that those behind it fill; but they promise hardly more than it.
        if best < 0 or gain < MASK_PRICE + min(price, usual_price):
            break
        _take(nodes[best], counts[best], ends, above, drafts)
        counts[best] += 1
        chosen[num_chosen] = best
        num_chosen += 1
        worth += gain - MASK_PRICE - price
        if worth > best_worth:
            num_best, best_worth = num_chosen, worth
    return _groups(nodes, chosen[:num_best])


@compiled_exactly
def _groups(nodes: IntArray, chosen: IntArray) -> IntArray:
    """How many times each of the nodes was chosen, without those that never were."""
    counts = np.zeros(len(nodes), np.int64)
    for at in chosen:
        counts[at] += 1
    kept = np.flatnonzero(counts)
    groups = np.empty((len(kept), 2), np.int64)
    groups[:, 0] = nodes[kept]
    groups[:, 1] = counts[kept]
    return groups


@compiled_exactly
def path_ends(parents: IntArray, path_log_probs: FloatArray) -> tuple[FloatArray, IntArray, IntArray]:
    """How likely the accepted path ends at each node and at the root, what is above each, and how deep each lies."""
    root = len(parents)
    ends = np.empty(root + 1, np.float64)
    above = np.full(root + 1, root, np.int64)
    depths = np.zeros(root + 1, np.int64)
    ends[root] = 1.0
    for node in range(root):
        if parents[node] >= 0:
            above[node] = parents[node]
        depths[node] = 1 + depths[above[node]]
        # A node's own place holds its path's probability until all of its children have taken their part.
        ends[node] = math.exp(path_log_probs[node])
        ends[above[node]] -= ends[node]
    return ends, above, depths


@compiled_exactly
def _offered(ends: FloatArray, num_groups: int) -> IntArray:
    """The likeliest ends, of equals the root and then the earlier one, and the root if it is not one of them."""
    root = len(ends) - 1
    nodes = np.empty(num_groups + 1, np.int64)
    is_offered = np.zeros(root + 1, np.bool_)
    for at in range(num_groups):
        likeliest = -1
        for place in range(root + 1):
            node = root if place == 0 else place - 1
            if not is_offered[node] and (likeliest < 0 or ends[node] > ends[likeliest]):
                likeliest = node
        nodes[at] = likeliest
        is_offered[likeliest] = True
    if is_offered[root]:
        return nodes[:num_groups]
    nodes[num_groups] = root
    return nodes


@compiled_exactly
def _promised(node: int, place: int, ends: FloatArray, above: IntArray, drafts: Drafts) -> float:
    """Accepted tokens that one more mask at `place` behind a node promises, at all ends at or below it."""
    total = 0.0
    for end in range(len(ends)):
        depth = place - _distance(node, end, above)
        if ends[end] >= _LEAST_END and 0 <= depth <= place:
            total += ends[end] * _gain(end, depth, place, drafts)
    return total


@compiled_exactly
def _take(node: int, place: int, ends: FloatArray, above: IntArray, drafts: Drafts) -> None:
    """Have that mask."""
    for end in range(len(ends)):
        depth = place - _distance(node, end, above)
        if ends[end] >= _LEAST_END and 0 <= depth <= place:
            if depth == drafts.lengths[end]:
                drafts.places[end, depth] = place
                drafts.lengths[end] += 1
            elif depth < drafts.lengths[end] and place < drafts.places[end, depth]:
                drafts.places[end, depth] = place


@compiled_exactly
def _distance(node: int, end: int, above: IntArray) -> int:
    """How far an end is below a node; more than there are nodes where it is not."""
    root = len(above) - 1
    distance = 0
    while end != node:
        if end == root:
            return root + 2**30
        end = above[end]
        distance += 1
    return distance


@compiled_exactly
def _gain(end: int, depth: int, place: int, drafts: Drafts) -> float:
    """Accepted tokens that a mask at `place` of its group adds to an end's draft, where it says the one at `depth`.

    Of two masks for one depth the nearer group's is better.
    """
    length = drafts.lengths[end]
    if depth > length or (depth < length and place >= drafts.places[end, depth]):
        return 0.0
    gain, path_with, path_without = 0.0, 1.0, 1.0
    for at in range(max(length, depth + 1)):
        rate = drafts.rates[drafts.places[end, at]] if at < length else 0.0
        path_without *= rate
        path_with *= drafts.rates[place] if at == depth else rate
        gain += path_with - path_without
    return gain
