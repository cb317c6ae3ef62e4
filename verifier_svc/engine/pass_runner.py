"""Runs passes, with early pruning where that pays, and says which nodes are left."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from verifier_svc.engine.kv_cache import HalfArray
from verifier_svc.engine.pass_plan import PassPlan
from verifier_svc.extras.pruning.pace import PassTimes, PruningPace, PruningSettings
from verifier_svc.extras.pruning.rows import num_candidates, survivors_of
from verifier_svc.model.target_model import TargetModel
from verifier_svc.verify.token_choice import Logits


@dataclass(frozen=True, slots=True)
class PassPart:
    """One sequence's part of a pass: logits [rows, vocab] and, where somebody wants them, hidden states [rows, hidden].

    With `survivors` only these nodes and masks have any: the others were pruned.
    """

    logits: Logits
    survivors: tuple[int, ...] | None = None
    states: HalfArray | None = None


@dataclass(frozen=True, slots=True)
class PassResult:
    """Logits [K, vocab] of a pass, and which of them are whose; `states` [K, hidden] where they are wanted.

    `survivors` has for each sequence the numbers of the nodes, and behind them of the masks, that have logits; it is
    None for a pass that was not pruned.
    """

    logits: Logits
    ranges: tuple[tuple[int, int], ...]
    survivors: tuple[tuple[int, ...], ...] | None = None
    num_pruned: int = 0
    states: HalfArray | None = None

    def parts(self) -> Iterator[PassPart]:
        """What each sequence gets, in order."""
        for index, (first, last) in enumerate(self.ranges):
            yield PassPart(
                self.logits[first:last],
                None if self.survivors is None else self.survivors[index],
                None if self.states is None else self.states[first:last],
            )


class PassRunner:
    """One target's passes; without `settings` none is pruned."""

    def __init__(self, target: TargetModel, settings: PruningSettings | None) -> None:
        self._target = target
        self._pace = None if settings is None else PruningPace(settings)
        self._is_pruned_first = False

    @property
    def pruning_times(self) -> Mapping[bool, PassTimes]:
        """Passes over rounds alone that could be pruned, by whether they were."""
        return {False: PassTimes(), True: PassTimes()} if self._pace is None else self._pace.times

    def run(self, plan: PassPlan) -> PassResult:
        """Run a pass."""
        pace = self._pace
        if pace is None or not self._target.can_prune(plan):
            return self._whole(plan)
        count = num_candidates(plan)
        if count and pace.compares:
            return self._compared(plan, pace, count)
        return self._timed(plan, pace, count, prunes=pace.prunes(plan.num_rows, count))

    def _compared(self, plan: PassPlan, pace: PruningPace, count: int) -> PassResult:
        """Run a pass both ways, each the first in its turn, and go on as if it had not been pruned.

        What the first run writes to the cache, the second writes again.
        """
        self._is_pruned_first = not self._is_pruned_first
        results = {
            prunes: self._timed(plan, pace, count, prunes=prunes)
            for prunes in (self._is_pruned_first, not self._is_pruned_first)
        }
        return results[False]

    def _timed(self, plan: PassPlan, pace: PruningPace, count: int, *, prunes: bool) -> PassResult:
        """Run a pass, of whose rows `count` may be pruned, and have the pace learn from it."""
        started_s = time.perf_counter()
        result = self._pruned(plan) if prunes else self._whole(plan)
        # Rows of prompts cost less, without logits.
        if count and all(segment.num_pending == 1 for segment in plan.segments):
            pace.pass_over(plan.num_rows, time.perf_counter() - started_s, was_pruned=prunes)
        return result

    def _whole(self, plan: PassPlan) -> PassResult:
        logits = self._target.forward(plan).numpy()
        return PassResult(logits, plan.logit_ranges, states=self._states(plan))

    def _states(self, plan: PassPlan) -> HalfArray | None:
        return self._target.take_states() if plan.wants_states else None

    def _pruned(self, plan: PassPlan) -> PassResult:
        logits_left, forward = self._target.forward_pruned(plan)
        logits, states = logits_left.numpy(), self._states(plan)
        if forward.kept is None:
            return PassResult(logits, plan.logit_ranges, states=states)
        survivors = tuple(survivors_of(segment) for segment in forward.plan.segments)
        return PassResult(logits, forward.plan.logit_ranges, survivors, forward.num_pruned, states)
