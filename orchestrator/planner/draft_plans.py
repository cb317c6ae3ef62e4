"""The limits of rounds that ask for drafts: those of many requests are the same, and worked out once."""

from __future__ import annotations

import math

from orchestrator.planner.base import RoundPlan
from orchestrator.planner.draft_times import DraftTimes
from orchestrator.planner.linger import worthwhile_linger_s
from orchestrator.planner.plan_snapshot import PlanSnapshot

# Nodes that drafters are asked for, in units of those that were worth their rows lately.
SPARE_NODES = 1.5
# Tokens that drafts are taken to gain, at least, when it is tried whether they do.
TRIAL_GAIN = 4.0
# Gains of requests are told apart in steps of one in so many, rounded up: they are known no better, and requests share
# plans.
STEPS_PER_GAIN = 16


class DraftPlans:
    """Plans by one stance, for so many running requests."""

    def __init__(
        self, stance: PlanSnapshot, num_running: int, linger_us: int, draft_times: DraftTimes | None = None
    ) -> None:
        """`linger_us` is the longest that a round may wait, `draft_times` what drafts take as yet."""
        self.stance = stance
        self.quickest_s, self.needed_s = (draft_times.quickest_s, draft_times.needed_s) if draft_times else (0.0, 0.0)
        self.num_running = max(1, num_running)
        self._most_linger_us = linger_us
        # What `CommonPlans` knows of them: those of requests that want nothing special, by weight and gain in steps.
        self.usual: dict[tuple[float, int], RoundPlan] = {}
        self._known: dict[tuple[int, float, int, int, frozenset[str], bool, bool], RoundPlan] = {}

    def plan(
        self,
        gain: float,
        weight: float,
        max_nodes: int,
        row_multiple: int,
        left_out: frozenset[str],
        is_trial: bool,
        waits: bool,
    ) -> RoundPlan:
        """The limits for a request whose drafts gain so much, those of a usual one being 1.

        `weight` is what its tokens count beside those of all. `waits` says whether the round lingers at all.
        """
        steps = math.ceil(STEPS_PER_GAIN * gain) if gain > 1 else STEPS_PER_GAIN
        key = (steps, weight, max_nodes, row_multiple, left_out, is_trial, waits)
        plan = self._known.get(key)
        if plan is None:
            gain, stance = steps / STEPS_PER_GAIN, self.stance
            if self.num_running > 1 and not is_trial:
                max_nodes = min(max_nodes, 1 + math.ceil(SPARE_NODES * gain * stance.nodes))
            linger_us = min(self._most_linger_us, self._linger_us(gain, weight, is_trial)) if waits else 0
            if self.is_vain(linger_us, is_trial=is_trial):
                linger_us = 0
            plan = self._known[key] = RoundPlan(max_nodes, linger_us, row_multiple, left_out, stance.price / weight)
        return plan

    def is_vain(self, linger_us: int, *, is_trial: bool) -> bool:
        """Whether no draft comes within so long a wait; late ones serve the rounds that run when they come.

        What the way between verifier and orchestrator takes only rounds that wait tell. So in a trial they do, unless
        the drafter alone takes longer.
        """
        return linger_us < 1e6 * (self.quickest_s if is_trial else self.needed_s)

    def _linger_us(self, gain: float, weight: float, is_trial: bool) -> int:
        tokens = gain * self.stance.gain
        if is_trial:
            # What is known may be out of date, and nothing is learned from drafts that are not waited for.
            tokens = max(tokens, TRIAL_GAIN)
        return round(1e6 * worthwhile_linger_s(tokens * weight, self.stance.rate, self.num_running))
