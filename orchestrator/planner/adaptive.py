"""The planner that learns how far speculation pays for all requests together, and its plan for one request."""

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

# Requests per pass whose trees the value model looks at, in turns, so that a pass costs the same however many draft;
# one in two passes where more than so many do, whose nodes take the time: a look costs as much as choosing among a
# dozen trees, and where so many draft, fewer looks show as much.
LOOKED_AT_PER_PASS = 2
MANY_ASKING = 32
PASSES_PER_LOOK_OF_MANY = 2
# Requests that may wait for their first tree at a time, and one more for each so many that run: reading prompts is the
# dearest work of drafters.
NEWCOMERS = 4
RUNNING_PER_NEWCOMER = 8
# Drafters have caught up when at most one in so many that ask waits for a first tree. That is waited for, but not for
# longer than so many seconds.
ASKING_PER_UNSETTLED = 4
LONGEST_UNSETTLED_S = 0.25
# Prompts that are read within so many passes change nothing.
FEW_CROWDED_PASSES = 2
# The power of the shortfall behind plain decoding with which the threshold rises.
DOUBT = 4
# How far below the threshold a request may stay where drafting pays for all together.
LEAST_SHARE_OF_THRESHOLD = 0.6
# Rounds that asked for drafts without one ever being there in time, after which none are expected.
ENOUGH_IN_VAIN = 32
# Drafts take as long as they did up to this share.
_SAME_TIME = 0.2
# Weight of an observation in running means.
_RATE = 0.05
# Fewer rounds of a pass that ask for drafts are the exception.
_FEWEST_ASKING = 0.5


