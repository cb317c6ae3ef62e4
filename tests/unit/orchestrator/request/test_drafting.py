"""Drafts of one request: which trees are used, what the verifier is sent, and when it may wait."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coppice.core.draft_distribution import DraftDistribution
from coppice.core.errors import InvalidTreeError
from coppice.core.sampled_tree import SampledTree
from coppice.core.sampling import SamplingParams
from coppice.core.tree import EMPTY_TREE, ROOT, TokenTree, chain
from coppice.v1 import sampling_pb2, tree_pb2
from orchestrator.planner.base import FixedPlanner, RoundContext, RoundPlan
from orchestrator.request.drafting import BUDGETS_SENT, Drafting
from orchestrator.request.rounds import UNKNOWN_LOAD, Outcome, VerifierLoad
from orchestrator.request.statistics import Statistics, verified_tree
from orchestrator.request.transcript import Transcript
from tests.unit.orchestrator.request.test_better_trees import connected

VOCAB = 50


class Round:
    """A request behind three prompt tokens, and everything that was sent for it."""

    def __init__(self, max_nodes: int = 6, max_tokens: int = 20, *, sampled: bool = False) -> None:
        self.transcript = Transcript([1, 2, 3], (), max_tokens, 100, (), ())
        planner = FixedPlanner(max_nodes, linger_us=1000)
        rule = sampling_pb2.ACCEPTANCE_RULE_TRAVERSAL if sampled else sampling_pb2.ACCEPTANCE_RULE_UNSPECIFIED
        sampling = SamplingParams(temperature=1.0)
        self.drafting = Drafting((), planner, self.transcript, sampling, None, False, VOCAB, acceptance=rule)
        self.drafting.open()
        self.sent: list[tuple[int, TokenTree]] = []
        self.drafting.opened(lambda base, tree, budget, linger_us: self.sent.append((base, tree)))

    def tree(self, source: str, tree: TokenTree, base: int = 3, assumed: tuple[int, ...] = ()) -> None:
        self.drafting.on_tree(source, base, assumed, tree)


def outcome(base: int, tokens: tuple[int, ...], accepted: int = 0, nodes: int = 0) -> Outcome:
    return Outcome(base, tokens, accepted, nodes, accepted, 0, b"", 1 + nodes, 1000, 0, 0)


def test_a_tree_for_the_committed_length_is_sent_at_once() -> None:
    one = Round()
    one.tree("a", chain([7, 8]))
    assert [(base, list(tree.paths())) for base, tree in one.sent] == [(3, [(7,), (7, 8)])]


def test_a_late_tree_that_the_outcome_did_not_leave_is_passed_on_as_it_is() -> None:
    one = Round()
    one.transcript.append((7, 9))
    one.drafting.round_done(outcome(3, (7, 9)))
    one.tree("a", chain([7, 9, 4]), base=3)
    one.tree("a", chain([7, 8, 4]), base=3)
    assert [(base, list(tree.paths())[-1]) for base, tree in one.sent] == [(3, (7, 9, 4))]
    assert one.drafting.stale == {"left": 1}


@pytest.mark.parametrize("base", [0, 2, 4])
def test_a_tree_for_another_length_is_counted_and_dropped(base: int) -> None:
    one = Round()
    one.tree("a", chain([7, 8]), base=base)
    assert not one.sent
    assert one.drafting.stale_drafts == 1


@pytest.mark.parametrize(("assumed", "fits"), [((2, 3), True), ((2, 4), False), ((2,), False)])
def test_a_tree_drafted_ahead_is_used_when_what_it_assumed_came_true(assumed: tuple[int, ...], fits: bool) -> None:
    one = Round()
    one.tree("a", chain([7]), base=1, assumed=assumed)
    assert bool(one.sent) == fits
    assert one.drafting.stale_drafts == (not fits)


def test_trees_of_several_sources_are_sent_as_their_union() -> None:
    one = Round()
    one.tree("a", chain([7, 8]))
    one.tree("b", chain([7, 9]))
    assert set(one.sent[-1][1].paths()) == {(7,), (7, 8), (7, 9)}


def test_the_likeliest_nodes_are_kept_and_none_reaches_past_the_end() -> None:
    one = Round(max_nodes=1, max_tokens=3)
    log_probs = (-0.1, -0.1, 0.0, -5.0, -1.0, -2.0, -6.0)
    one.tree("a", TokenTree((7, 8, 9, 10, 11, 12, 13), (-1, 0, 1, -1, -1, -1, -1), log_probs))
    assert BUDGETS_SENT == 4
    assert list(one.sent[-1][1].paths()) == [(7,), (7, 8), (11,), (12,)]


def test_a_token_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(InvalidTreeError, match="outside the vocabulary of 50"):
        Round().tree("a", chain([VOCAB]))


def test_trees_are_forgotten_with_their_round_and_come_back_only_for_it() -> None:
    one = Round()
    one.tree("a", chain([7]))
    one.transcript.append((9,))
    assert len(one.drafting.round_done(outcome(3, (9,)))) == 1
    one.tree("b", chain([8]), base=4)
    assert list(one.sent[-1][1].paths()) == [(8,)]
    one.drafting.opened(lambda base, tree, budget, linger_us: one.sent.append((base, tree)))
    assert one.sent[-1] == one.sent[-2]


def test_counts_go_to_the_sources_of_the_tree_that_was_verified() -> None:
    first, both = Round(), Round()
    first.tree("a", chain([7, 8]))
    both.tree("a", chain([7, 8]))
    both.tree("b", chain([7, 9]))
    statistics = Statistics()
    sent = [first.sent[0][1], both.sent[-1][1]]
    # The verifier had begun with the first tree when the union came.
    statistics.record(outcome(3, (7, 8, 4), accepted=2, nodes=2), sent)
    assert {name: (one.proposed, one.accepted) for name, one in statistics.sources.items()} == {"a": (2, 2)}
    statistics.record(outcome(3, (7, 9, 4), accepted=2, nodes=3), sent)
    assert {name: (one.proposed, one.accepted) for name, one in statistics.sources.items()} == {
        "a": (4, 3),
        "b": (2, 2),
    }


def test_what_is_left_of_an_earlier_tree_counts_where_the_verifier_had_taken_that() -> None:
    """It began with a long one, and what is left of that is verified next; the one that came late is of no use."""
    one = Round()
    one.tree("a", chain([7, 8, 9, 10, 11]))
    one.tree("a", chain([6]))
    one.transcript.append((7, 8))
    one.drafting.round_done(outcome(3, (7, 8), accepted=1, nodes=2))
    one.transcript.append((9, 10))
    sent = one.drafting.round_done(outcome(5, (9, 10), accepted=1, nodes=3))
    statistics = Statistics()
    statistics.record(outcome(5, (9, 10), accepted=1, nodes=3), sent)
    assert statistics.sources["a"].proposed == 3


def test_a_tree_that_came_too_late_counts_in_the_next_round_though_this_one_verified_the_targets_own() -> None:
    one = Round()
    one.tree("a", chain([7, 8, 9]))
    one.transcript.append((7,))
    own = redrafted(3, (7,), EMPTY_TREE, draft_origin=tree_pb2.DRAFT_ORIGIN_REDRAFT)
    one.drafting.round_done(own)
    one.transcript.append((8, 9, 4))
    [tree] = one.drafting.round_done(outcome(4, (8, 9, 4), accepted=2, nodes=2))
    assert (tree.token_ids, tree.source_names) == ((8, 9), ("a",))


def test_a_tree_that_was_cut_is_one_that_had_more_nodes() -> None:
    long, short = chain([7, 8, 9]).labelled("a"), chain([6]).labelled("b")
    assert verified_tree([long, short], 2).token_ids == (7, 8)
    assert verified_tree([long, short], 1) is short
    assert verified_tree([short], 2) is short


@pytest.mark.parametrize(
    ("round_context", "load", "plan"),
    [
        (RoundContext(has_drafter=True), UNKNOWN_LOAD, RoundPlan(12, 1000)),
        (RoundContext(has_drafter=True, requested_nodes=5), UNKNOWN_LOAD, RoundPlan(5, 1000)),
        (RoundContext(has_drafter=True, requested_nodes=99), UNKNOWN_LOAD, RoundPlan(12, 1000)),
        (RoundContext(has_drafter=True, requested_nodes=0), UNKNOWN_LOAD, RoundPlan(0, 0)),
        (RoundContext(has_drafter=False), UNKNOWN_LOAD, RoundPlan(12, 0)),
        (RoundContext(has_drafter=True, row_multiple=4), UNKNOWN_LOAD, RoundPlan(12, 1000, row_multiple=4)),
        (
            RoundContext(has_drafter=True, row_multiple=4),
            VerifierLoad(batch_size=1),
            RoundPlan(12, 1000, row_multiple=4),
        ),
        (RoundContext(has_drafter=True, row_multiple=4), VerifierLoad(batch_size=2), RoundPlan(12, 1000)),
    ],
)
def test_the_fixed_plan_waits_only_where_a_draft_can_come_and_fills_rows_only_alone(
    round_context: RoundContext, load: VerifierLoad, plan: RoundPlan
) -> None:
    assert FixedPlanner(12, 1000).plan(round_context, load) == plan


DRAWN_FROM = DraftDistribution((7, 8, 9), (1.0, 2.0, 5.0))


def sampled_tree(depth: int) -> TokenTree:
    """Two children of the root, and a chain of eights behind the first."""
    parents = (ROOT, ROOT, 0, *range(2, depth))
    distributions = (DRAWN_FROM, DRAWN_FROM, None, *[DRAWN_FROM] * (depth - 2), None)
    return SampledTree((7, 9, *[8] * (depth - 1)), parents, distributions).token_tree("a")


def test_a_sampled_tree_is_passed_on_whole_whatever_the_budget() -> None:
    one = Round(max_nodes=1, sampled=True)
    tree = sampled_tree(8)
    one.tree("a", tree)
    assert one.sent == [(3, tree)]


def test_a_sampled_tree_ends_where_the_output_does_and_stays_a_draw() -> None:
    one = Round(max_tokens=4, sampled=True)
    one.tree("a", sampled_tree(5))
    [(_, sent)] = one.sent
    assert sent.depth == 3
    assert SampledTree.of(sent).distributions == (DRAWN_FROM, DRAWN_FROM, None, DRAWN_FROM, None)


def test_of_sampled_trees_nothing_is_re_rooted_and_nothing_left_over() -> None:
    one = Round(sampled=True)
    one.tree("a", sampled_tree(4))
    one.transcript.append((7,))
    assert len(one.drafting.round_done(outcome(3, (7,)))) == 1
    one.tree("a", sampled_tree(4))
    assert len(one.sent) == 1
    assert one.drafting.stale == {"sampled": 1}
    one.drafting.opened(lambda base, tree, budget, linger_us: one.sent.append((base, tree)))
    assert len(one.sent) == 1


def test_a_tree_that_had_to_be_sampled_and_is_not_is_refused() -> None:
    with pytest.raises(InvalidTreeError, match="needs the distributions"):
        Round(sampled=True).tree("a", chain([7]))
    outside = DraftDistribution((7, VOCAB), (1.0, 1.0))
    with pytest.raises(InvalidTreeError, match="outside the vocabulary of 50"):
        Round(sampled=True).tree("a", SampledTree((7,), (ROOT,), (outside, None)).token_tree("a"))


def redrafted(base: int, tokens: tuple[int, ...], tree: TokenTree, **fields: int) -> Outcome:
    return replace(outcome(base, tokens), redraft=tree.labelled("redraft"), **fields)  # type: ignore[arg-type]


def test_the_targets_own_draft_is_merged_with_what_drafters_say() -> None:
    one = Round()
    one.transcript.append((7,))
    one.drafting.round_done(redrafted(3, (7,), chain([5, 6])))
    assert one.sent == []
    one.tree("a", chain([5, 8]), base=4)
    [(base, tree)] = one.sent
    assert (base, set(tree.paths())) == (4, {(5,), (5, 8), (5, 6)})
    assert tree.sources_of(0) == ("a", "redraft")
    # What holds for one round does not for the next.
    one.transcript.append((9,))
    one.drafting.round_done(outcome(4, (9,)))
    one.tree("a", chain([3]), base=5)
    assert one.sent[-1] == (5, chain([3]).labelled("a"))


def test_a_round_of_the_targets_own_draft_is_counted_as_that() -> None:
    one, statistics = Round(), Statistics()
    one.transcript.append((7,))
    first = redrafted(3, (7,), chain([5, 6]))
    statistics.record(first, one.drafting.round_done(first))
    one.transcript.append((5, 9))
    second = replace(outcome(4, (5, 9), accepted=1, nodes=2), draft_origin=tree_pb2.DRAFT_ORIGIN_REDRAFT)
    statistics.record(second, one.drafting.round_done(second))
    counts = statistics.sources["redraft"]
    assert (counts.proposed, counts.accepted) == (2, 1)
    assert statistics.origins[tree_pb2.DRAFT_ORIGIN_REDRAFT].accepted_tokens == 1


async def test_rounds_are_planned_by_the_load_that_was_told_last() -> None:
    told: list[VerifierLoad] = []

    class Hears(FixedPlanner):
        def plan(self, round_context: RoundContext, load: VerifierLoad = UNKNOWN_LOAD) -> RoundPlan:
            told.append(load)
            return super().plan(round_context, load)

    transcript = Transcript([1, 2, 3], (), 200, 500, (), ())
    drafting = Drafting((connected("a"),), Hears(4, linger_us=1000), transcript, SamplingParams(), 4, False, VOCAB)
    drafting.open()
    busy = drafting.load = VerifierLoad(batch_size=7, rows=30)
    drafting.on_drafters_changed()
    assert told[-1] is busy


async def test_what_is_left_over_for_a_round_without_drafts_is_verified_as_far_as_the_last_plan_went() -> None:
    """A budget of 0 would leave that to the verifier."""

    class Stops(FixedPlanner):
        def plan(self, round_context: RoundContext, load: VerifierLoad = UNKNOWN_LOAD) -> RoundPlan:
            return RoundPlan(self.max_nodes, self.linger_us)

    planner, sent = Stops(4, linger_us=1000), []
    transcript = Transcript([1, 2, 3], (), 200, 500, (), ())
    drafting = Drafting((connected("a"),), planner, transcript, SamplingParams(), 4, False, VOCAB)
    drafting.open()
    drafting.opening_linger_us()
    drafting.opened(lambda base, tree, budget, linger_us: sent.append((base, len(tree), budget)))
    drafting.on_tree("a", 3, (), chain(range(10, 26), [-0.01] * 16))
    planner.max_nodes = planner.linger_us = 0
    transcript.append((10,))
    drafting.round_done(outcome(3, (10,), 1, 4))
    assert sent == [(3, 16, 4), (4, 15, 4)]
    planner.max_nodes, planner.linger_us = 2, 1000
    transcript.append((11,))
    drafting.round_done(outcome(4, (11,), 1, 4))
    assert sent[-1] == (5, 14, 2)
