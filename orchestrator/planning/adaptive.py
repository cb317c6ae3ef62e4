"""The planner that learns: speculates as far as it pays for all requests together, and not at all where it does not."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coppice.tree import EMPTY_TREE, TokenTree
from orchestrator.planner import FixedPlanner, RoundPlan, Situation
from orchestrator.planning.budget import best_budget
from orchestrator.planning.cost_model import CostModel, PassRecord
from orchestrator.planning.exploration import PROBE_ROUNDS, Exploration
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


@dataclass(frozen=True, slots=True)
class Stance:
    """What the planner thinks of drafting now; until costs and values are known, that it is free and pays.

    `threshold` is the least gain, relative to that of a usual draft, with which a request's drafts pay. Of a usual
    draft, `gain` and `nodes` count what is worth at least `price` tokens per row. `rate` is in tokens per second.
    """

    threshold: float = 0.0
    price: float = 0.0
    gain: float = 0.0
    nodes: float = 0.0
    rate: float = 0.0

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
        # Running means: passes that a request misses while it waits for a draft; gain of a class of requests, greedy or
        # not, relative to that of a usual draft; committed tokens per round.
        self._missed = 0.0
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
        """Whether drafters can take another request in."""
        return self.num_newcomers < NEWCOMERS + self.num_running // RUNNING_PER_NEWCOMER

    def looks_at(self, number: int) -> bool:
        """Whether the value model has time for the trees of this request in this pass."""
        return (self.pass_number + number) % max(1, -(-self.num_running // LOOKED_AT_PER_PASS)) == 0

    def round_over(self, outcome: Outcome, last_pass: int, asked: bool) -> int:
        """Learn from a round of a request whose last one was in pass `last_pass`; returns the pass of this one."""
        record = self._passes.add(outcome, last_pass, asked)
        if asked and last_pass:
            self._missed += _RATE * (min(8, self.pass_number - last_pass - 1) - self._missed)
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
        self.exploration.next_pass(self.num_running, record.num_asked)
        if self._costs.add(record):
            self.replan()

    def replan(self) -> None:
        """Draw conclusions from what is known."""
        if not self._costs.is_known or not self.values.has_seen_trees or not self.num_running:
            return
        costs, running = self._costs.costs, float(self.num_running)
        plain_rate = running / self._costs.plain_round_s(running, running * self._context)
        # Where everybody drafts, so many are there for a pass.
        present = running / (1 + self._missed)
        plain_s = self._costs.plain_round_s(present, present * self._context)
        nodes = self.values.nodes_at_hand()
        drafting_s = plain_s + present * costs.asking_s
        scaled = [(value, present * count) for value, count in nodes]
        best = best_budget(scaled, present, drafting_s, costs.row_s)
        drafted_rate = (present + self._mean_gain * best.gain) / (drafting_s + costs.row_s * best.rows)
        rate = max(plain_rate, drafted_rate)
        price = rate * costs.row_s
        worth = [(value, count) for value, count in nodes if value > price]
        gain = sum(value * count for value, count in worth)
        num_nodes = sum(count for _, count in worth)
        # A request that waits for its draft misses tokens of its own, and spares the others its row.
        overhead = self._missed * max(0.0, 1 - rate * costs.round_s) + rate * (costs.asking_s + costs.row_s * num_nodes)
        threshold = overhead / gain if gain > 0 else math.inf
        self.stance = Stance(threshold, price, gain, num_nodes, rate)


class AdaptiveRequest:
    """One request's part of the plan."""

    def __init__(self, planner: AdaptivePlanner, is_greedy: bool, number: int) -> None:
        self._planner = planner
        self._number = number
        self._is_greedy = is_greedy
        self._last_pass = 0
        self._is_drafting = False
        self._is_newcomer = False
        self._probe_left = 0
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
        if self._probe_left:
            self._probe_left -= 1
            if not self._probe_left:
                self._end_probe()

    def close(self) -> None:
        """The request has ended."""
        if self._is_closed:
            return
        self._is_closed = True
        self._is_known()
        if self._probe_left:
            self._end_probe()
        if self._last_pass:
            self._planner.request_ended()

    def _drafts(self) -> bool:
        """Whether the next round asks for a draft."""
        planner = self._planner
        if planner.exploration.is_pausing:
            return False
        if self._pays():
            if not self._is_drafting and planner.may_join():
                self._begin()
            return self._is_drafting
        if not self._probe_left and not planner.exploration.begins_probe(planner.num_running):
            self._is_drafting = False
            self._is_known()
            return False
        if not self._probe_left:
            self._probe_left = PROBE_ROUNDS
            self._begin()
        return True

    def _pays(self) -> bool:
        margin = 1 - HYSTERESIS if self._is_drafting else 1 + HYSTERESIS
        return self._gain >= margin * self._planner.stance.threshold

    def _begin(self) -> None:
        self._is_drafting = True
        if not self._is_newcomer:
            self._is_newcomer = True
            self._planner.num_newcomers += 1

    def _is_known(self) -> None:
        """A tree has come, so that the drafters are up to date."""
        if self._is_newcomer:
            self._is_newcomer = False
            self._planner.num_newcomers -= 1

    def _end_probe(self) -> None:
        self._probe_left = 0
        self._planner.exploration.probe_over(found_gain=self._pays())

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
