"""The planner: learns when speculation pays for all requests together, and plans the rounds of each."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from coppice.core.tree import TokenTree
from orchestrator.planner.base import (
    UNKNOWN_LOAD,
    DraftGain,
    FixedPlanner,
    RoundContext,
    RoundPlan,
    VerifierLoad,
    round_plan,
)
from orchestrator.planner.budget import best_budget
from orchestrator.planner.cost_model import PASSES_PER_FIT, BorrowedCosts, CostModel, MissedPasses
from orchestrator.planner.draft_plans import HYSTERESIS, STEPS_PER_GAIN, CommonPlans, DraftPlans, PlanSnapshot
from orchestrator.planner.draft_times import DraftTimes
from orchestrator.planner.exploration import MOST_TOGETHER, TRIAL_ROUNDS, Exploration
from orchestrator.planner.knowledge import Knowledge
from orchestrator.planner.load import ClassWeights, PrefillPressure, class_weight
from orchestrator.planner.passes import MeasuredRates, PassLog, PassSample, PlanLagFilter
from orchestrator.planner.source_choice import NONE_LEFT_OUT, AcceptedPath, SourceChoice
from orchestrator.planner.value_model import UsualGains, ValueModel
from orchestrator.request.rounds import Outcome
from orchestrator.request.statistics import verified_tree

logger = logging.getLogger(__name__)

# Requests per pass whose trees the value model learns from, in turns, so that its cost per pass is bounded. Above
# MANY_ASKING drafting requests, one in PASSES_PER_LOOK_OF_MANY passes: learning from one tree costs as much as
# selecting from a dozen, and fewer trees per request suffice.
LOOKED_AT_PER_PASS = 2
MANY_ASKING = 32
PASSES_PER_LOOK_OF_MANY = 2
# Bound of requests that wait for their first tree: this many, plus one per RUNNING_PER_NEWCOMER running requests.
# Prefill is the most expensive work of drafters.
NEWCOMERS = 4
RUNNING_PER_NEWCOMER = 8
# Drafters are settled if at most one in this many asking requests waits for its first tree. Passes before that are
# ignored, but for at most LONGEST_UNSETTLED_S seconds.
ASKING_PER_UNSETTLED = 4
LONGEST_UNSETTLED_S = 0.25
# Prompts prefilled within this many passes are ignored.
FEW_CROWDED_PASSES = 2
# Exponent with which the threshold rises if less than plain decoding's rate is reached.
DOUBT = 4
# Least factor on the threshold if joint drafting pays.
LEAST_SHARE_OF_THRESHOLD = 0.6
# Asking rounds without any draft in time after which none are expected.
ENOUGH_IN_VAIN = 32
# Relative change of draft times below which plans are kept.
_SAME_TIME = 0.2
# Weight of an observation in running means.
_RATE = 0.05
# Mean number of asking rounds per pass below which drafting counts as off.
_FEWEST_ASKING = 0.5


class AdaptivePlanner:
    """Plans all requests of one verifier by one row price, which every request applies to its own trees.

    The objective is tokens per second over all requests. At the optimum, time is worth `rate` tokens per second;
    anything that yields fewer tokens than its time is worth is dropped: nodes below the row price, drafts below the
    cost of asking. Requests that force speculation get the fixed plan, and their rounds teach the models too, except
    those that name sources: their rounds count like another orchestrator's.

    Tokens of higher priority count more (`load.py`): a request's tokens are multiplied by its weight over the mean
    weight. Whether joint drafting pays is decided by unweighted tokens per second.
    """

    def __init__(
        self,
        max_nodes: int,
        linger_us: int,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
        values: ValueModel | None = None,
        gains: UsualGains | None = None,
    ) -> None:
        """`values` and `gains` may be shared with the planners of other verifiers."""
        self.fixed = FixedPlanner(max_nodes, linger_us)
        self.values = values or ValueModel()
        self.gains = gains or UsualGains()
        self.weights = ClassWeights()
        self.prefill = PrefillPressure(clock)
        self.exploration = Exploration(seed)
        self.sources = SourceChoice(seed)
        self.draft_times = DraftTimes()
        self.snapshot = PlanSnapshot()
        self._draft_plans = DraftPlans(self.snapshot, 0, linger_us)
        self._costs = CostModel()
        # Costs from another planner, until they are checked here.
        self._borrowed: BorrowedCosts | None = None
        self._passes = PassLog(clock)
        self._missed = MissedPasses()
        self._plan_lag = PlanLagFilter()
        self._measured = MeasuredRates()
        # Requests ever opened here; those not ended yet; of these, those past their first round, and those waiting for
        # their first tree.
        self._num_requests = 0
        self.num_begun = 0
        self.num_running = 0
        self.num_newcomers = 0
        # Rounds that asked for drafts before any was verified.
        self._num_in_vain = 0
        # Each drafting request's trees are learned from once in this many of its rounds; and how many more in this
        # pass.
        self.rounds_per_look = 1
        self.looks_left = LOOKED_AT_PER_PASS
        # Whether a request on the plain plan has its turn to try drafting.
        self.turn_is_taken = False
        # The verifier's latest load.
        self.load: VerifierLoad | None = None
        # Plans of requests that keep drafting; None after any change they may depend on.
        self.common: CommonPlans | None = None
        self._last_join = 0
        self._was_joint = True
        self._was_trying = False
        # Consecutive passes during which many prompts waited for prefill.
        self._num_crowded = 0
        self._unsettled_s = 0.0
        # Running means: asking rounds per pass, the same without turns, and committed tokens per sequence.
        self._asked = self._asked_anyway = 0.0
        self._context = 0.0

    @property
    def pass_number(self) -> int:
        """Number of the current pass."""
        return self._passes.pass_number

    def knowledge(self) -> Knowledge | None:
        """Learned state for another planner of a similar verifier; None until there is any."""
        if not self._costs.is_known or not self.values.has_seen_trees:
            return None
        gains = (self.gains.mean, self.gains.of_class(True), self.gains.of_class(False))
        return Knowledge(self._costs.evidence(), self._missed.evidence(), self.values.evidence(), gains, self._context)

    def begin_with(self, knowledge: Knowledge) -> None:
        """Start from another planner's learned state, before the first request.

        It has little weight, and is discarded if the first passes contradict it.
        """
        as_borrowed = CostModel()
        for costs in (as_borrowed, self._costs):
            costs.restore(knowledge.costs)
        self._borrowed = BorrowedCosts(as_borrowed)
        self._missed.restore(knowledge.missed)
        self.values.restore(knowledge.trees)
        self.gains.restore(*knowledge.gains)
        self._context = knowledge.context

    def update_load(self, load: VerifierLoad) -> None:
        """Set the verifier's load, changed or not."""
        self.load = load
        if load.batch_size and load.queued_sequences != self.prefill.num_queued:
            self.prefill.num_queued = load.queued_sequences
            self.common = None

    def find_common(self) -> CommonPlans:
        """Compute `common`."""
        plans, exploration = self.draft_plans, self.exploration
        hold = plans.snapshot.is_known and plans.num_running > 1 and exploration.is_idle and self.fixed.max_nodes > 0
        common = CommonPlans(plans, self.fixed.max_nodes, self.weights.mean, hold and not self.prefill.is_crowded())
        self.common = common
        return common

    @property
    def draft_plans(self) -> DraftPlans:
        """Plans of rounds that ask for drafts, for the current snapshot, load and draft times."""
        plans = self._draft_plans
        needed_s = self.draft_times.needed_s
        if plans.snapshot is not self.snapshot or abs(plans.needed_s - needed_s) > _SAME_TIME * needed_s:
            plans = self._draft_plans = self._new_draft_plans()
        return plans

    def _new_draft_plans(self) -> DraftPlans:
        return DraftPlans(self.snapshot, self.num_running, self.fixed.linger_us, self.draft_times)

    @property
    def some_draft(self) -> bool:
        """Whether requests currently ask for drafts. Turns do not count: each would justify the next."""
        return self._asked_anyway >= _FEWEST_ASKING

    @property
    def compares_sources(self) -> bool:
        """Whether sources are compared, with few enough running requests for all to draft regardless of gain."""
        return self.sources.is_comparing and self._few_run

    @property
    def _few_run(self) -> bool:
        return self.num_running <= MOST_TOGETHER

    def trial_over(self, found_gain: bool) -> None:
        """End a drafting trial, of all requests or of one."""
        self.exploration.trial_over(found_gain)
        self.sources.trial_over(found_gain, self._few_run)

    def follow(self, is_greedy: bool, priority: int = 0) -> AdaptiveRequest:
        """Plans of a new request."""
        return AdaptiveRequest(self, is_greedy, priority)

    def follow_apart(self) -> FixedPlanner:
        """The fixed plan."""
        return self.fixed

    def begins(self, weight: float) -> int:
        """Open a request; returns its number among all opened."""
        self._num_requests += 1
        self.num_begun += 1
        self.common = None
        self.prefill.num_unread += 1
        self.weights.add(weight)
        if not self.pass_number and self._costs.is_known:
            # No rounds yet: all knowledge is borrowed.
            self._replan(self.num_begun)
        return self._num_requests

    def first_round(self) -> None:
        """Count a request's first round: its prompt is prefilled."""
        self._now_run(self.num_running + 1)
        self.common = None
        self.prefill.num_unread -= 1

    def may_join(self) -> bool:
        """Whether another request may begin to draft; one after another if joint drafting does not pay."""
        if not self.snapshot.pays_jointly and self.pass_number < self._last_join + PASSES_PER_FIT:
            return False
        return self.num_newcomers < NEWCOMERS + self.num_running // RUNNING_PER_NEWCOMER

    def joins(self) -> None:
        """Count a request that begins to draft."""
        self.num_newcomers += 1
        self._last_join = self.pass_number

    def round_over(self, outcome: Outcome, last_pass: int, asked: bool, is_newcomer: bool) -> int:
        """Learn from a round of a request whose previous round was in pass `last_pass`; returns this round's pass."""
        passes = self._passes
        if (
            last_pass == passes.pass_number
            or outcome.pass_us != passes.pass_us
            or outcome.pass_rows != passes.pass_rows
        ):
            record = passes.begin(outcome)
            if record is not None:
                self._pass_over(record)
        pass_number = passes.pass_number
        passes.num_rounds += 1
        if not last_pass:
            passes.num_first += 1
        passes.num_tokens += len(outcome.token_ids)
        passes.context += outcome.base_length
        if asked:
            passes.num_asked += 1
            if not is_newcomer:
                self._missed.num_rounds += 1
                if pass_number > last_pass + 1:
                    self._missed.count(pass_number - last_pass)
        return pass_number

    def ends(self, weight: float, was_running: bool) -> None:
        """Remove a request that ended or moved to another verifier."""
        self.num_begun -= 1
        self.common = None
        self.weights.remove(weight)
        if not was_running:
            self.prefill.num_unread -= 1
            return
        self._now_run(self.num_running - 1)
        if self.num_running == 0:
            self._passes.idle()

    def _now_run(self, num_running: int) -> None:
        self.num_running = num_running
        self._draft_plans = self._new_draft_plans()

    def _check(self, borrowed: BorrowedCosts, record: PassSample) -> None:
        """Discard borrowed state that passes here contradict."""
        if borrowed.are_refuted_by(record):
            logger.info("pass durations differ from the borrowed cost model; borrowed planner state is discarded")
            self._costs, self._missed, self.snapshot = CostModel(), MissedPasses(), PlanSnapshot()
            self.values.forget()
            self.gains.restore(1.0, 1.0, 1.0)
        if borrowed.is_checked:
            self._borrowed = None

    def _pass_over(self, record: PassSample) -> None:
        self.common = None
        if self._borrowed is not None:
            self._check(self._borrowed, record)
        if not self.values.has_seen_trees:
            self._num_in_vain += record.num_asked
        if record.num_asked <= MANY_ASKING:
            self.looks_left = LOOKED_AT_PER_PASS
            self.rounds_per_look = max(1, -(-record.num_asked // LOOKED_AT_PER_PASS))
        else:
            # About every other pass has no turn.
            self.looks_left = 1
            self.rounds_per_look = PASSES_PER_LOOK_OF_MANY * record.num_asked
        self._context += _RATE * (record.context / record.num_rounds - self._context)
        self._asked += _RATE * (record.num_asked - self._asked)
        self._asked_anyway += _RATE * (max(0, record.num_asked - self.turn_is_taken) - self._asked_anyway)
        self._was_joint = record.is_joint
        # Passes with other sources do not measure the sources in use.
        is_experiment = self.sources.has_asked and (self.sources.is_trying or self.compares_sources)
        plain = self._measured.plain_of_one(self.num_running) if self.sources.is_comparing else 0.0
        if self.sources.pass_over(record, self.num_running, self._few_run, plain):
            # Earlier rates belong to other sources.
            self._measured.joint.forget()
            self.exploration.owe_trial()
        ran_as_planned = self._plan_lag.pass_over(record, self.draft_times.way_s)
        is_settled = self.num_newcomers * ASKING_PER_UNSETTLED <= record.num_asked
        seconds = record.pass_s + (record.gap_s or 0.0)
        self._unsettled_s = 0.0 if is_settled else self._unsettled_s + seconds
        # While drafters prefill prompts, drafts are late for all requests; such passes are ignored for a bounded time.
        is_typical = (is_settled or self._unsettled_s > LONGEST_UNSETTLED_S) and not is_experiment
        self._missed.pass_over(record.num_asked, record.is_joint, is_typical)
        if self._is_prefill_pass():
            if is_typical:
                self._costs.add(record)
            return
        self._measured.add(record, self.num_running, is_settled and not is_experiment, ran_as_planned)
        trial_is_over = self.exploration.next_pass(
            self.num_running, record.num_asked, record.num_rounds, seconds, is_settled, ran_as_planned
        )
        if self.exploration.is_trying and not self._was_trying:
            self._measured.joint.forget()
        self._was_trying = self.exploration.is_trying
        if (is_typical and self._costs.add(record)) or trial_is_over:
            self._replan(self.num_running)
        if trial_is_over:
            self.trial_over(found_gain=self.gains.mean >= self.snapshot.threshold)

    def _is_prefill_pass(self) -> bool:
        """Whether many prompts have been waiting for more than a few passes, so that passes do not measure rounds."""
        num_before = self._num_crowded
        self._num_crowded = num_before + 1 if self.prefill.is_crowded() else 0
        if num_before > FEW_CROWDED_PASSES and not self._num_crowded:
            # Many new requests: measure plain decoding before all of them ask for drafts.
            self.exploration.pause()
        return max(num_before, self._num_crowded) > FEW_CROWDED_PASSES

    def _replan(self, running: int) -> None:
        """Compute a snapshot for `running` requests."""
        knows_drafts = self.values.has_seen_trees or self._num_in_vain >= ENOUGH_IN_VAIN
        if not self._costs.is_known or not knows_drafts or not running:
            return
        self._missed.solve()
        costs = self._costs.costs
        reached = self._measured.all.tokens_per_s(running) or 0.0
        plain_rate = self._measured.plain.tokens_per_s(running) or running / self._plain_round_s(running)
        measured_joint_rate = self._measured.joint.tokens_per_s(running)
        joint_rate = measured_joint_rate or self._joint_rate(running)
        # A predicted joint rate may decide whether to draft but not raise the price, which would end drafting.
        rate = max(plain_rate, reached)
        price = rate * costs.row_s
        gain = num_nodes = 0.0
        for value, count in self.values.nodes_at_hand():
            if value <= price:
                break
            gain += value * count
            num_nodes += count
        # In joint drafting, one more request waits with all others; otherwise it misses passes that do not wait.
        pays_jointly = joint_rate > (plain_rate if self._was_joint else rate)
        is_joint = pays_jointly or self._was_joint
        missed = self._missed.of_one_more(running if is_joint else self._asked, is_joint)
        asking_s = costs.asking_jointly_s if is_joint else costs.asking_s
        # A request that waits for its draft loses tokens of its own, and frees its row for others.
        overhead = missed * max(0.0, 1 - rate * costs.round_s) + rate * (asking_s + costs.row_s * num_nodes)
        threshold = overhead / gain if gain > 0 else math.inf
        if pays_jointly and (self._was_joint or measured_joint_rate):
            # If joint drafting gains this much, only clear exceptions stop; estimates per request are no more accurate.
            threshold = min(1.0, threshold) * max(LEAST_SHARE_OF_THRESHOLD, plain_rate / joint_rate)
        elif self._asked > 0 and reached > 0:
            # Unmodelled costs show as a rate below plain decoding's and raise the threshold.
            threshold *= max(1.0, plain_rate / reached) ** DOUBT
        self.snapshot = PlanSnapshot(threshold, price, gain, num_nodes, rate, pays_jointly)

    def _joint_rate(self, running: int) -> float:
        """Predicted tokens per second if all `running` requests drafted."""
        costs = self._costs.costs
        # Sequences present in a pass.
        present = running / (1 + self._missed.jointly(running))
        drafting_s = self._plain_round_s(present) + present * costs.asking_jointly_s
        nodes = [(value, present * count) for value, count in self.values.nodes_at_hand()]
        best = best_budget(nodes, present, drafting_s, costs.row_s)
        return (present + self.gains.mean * best.gain) / (drafting_s + costs.row_s * best.rows)

    def _plain_round_s(self, num_rounds: float) -> float:
        return self._costs.plain_round_s(num_rounds, num_rounds * self._context)


# Least weight of a round in a request's gain, and weight of its class's gain in rounds.
_OWN_RATE = 0.03
_PRIOR_ROUNDS = 8
_MOST_RELATIVE_GAIN = 4.0
# Upper bounds of the weight of shared records of a prompt's beginning, in rounds. Lower for bad records: a drafting
# request corrects them itself, a request that does not draft cannot.
_MOST_KNOWN_ROUNDS = 16
_MOST_BAD_ROUNDS = 4
# Before a request begins to draft, its gain above the usual counts only from this many standard errors on; a round's
# accepted tokens have a standard deviation of about their mean.
_STANDARD_ERRORS = 2.0
# A request that stopped drafting while others draft tries TRIAL_ROUNDS rounds after this many, and after twice as many
# after each failure: one in 17 rounds at first, and 1.5 % in the long run.
FIRST_TURN_AFTER = 128
LONGEST_BETWEEN_TURNS = 512
# An asking request keeps its likeliest node if its value is at least this share of the row price.
FLOOR_SHARE = 0.5
# Decay per tree of earlier trees' weight in the request's own correction.
_FADE = 0.9
_PRIOR_TOKENS = 2.0


class AdaptiveRequest:
    """Plans one request by the planner's snapshot and its own record.

    The request asks drafters while the gain of its drafts, relative to usual ones, is above the snapshot's threshold,
    and in trials. Otherwise its rounds have no draft and no linger.

    No request is excluded for good: one that does not draft while others do gets a turn now and then, and one that
    drafts keeps one node, whatever its class and record, unless a row costs twice the node's own value.
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
        # Its number at the planner; 0 until its first plan is needed, since outputs of one prompt wait for the first of
        # them.
        self._number = 0
        self._last_pass = 0
        self._is_drafting = False
        # Whether it began to draft and waits for the first tree.
        self._is_newcomer = False
        # Whether drafters have more than one round's tokens to prefill for it.
        self._catches_up = False
        # Duration of the round's draft, once received.
        self._took_s: float | None = None
        self._alone_left = 0
        self._is_closed = False
        # Gain of its drafts relative to usual ones; a running mean with the number of rounds.
        self._gain = self._usual_gain = planner.gains.of_class(is_greedy)
        self._num_asked = 0
        self._total_gain = 0.0
        # Rounds of other requests with the same beginning, used as a prior.
        self._num_known = 0
        # Rounds since it last drafted, and after how many it tries again.
        self._num_aside = 0
        self._turn_after = FIRST_TURN_AFTER
        self._has_turn = False
        # Tokens promised by its verified trees, and accepted ones; and the log of a node's value relative to its
        # probability, before division by the mean weight.
        self._promised = self._accepted = _PRIOR_TOKENS
        self._log_worth = math.log(self._weight)
        self._row_multiple = 1
        # Available drafters, if several; those not asked for the next round, and for this one.
        self._sources: tuple[str, ...] = ()
        self._left_out_next = self._left_out = NONE_LEFT_OUT
        # The round's last draft before selection.
        self._at_hand: TokenTree | None = None

    def runs_on(self, verifier: str) -> None:
        """Move to the planner of another verifier when opened there, keeping the record of its drafts."""
        planner = self._fleet.get(verifier, self._planner)
        if planner is self._planner or self._is_closed:
            return
        was_newcomer, has_begun = self._is_newcomer, self._number > 0
        if has_begun:
            self._leave()
        self._planner = planner
        if not has_begun:
            return
        self._last_pass = self._alone_left = 0
        self._number = planner.begins(self._weight)
        if was_newcomer and planner.may_join():
            self._is_newcomer = True
            planner.joins()
        elif was_newcomer:
            # This verifier's drafters have their maximum of newcomers already.
            self._is_drafting = False

    def plan(self, round_context: RoundContext, load: VerifierLoad = UNKNOWN_LOAD) -> RoundPlan:
        """Limits of the next round: the fixed plan as far as it pays, or none."""
        planner = self._planner
        if (
            self._is_drafting
            and round_context.has_drafter
            and not (self._alone_left or self._catches_up or round_context.forced or round_context.sources)
            and round_context.requested_nodes is None
        ):
            # Fast path of most rounds.
            if load is not planner.load:
                planner.update_load(load)
            common = planner.common
            if common is None or common.snapshot is not planner.snapshot:
                common = planner.find_common()
            gain, weight = self._gain, self._weight / common.mean_weight
            if common.hold and gain * weight >= common.least_gain:
                self._row_multiple = 1
                self._sources, self._left_out_next = (), NONE_LEFT_OUT
                steps = math.ceil(STEPS_PER_GAIN * gain) if gain > 1 else STEPS_PER_GAIN
                return common.known.get((weight, steps)) or common.plan(weight, gain, steps)
        return self._plan_anew(round_context, load)

    def _plan_anew(self, round_context: RoundContext, load: VerifierLoad) -> RoundPlan:
        """Limits of the next round in the general case."""
        planner = self._planner
        if not self._number:
            self._number = planner.begins(self._weight)
        nodes, self._row_multiple = planner.fixed.limits(round_context, load)
        if round_context.forced or nodes == 0:
            return planner.fixed.plan(round_context, load)
        if not round_context.has_drafter:
            # The drafter is gone or has dropped the request: no tree is pending.
            self.tree_arrived()
            fixed = planner.fixed.plan(round_context, load)
            # The prefix cache may have a draft.
            return replace(fixed, row_price=self._row_price) if planner.snapshot.is_known else fixed
        if load is not planner.load:
            planner.update_load(load)
        if not self._drafts(has_choice=bool(round_context.sources)):
            return round_plan(0, 0)
        is_trial = self._alone_left > 0 or planner.exploration.is_trying
        self._sources, self._left_out_next = round_context.sources, NONE_LEFT_OUT
        if round_context.sources:
            self._left_out_next = planner.sources.left_out(self._number, round_context.sources)
        plans = planner.draft_plans
        if not plans.snapshot.is_known:
            fixed = planner.fixed.plan(round_context, load)
            if plans.is_vain(fixed.linger_us, is_trial=False):
                fixed = replace(fixed, linger_us=0)
            return replace(fixed, left_out=self._left_out_next) if self._left_out_next else fixed
        if plans.num_running > 1:
            self._row_multiple = 1
        # Prefill takes longer than a wait is worth, and the verifier must not reduce its patience for it.
        waits = not self._catches_up
        weight = self._weight / planner.weights.mean
        return plans.plan(self._gain, weight, nodes, self._row_multiple, self._left_out_next, is_trial, waits)

    def tree_arrived(self, took_s: float | None = None) -> None:
        """Record a draft's arrival; no first tree is pending any more."""
        if took_s is not None:
            self._took_s = took_s
            self._planner.draft_times.add(took_s)
        if self._is_newcomer:
            self._is_newcomer = self._catches_up = False
            self._planner.num_newcomers -= 1

    def select(self, tree: TokenTree) -> TokenTree:
        """Nodes worth their rows and, if the request is alone, further ones that fill the row multiple."""
        if not tree.token_ids:
            return tree
        self._at_hand = tree
        planner = self._planner
        snapshot = planner.snapshot
        if snapshot.price <= 0:
            return tree
        kept = planner.values.worth(tree, snapshot.log_price - self._log_worth + planner.weights.log_mean)
        if kept is None:
            return tree
        if not kept:
            kept = self._floor(tree)
        if self._row_multiple > 1 and kept:
            num_kept = kept if isinstance(kept, int) else len(kept)
            rows = -(-(1 + num_kept) // self._row_multiple) * self._row_multiple
            return tree.prune(rows - 1)
        return tree.first(kept) if isinstance(kept, int) else tree.take(kept)

    def round_over(self, outcome: Outcome, sent: Sequence[TokenTree], asked: bool) -> None:
        """Learn from a round."""
        if self._is_closed:
            return
        planner, last_pass = self._planner, self._last_pass
        if not last_pass:
            planner.first_round()
            # The first round is prefill, without linger.
            asked = False
        self._last_pass = planner.round_over(outcome, last_pass, asked, self._is_newcomer)
        took_s, self._took_s = self._took_s, None
        if outcome.linger_us and took_s is not None and self._last_pass == last_pass + 1:
            # Consecutive passes: the linger was for a draft, not for another pass.
            planner.draft_times.waited(outcome.linger_us / 1e6, took_s, was_in_time=outcome.had_fresh_draft)
        # The next round was planned before.
        left_out, self._left_out = self._left_out, self._left_out_next
        if asked:
            if self._sources:
                planner.sources.count(self._number, self._sources, left_out)
            self._learn(outcome, sent, left_out)
        elif not self._is_drafting:
            self._num_aside += 1
        if self._alone_left:
            self._alone_left -= 1
            if not self._alone_left:
                self._trial_over(found_gain=self._pays())

    def know(self, known: DraftGain) -> None:
        """Use records of requests with the same beginning as a prior: at most two thirds of it, one third if worse.

        The weight of the request's own rounds is kept.
        """
        if not known.rounds:
            return
        difference = known.total / known.rounds - self._usual_gain
        rounds = min(_MOST_KNOWN_ROUNDS if difference > 0 else _MOST_BAD_ROUNDS, known.rounds)
        prior = self._usual_gain + rounds / (_PRIOR_ROUNDS + rounds) * difference
        self._gain += _PRIOR_ROUNDS / (_PRIOR_ROUNDS + self._num_asked) * (prior - self._usual_gain)
        self._usual_gain = prior
        self._num_known = known.rounds

    @property
    def gain(self) -> DraftGain:
        """Record of this request's drafts."""
        return DraftGain(self._num_asked, self._total_gain)

    def close(self) -> None:
        """End the request."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._number:
            self._leave()

    @property
    def _relative_weight(self) -> float:
        """Weight of its tokens relative to the mean of all requests; 1 if all have one priority."""
        return self._weight / self._planner.weights.mean

    @property
    def _row_price(self) -> float:
        """Row price in this request's own tokens."""
        return self._planner.snapshot.price / self._relative_weight

    def _leave(self) -> None:
        self.tree_arrived()
        if self._alone_left:
            self._give_back_trial()
        self._planner.sources.request_ended(self._number)
        self._planner.ends(self._weight, was_running=self._last_pass > 0)

    def _trial_over(self, found_gain: bool) -> None:
        if self._has_turn:
            self._turn_after = FIRST_TURN_AFTER if found_gain else min(LONGEST_BETWEEN_TURNS, 2 * self._turn_after)
        else:
            self._planner.trial_over(found_gain)
        self._give_back_trial()

    def _give_back_trial(self) -> None:
        if self._has_turn:
            self._has_turn = self._planner.turn_is_taken = False
        else:
            self._planner.exploration.tried_alone()

    def _floor(self, tree: TokenTree) -> list[int]:
        """The likeliest node if worth its row without class and record: without drafts no record improves."""
        likeliest = max(range(len(tree)), key=tree.path_log_probs.__getitem__)
        floor = math.log(FLOOR_SHARE * self._planner.snapshot.price)
        return [likeliest] if self._planner.values.path_logs(tree)[likeliest] >= floor else []

    def _drafts(self, has_choice: bool) -> bool:
        """Whether the next round asks for a draft; `has_choice` if there are several sources."""
        exploration = self._planner.exploration
        if exploration.is_pausing or self._planner.prefill.is_crowded():
            return False
        if self._is_drafting and exploration.is_idle and self._pays():
            return True
        if exploration.is_trying:
            self._begin()
        elif self._pays() or (has_choice and self._planner.compares_sources):
            if not self._is_drafting and self._planner.may_join():
                self._begin()
        elif not self._alone_left:
            if exploration.tries_alone() or self._has_its_turn():
                self._alone_left = TRIAL_ROUNDS
                self._begin()
            else:
                self._is_drafting = False
                self.tree_arrived()
        return self._is_drafting

    def _has_its_turn(self) -> bool:
        """Whether it takes a turn, having not drafted for long while others do."""
        planner = self._planner
        if self._num_aside < self._turn_after or planner.turn_is_taken or not planner.some_draft:
            return False
        self._has_turn = planner.turn_is_taken = True
        # Results count as much as for a new request.
        self._num_asked = 0
        return True

    def _pays(self) -> bool:
        planner = self._planner
        margin = 1 - HYSTERESIS if self._is_drafting else 1 + HYSTERESIS
        gain = self._gain if self._is_drafting else self._sure_gain()
        return gain * (self._weight / planner.weights.mean) >= margin * planner.snapshot.threshold

    def _sure_gain(self) -> float:
        """Lower bound of its gain: any part above 1 reduced by its standard error.

        If usual drafts do not pay, the request with the best record of many begins to draft; without this bound it
        would mostly be a lucky one that then gains no more than others, and another would follow.
        """
        if self._gain <= 1:
            return self._gain
        num_rounds = _PRIOR_ROUNDS + self._num_asked + self._num_known
        return max(1.0, self._gain - _STANDARD_ERRORS / math.sqrt(num_rounds))

    def _begin(self) -> None:
        if not self._is_drafting:
            self._is_drafting = self._is_newcomer = True
            self._num_aside = 0
            self._catches_up = self._last_pass > 0
            self._planner.joins()

    def _learn(self, outcome: Outcome, sent: Sequence[TokenTree], left_out: frozenset[str]) -> None:
        planner = self._planner
        usual = planner.snapshot.gain
        if usual > 0 and not self._is_newcomer:
            gain = outcome.num_accepted / usual
            if gain > _MOST_RELATIVE_GAIN:
                gain = _MOST_RELATIVE_GAIN
            num_asked = self._num_asked = self._num_asked + 1
            self._total_gain += gain
            rate = 1 / (_PRIOR_ROUNDS + num_asked)
            self._gain += (rate if rate > _OWN_RATE else _OWN_RATE) * (gain - self._gain)
            planner.gains.add(gain, self._is_greedy)
        has_turn = planner.looks_left > 0 and (self._last_pass + self._number) % planner.rounds_per_look == 0
        if has_turn or (self._sources and planner.sources.is_tried_by(self._number)):
            planner.looks_left -= 1
            self._look(outcome, sent, left_out)

    def _look(self, outcome: Outcome, sent: Sequence[TokenTree], left_out: frozenset[str]) -> None:
        """Learn from a round's trees."""
        values, sources = self._planner.values, self._planner.sources
        promised = 0.0
        if self._at_hand is not None:
            values.note(self._at_hand)
            self._at_hand = None
        tree = verified_tree(sent, outcome.draft_nodes) if sent and outcome.draft_nodes else None
        if tree is not None:
            promised = values.learn(tree, outcome.token_ids[: outcome.num_accepted])
            self._promised = _FADE * self._promised + promised
            self._accepted = _FADE * self._accepted + outcome.num_accepted
            self._log_worth = math.log(self._weight * self._accepted / self._promised)
        if self._sources and not self._is_newcomer:
            verified = AcceptedPath(tree, outcome.token_ids, outcome.num_accepted)
            sources.learn(self._number, self._sources, left_out, sent, verified, promised)
