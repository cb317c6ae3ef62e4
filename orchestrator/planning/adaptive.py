"""The planner that learns: speculates as far as it pays for all requests together, and not at all where it does not."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coppice.tree import EMPTY_TREE, TokenTree
from orchestrator.planner import FixedPlanner, RoundPlan, Situation
from orchestrator.planning.budget import best_budget
from orchestrator.planning.cost_model import PASSES_PER_FIT, CostModel, PassRecord
from orchestrator.planning.exploration import TRIAL_ROUNDS, Exploration
from orchestrator.planning.linger import worthwhile_linger_s
from orchestrator.planning.pass_log import PassLog
from orchestrator.planning.value_model import ValueModel
from orchestrator.rounds import Outcome
from orchestrator.statistics import verified_tree

# Nodes are cut only below this share of the price: both the price and their values are estimates.
CLEARLY = 0.8
# A request changes between drafting and not only when it is this clear that it should.
HYSTERESIS = 0.05
# Requests per pass whose trees the value model looks at, in turns, so that a pass costs the same however many run.
LOOKED_AT_PER_PASS = 4
# Requests that may wait for their first tree at a time, and one more for each so many that run: reading prompts is the
# dearest work of drafters.
NEWCOMERS = 4
RUNNING_PER_NEWCOMER = 8
# Nodes that drafters are asked for, in units of those that were worth their rows lately.
SPARE_NODES = 1.5
# Weight of an observation in the planner's running means, and the least in a request's own.
_RATE = 0.05
_OWN_RATE = 0.03
_PRIOR_ROUNDS = 8
_MOST_RELATIVE_GAIN = 4.0
_FEWEST_PASSES = 8


@dataclass(frozen=True, slots=True)
class Stance:
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

    @property
    def log_price(self) -> float:
        """The logarithm of a path probability below which a node is clearly not worth its row."""
        return math.log(CLEARLY * self.price) if self.price > 0 else -math.inf


class AdaptivePlanner:
    """Plans all requests of one verifier by one price, which every request applies to its own trees.

    What is maximised is tokens per second of all requests. At the best plan's rate, time is worth `rate` tokens a
    second; whatever gives fewer tokens than its time is worth is left out: a node below the price of its row, a draft
    below the cost of asking for it. Requests that force speculation get the fixed plan, and teach the models too.
    """

    def __init__(
        self, max_nodes: int, linger_us: int, seed: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.fixed = FixedPlanner(max_nodes, linger_us)
        self.values = ValueModel()
        self.exploration = Exploration(seed)
        self.stance = Stance()
        self._costs = CostModel()
        self._passes = PassLog(clock)
        self._num_requests = 0
        # Requests that have had a round, and those of them that wait for their first tree.
        self.num_running = 0
        self.num_newcomers = 0
        self._last_join = 0
        # Running means: passes that a request misses while it waits for a draft, where only some ask for one and where
        # everybody does; gain of a class of requests, greedy or
        # not, relative to that of a usual draft; committed tokens per round.
        self._missed = 0.0
        self._missed_jointly = 0.0
        self._is_joint = True
        self._measured = _Rate()
        self._class_gain = {True: 1.0, False: 1.0}
        self._mean_gain = 1.0
        self._context = 0.0

    @property
    def pass_number(self) -> int:
        """Counts passes."""
        return self._passes.pass_number

    def follow(self, is_greedy: bool) -> AdaptiveRequest:
        """The plans of a request that begins now."""
        self._num_requests += 1
        return AdaptiveRequest(self, is_greedy, self._num_requests)

    def usual_gain(self, is_greedy: bool) -> float:
        """Relative gain that a request of a class is expected to have."""
        return self._class_gain[is_greedy]

    def may_join(self) -> bool:
        """Whether another request may begin to draft: where it pays for a few only, one after another."""
        if not self.stance.pays_jointly and self.pass_number < self._last_join + PASSES_PER_FIT:
            return False
        return self.num_newcomers < NEWCOMERS + self.num_running // RUNNING_PER_NEWCOMER

    def joins(self) -> None:
        """A request begins to draft."""
        self.num_newcomers += 1
        self._last_join = self.pass_number

    def looks_at(self, number: int) -> bool:
        """Whether the value model has time for the trees of this request in this pass."""
        return (self.pass_number + number) % max(1, -(-self.num_running // LOOKED_AT_PER_PASS)) == 0

    def round_over(self, outcome: Outcome, last_pass: int, asked: bool) -> int:
        """Learn from a round of a request whose last one was in pass `last_pass`; returns the pass of this one."""
        record = self._passes.add(outcome, last_pass, asked)
        if asked and last_pass:
            missed = min(8, self.pass_number - last_pass - 1)
            if self._is_joint:
                self._missed_jointly += _RATE * (missed - self._missed_jointly)
            else:
                self._missed += _RATE * (missed - self._missed)
        if record is not None:
            self._pass_over(record)
        return self.pass_number

    def gained(self, relative_gain: float, is_greedy: bool) -> None:
        """A round that had asked for drafts accepted so much, relative to a usual draft."""
        self._class_gain[is_greedy] += _RATE * (relative_gain - self._class_gain[is_greedy])
        self._mean_gain += _RATE * (relative_gain - self._mean_gain)

    def request_ended(self) -> None:
        """A request that had had a round has ended."""
        self.num_running -= 1
        if self.num_running == 0:
            self._passes.idle()

    def _pass_over(self, record: PassRecord) -> None:
        self._context += _RATE * (record.context / record.num_rounds - self._context)
        self._is_joint = record.is_joint
        self._measured.add(record)
        seconds = record.pass_s + (record.gap_s or 0.0)
        trial_is_over = self.exploration.next_pass(self.num_running, record.num_asked, seconds)
        if self._costs.add(record) or trial_is_over:
            self._replan()
        if trial_is_over:
            self.exploration.trial_over(found_gain=self._mean_gain >= self.stance.threshold)

    def _replan(self) -> None:
        """Draw conclusions from what is known."""
        if not self._costs.is_known or not self.values.has_seen_trees or not self.num_running:
            return
        costs, running = self._costs.costs, float(self.num_running)
        plain_rate = running / self._plain_round_s(running)
        joint_rate = self._joint_rate()
        # What is predicted for drafting only decides whether to draft: a price beyond what is reached would end it.
        rate = max(plain_rate, self._measured.tokens_per_s)
        price = rate * costs.row_s
        worth = [(value, count) for value, count in self.values.nodes_at_hand() if value > price]
        gain = sum(value * count for value, count in worth)
        num_nodes = sum(count for _, count in worth)
        # Where all draft, one more waits with the others; else it is among few, and misses passes that do not wait.
        pays_jointly = joint_rate > (plain_rate if self._is_joint else rate)
        is_joint = pays_jointly or self._is_joint
        asking_s = costs.asking_jointly_s if is_joint else costs.asking_s
        missed = self._missed_jointly if is_joint else self._missed
        # A request that waits for its draft misses tokens of its own, and spares the others its row.
        overhead = missed * max(0.0, 1 - rate * costs.round_s) + rate * (asking_s + costs.row_s * num_nodes)
        threshold = overhead / gain if gain > 0 else math.inf
        self.stance = Stance(threshold, price, gain, num_nodes, rate, pays_jointly)

    def _joint_rate(self) -> float:
        """Tokens per second if every request drafted."""
        costs = self._costs.costs
        # So many are there for a pass.
        present = self.num_running / (1 + self._missed_jointly)
        drafting_s = self._plain_round_s(present) + present * costs.asking_jointly_s
        nodes = [(value, present * count) for value, count in self.values.nodes_at_hand()]
        best = best_budget(nodes, present, drafting_s, costs.row_s)
        return (present + self._mean_gain * best.gain) / (drafting_s + costs.row_s * best.rows)

    def _plain_round_s(self, num_rounds: float) -> float:
        return self._costs.plain_round_s(num_rounds, num_rounds * self._context)


class _Rate:
    """Tokens per second of the last passes, while the load is about the same."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0
        self._num_rounds = 0.0
        self._num_passes = 0

    @property
    def tokens_per_s(self) -> float:
        """0 while there are too few passes to tell."""
        return self._tokens / self._seconds if self._num_passes >= _FEWEST_PASSES else 0.0

    def add(self, record: PassRecord) -> None:
        """Take a pass in."""
        if record.gap_s is None:
            return
        if abs(record.num_rounds - self._num_rounds) > self._num_rounds / 2:
            self._tokens = self._seconds = 0.0
            self._num_passes, self._num_rounds = 0, record.num_rounds
        self._tokens += record.num_tokens - _RATE * self._tokens
        self._seconds += record.pass_s + record.gap_s - _RATE * self._seconds
        self._num_passes += 1


