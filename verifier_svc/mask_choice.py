"""Which ends of a round get masks, and how many: those that promise the next round most accepted tokens. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from coppice.tree import ROOT, TokenTree
from verifier_svc.mask_groups import MaskGroup, MaskShape

# Accepted tokens that a mask has to promise the next round: its row would cost more than less could gain. A pass
# computes rows in multiples, and one that is computed anyhow costs little more than its additions.
LEAST_GAIN = 0.08
LEAST_GAIN_OF_FREE_ROW = 0.03
# A mask's token is accepted so much less often than that of the mask before it, whose tokens are accepted too.
FURTHER = 0.8
# Ends that are less likely are not worth looking at.
_LEAST_END = 1e-3


def choose_groups(
    tree: TokenTree, shape: MaskShape, max_rows: int, room: int, hit_rate: float, *, row_multiple: int = 1
) -> tuple[MaskGroup, ...]:
    """Masks where they promise most, behind likely ends of the accepted path; the likeliest end's group comes first.

    One mask after the other is given to the end where it adds most to the next round: behind that end, and behind those
    below that have no nearer ones (`masks_for`). So masks behind the root are of use wherever the path ends.

    Args:
        tree: what the round verifies, whose own probabilities are believed.
        shape: of the groups, at most.
        max_rows: most rows of all masks together.
        room: tokens that the output may still have. What a mask predicts must be of use in the next round, which
            has a token of its own to add.
        hit_rate: how likely the token that a group's first mask predicts is accepted.
        row_multiple: a pass has a multiple of so many rows; believed to be this sequence's alone.
    """
    ends = end_probabilities(tree)
    likeliest = sorted(range(ROOT, len(tree)), key=lambda node: (-ends[node], node))[: shape.num_groups]
    rates = [hit_rate * FURTHER**place for place in range(shape.num_masks)]
    counts = dict.fromkeys([*likeliest, ROOT], 0)
    most = {node: min(shape.num_masks, room - 2 - (0 if node == ROOT else tree.depths[node])) for node in counts}
    below = _ends_below(tree, ends, most)
    # Of each end's draft, the places of the masks that it would come from.
    drafts: dict[int, list[int]] = {}
    for num_masks in range(max_rows):
        is_free = (1 + len(tree) + num_masks) % row_multiple != 0
        is_full = sum(map(bool, counts.values())) == shape.num_groups
        gains = [
            (_gain(below[node], drafts, count, rates, ends), node)
            for node, count in counts.items()
            if count < most[node] and (count or not is_full)
        ]
        # Of equal gains the likelier end's comes first.
        gain, node = max(gains, key=lambda one: one[0], default=(0.0, ROOT))
        if gain < (LEAST_GAIN_OF_FREE_ROW if is_free else LEAST_GAIN):
            break
        for end, distance in below[node]:
            if counts[node] >= distance:
                drafts[end] = _with_mask(drafts.get(end, []), counts[node] - distance, counts[node])
        counts[node] += 1
    return tuple(MaskGroup(node, count) for node, count in counts.items() if count)


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


def _gain(
    below: Sequence[tuple[int, int]],
    drafts: Mapping[int, list[int]],
    place: int,
    rates: Sequence[float],
    ends: Sequence[float],
) -> float:
    """Accepted tokens that one more mask, at a place of its group, promises the next round."""
    gain = 0.0
    for end, distance in below:
        if place >= distance:
            draft = drafts.get(end, [])
            more = _with_mask(draft, place - distance, place)
            gain += ends[end] * (_accepted(more, rates) - _accepted(draft, rates))
    return gain


def _with_mask(draft: list[int], depth: int, place: int) -> list[int]:
    """A draft whose token at a depth may come from the mask at `place`; the nearer group's is the better one."""
    if depth == len(draft):
        return [*draft, place]
    if place >= draft[depth]:
        return draft
    return [*draft[:depth], place, *draft[depth + 1 :]]


def _accepted(draft: Sequence[int], rates: Sequence[float]) -> float:
    """Tokens accepted on average of a chain whose tokens come from masks at these places."""
    total, path = 0.0, 1.0
    for place in draft:
        path *= rates[place]
        total += path
    return total
