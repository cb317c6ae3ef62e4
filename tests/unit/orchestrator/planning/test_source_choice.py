"""Which sources are asked: those that add enough for their time; others are tried now and then."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from coppice.tree import ROOT, TokenTree, chain
from orchestrator.merge import labelled, merge
from orchestrator.planning.cost_model import PassRecord
from orchestrator.planning.source_choice import (
    LONGEST_BETWEEN_PAUSES,
    NONE_LEFT_OUT,
    PAUSE_PASSES,
    TRIAL_SHARE,
    SourceChoice,
    Verified,
)

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
        seconds += sum(
            quality.extra_s
            for name, quality in self.qualities.items()
            if self._num_asking(name) >= self.num_requests / 2
        )
        record = PassRecord(self.num_requests, self.num_requests, 0, 0, 0, seconds, 0.0)
        for number, left_out in list(self._plans.items()):
            self.num_rounds += 1
            trees = [self._tree(name) for name in names if name not in left_out and not self.qualities[name].is_silent]
            for name in names:
                self.asked[name] += name not in left_out
            tree = merge(trees)
            accepted = max((path[-1] + 1 for path in tree.paths() if path[-1] != 99), default=0)
            verified = Verified(tree, list(range(accepted + 1)), accepted)
            self.choice.count(number, names, left_out)
            self.choice.learn(number, names, left_out, [tree], verified)
            self._plans[number] = self.choice.left_out(number, names)
        self.choice.pass_over(record, self.num_requests)

    def _num_asking(self, name: str) -> int:
        return sum(name not in left_out for left_out in self._plans.values())

    def _tree(self, name: str) -> TokenTree:
        right = max(0, round(self._random.gauss(self.qualities[name].right, 1.2)))
        # What comes behind it is wrong.
        return labelled(chain([*range(right), 99]), name)


GOOD, BETTER = Quality(2.0), Quality(3.0)


@pytest.mark.parametrize("num_requests", [1, 4, 16])
@pytest.mark.parametrize("seed", range(3))
def test_a_source_that_adds_nothing_is_soon_tried_only_and_the_other_always_asked(num_requests: int, seed: int) -> None:
    one = Rounds({"good": GOOD, "useless": Quality(-9.0)}, num_requests, seed)
    one.run(150)
    shares = one.run(1500 if num_requests == 1 else 300)
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
    one._tree = lambda name: labelled(chain(range(2)), name)  # type: ignore[method-assign]
    one.run(400)
    shares = one.run(600)
    assert shares["quick"] == 1.0
    assert shares["slow"] <= 2 * TRIAL_SHARE


@pytest.mark.parametrize("num_requests", [1, 8])
def test_sources_that_both_add_enough_are_both_asked_save_for_pauses(num_requests: int) -> None:
    one = Rounds({"good": GOOD, "better": BETTER}, num_requests)
    one.run(400)
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
    one = Rounds({"good": GOOD, "useless": Quality(-9.0)}, 32)
    seen = [one.run(1)["useless"] for _ in range(60)]
    steps = [share for before, share in itertools.pairwise(seen) if share != before]
    assert any(0.4 < share < 0.6 for share in steps)
    assert any(0.2 < share < 0.3 for share in steps)


def test_one_source_is_asked_whatever_is_known_of_those_that_are_there() -> None:
    one = Rounds({"good": GOOD, "useless": Quality(-9.0), "silent": Quality(1.0, is_silent=True)}, 1)
    one.run(600)
    number = next(number for number in range(2, 9) if not one.choice.is_tried_by(number))
    assert one.choice.left_out(number, ("good", "useless", "silent")) == {"useless", "silent"}
    assert one.choice.left_out(number, ("useless", "silent")) == NONE_LEFT_OUT


def test_one_that_adds_tokens_where_drafting_as_a_whole_is_tried_comes_back_without_a_trial_of_its_own() -> None:
    one = Rounds({"good": GOOD, "other": Quality(-9.0)}, 1)
    one.run(150)
    names = ("good", "other")
    tree = merge([labelled(chain([99]), "good"), labelled(chain([1, 2]), "other")])
    while one.choice.is_tried_by(1):
        one.run(1)
    assert one.choice.left_out(1, names) == {"other"}
    for _ in range(30):
        one.choice.count(1, names, NONE_LEFT_OUT)
        one.choice.learn(1, names, NONE_LEFT_OUT, [tree], Verified(tree, (1, 2, 3), 2))
        one.choice.pass_over(PassRecord(1, 1, 3, 4, 9, PASS_S, 0.0), 1)
    assert one.choice.left_out(1, names) != {"other"}


def test_a_trial_ends_with_its_request() -> None:
    one = Rounds({"good": GOOD, "useless": Quality(-9.0)}, 1)
    while not one.choice.is_tried_by(1):
        one.run(1)
    one.choice.request_ended(2)
    assert one.choice.is_tried_by(1)
    one.choice.request_ended(1)
    assert not one.choice.is_tried_by(1)
    assert "useless" in one.choice.left_out(1, ("good", "useless"))


def test_what_a_source_adds_are_accepted_nodes_of_its_own_alone() -> None:
    names = ("a", "b", "cache")
    #     1ab - 2a - 3ac
    #      \ 4b
    tree = TokenTree((1, 2, 3, 4), (ROOT, 0, 1, 0), (-0.1,) * 4, names, (0b011, 0b001, 0b101, 0b010))
    long, short = Verified(tree, (1, 2, 3, 9), 3), Verified(tree, (1, 4, 9), 2)
    assert [long.added_by(name, ("a", "b")) for name in ("a", "b")] == [2, 0]
    assert [short.added_by(name, ("a", "b")) for name in ("a", "b")] == [0, 1]
    assert Verified(None, (9,), 0).added_by("a", ("a", "b")) == 0


def test_a_source_that_comes_while_another_is_dropped_is_known_from_its_first_round() -> None:
    """Plans of a trial of all ask nobody which sources to leave out."""
    choice = SourceChoice(0)
    choice.left_out(1, ("a", "b"))
    choice._sources["a"].share = 0.0
    choice._until_trial = 100
    choice.count(1, ("a", "new"), NONE_LEFT_OUT)
    choice.pass_over(PassRecord(1, 1, 1, 1, 3, 0.001, 0.001), 1)
    assert choice.left_out(2, ("a", "new")) == {"a"}
