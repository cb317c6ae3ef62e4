"""Which ends of a round get masks, and how many: those that promise the next round most accepted tokens. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from coppice.core.tree import ROOT, TokenTree
from verifier_svc.extras.redraft.mask_counts import count_masks
from verifier_svc.extras.redraft.mask_groups import MaskGroup, MaskShape
from verifier_svc.model.pass_curve import PassCurve

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
