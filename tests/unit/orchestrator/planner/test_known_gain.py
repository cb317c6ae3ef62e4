"""What is known of a prompt's beginning, as the prior of a request's own gain."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from coppice.lab.simulator.policies import Policy
from orchestrator.planner.adaptive import LEAST_SHARE, AdaptivePlanner, AdaptiveRequest
from orchestrator.planner.base import Planner, RoundContext
from orchestrator.prefix_cache.values import PrefixStatistics
from orchestrator.request.rounds import Outcome
from orchestrator.request.statistics import DraftGain, Statistics
from tests.unit.orchestrator.planner.drawn_text import Predictability
from tests.unit.orchestrator.planner.endless_load import EndlessLoad

PLANNER = Policy("planner")
EASY, HOPELESS = Predictability(), Predictability(first=0.1, second=0.05)
# Of a hundred rounds, no draft was accepted; and of as many, twice as much as of usual ones.
BAD, GOOD = DraftGain(100, 0.0), DraftGain(100, 200.0)


def request() -> AdaptiveRequest:
    planner = AdaptivePlanner(15, 40_000)
    planner.mean_accepted = 2.0
    return planner.follow(is_greedy=True)


def play(one: AdaptiveRequest, accepted: list[int]) -> None:
    """Rounds that had asked for drafts, the first aside, which is the prompt's."""
    for number, count in enumerate(accepted):
        outcome = Outcome(100 + number, (1,) * (count + 1), count, 0, 0, 0, b"", number, 1000, 0, 0)
        one.tree_arrived()
        one.round_over(outcome, [], asked=True)


def gain_of(one: AdaptiveRequest) -> float:
    return one._gain


@pytest.mark.parametrize("num_before", [0, 1, 3, 6])
def test_it_does_not_matter_in_which_round_it_comes(num_before: int) -> None:
    accepted = [0, 2, 1, 3, 0, 2, 4, 1]
    early, late = request(), request()
    early.know(GOOD)
    play(early, accepted)
    play(late, accepted[: 1 + num_before])
    late.know(GOOD)
    play(late, accepted[1 + num_before :])
    # Gains of the two planners' classes are alike, too, so that only the order differs. After a pause in between, the
    # first round of the rest is no prompt's.
    assert gain_of(late) == pytest.approx(gain_of(early))


@pytest.mark.parametrize(
    ("known", "expected"),
    [(BAD, 2 / 3), (GOOD, 5 / 3), (DraftGain(8, 16.0), 1.5), (DraftGain(2, 0.0), 0.8), (DraftGain(), 1)],
)
def test_its_weight_is_bounded_by_its_rounds_and_by_two_parts_of_three_or_one_where_it_is_bad(
    known: DraftGain, expected: float
) -> None:
    one = request()
    one.know(known)
    assert gain_of(one) == pytest.approx(expected)


def test_the_requests_own_rounds_soon_say_more() -> None:
    one, other = request(), request()
    other.know(BAD)
    for each in (one, other):
        play(each, [0] + [2] * 24)
    # Of a third of a usual draft's gain, eight rounds' weight among 32 is left.
    assert gain_of(one) - gain_of(other) == pytest.approx(1 / 3 * 8 / 32, abs=0.01)


def test_one_hit_of_drafters_that_never_hit_is_within_the_bounds_of_statistics() -> None:
    one = request()
    play(one, [0] * 4000 + [3])
    record = PrefixStatistics.of(Statistics(), 0.0, 0.0, one.gain)
    assert record.gain.rounds == 4000
    assert 0 < record.gain.total < 1000


def test_a_request_counts_what_its_drafts_gain() -> None:
    one = request()
    play(one, [0, 2, 4, 0])
    assert one.gain == DraftGain(3, 3.0)


@pytest.mark.parametrize(("known", "drafts"), [(None, False), (GOOD, True), (BAD, False)])
def test_where_usual_drafts_do_not_pay_a_good_beginning_makes_a_request_draft(
    known: DraftGain | None, drafts: bool
) -> None:
    one = request()
    one._planner.break_even = 1.3 * one._planner.mean_accepted / LEAST_SHARE
    if known is not None:
        one.know(known)
    assert (one.plan(RoundContext(has_drafter=True)).max_nodes > 0) == drafts


def deployment(text: Predictability, known: DraftGain | None, seed: int) -> EndlessLoad:
    def planner(clock: Callable[[], float]) -> Planner:
        made = AdaptivePlanner(15, 40_000, clock=clock)
        follow = made.follow

        def told(is_greedy: bool) -> AdaptiveRequest:
            one = follow(is_greedy)
            if known is not None:
                one.know(known)
            return one

        made.follow = told  # type: ignore[method-assign]
        return made

    return EndlessLoad(planner, PLANNER, text, seed)


@pytest.mark.parametrize("num_requests", [1, 4, 8])
def test_a_beginning_that_is_known_wrongly_costs_hardly_anything(num_requests: int) -> None:
    """All requests believe that their drafts gain nothing, which is not so, or much, where they gain nothing."""
    for text, known in ((EASY, BAD), (HOPELESS, GOOD)):
        tokens = {}
        for one in (None, known):
            tokens[one] = 0.0
            for seed in range(3):
                model = deployment(text, one, seed)
                model.set_load(num_requests)
                tokens[one] += model.run(3.0)
        assert tokens[known] >= 0.95 * tokens[None]