class AdaptiveRequest:
    """One request's part of the plan."""

    def __init__(self, planner: AdaptivePlanner, is_greedy: bool, number: int) -> None:
        self._planner = planner
        self._number = number
        self._is_greedy = is_greedy
        self._last_pass = 0
        self._is_drafting = False
        self._is_newcomer = False
        self._alone_left = 0
        self._is_closed = False
        # Gain of its drafts relative to a usual one's, from so many rounds.
        self._gain = planner.usual_gain(is_greedy)
        self._num_asked = 0
        # Tokens that verified trees had promised, and those accepted.
        self._promised = self._accepted = 2.0
        self._multiple = 1

    def plan(self, situation: Situation) -> RoundPlan:
        """The next round's limits: the fixed plan as far as it pays, or nothing at all."""
        fixed = self._planner.fixed.plan(situation)
        self._multiple = fixed.row_multiple
        if situation.forced or not situation.has_drafter or fixed.max_nodes == 0:
            return fixed
        if not self._drafts():
            return RoundPlan(0, 0)
        stance, running = self._planner.stance, self._planner.num_running
        if not stance.rate or not stance.gain:
            return fixed
        linger_us = fixed.linger_us
        linger_s = worthwhile_linger_s(max(self._gain, 1.0) * stance.gain, stance.rate, max(1, running))
        linger_us = min(linger_us, round(1e6 * linger_s))
        nodes = fixed.max_nodes
        if running > 1:
            nodes = min(nodes, 1 + math.ceil(SPARE_NODES * max(1.0, self._gain) * stance.nodes))
        return RoundPlan(nodes, linger_us, fixed.row_multiple if running <= 1 else 1)

    def select(self, tree: TokenTree) -> TokenTree:
        """The nodes that are worth their rows, and where the request is alone those that fill up the last ones."""
        planner = self._planner
        self._is_known()
        if not len(tree):
            return tree
        if planner.looks_at(self._number):
            planner.values.note(tree)
        if planner.stance.price <= 0:
            return tree
        least = planner.stance.log_price - math.log(self._accepted / self._promised)
        logs = planner.values.path_logs(tree)
        kept = [node for node, value in enumerate(logs) if value >= least]
        if self._multiple > 1 and kept:
            rows = -(-(1 + len(kept)) // self._multiple) * self._multiple
            return tree.prune(rows - 1)
        return tree.select(kept) if kept else EMPTY_TREE

    def round_over(self, outcome: Outcome, sent: Sequence[TokenTree], asked: bool) -> None:
        """Learn from a round."""
        planner = self._planner
        is_first = self._last_pass == 0
        if self._is_closed:
            return
        if is_first:
            planner.num_running += 1
        # The first round is the prompt's, which waits for nobody.
        self._last_pass = planner.round_over(outcome, self._last_pass, asked and not is_first)
        if asked and not is_first:
            self._learn(outcome, sent)
        if self._alone_left:
            self._alone_left -= 1
            if not self._alone_left:
                self._end_alone()

    def close(self) -> None:
        """The request has ended."""
        if self._is_closed:
            return
        self._is_closed = True
        self._is_known()
        if self._alone_left:
            self._end_alone()
        if self._last_pass:
            self._planner.request_ended()

    def _drafts(self) -> bool:
        """Whether the next round asks for a draft."""
        exploration = self._planner.exploration
        if exploration.is_pausing:
            return False
        if exploration.is_trying:
            self._begin()
        elif self._pays():
            if not self._is_drafting and self._planner.may_join():
                self._begin()
        elif not self._alone_left:
            if exploration.tries_alone():
                self._alone_left = TRIAL_ROUNDS
                self._begin()
            else:
                self._is_drafting = False
                self._is_known()
        return self._is_drafting

    def _pays(self) -> bool:
        margin = 1 - HYSTERESIS if self._is_drafting else 1 + HYSTERESIS
        return self._gain >= margin * self._planner.stance.threshold

    def _begin(self) -> None:
        if not self._is_drafting:
            self._is_drafting = self._is_newcomer = True
            self._planner.joins()

    def _is_known(self) -> None:
        """A tree has come, so that the drafters are up to date."""
        if self._is_newcomer:
            self._is_newcomer = False
            self._planner.num_newcomers -= 1

    def _end_alone(self) -> None:
        self._alone_left = 0
        self._planner.exploration.tried_alone()
        self._planner.exploration.trial_over(found_gain=self._pays())

    def _learn(self, outcome: Outcome, sent: Sequence[TokenTree]) -> None:
        planner = self._planner
        if planner.stance.gain > 0 and not self._is_newcomer:
            relative = min(_MOST_RELATIVE_GAIN, outcome.num_accepted / planner.stance.gain)
            self._num_asked += 1
            self._gain += max(_OWN_RATE, 1 / (_PRIOR_ROUNDS + self._num_asked)) * (relative - self._gain)
            planner.gained(relative, self._is_greedy)
        if sent and outcome.draft_nodes and planner.looks_at(self._number):
            promised = planner.values.learn(
                verified_tree(sent, outcome.draft_nodes),
                outcome.token_ids[: outcome.num_accepted],
            )
            self._promised = 0.9 * self._promised + promised
            self._accepted = 0.9 * self._accepted + outcome.num_accepted
