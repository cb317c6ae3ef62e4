"""Early pruning (ProPD, 2402.13485): selection of the rows that remain after an early layer. Pure.

A node remains if its parent does and the early score of its token reaches the threshold, which tokens drawn by the
target seldom miss. Selection precedes the draw of the target's tokens, so that sample-and-follow stays lossless; other
rules would not. Prompt rows and roots always remain, as do all rows of sequences without a draw rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from coppice.core.noise import gumbel_of
from coppice.core.tree import ROOT
from verifier_svc.engine.kv_cache import IntArray
from verifier_svc.engine.pass_plan import PassPlan, Segment, SequenceRows, padded_size
from verifier_svc.extras.redraft.groups import MaskGroup
from verifier_svc.verify.draw_rule import DrawRule

BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Candidates:
    """Prunable nodes [C]: their rows, parents' rows, tokens, and least scores to remain."""

    rows: IntArray
    parent_rows: IntArray
    token_ids: IntArray
    least_scores: FloatArray

    def __len__(self) -> int:
        return len(self.rows)


def num_candidates(plan: PassPlan) -> int:
    """Number of prunable nodes of a pass."""
    return sum(
        _num_nodes(plan, segment)
        for segment, rule in zip(plan.segments, plan.draw_rules, strict=True)
        if rule is not None
    )


def candidates_of(plan: PassPlan) -> Candidates:
    """Prunable nodes of a pass, in order."""
    rows: list[int] = []
    parent_rows: list[int] = []
    rules: list[DrawRule] = []
    counts: list[int] = []
    for segment, rule in zip(plan.segments, plan.draw_rules, strict=True):
        if rule is None:
            continue
        first, root = segment.start + segment.num_pending, segment.start + segment.num_pending - 1
        count = _num_nodes(plan, segment)
        rows += range(first, first + count)
        parent_rows += [root if parent == ROOT else first + parent for parent in segment.parents[:count]]
        rules.append(rule)
        counts.append(count)
    places = np.array(rows, np.int64)
    token_ids = plan.token_ids[places]
    least_scores = np.repeat(np.array([rule.threshold for rule in rules]), counts)
    temperatures = np.repeat(np.array([rule.temperature for rule in rules]), counts)
    # Vectorised over all sequences: noise for a few tokens takes as long as for a few hundred.
    drawn = np.flatnonzero(temperatures)
    if len(drawn):
        seeds = np.repeat(np.array([rule.seed for rule in rules], np.uint64), counts)[drawn]
        noise = gumbel_of(seeds, plan.positions[places[drawn]], token_ids[drawn])
        least_scores[drawn] -= temperatures[drawn] * noise
    return Candidates(places, np.array(parent_rows, np.int64), token_ids, least_scores)


def surviving_rows(plan: PassPlan, candidates: Candidates, scores: npt.NDArray[np.floating]) -> IntArray:
    """Remaining rows, in order, from the candidates' early scores [C]. NaN prunes nothing."""
    survives = np.ones(plan.num_rows, np.bool_)
    survives[candidates.rows[scores < candidates.least_scores]] = False
    if not survives.all():
        for segment in plan.segments:
            _close_under_parents(segment, survives)
    rows: IntArray = np.flatnonzero(survives)
    return rows


def without_pruned(plan: PassPlan, rows: IntArray, row_multiple: int) -> PassPlan:
    """Pass over `rows` [R], in order and closed under parents; padding repeats row 0.

    Keys and values are written to the same slots.
    """
    new_rows = np.full(plan.num_rows, -1, np.int64)
    new_rows[rows] = np.arange(len(rows))
    padding = np.zeros(padded_size(len(rows), row_multiple) - len(rows), np.int64)
    padded = np.concatenate([rows, padding])
    positions = plan.positions[padded]
    bounds = np.searchsorted(rows, [segment.start for segment in plan.segments] + [plan.num_rows])
    segments = [
        _narrowed(segment, rows[start:stop], int(start), positions[start:stop])
        for segment, start, stop in zip(plan.segments, bounds, bounds[1:], strict=False)
    ]
    num_logits = plan.logit_ranges[-1][1] if plan.logit_ranges else 0
    old_logit_rows = plan.logit_rows[:num_logits]
    is_left = new_rows[old_logit_rows] >= 0
    logit_rows = new_rows[old_logit_rows[is_left]]
    logit_padding = np.repeat(logit_rows[-1:], padded_size(len(logit_rows), row_multiple) - len(logit_rows))
    before = np.concatenate([[0], np.cumsum(is_left)])
    mask_places = plan.mask_places
    if mask_places is not None:
        mask_places = np.concatenate([mask_places[rows], padding - 1])
    return replace(
        plan,
        token_ids=plan.token_ids[padded],
        positions=positions,
        write_slots=plan.write_slots[rows],
        segments=tuple(segments),
        logit_rows=np.concatenate([logit_rows, logit_padding]),
        logit_ranges=tuple((int(before[first]), int(before[last])) for first, last in plan.logit_ranges),
        num_rows=len(rows),
        mask_places=mask_places,
    )


def survivors_of(segment: Segment) -> tuple[int, ...]:
    """Remaining nodes of a segment, followed by its remaining masks, as indices before pruning."""
    nodes: list[int] = (segment.row_places[segment.num_pending :] - segment.num_pending).tolist()
    return tuple(nodes)


def surviving_part(rows: SequenceRows, survivors: Sequence[int]) -> SequenceRows:
    """Rows of a sequence without its pruned nodes and the masks after these.

    Unchanged if nothing was pruned: a sampled tree keeps its distributions.
    """
    num_nodes = len(rows.tree)
    if len(survivors) == num_nodes + rows.num_masks:
        return rows
    kept = [node for node in survivors if node < num_nodes]
    places = {ROOT: ROOT, **{old: new for new, old in enumerate(kept)}}
    masks = tuple(MaskGroup(places[group.node], group.num_masks) for group in rows.masks if group.node in places)
    return replace(rows, tree=rows.tree.select(kept), masks=masks)


def _num_nodes(plan: PassPlan, segment: Segment) -> int:
    masks = 0 if plan.mask_places is None else int((plan.mask_places[segment.start : segment.stop] >= 0).sum())
    return len(segment.parents) - masks


def _close_under_parents(segment: Segment, survives: BoolArray) -> None:
    first = segment.start + segment.num_pending
    for node, parent in enumerate(segment.parents):
        if parent != ROOT and not survives[first + parent]:
            survives[first + node] = False


def _narrowed(segment: Segment, rows: IntArray, start: int, positions: IntArray) -> Segment:
    if len(rows) == segment.stop - segment.start and segment.places is None:
        return replace(segment, start=start, stop=start + len(rows), positions=positions)
    places = rows - segment.start
    nodes = (places[segment.num_pending :] - segment.num_pending).tolist()
    new_nodes = {ROOT: ROOT, **{old: new for new, old in enumerate(nodes)}}
    return replace(
        segment,
        start=start,
        stop=start + len(rows),
        parents=tuple([new_nodes[segment.parents[node]] for node in nodes]),
        positions=positions,
        places=places,
    )
