"""One request's part of the adaptive plan: whether it drafts, and which nodes of its trees are worth their rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from coppice.core.tree import TokenTree
from orchestrator.planner.base import UNKNOWN_LOAD, DraftGain, Load, RoundPlan, Situation, round_plan
from orchestrator.planner.common_plans import HYSTERESIS
from orchestrator.planner.draft_plans import STEPS_PER_GAIN
from orchestrator.planner.exploration import TRIAL_ROUNDS
from orchestrator.planner.latency_class import class_weight
from orchestrator.planner.source_choice import NONE_LEFT_OUT, Verified
from orchestrator.request.rounds import Outcome
from orchestrator.request.statistics import verified_tree

if TYPE_CHECKING:
    from orchestrator.planner.adaptive import AdaptivePlanner

# Least weight of a round in a request's own gain, and the rounds that its class's gain stands for at first.
_OWN_RATE = 0.03
_PRIOR_ROUNDS = 8
_MOST_RELATIVE_GAIN = 4.0
# The most rounds that what is known of a prompt's beginning stands for, beside those of the class. Fewer where it is
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
    """Decides for one request, by the planner's stance and its own record.

    It asks drafters while its drafts gain more, compared with usual ones, than the stance's threshold, and when it is
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
        # worth beside its probability, but for the mean weight of all.
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

    def plan(self, situation: Situation, load: Load = UNKNOWN_LOAD) -> RoundPlan:
        """The next round's limits: the fixed plan as far as it pays, or nothing at all."""
        planner = self._planner
        if (
            self._is_drafting
            and situation.has_drafter
            and not (self._alone_left or self._catches_up or situation.forced or situation.sources)
            and situation.requested_nodes is None
        ):
            # As most do most of the time.
            if load is not planner.load:
                planner.hear(load)
            common = planner.common
            if common is None or common.stance is not planner.stance:
                common = planner.find_common()
            gain, weight = self._gain, self._weight / common.mean_weight
            if common.hold and gain * weight >= common.least_gain:
                self._row_multiple = 1
                self._sources, self._left_out_next = (), NONE_LEFT_OUT
                steps = math.ceil(STEPS_PER_GAIN * gain) if gain > 1 else STEPS_PER_GAIN
                return common.known.get((weight, steps)) or common.plan(weight, gain, steps)
        return self._plan_anew(situation, load)

    def _plan_anew(self, situation: Situation, load: Load) -> RoundPlan:
        """The next round's limits, whatever the request does."""
        planner = self._planner
        if not self._number:
            self._number = planner.begins(self._weight)
        nodes, self._row_multiple = planner.fixed.limits(situation, load)
        if situation.forced or nodes == 0:
            return planner.fixed.plan(situation, load)
        if not situation.has_drafter:
            # A drafter that has dropped the request, or is gone, owes it nothing.
            self.tree_arrived()
            fixed = planner.fixed.plan(situation, load)
            # The cache may have something.
            return replace(fixed, row_price=self._row_price) if planner.stance.is_known else fixed
        if load is not planner.load:
            planner.hear(load)
        if not self._drafts(has_choice=bool(situation.sources)):
            return round_plan(0, 0)
        is_trial = self._alone_left > 0 or planner.exploration.is_trying
        self._sources, self._left_out_next = situation.sources, NONE_LEFT_OUT
        if situation.sources:
            self._left_out_next = planner.sources.left_out(self._number, situation.sources)
        plans = planner.draft_plans
        if not plans.stance.is_known:
            fixed = planner.fixed.plan(situation, load)
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
        stance = planner.stance
        if stance.price <= 0:
            return tree
        kept = planner.values.worth(tree, stance.log_price - self._log_worth + planner.weights.log_mean)
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
        return self._planner.stance.price / self._relative_weight

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
        floor = math.log(FLOOR_SHARE * self._planner.stance.price)
        return [likeliest] if self._planner.values.path_logs(tree)[likeliest] >= floor else []

    def _drafts(self, has_choice: bool) -> bool:
        """Whether the next round asks for a draft, of sources among which there is a choice or not."""
        exploration = self._planner.exploration
        if exploration.is_pausing or self._planner.reading.is_crowded():
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
        return gain * (self._weight / planner.weights.mean) >= margin * planner.stance.threshold

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
        usual = planner.stance.gain
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
            verified = Verified(tree, outcome.token_ids, outcome.num_accepted)
            sources.learn(self._number, self._sources, left_out, sent, verified, promised)
