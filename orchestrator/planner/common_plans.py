"""The plans of requests that draft and go on drafting, as most do most of the time: looked up, not worked out."""

from __future__ import annotations

from orchestrator.planner.base import RoundPlan
from orchestrator.planner.draft_plans import DraftPlans
from orchestrator.planner.source_choice import NONE_LEFT_OUT

# A request changes between drafting and not only when it is this clear that it should.
HYSTERESIS = 0.05


class CommonPlans:
    """What holds for all of these requests until a pass ends, or a request begins or ends.

    `hold` says whether there is any such thing: not while something is tried, prompts are read, nothing is known yet,
    or where a request is alone. A request goes on that gains at least `least_gain`, times its weight over
    `mean_weight`. `known` are plans by that weight and by gains in steps.
    """

    __slots__ = ("_max_nodes", "_plans", "hold", "known", "least_gain", "mean_weight", "stance")

    def __init__(self, plans: DraftPlans, max_nodes: int, mean_weight: float, hold: bool) -> None:
        self._plans = plans
        self._max_nodes = max_nodes
        self.stance = plans.stance
        self.known = plans.usual
        self.mean_weight = mean_weight
        self.least_gain = (1 - HYSTERESIS) * plans.stance.threshold
        self.hold = hold

    def plan(self, weight: float, gain: float, steps: int) -> RoundPlan:
        """A plan that is not known yet, of a request with this weight and gain."""
        plan = self.known[weight, steps] = self._plans.plan(
            gain, weight, self._max_nodes, 1, NONE_LEFT_OUT, is_trial=False, waits=True
        )
        return plan
