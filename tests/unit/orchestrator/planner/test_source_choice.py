"""Which sources are asked: those that add enough for their time; others are tried now and then."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from coppice.core.tree import ROOT, TokenTree, chain
from orchestrator.planner.passes import PassSample
from orchestrator.planner.source_choice import (
    LONGEST_BETWEEN_PAUSES,
    LONGEST_TRIAL,
    NONE_LEFT_OUT,
    PAUSE_PASSES,
    TRIAL_SHARE,
    AcceptedPath,
    SourceChoice,
)
from orchestrator.planner.source_comparison import FIRST_BETWEEN
from orchestrator.request.merge import merge

SLOW_S, PASS_S = 0.004, 0.01


@dataclass
class Quality:
    """Tokens that a source's tree holds of what is said next, on average; the time that asking it adds to a pass."""

    right: float
    extra_s: float = 0.0
    is_silent: bool = False


class Rounds:
    """Rounds of requests whose sources all draft the one thing that is said, each down to a depth of its own."""

    def __init__(self, qualities: Mapping[str, Quality], num_requests: int, seed: int = 0) -> None:
        self.choice = SourceChoice(seed)
        self.qualities = dict(qualities)
        self.num_requests = num_requests
        self.num_rounds = 0
        self.asked = dict.fromkeys(qualities, 0)
        self._random = random.Random(seed)
        self._plans = dict.fromkeys(range(1, num_requests + 1), NONE_LEFT_OUT)

    def run(self, num_passes: int) -> dict[str, float]:
        """Passes of all requests; returns the share of rounds that asked each source."""
        before, rounds_before = dict(self.asked), self.num_rounds
        for _ in range(num_passes):
            self._pass()
        num_rounds = self.num_rounds - rounds_before
        return {name: (self.asked[name] - before[name]) / num_rounds for name in self.asked}

    def _pass(self) -> None:
        names = tuple(self.qualities)
        seconds = PASS_S * self._random.uniform(0.9, 1.1)
        seconds += sum(quality.extra_s for name, quality in self.qualities.items() if self._num_asking(name))
        record = PassSample(self.num_requests, self.num_requests, 0, 0, 0, seconds, 0.0)
        for number, left_out in list(self._plans.items()):
            self.num_rounds += 1
            trees = [self._tree(name) for name in names if name not in left_out and not self.qualities[name].is_silent]
            for name in names:
                self.asked[name] += name not in left_out
            tree = merge(trees)
            accepted = max((path[-1] + 1 for path in tree.paths() if path[-1] != 99), default=0)
            verified = AcceptedPath(tree, list(range(accepted + 1)), accepted)
            self.choice.count(number, names, left_out)
            self.choice.learn(number, names, left_out, [tree], verified, accepted)
            self._plans[number] = self.choice.left_out(number, names)
        self.choice.pass_over(record, self.num_requests, may_compare=True)

    def _num_asking(self, name: str) -> int:
        return sum(name not in left_out for left_out in self._plans.values())

    def _tree(self, name: str) -> TokenTree:
        right = max(0, round(self._random.gauss(self.qualities[name].right, 1.2)))
        # What comes behind it is wrong.
        return chain([*range(right), 99]).labelled(name)


GOOD, BETTER = Quality(2.0), Quality(3.0)


@pytest.mark.parametrize("num_requests", [1, 4, 16])
@pytest.mark.parametrize("seed", range(3))
def test_a_source_that_adds_nothing_is_soon_tried_only_and_the_other_always_asked(num_requests: int, seed: int) -> None:
    one = Rounds({"good": GOOD, "useless": Quality(-9.0)}, num_requests, seed)
    one.run(150)
    shares = one.run(1500)
    assert shares["good"] == 1.0
    assert 0 < shares["useless"] <= 1.5 * TRIAL_SHARE


@pytest.mark.parametrize("num_requests", [1, 8])
def test_a_silent_source_is_tried_only(num_requests: int) -> None:
    one = Rounds({"good": GOOD, "silent": Quality(5.0, is_silent=True)}, num_requests)
    one.run(150)
    # Its trials take as long as trials may.
    assert 0 < one.run(1500)["silent"] <= 5 * TRIAL_SHARE


