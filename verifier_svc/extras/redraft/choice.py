"""Choice of nodes after which masks are computed, by expected accepted tokens of the next round. Pure.

Runs every round, so its loops are compiled. In their arrays the root's index is after those of all nodes.
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

# Least expected accepted tokens of a mask even if its row is free: covers its additions and its part of the draft.
MASK_PRICE = 0.02
# Less likely ends are ignored.
_LEAST_END = 1e-3
# Ratio of acceptance rates of consecutive masks, given that earlier ones are accepted.
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
    """Mask groups after likely ends of the accepted path, likeliest first.

    Greedy: the next mask goes where it adds most expected tokens to the next round, at that node and at descendants
    without nearer masks (`masks_for`); masks after the root thus serve every end. The number of masks maximises
    expected tokens minus the cost of all added rows.

    Args:
        tree: the tree to be verified; its probabilities are taken as they are.
        shape: bounds of masks per group and of groups.
        max_rows: upper bound of mask rows.
        room: tokens that the output may still have. Masks must serve the next round, which commits a token of its own.
        hit_rate: acceptance rate of the first mask's token.
        curve: pass duration by rows; treated as if the pass had only this sequence.
        rate: accepted tokens that justify the duration of the smallest pass.
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
    """Number of nodes of a tree, likeliest first, that maximises expected tokens minus the cost of their rows.

    Args:
        path_log_probs: of the tree's nodes, in any order.
        num_masks: mask rows that the pass has besides.
        curve: pass duration by rows; treated as if the pass had only this sequence.
        rate: accepted tokens that justify the duration of the smallest pass.
    """
    best, best_worth, promised = 0, -rate * curve.at(1 + num_masks), 0.0
    for count, log_prob in enumerate(sorted(path_log_probs, reverse=True), 1):
        promised += math.exp(log_prob)
        worth = promised - rate * curve.at(1 + count + num_masks)
        if worth > best_worth:
            best, best_worth = count, worth
    return best


class Drafts(NamedTuple):
    """Draft of the next round at each end: a chain whose token at each depth comes from a mask.

    `places` [ends, depths] are the masks' positions in their groups, `lengths` [ends] the chains' lengths, and `rates`
    [places] acceptance rates by position.
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
        parents: parents of nodes, -1 for the root [nodes].
        path_log_probs: of nodes [nodes].
        rates: acceptance rates by a mask's position in its group [places].
        num_groups: upper bound of groups, at most the number of ends.
        room: upper bound of useful masks after the root.
        times: least expected tokens of passes with 0, 1, ... masks; bounds the number of masks.
        usual_price: least expected tokens of a row on average over row blocks.

    Returns:
        nodes and their numbers of masks [groups, 2].
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
                # Ties go to the likelier end.
                if best < 0 or promised > gain:
                    best, gain = at, promised
        price = times[num_chosen + 1] - times[num_chosen]
        # It may begin a block of rows that further masks fill; but these promise hardly more than it.
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
    """Nodes chosen at least once, with counts [groups, 2]."""
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
    """Probabilities that the accepted path ends at each node and the root, their parents, and their depths."""
    root = len(parents)
    ends = np.empty(root + 1, np.float64)
    above = np.full(root + 1, root, np.int64)
    depths = np.zeros(root + 1, np.int64)
    ends[root] = 1.0
    for node in range(root):
        if parents[node] >= 0:
            above[node] = parents[node]
        depths[node] = 1 + depths[above[node]]
        # Holds the path's probability until all children are subtracted.
        ends[node] = math.exp(path_log_probs[node])
        ends[above[node]] -= ends[node]
    return ends, above, depths


@compiled_exactly
def _offered(ends: FloatArray, num_groups: int) -> IntArray:
    """The likeliest ends (ties: the root, then the earlier node), and the root if not among them."""
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
    """Expected accepted tokens of a mask at `place` of a node's group, over all ends at or below the node."""
    total = 0.0
    for end in range(len(ends)):
        depth = place - _distance(node, end, above)
        if ends[end] >= _LEAST_END and 0 <= depth <= place:
            total += ends[end] * _gain(end, depth, place, drafts)
    return total


@compiled_exactly
def _take(node: int, place: int, ends: FloatArray, above: IntArray, drafts: Drafts) -> None:
    """Add this mask to the drafts."""
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
    """Depth of an end below a node; larger than any depth if it is not a descendant."""
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
    """Expected accepted tokens that a mask at `place` of its group adds to an end's draft at `depth`.

    Of two masks for one depth the nearer group's is used.
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