class AdaptivePlanner:
    """Plans all requests of one verifier by one price, which every request applies to its own trees.

    What is maximised is tokens per second of all requests. At the best plan's rate, time is worth `rate` tokens a
    second; whatever gives fewer tokens than its time is worth is left out: a node below the price of its row, a draft
    below the cost of asking for it. Requests that force speculation get the fixed plan, and teach the models too, but
    for those that name their sources: their rounds are to the planner what another orchestrator's are.

    Tokens of a higher priority count more (`load.py`): a request's nodes and drafts are worth their tokens
    times its weight over the mean weight of all. Whether it pays that all draft is decided by plain tokens per second.
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
        # What another planner had learned, until it is known whether it holds here.
        self._borrowed: BorrowedCosts | None = None
        self._passes = PassLog(clock)
        self._missed = MissedPasses()
        self._plan_lag = PlanLagFilter()
        self._measured = MeasuredRates()
        # Requests that were ever here; those that have begun and not ended; of these the ones that have had a
        # round, and those that wait for their first tree.
        self._num_requests = 0
        self.num_begun = 0
        self.num_running = 0
        self.num_newcomers = 0
        # Rounds that asked for drafts while none had ever been verified.
        self._num_in_vain = 0
        # The value model has time for the trees of each request that drafts in one of so many of its rounds, and for so
        # many more in this pass.
        self.rounds_per_look = 1
        self.looks_left = LOOKED_AT_PER_PASS
        # Whether a request that has stood aside for long has its turn to draft.
        self.turn_is_taken = False
        # The verifier's last word about its load that was heard here.
        self.load: VerifierLoad | None = None
        # The plans of those that go on drafting; None when anything may have changed that they depend on.
        self.common: CommonPlans | None = None
        self._last_join = 0
        self._was_joint = True
        self._was_trying = False
        # Passes in a row before which many prompts waited to be read.
        self._num_crowded = 0
        self._unsettled_s = 0.0
        # Running means: rounds of a pass that ask for drafts; those of them that do, turns apart; committed tokens of a
        # sequence.
        self._asked = self._asked_anyway = 0.0
        self._context = 0.0

    @property
    def pass_number(self) -> int:
        """Counts passes."""
        return self._passes.pass_number

    def knowledge(self) -> Knowledge | None:
        """What was learned so far that another planner of such a verifier could use; None while that is nothing."""
        if not self._costs.is_known or not self.values.has_seen_trees:
            return None
        gains = (self.gains.mean, self.gains.of_class(True), self.gains.of_class(False))
        return Knowledge(self._costs.evidence(), self._missed.evidence(), self.values.evidence(), gains, self._context)

    def begin_with(self, knowledge: Knowledge) -> None:
        """Take what another planner has learned, before the first request.

        It counts little against what comes, and nothing more if the first passes take other times than it says.
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
        """The verifier's load is another one, or is told anew."""
        self.load = load
        if load.batch_size and load.queued_sequences != self.prefill.num_queued:
            self.prefill.num_queued = load.queued_sequences
            self.common = None

    def find_common(self) -> CommonPlans:
        """Work `common` out."""
        plans, exploration = self.draft_plans, self.exploration
        hold = plans.snapshot.is_known and plans.num_running > 1 and exploration.is_idle and self.fixed.max_nodes > 0
        common = CommonPlans(plans, self.fixed.max_nodes, self.weights.mean, hold and not self.prefill.is_crowded())
        self.common = common
        return common

    @property
    def draft_plans(self) -> DraftPlans:
        """Plans of rounds that ask for drafts."""
        plans = self._draft_plans
        needed_s = self.draft_times.needed_s
        if plans.snapshot is not self.snapshot or abs(plans.needed_s - needed_s) > _SAME_TIME * needed_s:
            plans = self._draft_plans = self._new_draft_plans()
        return plans

    def _new_draft_plans(self) -> DraftPlans:
        return DraftPlans(self.snapshot, self.num_running, self.fixed.linger_us, self.draft_times)

    @property
    def some_draft(self) -> bool:
        """Whether requests ask for drafts these days. Turns count for nothing: each would be the reason of the next."""
        return self._asked_anyway >= _FEWEST_ASKING

    @property
    def compares_sources(self) -> bool:
        """Whether sources are compared, for which few enough requests run to draft whatever they gain."""
        return self.sources.is_comparing and self._few_run

    @property
    def _few_run(self) -> bool:
        return self.num_running <= MOST_TOGETHER

    def trial_over(self, found_gain: bool) -> None:
        """Drafting was tried, by all requests or by one."""
        self.exploration.trial_over(found_gain)
        self.sources.trial_over(found_gain, self._few_run)

    def follow(self, is_greedy: bool, priority: int = 0) -> AdaptiveRequest:
        """The plans of a request that begins now."""
        return AdaptiveRequest(self, is_greedy, priority)

    def follow_apart(self) -> FixedPlanner:
        """The fixed plan."""
        return self.fixed

    def begins(self, weight: float) -> int:
        """A request is opened here; returns its number among all that ever were."""
        self._num_requests += 1
        self.num_begun += 1
        self.common = None
        self.prefill.num_unread += 1
        self.weights.add(weight)
        if not self.pass_number and self._costs.is_known:
            # Nobody has had a round yet, and what was learned elsewhere is all there is.
            self._replan(self.num_begun)
        return self._num_requests

    def first_round(self) -> None:
        """A request has had its first round here: its prompt has been read."""
        self._now_run(self.num_running + 1)
        self.common = None
        self.prefill.num_unread -= 1

    def may_join(self) -> bool:
        """Whether another request may begin to draft: where it pays for a few only, one after another."""
        if not self.snapshot.pays_jointly and self.pass_number < self._last_join + PASSES_PER_FIT:
            return False
        return self.num_newcomers < NEWCOMERS + self.num_running // RUNNING_PER_NEWCOMER

    def joins(self) -> None:
        """A request begins to draft."""
        self.num_newcomers += 1
        self._last_join = self.pass_number

    def round_over(self, outcome: Outcome, last_pass: int, asked: bool, is_newcomer: bool) -> int:
        """Learn from a round of a request whose last one was in pass `last_pass`; returns the pass of this one."""
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
        """A request has ended, or goes on elsewhere."""
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
        """Begin anew if what was learned elsewhere is of no use here."""
        if borrowed.are_refuted_by(record):
            logger.info("passes take other times here than where the planner's knowledge comes from: it is forgotten")
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
            # A turn comes to nobody in about every other pass.
            self.looks_left = 1
            self.rounds_per_look = PASSES_PER_LOOK_OF_MANY * record.num_asked
        self._context += _RATE * (record.context / record.num_rounds - self._context)
        self._asked += _RATE * (record.num_asked - self._asked)
        self._asked_anyway += _RATE * (max(0, record.num_asked - self.turn_is_taken) - self._asked_anyway)
        self._was_joint = record.is_joint
        # What other sources cost is no measure of those that are asked.
        is_experiment = self.sources.has_asked and (self.sources.is_trying or self.compares_sources)
        plain = self._measured.plain_of_one(self.num_running) if self.sources.is_comparing else 0.0
        if self.sources.pass_over(record, self.num_running, self._few_run, plain):
            # What was reached so far is that of others, too.
            self._measured.joint.forget()
            self.exploration.owe_trial()
        ran_as_planned = self._plan_lag.pass_over(record, self.draft_times.way_s)
        is_settled = self.num_newcomers * ASKING_PER_UNSETTLED <= record.num_asked
        seconds = record.pass_s + (record.gap_s or 0.0)
        self._unsettled_s = 0.0 if is_settled else self._unsettled_s + seconds
        # While drafters read prompts they are late for everyone; that is no measure of what drafts cost, unless it goes
        # on and on.
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
        """Whether many prompts are read for more than a moment, so that a pass is no measure of what rounds reach."""
        num_before = self._num_crowded
        self._num_crowded = num_before + 1 if self.prefill.is_crowded() else 0
        if num_before > FEW_CROWDED_PASSES and not self._num_crowded:
            # Many requests are new: what they reach without drafts is seen before all of them ask for some.
            self.exploration.pause()
        return max(num_before, self._num_crowded) > FEW_CROWDED_PASSES

    def _replan(self, running: int) -> None:
        """Draw conclusions from what is known, for so many running requests."""
        knows_drafts = self.values.has_seen_trees or self._num_in_vain >= ENOUGH_IN_VAIN
        if not self._costs.is_known or not knows_drafts or not running:
            return
        self._missed.solve()
        costs = self._costs.costs
        reached = self._measured.all.tokens_per_s(running) or 0.0
        plain_rate = self._measured.plain.tokens_per_s(running) or running / self._plain_round_s(running)
        measured_joint_rate = self._measured.joint.tokens_per_s(running)
        joint_rate = measured_joint_rate or self._joint_rate(running)
        # What is predicted for drafting only decides whether to draft: a price beyond what is reached would end it.
        rate = max(plain_rate, reached)
        price = rate * costs.row_s
        gain = num_nodes = 0.0
        for value, count in self.values.nodes_at_hand():
            if value <= price:
                break
            gain += value * count
            num_nodes += count
        # Where all draft, one more waits with the others; else it is among few, and misses passes that do not wait.
        pays_jointly = joint_rate > (plain_rate if self._was_joint else rate)
        is_joint = pays_jointly or self._was_joint
        missed = self._missed.of_one_more(running if is_joint else self._asked, is_joint)
        asking_s = costs.asking_jointly_s if is_joint else costs.asking_s
        # A request that waits for its draft misses tokens of its own, and spares the others its row.
        overhead = missed * max(0.0, 1 - rate * costs.round_s) + rate * (asking_s + costs.row_s * num_nodes)
        threshold = overhead / gain if gain > 0 else math.inf
        if pays_jointly and (self._was_joint or measured_joint_rate):
            # Where all gain so much by it, only one that stands out had better not; the estimate for one is no finer.
            threshold = min(1.0, threshold) * max(LEAST_SHARE_OF_THRESHOLD, plain_rate / joint_rate)
        elif self._asked > 0 and reached > 0:
            # Costs that no model knows show in what is reached: less than without drafts makes them dearer.
            threshold *= max(1.0, plain_rate / reached) ** DOUBT
        self.snapshot = PlanSnapshot(threshold, price, gain, num_nodes, rate, pays_jointly)

    def _joint_rate(self, running: int) -> float:
        """Tokens per second if every one of so many requests drafted."""
        costs = self._costs.costs
        # So many are there for a pass.
        present = running / (1 + self._missed.jointly(running))
        drafting_s = self._plain_round_s(present) + present * costs.asking_jointly_s
        nodes = [(value, present * count) for value, count in self.values.nodes_at_hand()]
        best = best_budget(nodes, present, drafting_s, costs.row_s)
        return (present + self.gains.mean * best.gain) / (drafting_s + costs.row_s * best.rows)

    def _plain_round_s(self, num_rounds: float) -> float:
        return self._costs.plain_round_s(num_rounds, num_rounds * self._context)


