"""Plans of asking rounds; identical for many requests, so computed once."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from orchestrator.planner.base import RoundPlan
from orchestrator.planner.budget import worthwhile_linger_s
from orchestrator.planner.draft_times import DraftTimes
from orchestrator.planner.source_choice import NONE_LEFT_OUT

# Nodes are cut only below this share of the price: price and values are estimates.
CLEARLY = 0.8
# Requested nodes in units of those recently worth their rows.
SPARE_NODES = 1.5
# Least gain in tokens assumed in trials.
TRIAL_GAIN = 4.0
# Gains are rounded up to steps of one in this many, within their accuracy, so that requests share plans.
STEPS_PER_GAIN = 16
# Relative margin of the threshold before a request starts or stops drafting.
HYSTERESIS = 0.05


@dataclass(frozen=True, slots=True)
class PlanSnapshot:
    """State of the planner; before costs and values are known, drafting is free and pays.

    `threshold` is the least gain, relative to a usual draft's, with which drafts pay. `gain` and `nodes` are a usual
    draft's tokens and nodes worth at least `price` tokens per row. `rate` is in tokens per second. `pays_jointly`:
    drafting by all requests would pay.
    """

    threshold: float = 0.0
    price: float = 0.0
    gain: float = 0.0
    nodes: float = 0.0
    rate: float = 0.0
    pays_jointly: bool = True
    # Log of the path probability below which a node is clearly not worth its row.
    log_price: float = field(init=False)

    def __post_init__(self) -> None:
        log_price = math.log(CLEARLY * self.price) if self.price > 0 else -math.inf
        object.__setattr__(self, "log_price", log_price)

    @property
    def is_known(self) -> bool:
        """Whether costs and values are known."""
        return self.rate > 0


class DraftPlans:
    """Plans for one snapshot and number of running requests."""

    def __init__(
        self, snapshot: PlanSnapshot, num_running: int, linger_us: int, draft_times: DraftTimes | None = None
    ) -> None:
        """`linger_us` is the largest linger, `draft_times` are drafts' durations so far."""
        self.snapshot = snapshot
        self.quickest_s, self.needed_s = (draft_times.quickest_s, draft_times.needed_s) if draft_times else (0.0, 0.0)
        self.num_running = max(1, num_running)
        self._most_linger_us = linger_us
        # For `CommonPlans`: plans of ordinary requests by weight and gain in steps.
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
        """Limits for a request whose drafts have this gain relative to usual ones.

        `weight` is the request's relative weight. Without `waits` the round does not linger.
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
        """Whether no draft would come within this linger; late ones serve later rounds.

        The transfer time between verifier and orchestrator is learned only from rounds that wait. Trials therefore wait
        unless the drafter alone takes longer.
        """
        return linger_us < 1e6 * (self.quickest_s if is_trial else self.needed_s)

    def _linger_us(self, gain: float, weight: float, is_trial: bool) -> int:
        tokens = gain * self.snapshot.gain
        if is_trial:
            # Known gains may be out of date, and nothing is learned without waiting.
            tokens = max(tokens, TRIAL_GAIN)
        return round(1e6 * worthwhile_linger_s(tokens * weight, self.snapshot.rate, self.num_running))


class CommonPlans:
    """Plans shared by all requests until a pass ends or a request begins or ends.

    `hold`: whether plans can be shared; not in trials, during prefill of many prompts, before costs are known, or with
    a single request. A request keeps drafting if its gain times its weight over `mean_weight` is at least `least_gain`.
    `known` are plans by that relative weight and by gain in steps.
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
        """Compute and store the plan for this weight and gain."""
        plan = self.known[weight, steps] = self._plans.plan(
            gain, weight, self._max_nodes, 1, NONE_LEFT_OUT, is_trial=False, waits=True
        )
        return plan
