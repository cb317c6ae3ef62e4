"""One request's part of the adaptive plan: whether it drafts, and which nodes of its trees are worth their rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from coppice.tree import TokenTree
from orchestrator.planner import DraftGain, RoundPlan, Situation, round_plan
from orchestrator.planning.exploration import TRIAL_ROUNDS
from orchestrator.planning.linger import worthwhile_linger_s
from orchestrator.rounds import Outcome
from orchestrator.statistics import verified_tree

if TYPE_CHECKING:
    from orchestrator.planning.adaptive import AdaptivePlanner

# A request changes between drafting and not only when it is this clear that it should.
HYSTERESIS = 0.05
# Nodes that drafters are asked for, in units of those that were worth their rows lately.
SPARE_NODES = 1.5
# Tokens that drafts are taken to gain, at least, when it is tried whether they do.
TRIAL_GAIN = 4.0
# Least weight of a round in a request's own gain, and the rounds that its class's gain stands for at first.
_OWN_RATE = 0.03
_PRIOR_ROUNDS = 8
_MOST_RELATIVE_GAIN = 4.0
# The most rounds that what is known of a prompt's beginning stands for, beside those of the class. Fewer where it is
# bad: a request that drafts finds out itself, one that does not finds out nothing.
_MOST_KNOWN_ROUNDS = 16
_MOST_BAD_ROUNDS = 4
# What a tree looked at leaves of the weight of earlier ones in the request's own correction.
_FADE = 0.9
_PRIOR_TOKENS = 2.0


class AdaptiveRequest:
    """Decides for one request, by the planner's stance and its own record.

    It asks drafters while its drafts gain more, compared with usual ones, than the stance's threshold, and when it is
    its turn to try. While it does not ask, there is nothing to draft, to verify or to wait for.
    """

    def __init__(self, planner: AdaptivePlanner, is_greedy: bool, number: int) -> None:
        self._planner = planner
        self._is_greedy = is_greedy
        self._number = number
        self._last_pass = 0
        self._is_drafting = False
        # Whether drafters owe it the first tree since it began to draft.
        self._is_newcomer = False
        # Whether they have to read more for it than a round's tokens.
        self._catches_up = False
        self._alone_left = 0
        self._is_closed = False
        # Gain of its drafts relative to usual ones, from so many rounds.
        self._gain = planner.usual_gain(is_greedy)
        self._usual_gain = self._gain
        self._num_asked = 0
        self._total_gain = 0.0
        # Tokens that its verified trees promised, and those accepted.
        self._promised = self._accepted = _PRIOR_TOKENS
        self._row_multiple = 1
        # The round's last draft, before nodes were cut.
        self._at_hand: TokenTree | None = None

    def plan(self, situation: Situation) -> RoundPlan:
        """The next round's limits: the fixed plan as far as it pays, or nothing at all."""
        fixed = self._planner.fixed.plan(situation)
        self._row_multiple = fixed.row_multiple
        if situation.forced or not situation.has_drafter or fixed.max_nodes == 0:
            return fixed
        if not self._drafts():
            return round_plan(0, 0)
        stance, running = self._planner.stance, max(1, self._planner.num_running)
        if not stance.is_known:
            return fixed
        gain, nodes = max(1.0, self._gain) * stance.gain, fixed.max_nodes
        if running > 1:
            self._row_multiple = 1
        if self._planner.exploration.is_trying or self._alone_left:
            # What is known may be out of date, and nothing is learned from drafts that are not waited for.
            gain = max(gain, TRIAL_GAIN)
        elif running > 1:
            nodes = min(nodes, 1 + math.ceil(SPARE_NODES * max(1.0, self._gain) * stance.nodes))
        # Reading takes longer than is worth waiting, and the verifier is not to lose its patience over it.
        linger_s = 0.0 if self._catches_up else worthwhile_linger_s(gain, stance.rate, running)
        return round_plan(nodes, min(fixed.linger_us, round(1e6 * linger_s)), self._row_multiple)

    def tree_arrived(self) -> None:
        """Drafters owe the request nothing."""
        if self._is_newcomer:
            self._is_newcomer = self._catches_up = False
            self._planner.num_newcomers -= 1

    def select(self, tree: TokenTree) -> TokenTree:
        """The nodes that are worth their rows and, where the request is alone, those that fill up the last ones."""
        if not len(tree):
            return tree
        self._at_hand = tree
        stance, values = self._planner.stance, self._planner.values
        if stance.price <= 0:
            return tree
        kept = values.worth(tree, stance.log_price - math.log(self._accepted / self._promised))
        if kept is None:
            return tree
        if self._row_multiple > 1 and kept:
            rows = -(-(1 + len(kept)) // self._row_multiple) * self._row_multiple
            return tree.prune(rows - 1)
        return tree.select(kept)

    def round_over(self, outcome: Outcome, sent: Sequence[TokenTree], asked: bool) -> None:
        """Learn from a round."""
        if self._is_closed:
            return
        is_first = self._last_pass == 0
        self._planner.num_running += is_first
        # The first round is the prompt's, which waits for nobody.
        asked = asked and not is_first
        self._last_pass = self._planner.round_over(outcome, self._last_pass, asked, self._is_newcomer)
        if asked:
            self._learn(outcome, sent)
        if self._alone_left:
            self._alone_left -= 1
            if not self._alone_left:
                self._planner.exploration.trial_over(found_gain=self._pays())
                self._planner.exploration.tried_alone()

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

    @property
    def gain(self) -> DraftGain:
        """What drafts of this request have gained."""
        return DraftGain(self._num_asked, self._total_gain)

    def close(self) -> None:
        """The request has ended."""
        if self._is_closed:
            return
        self._is_closed = True
        self.tree_arrived()
        if self._alone_left:
            self._planner.exploration.tried_alone()
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
                self.tree_arrived()
        return self._is_drafting

    def _pays(self) -> bool:
        margin = 1 - HYSTERESIS if self._is_drafting else 1 + HYSTERESIS
        return self._gain >= margin * self._planner.stance.threshold

    def _begin(self) -> None:
        if not self._is_drafting:
            self._is_drafting = self._is_newcomer = True
            self._catches_up = self._last_pass > 0
            self._planner.joins()

    def _learn(self, outcome: Outcome, sent: Sequence[TokenTree]) -> None:
        usual, values = self._planner.stance.gain, self._planner.values
        if usual > 0 and not self._is_newcomer:
            gain = min(_MOST_RELATIVE_GAIN, outcome.num_accepted / usual)
            self._num_asked += 1
            self._total_gain += gain
            self._gain += max(_OWN_RATE, 1 / (_PRIOR_ROUNDS + self._num_asked)) * (gain - self._gain)
            self._planner.gained(gain, self._is_greedy)
        if not self._planner.looks_at(self._number):
            return
        if self._at_hand is not None:
            values.note(self._at_hand)
            self._at_hand = None
        if sent and outcome.draft_nodes:
            tree = verified_tree(sent, outcome.draft_nodes)
            promised = values.learn(tree, outcome.token_ids[: outcome.num_accepted])
            self._promised = _FADE * self._promised + promised
            self._accepted = _FADE * self._accepted + outcome.num_accepted