# Least weight of a round in a request's own gain, and the rounds that its class's gain stands for at first.
_OWN_RATE = 0.03
_PRIOR_ROUNDS = 8
_MOST_RELATIVE_GAIN = 4.0
# The most rounds that what is known of a prompt's beginning stands for, besides those of the class. Fewer where it is
# bad: a request that drafts finds out itself, one that does not finds out nothing.
_MOST_KNOWN_ROUNDS = 16
_MOST_BAD_ROUNDS = 4
# Before a request begins to draft, what it gains beyond usual drafts counts from so many standard errors on: what
# rounds accept differs by about as much as they accept.
_STANDARD_ERRORS = 2.0
# A request that stands aside while others draft tries again for TRIAL_ROUNDS after so many rounds, and after twice as
# many each time that it was in vain: one in 17 rounds at first, and 1.5 % in the long run.
FIRST_TURN_AFTER = 128
LONGEST_BETWEEN_TURNS = 512
# A request that asks for drafts keeps its likeliest node where that is worth this share of its row.
FLOOR_SHARE = 0.5
# What a tree looked at leaves of the weight of earlier ones in the request's own correction.
_FADE = 0.9
_PRIOR_TOKENS = 2.0


class AdaptiveRequest:
    """Decides for one request, by the planner's snapshot and its own record.

    It asks drafters while its drafts gain more, compared with usual ones, than the snapshot's threshold, and when it is
    its turn to try. While it does not ask, there is nothing to draft, to verify or to wait for.

    Nobody is left out for good: who does not draft while others do has its turn now and then, and who drafts keeps one
    node, however low its class and its record, unless a row costs twice what the node is worth by itself.
    """

    def __init__(
        self,
        planner: AdaptivePlanner,
        is_greedy: bool,
        priority: int = 0,
        fleet: Mapping[str, AdaptivePlanner] | None = None,
    ) -> None:
        """`fleet` are the planners of all verifiers, by address, where there are several."""
        self._planner = planner
        self._fleet = fleet or {}
        self._is_greedy = is_greedy
        self._weight = class_weight(priority)
        # Its number at the planner; 0 until its first plan is wanted, since outputs wait for the first of their prompt.
        self._number = 0
        self._last_pass = 0
        self._is_drafting = False
        # Whether drafters owe it the first tree since it began to draft.
        self._is_newcomer = False
        # Whether they have to read more for it than a round's tokens.
        self._catches_up = False
        # What the draft made for the round took, once it is here.
        self._took_s: float | None = None
        self._alone_left = 0
        self._is_closed = False
        # Gain of its drafts relative to usual ones, from so many rounds.
        self._gain = self._usual_gain = planner.gains.of_class(is_greedy)
        self._num_asked = 0
        self._total_gain = 0.0
        # Rounds of others with its beginning, which say what it may expect.
        self._num_known = 0
        # Rounds since it drafted last, and after how many it tries again.
        self._num_aside = 0
        self._turn_after = FIRST_TURN_AFTER
        self._has_turn = False
        # Tokens that its verified trees promised, and those accepted; and the logarithm of what a node of its trees is
        # worth besides its probability, but for the mean weight of all.
        self._promised = self._accepted = _PRIOR_TOKENS
        self._log_worth = math.log(self._weight)
        self._row_multiple = 1
        # Drafters that there are to choose among; those that are not asked for the next round, and for this one.
        self._sources: tuple[str, ...] = ()
        self._left_out_next = self._left_out = NONE_LEFT_OUT
        # The round's last draft, before nodes were cut.
        self._at_hand: TokenTree | None = None

    def runs_on(self, verifier: str) -> None:
        """Belong to the planner of the verifier that it was opened on; what is known of its drafts goes with it."""
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
            # As many as this verifier's drafters can take begin to draft there already: its turn comes later.
            self._is_drafting = False

    def plan(self, round_context: RoundContext, load: VerifierLoad = UNKNOWN_LOAD) -> RoundPlan:
        """The next round's limits: the fixed plan as far as it pays, or nothing at all."""
        planner = self._planner
        if (
            self._is_drafting
            and round_context.has_drafter
            and not (self._alone_left or self._catches_up or round_context.forced or round_context.sources)
            and round_context.requested_nodes is None
        ):
            # As most do most of the time.
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
        """The next round's limits, whatever the request does."""
        planner = self._planner
        if not self._number:
            self._number = planner.begins(self._weight)
        nodes, self._row_multiple = planner.fixed.limits(round_context, load)
        if round_context.forced or nodes == 0:
            return planner.fixed.plan(round_context, load)
        if not round_context.has_drafter:
            # A drafter that has dropped the request, or is gone, owes it nothing.
            self.tree_arrived()
            fixed = planner.fixed.plan(round_context, load)
            # The cache may have something.
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
        # Reading takes longer than is worth waiting, and the verifier is not to lose its patience over it.
        waits = not self._catches_up
        weight = self._weight / planner.weights.mean
        return plans.plan(self._gain, weight, nodes, self._row_multiple, self._left_out_next, is_trial, waits)

    def tree_arrived(self, took_s: float | None = None) -> None:
        """Drafters owe the request nothing."""
        if took_s is not None:
            self._took_s = took_s
            self._planner.draft_times.add(took_s)
        if self._is_newcomer:
            self._is_newcomer = self._catches_up = False
            self._planner.num_newcomers -= 1

    def select(self, tree: TokenTree) -> TokenTree:
        """The nodes that are worth their rows and, where the request is alone, those that fill up the last ones."""
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
            # The first round is the prompt's, which waits for nobody.
            asked = False
        self._last_pass = planner.round_over(outcome, last_pass, asked, self._is_newcomer)
        took_s, self._took_s = self._took_s, None
        if outcome.linger_us and took_s is not None and self._last_pass == last_pass + 1:
            # It was in the pass before, too: it waited for drafts, not for a pass of others.
            planner.draft_times.waited(outcome.linger_us / 1e6, took_s, was_in_time=outcome.had_fresh_draft)
        # The next round has been planned already.
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
        """Let the request begin where others with its beginning were: two parts of three of its prior, at most, or one.

        What its own rounds have shown so far keeps its weight.
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
        """What drafts of this request have gained."""
        return DraftGain(self._num_asked, self._total_gain)

    def close(self) -> None:
        """The request has ended."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._number:
            self._leave()

    @property
    def _relative_weight(self) -> float:
        """What its tokens count, compared with those of all requests; 1 where all have one priority."""
        return self._weight / self._planner.weights.mean

    @property
    def _row_price(self) -> float:
        """What a row of this request has to bring, in its own tokens."""
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
        """The likeliest node, if it is worth enough without regard to class and record, which it could not better."""
        likeliest = max(range(len(tree)), key=tree.path_log_probs.__getitem__)
        floor = math.log(FLOOR_SHARE * self._planner.snapshot.price)
        return [likeliest] if self._planner.values.path_logs(tree)[likeliest] >= floor else []

    def _drafts(self, has_choice: bool) -> bool:
        """Whether the next round asks for a draft, of sources among which there is a choice or not."""
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
        """Whether it tries again, since it has not drafted for long while others do."""
        planner = self._planner
        if self._num_aside < self._turn_after or planner.turn_is_taken or not planner.some_draft:
            return False
        self._has_turn = planner.turn_is_taken = True
        # It weighs what it finds as a request that begins does.
        self._num_asked = 0
        return True

    def _pays(self) -> bool:
        planner = self._planner
        margin = 1 - HYSTERESIS if self._is_drafting else 1 + HYSTERESIS
        gain = self._gain if self._is_drafting else self._sure_gain()
        return gain * (self._weight / planner.weights.mean) >= margin * planner.snapshot.threshold

    def _sure_gain(self) -> float:
        """What its drafts gain; of what is beyond usual ones, only as much as is hardly chance.

        Where usual drafts do not pay, the request that begins is the one of many whose record stands out, and without
        this it would mostly be the one that was lucky: it drafts, gains what others do, and the next one begins.
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
