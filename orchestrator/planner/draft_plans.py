"""Plans of rounds that ask for drafts: those of many requests are the same, and worked out once."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from orchestrator.planner.base import RoundPlan
from orchestrator.planner.budget import worthwhile_linger_s
from orchestrator.planner.draft_times import DraftTimes
from orchestrator.planner.source_choice import NONE_LEFT_OUT

# Nodes are cut only below this share of the price: both the price and their values are estimates.
CLEARLY = 0.8
# Nodes that drafters are asked for, in units of those that were worth their rows lately.
SPARE_NODES = 1.5
# Tokens that drafts are taken to gain, at least, when it is tried whether they do.
TRIAL_GAIN = 4.0
# Gains of requests are told apart in steps of one in so many, rounded up: they are known no better, and requests share
# plans.
STEPS_PER_GAIN = 16
# A request changes between drafting and not only when it is this clear that it should.
HYSTERESIS = 0.05


@dataclass(frozen=True, slots=True)
class PlanSnapshot:
    """What the planner thinks of drafting now; until costs and values are known, that it is free and pays.

    `threshold` is the least gain, relative to that of a usual draft, with which a request's drafts pay. Of a usual
    draft, `gain` and `nodes` count what is worth at least `price` tokens per row. `rate` is in tokens per second.
    `pays_jointly` says whether it would pay if everybody drafted.
    """

    threshold: float = 0.0
    price: float = 0.0
    gain: float = 0.0
    nodes: float = 0.0
    rate: float = 0.0
    pays_jointly: bool = True
    # The logarithm of a path probability below which a node is clearly not worth its row.
    log_price: float = field(init=False)

    def __post_init__(self) -> None:
        log_price = math.log(CLEARLY * self.price) if self.price > 0 else -math.inf
        object.__setattr__(self, "log_price", log_price)

    @property
    def is_known(self) -> bool:
        """Whether there is anything to plan with."""
        return self.rate > 0


class DraftPlans:
    """Plans by one snapshot, for so many running requests."""

    def __init__(
        self, snapshot: PlanSnapshot, num_running: int, linger_us: int, draft_times: DraftTimes | None = None
    ) -> None:
        """`linger_us` is the longest that a round may wait, `draft_times` what drafts take as yet."""
        self.snapshot = snapshot
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

        `weight` is what its tokens count compared with those of all. `waits` says whether the round lingers at all.
        """
        steps = math.ceil(STEPS_PER_GAIN * gain) if gain > 1 else STEPS_PER_GAIN
        key = (steps, weight, max_nodes, row_multiple, left_out, is_trial, waits)
        plan = self._known.get(key)
        if plan is None:
            gain, snapshot = steps / STEPS_PER_GAIN, self.snapshot
            if self.num_running > 1 and not is_trial:
                max_nodes = min(max_nodes, 1 + math.ceil(SPARE_NODES * gain * snapshot.nodes))
            linger_us = min(self._most_linger_us, self._linger_us(gain, weight, is_trial)) if waits else 0
            if self.is_vain(linger_us, is_trial=is_trial):
                linger_us = 0
            plan = self._known[key] = RoundPlan(max_nodes, linger_us, row_multiple, left_out, snapshot.price / weight)
        return plan

    def is_vain(self, linger_us: int, *, is_trial: bool) -> bool:
        """Whether no draft comes within so long a wait; late ones serve the rounds that run when they come.

        What the way between verifier and orchestrator takes only rounds that wait tell. So in a trial they do, unless
        the drafter alone takes longer.
        """
        return linger_us < 1e6 * (self.quickest_s if is_trial else self.needed_s)

    def _linger_us(self, gain: float, weight: float, is_trial: bool) -> int:
        tokens = gain * self.snapshot.gain
        if is_trial:
            # What is known may be out of date, and nothing is learned from drafts that are not waited for.
            tokens = max(tokens, TRIAL_GAIN)
        return round(1e6 * worthwhile_linger_s(tokens * weight, self.snapshot.rate, self.num_running))


class CommonPlans:
    """What holds for all of these requests until a pass ends, or a request begins or ends.

    `hold` says whether there is any such thing: not while something is tried, prompts are read, nothing is known yet,
    or where a request is alone. A request goes on that gains at least `least_gain`, times its weight over
    `mean_weight`. `known` are plans by that weight and by gains in steps.
    """

    __slots__ = ("_max_nodes", "_plans", "hold", "known", "least_gain", "mean_weight", "snapshot")

    def __init__(self, plans: DraftPlans, max_nodes: int, mean_weight: float, hold: bool) -> None:
        self._plans = plans
        self._max_nodes = max_nodes
        self.snapshot = plans.snapshot
        self.known = plans.usual
        self.mean_weight = mean_weight
        self.least_gain = (1 - HYSTERESIS) * plans.snapshot.threshold
        self.hold = hold

    def plan(self, weight: float, gain: float, steps: int) -> RoundPlan:
        """A plan that is not known yet, of a request with this weight and gain."""
        plan = self.known[weight, steps] = self._plans.plan(
            gain, weight, self._max_nodes, 1, NONE_LEFT_OUT, is_trial=False, waits=True
        )
        return plan
