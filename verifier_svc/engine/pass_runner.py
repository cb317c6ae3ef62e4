"""Runs passes, with early pruning where that pays, and draws their tokens."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from verifier_svc.engine.kv_cache import HalfArray
from verifier_svc.engine.pass_plan import PassPlan, SequenceRows
from verifier_svc.extras.pruning.pace import PassTimes, PruningPace, PruningSettings
from verifier_svc.extras.pruning.rows import num_candidates, surviving_part, survivors_of
from verifier_svc.model.target_model import TargetModel
from verifier_svc.verify.sampler import Draws, Logits, RowTable

# Upper bound of a pass's logits in memory at a time.
MAX_LOGIT_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class PassPart:
    """One sequence's part of a pass: logits [rows, vocab] of the root, the tree and the masks; empty if not needed.

    `draws` [1 + nodes, 2] are those of root and tree, if the pass draws tokens; `states` [rows, hidden] exist if
    wanted, and so do those of the shown rows, `shown` [rows, hidden], unless the pass was pruned or captured. With
    `survivors` only these nodes and masks have rows, the others were pruned.
    """

    logits: Logits
    draws: Draws | None = None
    survivors: tuple[int, ...] | None = None
    states: HalfArray | None = None
    shown: HalfArray | None = None


@dataclass(frozen=True, slots=True)
class PassResult:
    """Parts of the sequences, in order, and the number of pruned nodes."""

    parts: tuple[PassPart, ...]
    num_pruned: int = 0


class PassRunner:
    """Passes of one target; without `settings` none is pruned."""

    def __init__(self, target: TargetModel, vocab_size: int, settings: PruningSettings | None) -> None:
        self._target = target
        self._vocab_size = vocab_size
        self._pace = None if settings is None else PruningPace(settings)
        self._is_pruned_first = False

    @property
    def pruning_times(self) -> Mapping[bool, PassTimes]:
        """Totals of prunable passes without prefill, by whether they were pruned."""
        return {False: PassTimes(), True: PassTimes()} if self._pace is None else self._pace.times

    def run(self, plan: PassPlan, work: Sequence[SequenceRows]) -> PassResult:
        """Run the pass planned for these rows."""
        pace = self._pace
        if pace is None or not self._target.can_prune(plan):
            return self._whole(plan, work)
        count = num_candidates(plan)
        if count and pace.compares:
            return self._compared(plan, work, pace, count)
        return self._timed(plan, work, pace, count, prunes=pace.prunes(plan.num_rows, count))

    def _compared(self, plan: PassPlan, work: Sequence[SequenceRows], pace: PruningPace, count: int) -> PassResult:
        """Run a pass both ways, in alternating order, and use the unpruned result.

        Both write the same slots of the cache. With recurrent layers the whole pass comes last, since states advance
        over rows of the last one.
        """
        self._is_pruned_first = self._target.recurrent is not None or not self._is_pruned_first
        results = {
            prunes: self._timed(plan, work, pace, count, prunes=prunes)
            for prunes in (self._is_pruned_first, not self._is_pruned_first)
        }
        return results[False]

    def _timed(
        self, plan: PassPlan, work: Sequence[SequenceRows], pace: PruningPace, count: int, *, prunes: bool
    ) -> PassResult:
        """Run a pass with `count` prunable rows, and update the pace with its duration."""
        started_s = time.perf_counter()
        result = self._pruned(plan, work) if prunes else self._whole(plan, work)
        # Only without prefill, whose rows are cheaper for lack of logits.
        if count and all(segment.num_pending == 1 for segment in plan.segments):
            pace.pass_over(plan.num_rows, time.perf_counter() - started_s, was_pruned=prunes)
        return result

    def _whole(self, plan: PassPlan, work: Sequence[SequenceRows]) -> PassResult:
        most = max(1, MAX_LOGIT_BYTES // (4 * self._vocab_size))
        if len(plan.logit_rows) > most and self._target.can_split(plan):
            return self._in_blocks(plan, work, most)
        logits = self._target.forward(plan).numpy()
        return PassResult(self._parts(logits, plan, work))

    def _in_blocks(self, plan: PassPlan, work: Sequence[SequenceRows], most: int) -> PassResult:
        """Run a pass whose logits are computed and sampled in blocks of rows; only needed ones are kept."""
        table = _table(plan, work)
        kept: list[list[Logits]] = [[] for _ in work]
        first = 0
        for block in self._target.forward_in_blocks(plan, most):
            logits = block.numpy()
            table.draw(logits, torch.get_num_threads(), first=first)
            for (start, stop), rows, parts in zip(plan.logit_ranges, work, kept, strict=True):
                if rows.keeps_logits and start < first + len(logits) and first < stop:
                    parts.append(logits[max(start - first, 0) : stop - first].copy())
            first += len(logits)
        states, drawn = self._states(plan), table.drawn()
        return PassResult(
            tuple(
                PassPart(
                    np.concatenate(parts) if parts else np.empty((0, self._vocab_size), np.float32),
                    next(drawn) if _is_drawn(rows) else None,
                    None,
                    *_states_of(states, plan, index),
                )
                for index, (rows, parts) in enumerate(zip(work, kept, strict=True))
            )
        )

    def _pruned(self, plan: PassPlan, work: Sequence[SequenceRows]) -> PassResult:
        logits_left, forward = self._target.forward_pruned(plan)
        logits = logits_left.numpy()
        if forward.kept is None:
            return PassResult(self._parts(logits, plan, work))
        survivors = [survivors_of(segment) for segment in forward.plan.segments]
        left = [
            surviving_part(rows, some) if rows.wants_logits else rows
            for rows, some in zip(work, survivors, strict=True)
        ]
        return PassResult(self._parts(logits, forward.plan, left, survivors), forward.num_pruned)

    def _parts(
        self,
        logits: Logits,
        plan: PassPlan,
        work: Sequence[SequenceRows],
        survivors: Sequence[tuple[int, ...] | None] = (),
    ) -> tuple[PassPart, ...]:
        """Draw tokens from the logits of a pass, and split the result by sequence."""
        states, table = self._states(plan), _table(plan, work)
        table.draw(logits, torch.get_num_threads())
        drawn = table.drawn()
        return tuple(
            PassPart(
                logits[start:stop],
                next(drawn) if _is_drawn(rows) else None,
                some,
                *_states_of(states, plan, index),
            )
            for index, ((start, stop), rows, some) in enumerate(
                zip(plan.logit_ranges, work, survivors or [None] * len(work), strict=True)
            )
        )

    def _states(self, plan: PassPlan) -> HalfArray | None:
        return self._target.take_states() if plan.wants_states else None


def _states_of(states: HalfArray | None, plan: PassPlan, index: int) -> tuple[HalfArray | None, HalfArray | None]:
    """States of the logit rows of sequence `index` of a pass, and of its shown rows."""
    if states is None:
        return None, None
    (start, stop), (first, last) = plan.logit_ranges[index], plan.shown_ranges[index]
    shown = states[len(plan.logit_rows) :][first:last]
    return states[start:stop], shown if len(shown) else None


def _is_drawn(rows: SequenceRows) -> bool:
    return rows.wants_logits and rows.chooser is not None


def _table(plan: PassPlan, work: Sequence[SequenceRows]) -> RowTable:
    """Rows from which the pass draws."""
    table = RowTable()
    for (first, _), rows in zip(plan.logit_ranges, work, strict=True):
        if rows.wants_logits and rows.chooser is not None:
            table.add(rows.chooser, rows.tree, first, rows.cache.length + len(rows.pending))
    return table
