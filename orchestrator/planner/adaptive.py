"""The planner: learns when speculation pays for all requests together, and plans the rounds of each."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

from coppice.core.tree import TokenTree
from orchestrator.planner.base import FixedPlanner, RequestPlanner, RoundContext, RoundPlan, round_plan
from orchestrator.planner.load import ClassWeights, PrefillPressure, class_weight
from orchestrator.planner.node_values import NodeValues
from orchestrator.planner.paired_choice import ALL, OFF, PairedChoice
from orchestrator.planner.pass_costs import PassCosts
from orchestrator.request.rounds import UNKNOWN_LOAD, Outcome, VerifierLoad
from orchestrator.request.statistics import DraftGain, verified_tree

# Least weight of a round in running means.
RATE = 0.03
# Weight of a pass in the mean number of running requests, and distance of its binary logarithm from that of a choice at
# which another choice takes over: beyond half a step, so that a request more or less changes nothing.
LOAD_RATE, OTHER_LOAD = 0.1, 0.75
# Factor of a step of the load, which is no fluctuation.
STEP_OF_LOAD = 3.0
# Rounds that a request's prior counts for; a round's accepted tokens vary by about their mean.
PRIOR_ROUNDS = 8
# Share of the accepted tokens that pay for asking below which a request stands aside: while others wait for drafts, it
# saves less than its own wait. And share of a row's price that its likeliest node must be worth to be kept: without
# drafts no record improves.
LEAST_SHARE = 0.5
# Lower bound of the accepted tokens of usual drafts: gains are in units of them, and one hit of drafters that never hit
# must not be out of all bounds.
LEAST_ACCEPTED = 0.01
# Rounds after which a request that stands aside has a turn of PRIOR_ROUNDS: 3 % of its rounds.
TURN_AFTER = 256
# Requested nodes in units of those that were worth their rows: the next tree may be a better one.
SPARE_NODES = 1.5
# Drafters have settled if at most one in this many asking requests waits for its first tree.
ASKING_PER_NEWCOMER = 4
# Gains are rounded up to one in this many, so that requests share plans.
STEPS_PER_GAIN = 16

_NO_DRAFTS = RoundPlan(0, 0)


class AdaptivePlanner:
    """Plans all requests of one verifier by a measured choice of whom to ask, and one price per row for all trees.

    The objective is tokens per second over all requests. Whether to ask drafters, and which, is measured at each load
    (`paired_choice.py`). A node is sent if it promises more than its row costs: time is worth `rate` tokens per second,
    and a pass with a set S of nodes yields the most tokens per second if S are those above rate x time per row; each
    request finds its own by that price. Tokens of higher priority count more (`load.py`). Requests that force
    speculation get the fixed plan.
    """

    def __init__(
        self,
        max_nodes: int,
        linger_us: int,
        clock: Callable[[], float] = time.monotonic,
        values: NodeValues | None = None,
    ) -> None:
        """`values` may be shared with the planners of other verifiers."""
        self.fixed = FixedPlanner(max_nodes, linger_us)
        self.values = values or NodeValues()
        self.weights = ClassWeights()
        self.prefill = PrefillPressure(clock)
        self._clock = clock
        self._costs = PassCosts()
        # Choices by the binary logarithm of the number of running requests, its mean, and kinds to choose from.
        self.choice = PairedChoice(guessed=self.values.guessed)
        self._choices = {0: self.choice}
        self._running, self._level = 1.0, 0
        self.kinds: tuple[str, ...] = ()
        # The verifier's latest load.
        self.load: VerifierLoad | None = None
        # Requests not ended; of these, those past their first round, and those waiting for their first tree.
        self.num_begun = self.num_running = self.num_newcomers = 0
        self.num_ended = 0
        # Tokens of running requests that drafters have not read, because they were not asked.
        self.num_unread = 0
        # Means over asking rounds: accepted tokens, nodes sent, and gains of greedy requests and others relative to
        # the mean.
        self.mean_accepted = 0.0
        self.mean_nodes = float(max_nodes)
        self.class_gains = {True: 1.0, False: 1.0}
        # Tokens per second, tokens that a row costs and its logarithm, and accepted tokens that pay for asking.
        self.rate = self.price = self.break_even = 0.0
        self.log_price = -math.inf
        # Whether requests ask for drafts, and plans of those that do, by weight, gain in steps and context. Cleared by
        # any change that they depend on.
        self.asks = True
        self.plans: dict[tuple[float, int, RoundContext], RoundPlan] = {}
        # Trials without drafts, with drafts, with other kinds of drafters, and turns of single requests.
        self.num_pauses = self.num_trials = self.num_comparisons = self.num_turns = 0
        # Of the current pass: its number, rows and time, and counts to which requests add.
        self.pass_number = self._pass_rows = self._pass_us = 0
        self.num_rounds = self.num_able = self.num_asked = self.num_nodes = 0
        self.num_tokens = 0.0
        # Asking rounds until node values learn from a tree: about one in a pass, of the requests in turn.
        self.until_look = 1
        # End of the latest pass, and seconds from the one before; None if the verifier was idle.
        self._ended_s: float | None = None
        self._seconds: float | None = None

    def follow(self, is_greedy: bool, priority: int = 0) -> AdaptiveRequest:
        """Plans of a new request."""
        return AdaptiveRequest(self, is_greedy, priority)

    @property
    def pays(self) -> bool:
        """Whether drafting by all requests pays at this load, as far as known."""
        return self.choice.best != OFF

    @property
    def shares(self) -> dict[str, float]:
        """1 for each kind of drafter that is asked and 0 for others; empty without a choice."""
        best = self.choice.best
        return {kind: float(best == ALL or kind in best) for kind in self.kinds}

    def left_out(self, kinds: tuple[str, ...]) -> frozenset[str]:
        """Kinds that are not asked now, of those to choose from."""
        if not kinds:
            return frozenset()
        if kinds != self.kinds:
            self.kinds = kinds
            for choice in self._choices.values():
                choice.offer(kinds)
            self._reprice()
        arm = self.choice.current
        return frozenset() if arm == ALL else frozenset(kinds).difference(arm)

    def update_load(self, load: VerifierLoad) -> None:
        """Set the verifier's load, changed or not."""
        was_alone = self.load is None or self.load.batch_size <= 1
        num_queued = load.queued_sequences if load.batch_size else self.prefill.num_queued
        if (load.batch_size <= 1) != was_alone or num_queued != self.prefill.num_queued:
            self.plans.clear()
        self.load, self.prefill.num_queued = load, num_queued

    def begins(self, weight: float) -> None:
        """Count a request that is about to be opened."""
        self.num_begun += 1
        if self._ended_s is None:
            # What the first pass takes counts, too.
            self._ended_s = self._clock()
        self.prefill.num_unread += 1
        self.weights.add(weight)
        self.plans.clear()

    def first_round(self) -> None:
        """Count a request's first round: its prompt is prefilled."""
        self.prefill.num_unread -= 1
        self.num_running += 1
        self.plans.clear()

    def ends(self, weight: float, was_running: bool) -> None:
        """Remove a request that ended or moved to another verifier."""
        self.num_begun -= 1
        self.weights.add(weight, -1)
        self.plans.clear()
        if not was_running:
            self.prefill.num_unread -= 1
            return
        self.num_running -= 1
        self.num_ended += 1
        if not self.num_running:
            # The time until the next pass says nothing.
            self._ended_s = None

    def begin_pass(self, outcome: Outcome, last_pass: int) -> None:
        """Begin a pass with its first outcome, unless it is the current one, and learn from the previous one."""
        is_next = last_pass == self.pass_number
        if not is_next and (outcome.pass_us, outcome.pass_rows) == (self._pass_us, self._pass_rows):
            return
        if self.num_rounds:
            self._pass_over()
        now_s = self._clock()
        self._seconds = None if self._ended_s is None else now_s - self._ended_s
        self._ended_s = now_s
        self.pass_number += 1
        self._pass_rows, self._pass_us = outcome.pass_rows, outcome.pass_us
        self.num_rounds = self.num_able = self.num_asked = self.num_nodes = 0
        self.num_tokens = 0.0

    def _pass_over(self) -> None:
        pass_s = self._pass_us / 1e6
        num_tokens = self.num_tokens / self.weights.mean
        shape = self.num_rounds, self.num_nodes, self.num_asked, self._pass_rows
        # What prompts and outliers took would be most of a block's noise: tokens bear the mean of what prompts take.
        usual_s = self._costs.add(*shape, num_tokens, pass_s)
        seconds = None if self._seconds is None else max(usual_s, self._seconds - pass_s + usual_s)
        self._follow_load()
        has_switched = False
        if self.prefill.is_crowded() or not self.num_able:
            # Requests without speculation or drafters say nothing about an arm.
            self.choice.hold()
        else:
            late = ASKING_PER_NEWCOMER * self.num_newcomers
            is_settled = not self.num_asked if self.choice.current == OFF else late <= self.num_asked
            # Of requests that have only begun, prompts are known and tokens are not.
            self.choice.other_s = self._costs.other_s if self.num_ended >= self.num_running else (0.0, 0.0)
            has_switched = self.choice.pass_over(num_tokens, self.num_rounds, seconds, is_settled, self.num_unread)
        self._reprice()
        if has_switched and self.choice.is_trial:
            self.num_pauses += self.choice.current == OFF
            self.num_trials += self.choice.best == OFF
            self.num_comparisons += OFF not in (self.choice.current, self.choice.best)

    def _follow_load(self) -> None:
        """Take the choice for the mean number of running requests.

        At a load above those that are known it begins without drafts: drafters may not keep up with so many.
        """
        running = max(1, self.num_running)
        self._running += LOAD_RATE * (running - self._running)
        if not 1 / STEP_OF_LOAD < running / self._running < STEP_OF_LOAD:
            self._running = running
        log = math.log2(self._running)
        if abs(log - self._level) < OTHER_LOAD:
            return
        before, level = self.choice, round(log)
        before.leave()
        if level not in self._choices:
            best = OFF if level > self._level and before.blocks else before.best
            self._choices[level] = PairedChoice(self.kinds, before, best=best)
        self._level, self.choice = level, self._choices[level]
        self.choice.leave()

    def _reprice(self) -> None:
        choice = self.choice
        asks = choice.current != OFF
        usual, plain, current = (choice.blocks.get(arm) for arm in (choice.best, OFF, choice.current))
        rate = usual.rate if usual else self.rate
        price = rate * self._costs.row_s
        break_even = current.pass_s / plain.pass_s - 1 if current and plain else 0.0
        if (asks, rate, price, break_even) != (self.asks, self.rate, self.price, self.break_even):
            self.asks, self.rate, self.price, self.break_even = asks, rate, price, break_even
            self.log_price = math.log(price) if price > 0 else -math.inf
            self.plans.clear()


