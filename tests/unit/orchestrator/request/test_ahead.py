"""What the orchestrator makes of draft-ahead: who is told what to expect, what goes to the verifier, what counts."""

from __future__ import annotations

from typing import Any

import pytest

from coppice.core.errors import InvalidTreeError
from coppice.core.sampling import SamplingParams
from coppice.core.tree import ROOT, TokenTree, chain
from coppice.v1 import drafter_pb2
from coppice.wire.convert import tree_to_proto
from orchestrator.peers.drafter_client import DrafterClient
from orchestrator.planner.base import FixedPlanner
from orchestrator.request.ahead import MOST_MERGED, MOST_NODES, AheadCounts, ExpectedDraft, hung
from orchestrator.request.drafting import Drafting
from orchestrator.request.rounds import Outcome
from orchestrator.request.transcript import Transcript
from tests.unit.orchestrator.test_left_out_drafters import connected


class Request:
    """A request behind three tokens, with two drafters of which a drafts ahead, and everything that was sent."""

    def __init__(self, *, synchronous: bool = False, max_nodes: int = 6, opened: bool = True) -> None:
        self.told: dict[str, list[Any]] = {"a": [], "b": []}
        self.clients = {kind: connected(kind, self.told[kind]) for kind in "ab"}
        self.clients["a"].drafts_ahead = True
        self.transcript = Transcript([1, 2, 3], (), 40, 100, (), ())
        planner = FixedPlanner(max_nodes, 1000)
        clients = tuple(self.clients.values())
        self.drafting = Drafting(
            clients, planner, self.transcript, SamplingParams(), None, False, 50, synchronous=synchronous
        )
        self.drafting.open()
        self.sent: list[tuple[int, TokenTree]] = []
        self.ahead: list[tuple[int, TokenTree]] = []
        if opened:
            self.open_verifier()

    def open_verifier(self) -> None:
        self.drafting.opened(
            lambda base, tree, budget, linger_us: self.sent.append((base, tree)),
            "",
            lambda base, tree: self.ahead.append((base, tree)),
        )

    def commit(self, *token_ids: int) -> None:
        outcome = self.outcome(*token_ids)
        self.transcript.append(token_ids)
        self.drafting.learn(outcome, self.drafting.round_done(outcome))

    def outcome(self, *token_ids: int) -> Outcome:
        return Outcome(self.transcript.length, token_ids, 0, 0, 0, 0, b"", 1, 1000, 0, 0)

    def expected(self, kind: str) -> list[tuple[int, tuple[int, ...]]]:
        messages = [one.expect for one in self.told[kind] if one.WhichOneof("event") == "expect"]
        return [(one.base_length, tuple(one.tree.token_ids)) for one in messages]

    @property
    def counts(self) -> tuple[int, list[int], int]:
        counts = self.drafting.ahead.counts
        return counts.expected, counts.hits_by_rank, counts.inside


DRAFTS = [ExpectedDraft((7, 9), -0.5, chain([4, 5])), ExpectedDraft((7, 8, 6), -1.0, chain([2], [-0.1]))]


async def test_a_drafter_that_drafts_ahead_is_told_of_its_merged_tree_once_a_round_and_no_other() -> None:
    one = Request()
    one.drafting.on_tree("b", 3, (), chain([7, 9]))
    assert one.expected("a") == []
    one.drafting.on_tree("a", 3, (), chain([7, 8]))
    one.drafting.on_tree("b", 3, (), chain([9]))
    assert one.expected("a") == [(3, (7, 9, 8))]
    assert one.expected("b") == []
    one.commit(7, 8, 3)
    one.drafting.on_tree("a", 6, (), chain([4]))
    assert one.expected("a")[1:] == [(6, (4,))]
    # Outcome and expectation: two messages a round.
    assert len(one.told["a"]) == 1 + 1 + 2


async def test_what_is_expected_is_what_the_budget_lets_be_verified() -> None:
    one = Request(max_nodes=1)
    one.drafting.on_tree("a", 3, (), chain([7, 8, 9], [-0.1, -0.1, -0.1]))
    assert one.expected("a") == [(3, (7,))]


@pytest.mark.parametrize("setting", ["synchronous", "no nodes"])
async def test_nobody_expects_anything_where_rounds_wait_or_nothing_is_drafted(setting: str) -> None:
    one = Request(synchronous=setting == "synchronous", max_nodes=0 if setting == "no nodes" else 6)
    for kind in "ab":
        one.drafting.on_tree(kind, 3, (), chain([7, 8]))
    one.drafting.on_ahead("a", 3, DRAFTS)
    assert one.expected("a") == []
    assert one.ahead == []
    one.commit(7, 9)
    assert one.counts == (0, [], 0)


async def test_trees_drafted_ahead_go_to_the_verifier_at_once_as_one_tree_of_outcomes() -> None:
    one = Request()
    one.drafting.on_tree("a", 3, (), chain([7, 8]))
    one.drafting.on_ahead("a", 3, DRAFTS)
    [(base, tree)] = one.ahead
    assert base == 3
    assert set(tree.paths()) == {(7,), (7, 9), (7, 9, 4), (7, 9, 4, 5), (7, 8), (7, 8, 6), (7, 8, 6, 2)}
    assert tree.path_log_probs[tree.children[tree.children[ROOT, 7], 9]] == -0.5
    # The round's own draft stays what it was.
    assert [list(sent.paths()) for _, sent in one.sent] == [[(7,), (7, 8)]]
    # Another verifier gets both.
    one.open_verifier()
    assert one.ahead[-1] == one.ahead[0]