@pytest.mark.parametrize("num_requests", [1, 8])
def test_of_two_that_say_the_same_the_one_that_costs_less_stays(num_requests: int) -> None:
    one = Rounds({"slow": Quality(2.0, SLOW_S), "quick": Quality(2.0)}, num_requests)
    one._tree = lambda name: chain(range(2)).labelled(name)  # type: ignore[method-assign]
    one.run(400)
    shares = one.run(600)
    assert shares["quick"] == 1.0
    assert shares["slow"] <= 2 * TRIAL_SHARE


@pytest.mark.parametrize("num_requests", [1, 8])
def test_sources_that_both_add_enough_are_both_asked_save_for_pauses(num_requests: int) -> None:
    one = Rounds({"good": GOOD, "better": BETTER}, num_requests)
    one.run(1000)
    shares = one.run(800)
    assert min(shares.values()) >= 1 - 3 * PAUSE_PASSES / LONGEST_BETWEEN_PAUSES
    assert min(shares.values()) < 1


def test_a_source_whose_gain_is_not_worth_its_time_is_dropped_and_one_whose_is_stays() -> None:
    # Beside the good one's two tokens and the target's own, it adds half a token, a sixth, or more.
    dear, cheap = (Rounds({"good": GOOD, "other": Quality(2.0, extra_s)}, 4) for extra_s in (0.006, 0.0))
    for one in (dear, cheap):
        one.run(400)
    assert dear.run(600)["other"] <= 3 * TRIAL_SHARE
    assert cheap.run(600)["other"] >= 0.9


@pytest.mark.parametrize("num_requests", [1, 8])
def test_a_source_that_has_become_good_is_asked_again_and_one_that_has_become_bad_no_more(num_requests: int) -> None:
    one = Rounds({"first": GOOD, "second": Quality(-9.0)}, num_requests)
    one.run(600)
    one.qualities = {"first": Quality(-9.0), "second": GOOD}
    one.run(1200)
    shares = one.run(600)
    assert shares["second"] == 1.0
    assert shares["first"] <= 2 * TRIAL_SHARE


def test_a_share_changes_by_and_by_and_each_request_keeps_its_own() -> None:
    one = Rounds({"good": GOOD, "late": Quality(-9.0)}, 32)
    one.run(100)
    one.qualities["late"] = BETTER
    seen = [one.run(1)["late"] for _ in range(400)]
    steps = [share for before, share in itertools.pairwise(seen) if share != before]
    assert any(0.2 < share < 0.3 for share in steps)
    assert any(0.4 < share < 0.6 for share in steps)
    assert 1.0 in steps


def test_one_source_is_asked_whatever_is_known_of_those_that_are_there() -> None:
    one = Rounds({"good": GOOD, "useless": Quality(-9.0), "silent": Quality(1.0, is_silent=True)}, 1)
    one.run(600)
    number = next(number for number in range(2, 9) if not one.choice.is_tried_by(number))
    assert one.choice.left_out(number, ("good", "useless", "silent")) == {"useless", "silent"}
    assert len(one.choice.left_out(number, ("useless", "silent"))) == 1


def test_what_is_tried_in_vain_is_another_source_each_time_and_every_other_time_the_best_until_all_are_compared() -> (
    None
):
    names = ("poor", "good", "better")
    one = Rounds({"poor": Quality(0.0, SLOW_S), "good": Quality(2.0, SLOW_S), "better": Quality(4.0, SLOW_S)}, 1)
    while one.num_rounds == 0 or one.choice.is_comparing:
        one.run(1)
    asked = []
    for _ in range(4):
        [alone] = set(names) - one.choice.left_out(2, names)
        asked.append(alone)
        one.choice.trial_over(found_gain=False, may_compare=False)
    assert asked == ["better", "good", "better", "poor"]
    one.choice.trial_over(found_gain=False, may_compare=True)
    # The last comparison was only just now.
    assert not one.choice.is_comparing
    one.run(FIRST_BETWEEN)
    one.choice.trial_over(found_gain=True, may_compare=True)
    assert not one.choice.is_comparing
    one.choice.trial_over(found_gain=False, may_compare=True)
    assert one.choice.is_comparing