class AdaptiveRequest(RequestPlanner):
    """Plans one request: as its planner has chosen, unless its own drafts gain too little.

    No request is excluded for good: one that stands aside takes a turn now and then, and one that asks keeps one node,
    whatever its class, unless a row costs twice the node's own value.
    """

    def __init__(
        self,
        planner: AdaptivePlanner,
        is_greedy: bool,
        priority: int = 0,
        fleet: Mapping[str, AdaptivePlanner] | None = None,
    ) -> None:
        """`fleet` are the planners of all verifiers by address, if there are several."""
        self._planner = planner
        self._fleet = fleet or {}
        self._is_greedy = is_greedy
        self._weight = class_weight(priority)
        self._log_weight = math.log(self._weight)
        # Outputs of one prompt wait for the first of them, so a request begins with its first plan.
        self._has_begun = self._is_closed = False
        self._last_pass = 0
        # Whether it asks for drafts, waits for its first tree, and has more than a round's tokens to be prefilled.
        self._is_drafting = self._is_newcomer = self._catches_up = False
        # Whether it has drafters and leaves it to the planner to ask them.
        self._is_able = False
        # Accepted tokens of its drafts relative to those of usual ones: a running mean, its prior, and rounds.
        self._gain = self._prior = planner.class_gains[is_greedy]
        self._num_asked, self._total_gain = 0, 0.0
        # Tokens that its drafters have not read.
        self._num_unread = 0
        # Rounds since it last asked, and those left of its turn.
        self._num_aside = self._turn_left = 0
        self._row_multiple = 1

    def runs_on(self, verifier: str) -> None:
        """Move to the planner of another verifier when opened there, keeping the record of its drafts."""
        planner = self._fleet.get(verifier, self._planner)
        if planner is self._planner or self._is_closed:
            return
        was_newcomer = self._is_newcomer
        if self._has_begun:
            self._leave()
            planner.begins(self._weight)
        if was_newcomer:
            self._is_newcomer = True
            planner.num_newcomers += 1
        self._planner, self._last_pass = planner, 0

    def plan(self, round_context: RoundContext, load: VerifierLoad = UNKNOWN_LOAD) -> RoundPlan:
        """Limits of the next round: the fixed plan as far as it pays, or none."""
        planner = self._planner
        if load is not planner.load:
            planner.update_load(load)
        if self._is_drafting and not self._turn_left:
            # Most rounds, and the only rounds whose plan is in the table: looked up without further tests.
            plan = planner.plans.get((self._weight, math.ceil(STEPS_PER_GAIN * self._gain), round_context))
            if plan is not None:
                self._row_multiple = plan.row_multiple
                return plan
        elif (
            not planner.asks
            and self._has_begun
            and round_context.has_drafter
            and not round_context.forced
            and round_context.sources in ((), planner.kinds)
        ):
            # Its drafter may have come after its last other plan.
            self._is_able = True
            self._stand_aside()
            return _NO_DRAFTS
        return self._plan_anew(round_context, load)

    def _plan_anew(self, round_context: RoundContext, load: VerifierLoad) -> RoundPlan:
        planner = self._planner
        if not self._has_begun:
            self._has_begun = True
            planner.begins(self._weight)
        nodes, multiple = planner.fixed.limits(round_context, load)
        self._is_able = nodes > 0 and round_context.has_drafter and not round_context.forced
        if round_context.forced or nodes == 0:
            return planner.fixed.plan(round_context, load)
        weight = self._weight / planner.weights.mean
        if not round_context.has_drafter:
            # The drafter is gone or has dropped the request, so no tree is pending; the prefix cache may have one.
            self.tree_arrived()
            return round_plan(nodes, 0, multiple, row_price=planner.price / weight)
        left_out = planner.left_out(round_context.sources)
        if not self._drafts(weight):
            return _NO_DRAFTS
        if planner.num_running > 1:
            # With others, rows that fill up the multiple are not free.
            multiple = 1
            nodes = min(nodes, 1 + math.ceil(SPARE_NODES * planner.mean_nodes))
        self._row_multiple = multiple
        steps = math.ceil(STEPS_PER_GAIN * self._gain)
        linger_us = 0 if self._catches_up else planner.fixed.linger_us
        if planner.rate and planner.mean_accepted:
            # A round may wait as long as its draft is worth. One that others go on without loses its share of the rate;
            # if all wait, the whole rate is lost and all drafts are gained: the bound is the same.
            tokens = steps / STEPS_PER_GAIN * planner.mean_accepted * weight
            linger_us = min(linger_us, round(1e6 * tokens * max(1, planner.num_running) / planner.rate))
        plan = RoundPlan(nodes, linger_us, multiple, left_out, planner.price / weight)
        if not (self._catches_up or self._turn_left):
            planner.plans[self._weight, steps, round_context] = plan
        return plan

    def tree_arrived(self) -> None:
        """Record a draft's arrival; no first tree is pending any more."""
        if self._is_newcomer:
            self._is_newcomer = self._catches_up = False
            self._planner.num_newcomers -= 1
            if self._is_drafting:
                self._has_read()

    def select(self, tree: TokenTree) -> TokenTree:
        """Nodes worth their rows and, if the request is alone, further ones that fill the row multiple."""
        planner = self._planner
        if not tree.token_ids or planner.price <= 0:
            return tree
        kept = planner.values.worth(tree, planner.log_price - self._log_weight + planner.weights.log_mean)
        if not kept.token_ids:
            kept = planner.values.worth(tree, planner.log_price + math.log(LEAST_SHARE)).prune(1)
        num_kept = len(kept.token_ids)
        planner.mean_nodes += RATE * (num_kept - planner.mean_nodes)
        if self._row_multiple > 1 and num_kept:
            rows = -(-(1 + num_kept) // self._row_multiple) * self._row_multiple
            return tree.prune(rows - 1)
        return kept

    def round_over(self, outcome: Outcome, sent: Sequence[TokenTree], asked: bool) -> None:
        """Learn from a round."""
        if self._is_closed:
            return
        planner, last_pass = self._planner, self._last_pass
        planner.begin_pass(outcome, last_pass)
        if not last_pass:
            planner.first_round()
            # The first round is prefill, without linger.
            asked = False
        self._last_pass = planner.pass_number
        planner.num_rounds += 1
        planner.num_able += self._is_able
        planner.num_tokens += self._weight * len(outcome.token_ids)
        planner.num_nodes += outcome.draft_nodes
        if asked:
            planner.num_asked += 1
            if not self._is_newcomer:
                self._learn(outcome, sent)
        elif self._is_able and not self._is_drafting:
            self._num_aside += 1
            num_unread = len(outcome.token_ids) if last_pass else outcome.base_length + len(outcome.token_ids)
            self._num_unread += num_unread
            planner.num_unread += num_unread

    def know(self, known: DraftGain) -> None:
        """Use records of requests with the same beginning as a prior: at most two thirds of it, one third if worse.

        A request that stands aside cannot correct a bad one.
        """
        if not known.rounds:
            return
        difference = known.total / known.rounds - self._prior
        rounds = min(2 * PRIOR_ROUNDS if difference > 0 else PRIOR_ROUNDS // 2, known.rounds)
        prior = self._prior + rounds / (PRIOR_ROUNDS + rounds) * difference
        self._gain += PRIOR_ROUNDS / (PRIOR_ROUNDS + self._num_asked) * (prior - self._prior)
        self._prior = prior

    @property
    def gain(self) -> DraftGain:
        """Record of this request's drafts."""
        return DraftGain(self._num_asked, self._total_gain)

    def close(self) -> None:
        """End the request."""
        if not self._is_closed:
            self._is_closed = True
            if self._has_begun:
                self._leave()

    def _has_read(self) -> None:
        self._planner.num_unread -= self._num_unread
        self._num_unread = 0

    def _leave(self) -> None:
        self.tree_arrived()
        self._has_read()
        self._planner.ends(self._weight, was_running=self._last_pass > 0)

    def _drafts(self, weight: float) -> bool:
        """Whether the next round asks for a draft."""
        planner = self._planner
        if not planner.asks or planner.prefill.is_crowded():
            return self._stand_aside()
        # In a trial its record does not count, since texts may have changed.
        worth = planner.break_even if planner.choice.is_trial else self._gain * planner.mean_accepted
        if self._turn_left:
            self._turn_left -= 1
        elif worth * weight < LEAST_SHARE * planner.break_even:
            if self._num_aside < TURN_AFTER:
                return self._stand_aside()
            self._turn_left = PRIOR_ROUNDS
            # What it gains in its turn counts as much as of a new request.
            self._num_asked = 0
            planner.num_turns += 1
        if not self._is_drafting:
            self._is_drafting = self._is_newcomer = True
            self._num_aside = 0
            self._catches_up = self._last_pass > 0
            planner.num_newcomers += 1
        return True

    def _stand_aside(self) -> bool:
        self._is_drafting = False
        self.tree_arrived()
        return False

    def _learn(self, outcome: Outcome, sent: Sequence[TokenTree]) -> None:
        planner, accepted = self._planner, outcome.num_accepted
        usual = planner.mean_accepted
        if usual:
            gain = accepted / usual
            num_asked = self._num_asked = self._num_asked + 1
            self._total_gain += gain
            rate = 1 / (PRIOR_ROUNDS + num_asked)
            self._gain += (rate if rate > RATE else RATE) * (gain - self._gain)
            planner.class_gains[self._is_greedy] += RATE * (gain - planner.class_gains[self._is_greedy])
            planner.mean_accepted = max(LEAST_ACCEPTED, usual + RATE * (accepted - usual))
        else:
            planner.mean_accepted = float(accepted)
        planner.until_look -= 1
        if planner.until_look <= 0 and sent and outcome.draft_nodes:
            # Not a divisor of the rounds of a pass, or it would be the same request's each time.
            planner.until_look = planner.num_running + (planner.num_running > 1)
            planner.values.learn(verified_tree(sent, outcome.draft_nodes), outcome.token_ids)