async def test_hits_count_by_rank_of_all_outcomes_that_somebody_expected() -> None:
    one = Request()
    # The last two ended inside the expected tree: another one was verified. It goes on behind the first of them.
    rounds = [(7, 8, 6), (7, 9), (5,), (7,), (7, 8)]
    for outcome in rounds:
        base = one.transcript.length
        one.drafting.on_tree("a", base, (), chain([7, 8]))
        one.drafting.on_ahead("a", base, DRAFTS)
        one.commit(*outcome)
    assert one.counts == (5, [1, 2], 1)
    one.commit(3)
    assert one.counts == (5, [1, 2], 1)
    total = AheadCounts(1, [0, 0, 1], 1)
    total.add(one.drafting.ahead.counts)
    assert total == AheadCounts(6, [1, 2, 1], 2)


async def test_an_outcome_that_was_drafted_for_leaves_its_tree_as_the_next_draft() -> None:
    one = Request()
    one.drafting.on_tree("a", 3, (), chain([7, 8]))
    one.drafting.on_ahead("a", 3, DRAFTS)
    one.commit(7, 9)
    sent = one.drafting.round_ended(one.outcome())
    assert [list(tree.paths()) for tree in sent] == [[(4,), (4, 5)]]
    assert sent[0].source_names == ("a",)


async def test_trees_that_come_late_are_passed_on_for_the_outcome_that_came_and_dropped_for_others() -> None:
    one = Request()
    one.drafting.on_tree("a", 3, (), chain([7, 8]))
    one.commit(7, 9)
    one.drafting.on_ahead("a", 3, DRAFTS)
    assert one.ahead == []
    assert [base for base, _ in one.sent] == [3, 3]
    one.drafting.on_ahead("a", 3, DRAFTS[1:])
    one.drafting.on_ahead("a", 99, DRAFTS)
    assert one.drafting.stale == {"left": 2}
    # Nobody was told what to expect of this round.
    one.drafting.on_ahead("a", 5, DRAFTS)
    assert one.drafting.stale == {"left": 2, "unasked": 1}
    assert one.counts == (1, [], 0)


async def test_huge_and_many_trees_are_bounded_in_their_order() -> None:
    many = [ExpectedDraft((number % 50, number // 50), -1.0, chain([1] * 30)) for number in range(1000)]
    tree = hung(many, "a")
    assert len(tree) <= MOST_NODES
    assert tree.children[tree.children[ROOT, 0], 0] >= 0
    one = Request()
    one.drafting.on_tree("a", 3, (), chain([7, 8]))
    for _ in range(20):
        one.drafting.on_ahead("a", 3, many)
    assert len(one.ahead[-1][1]) <= MOST_NODES


async def test_trees_of_a_round_are_bounded_together() -> None:
    one = Request()
    one.drafting.on_tree("a", 3, (), chain([7, 8]))
    for first in range(20):
        different = [ExpectedDraft((first, number), -1.0, chain([1, 2, 3])) for number in range(50)]
        one.drafting.on_ahead("a", 3, different)
    assert 0 < len(one.ahead[-1][1]) <= MOST_MERGED


async def test_tokens_and_probabilities_that_make_no_sense_are_refused() -> None:
    one = Request()
    one.drafting.on_tree("a", 3, (), chain([7, 8]))
    with pytest.raises(InvalidTreeError, match="outside the vocabulary"):
        one.drafting.on_ahead("a", 3, [ExpectedDraft((50,), 0.0, chain([1]))])
    with pytest.raises(InvalidTreeError, match="outside the vocabulary"):
        one.drafting.on_ahead("a", 3, [ExpectedDraft((1,), 0.0, chain([50]))])
    with pytest.raises(InvalidTreeError, match="log-probability"):
        ExpectedDraft((1,), float("nan"), chain([1]))


async def test_a_cyclic_tree_drops_the_drafter_from_the_sequence_alone() -> None:
    one = Request()
    client: DrafterClient = one.clients["a"]
    response = drafter_pb2.DraftResponse(sequence_id=1)
    added = response.ahead.trees.add(base_length=3, tree=tree_to_proto(chain([1, 2])), assumed_token_ids=[7, 9])
    added.tree.parents[0] = 1
    client.on_message(response)
    assert (client.num_dropped, client.num_sequences) == (1, 0)


def test_tokens_of_the_expected_tree_are_as_likely_as_it_says_and_outcomes_as_likely_as_they_are() -> None:
    tree = hung(DRAFTS, "a", chain([7, 8, 3], [-0.25, -0.5, -0.1]))
    seven, eight = tree.find([7]), tree.find([7, 8])
    assert seven is not None
    assert eight is not None
    assert (tree.log_probs[seven], tree.log_probs[eight]) == (-0.25, -0.5)
    for draft in DRAFTS:
        end = tree.find(draft.assumed)
        assert end is not None
        assert tree.path_log_probs[end] == draft.log_prob
    # An outcome that is likelier than the expected tree says its path is: nothing is more than certain.
    likely = hung([ExpectedDraft((7, 6), -0.1, chain([1]))], "a", chain([7, 8], [-0.25, -0.5]))
    assert likely.log_probs == (-0.25, 0.0, 0.0)