def test_sources_are_compared_anew_when_rounds_have_quite_other_tokens() -> None:
    one = Rounds({"first": Quality(3.0, SLOW_S), "second": Quality(2.0, SLOW_S)}, 1)
    one._tree = lambda name: chain(range(round(one.qualities[name].right))).labelled(name)  # type: ignore[method-assign]
    one.run(FIRST_BETWEEN // 2)
    assert one.choice.left_out(2, ("first", "second")) == {"second"}
    one.qualities["first"] = Quality(1.0, SLOW_S)
    num_passes = next(num_passes for num_passes in range(100) if one.choice.is_comparing or not one.run(1))
    assert num_passes < 60
    one.run(80)
    assert one.choice.left_out(2, ("first", "second")) == {"first"}


def test_a_trial_whose_request_ends_goes_on_with_the_next_one() -> None:
    names = ("good", "useless")
    one = Rounds({"good": GOOD, "useless": Quality(-9.0)}, 2)
    while not one.choice.is_trying:
        one.run(1)
    tried, other = (1, 2) if one.choice.is_tried_by(1) else (2, 1)
    one.choice.request_ended(other)
    assert one.choice.is_tried_by(tried)
    one.choice.request_ended(tried)
    assert not one.choice.is_tried_by(tried)
    assert one.choice.is_trying
    assert one.choice.left_out(other, names) == {"useless"}
    one.choice.count(other, names, frozenset({"useless"}))
    assert one.choice.left_out(other, names) == NONE_LEFT_OUT


@pytest.mark.parametrize("is_asked", [True, False])
def test_a_trial_of_a_source_that_is_gone_or_of_requests_that_stop_drafting_is_soon_over(*, is_asked: bool) -> None:
    one = Rounds({"good": GOOD, "fair": GOOD, "useless": Quality(-9.0)}, 1)
    while not one.choice.is_tried_by(1):
        one.run(1)
    del one.qualities[one.choice._trial.name]  # type: ignore[union-attr]
    record = PassSample(1, 0, 1, 1, 9, PASS_S, 0.0)
    for _ in range(LONGEST_TRIAL):
        if is_asked:
            one.run(1)
        else:
            one.choice.pass_over(record, 1, may_compare=True)
    assert not one.choice.is_trying


def test_what_a_source_adds_are_accepted_nodes_of_its_own_alone() -> None:
    names = ("a", "b", "cache")
    #     1ab - 2a - 3ac
    #      \ 4b
    tree = TokenTree((1, 2, 3, 4), (ROOT, 0, 1, 0), (-0.1,) * 4, names, (0b011, 0b001, 0b101, 0b010))
    long, short = AcceptedPath(tree, (1, 2, 3, 9), 3), AcceptedPath(tree, (1, 4, 9), 2)
    assert [long.added_by(name, ("a", "b")) for name in ("a", "b")] == [2, 0]
    assert [short.added_by(name, ("a", "b")) for name in ("a", "b")] == [0, 1]
    assert AcceptedPath(None, (9,), 0).added_by("a", ("a", "b")) == 0


def test_a_source_that_comes_later_is_tried_beside_the_others() -> None:
    one = Rounds({"good": GOOD, "useless": Quality(-9.0)}, 1)
    one.run(100)
    one.qualities["new"] = Quality(6.0)
    one.asked["new"] = 0
    # The round that is planned already knows nothing of it.
    one.run(1)
    assert one.run(1)["new"] == 0
    one.run(700)
    assert one.run(100)["new"] >= 0.9


def test_rounds_of_a_request_that_comes_from_another_verifier_are_no_choice_of_this_one() -> None:
    choice = SourceChoice(0)
    choice.count(1, ("a", "b"), frozenset({"b"}))
    choice.pass_over(PassSample(1, 1, 1, 1, 3, 0.001, 0.001), 1, may_compare=True)
    assert not choice.is_comparing
    assert len(choice.left_out(1, ("a", "b"))) == 1
